"""Tests of autotune/trial/itself.py: what a user's model does by itself."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from simulations import Simulation, cuda, device, workload
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.checkpoint import checkpoint
from workloads import quick_launches, write_script

from autotune.search.remarks import on_itself
from autotune.space import Config
from autotune.step.make import make_stepper
from autotune.trial.guard import check, gradients
from autotune.trial.isolate import Isolated
from autotune.trial.itself import does_itself, watching
from autotune.trial.order import Source
from autotune.workload import Workload, live_workload

BATCH = [torch.randn(8, 4), torch.randint(0, 2, (8,))]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """What is computed here is small."""
    with quick_launches():
        yield


class Net(nn.Module):
    """Layers that are called in some way."""

    def __init__(self, call: Callable[..., Tensor] = lambda layer, value: layer(value)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 2)
        self.call = call

    def forward(self, value: Tensor) -> Tensor:
        """Return scores."""
        for layer in self.layers:
            value = self.call(layer, value).tanh()
        scores: Tensor = self.head(value)
        return scores


def autocast(layer: nn.Module, value: Tensor) -> Tensor:
    """Compute in bf16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lower: Tensor = layer(value)
    return lower.float()


def autocast_off(layer: nn.Module, value: Tensor) -> Tensor:
    """Compute in fp32 whatever is around it, as models of Hugging Face do in places."""
    with torch.autocast("cpu", enabled=False):
        result: Tensor = layer(value)
    return result


def recomputed(layer: nn.Module, value: Tensor) -> Tensor:
    """Compute again in backward."""
    result: Tensor = checkpoint(layer, value, use_reentrant=False)
    return result


def scaled(model: nn.Module, batch: Any) -> Tensor:
    """Return a loss that is scaled by a scaler of its own."""
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return GradScaler("cpu").scale(loss)


def scaled_off(model: nn.Module, batch: Any) -> Tensor:
    """Return a loss that a scaler leaves as it is."""
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return GradScaler("cpu", enabled=False).scale(loss)


def tied() -> nn.Module:
    """Return a model of which two layers have one weight."""
    model = Net()
    model.layers[2].weight = model.layers[0].weight
    return model


def compiled_in_place() -> nn.Module:
    """Return a model that was told to compile itself."""
    model = Net()
    model.compile(backend="eager")
    return model


def compiled() -> nn.Module:
    """Return a model that was given to torch.compile."""
    model: object = torch.compile(Net(), backend="eager")
    assert isinstance(model, nn.Module)
    return model


def compiled_within() -> nn.Module:
    """Return a model of which a part was given to torch.compile."""
    return nn.Sequential(compiled())


def of(model: nn.Module, **functions: Any) -> Workload:
    """Return the workload of a model."""
    return live_workload(model, lambda: [BATCH], **functions)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Net, {}),
        (lambda: Net(autocast), {"amp": "bf16"}),
        (lambda: Net(autocast_off), {}),
        (lambda: Net(torch.autocast("cpu", dtype=torch.bfloat16)(autocast)), {"amp": "bf16"}),
        (lambda: Net(recomputed), {"checkpointing": "torch.utils.checkpoint"}),
        (tied, {"shared": "layers.2.weight"}),
        (compiled_in_place, {"compile": "torch.compile"}),
        (compiled, {"compile": "torch.compile"}),
        (compiled_within, {"compile": "torch.compile"}),
    ],
    ids=["plain", "own", "off", "decorated", "recomputed", "tied", "in place", "compiled", "part"],
)
def test_what_a_model_does_is_seen(make: Callable[[], Any], expected: dict[str, str]) -> None:
    """In one forward pass on tensors without data, or in how it is made."""
    model = make()

    assert does_itself(of(model), model, BATCH) == expected


@pytest.mark.parametrize(
    ("loss_fn", "expected"), [(scaled, {"scaler": "GradScaler"}), (scaled_off, {})]
)
def test_a_scaler_of_a_loss_is_seen(loss_fn: Any, expected: dict[str, str]) -> None:
    """One that is switched off does nothing."""
    model = Net()

    assert does_itself(of(model, loss_fn=loss_fn), model, BATCH) == expected


def test_what_cannot_run_without_data_tells_what_it_did_until_then() -> None:
    """A step that reads values ends there, and the survey goes on."""

    def reading(layer: nn.Module, value: Tensor) -> Tensor:
        result = autocast(layer, value)
        return result if float(result.sum()) > 0 else -result

    model = Net(reading)

    assert does_itself(of(model), model, BATCH) == {"amp": "bf16"}


def test_nothing_is_left_behind() -> None:
    """No gradient, no buffer that moved, no profile, and one that was there goes on."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = {name: item.clone() for name, item in model.state_dict().items()}
    calls = []

    def own(*event: object) -> None:
        calls.append(event)

    sys.setprofile(own)
    try:
        does_itself(of(model), model, BATCH)
        kept = sys.getprofile()
    finally:
        sys.setprofile(None)

    assert kept is own
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(item.grad is None for item in model.parameters())


def test_many_shared_parameters_are_counted() -> None:
    """A few are named."""
    model = Net()
    for layer in model.layers:
        layer.weight, layer.bias = model.layers[0].weight, model.layers[0].bias

    found = does_itself(of(model), model, BATCH)["shared"]

    assert found == "layers.1.weight, layers.1.bias, layers.2.weight and 3 more"


def test_what_is_called_is_watched_wherever_it_is() -> None:
    """The product's own autocast included."""
    with watching() as seen:
        autocast(nn.Linear(4, 4), BATCH[0])
    autocast(nn.Linear(4, 4), BATCH[0])

    assert seen == {"amp": "bf16"}


@pytest.mark.parametrize(
    ("itself", "knob", "values", "reason"),
    [
        ({"amp": "bf16"}, "amp", ("off",), "the model autocasts by itself, to bf16"),
        ({"scaler": "GradScaler"}, "amp", ("off",), "GradScaler of its own"),
        ({"checkpointing": "x"}, "checkpointing", ("off",), "the model checkpoints by itself"),
        ({"compile": "x", "shared": "y"}, "amp", ("off", "bf16"), ""),
    ],
)
def test_a_knob_is_not_put_on_top(
    itself: dict[str, str], knob: str, values: tuple[str, ...], reason: str
) -> None:
    """It is not in the space, and the report says why."""
    facts = workload(does_itself=itself, blocks=("layers.0", "layers.1"))
    space = Simulation(workload=facts, device=device()).task.space

    assert space.choices(knob) == values
    assert reason in space.left_out.get(knob, "")


def test_it_is_told_in_one_line() -> None:
    """Whatever there is of it; of a model that does nothing by itself nothing."""
    ways = {"amp": "bf16", "shared": "head.weight", "checkpointing": "torch.utils.checkpoint"}
    (line,) = on_itself(workload(does_itself=ways))

    assert line.startswith("by itself the workload autocasts to bf16, so amp is not put on top")
    assert "checkpoints" in line
    assert "head.weight" in line
    assert list(on_itself(workload())) == []


@pytest.mark.parametrize("knob", ["amp", "checkpointing"])
def test_a_baseline_that_says_so_is_kept(knob: str) -> None:
    """What the user has today is not taken away."""
    facts = workload(does_itself={"amp": "bf16", "checkpointing": "x"}, blocks=("layers.0",))
    own = {"amp": "fp16", "checkpointing": "full"}
    space = Simulation(workload=facts, device=cuda(), baseline={knob: own[knob]}).task.space

    assert own[knob] in space.choices(knob)


@pytest.mark.slow
@pytest.mark.parametrize("forward", ["import os; os._exit(3)", "import time; time.sleep(600)"])
def test_a_forward_that_never_ends_takes_nothing_from_a_survey(
    tmp_path: Path, forward: str
) -> None:
    """What was found before is answered; that the step fails, the baseline's launch will tell."""
    source = Source(script=write_script(tmp_path, forward=forward))
    with Isolated(source, device="cpu", preload={}) as runner:
        facts = runner.survey(scan_seconds=0.1).workload

    assert facts.dataset_length == 64
    assert facts.does_itself == {}


@pytest.mark.slow
def test_a_survey_in_a_process_of_its_own_tells_it(tmp_path: Path) -> None:
    """Facts come as they are found, the last answer whole."""
    top = "class Auto(Model):\n    forward = torch.autocast('cpu')(Model.forward)\n\nModel = Auto"
    source = Source(script=write_script(tmp_path, top=top))
    with Isolated(source, device="cpu", preload={}) as runner:
        facts = runner.survey(scan_seconds=0.1).workload

    assert facts.does_itself == {"amp": "bf16"}


WHOLE = Config(batch_size=16)


@pytest.mark.parametrize(
    "config",
    [
        Config(batch_size=8, accumulation_steps=2),
        Config(batch_size=16, amp="bf16"),
        Config(batch_size=16, checkpointing="full"),
    ],
    ids=["split", "bf16", "checkpointed"],
)
@pytest.mark.parametrize("call", [autocast, recomputed, None], ids=["autocast", "own", "tied"])
def test_its_gradients_are_those_of_the_baseline(call: Any, config: Config) -> None:
    """A precision of its own rounds both sides, and what is recomputed twice is the same."""
    model = Net(call) if call else tied()
    stepper = make_stepper(
        model.train(), torch.optim.SGD(model.parameters(), 0.1), device=torch.device("cpu")
    )
    torch.manual_seed(3)
    window = [[torch.randn(64, 4), torch.randint(0, 2, (64,))] for _ in range(4)]
    blocks = [f"layers.{number}" for number in range(4)]

    outcome = check(stepper, window, config=config, baseline=WHOLE, blocks=blocks)

    assert outcome.name == "measured", outcome


@pytest.mark.slow
def test_a_compiled_model_has_the_gradients_of_its_eager_one() -> None:
    """Named as the model names them."""
    window = [BATCH, BATCH]
    found = [
        gradients(
            make_stepper(
                model, torch.optim.SGD(model.parameters(), 0.1), device=torch.device("cpu")
            ),
            window,
        ).by_name
        for model in (Net(), compiled())
    ]

    assert {f"_orig_mod.{name}" for name in found[0]} == set(found[1])
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][f"_orig_mod.{name}"], gradient)
