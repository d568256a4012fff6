"""Public bug reports on accumulation, checkpointing and precision, each a test named by its row.

Rows are those of a study of tools like ours: Transformers, axolotl, PEFT, Accelerate, diffusers,
PyTorch.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulations import MIB, Simulation, cuda, landscape, recomputing, workload
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from workloads import quick_launches

from autotune.device.cuda import CudaDevice
from autotune.outcome import Invalid, Measured
from autotune.space import Config
from autotune.step.checkpointing import checkpointed, find_blocks
from autotune.step.make import make_stepper
from autotune.step.restore import borrowed
from autotune.step.window import Stepper, windows
from autotune.trial.guard import check, gradients

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """What is computed here is small."""
    with quick_launches():
        yield


class Block(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, value: Tensor) -> Tensor:
        """Return what they make of a value."""
        result: Tensor = self.layers(value)
        return result


class Tagger(nn.Module):
    """A frozen embedding, two blocks and a class for each token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 6).requires_grad_(requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores, the classes in the second dimension."""
        value = self.embed(tokens)
        for block in self.blocks:
            value = block(value)
        scores: Tensor = self.head(value)
        return scores.transpose(1, 2)


def stepper_of(model: nn.Module, **options: Any) -> Stepper:
    """Return a stepper that subtracts the gradient."""
    return make_stepper(model, SGD(model.parameters(), lr=1.0), device=CPU, **options)


def sentences(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return sentences of so many tokens that count."""
    torch.manual_seed(1)
    tokens = torch.randint(0, 9, (len(lengths), 8))
    counts = torch.arange(8) < torch.tensor(lengths)[:, None]
    return tokens, (tokens % 3).where(counts, -100)


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_row_078_tokens_weigh_the_same_wherever_they_are(steps: int) -> None:
    """Means of means were accumulated, and a short last window was divided as a whole one."""
    lengths = [8, 1, 2, 7, 0, 1, 3]
    batches = list(zip(*(part.split(1) for part in sentences(lengths)), strict=True))

    for window, start in zip(windows(batches, steps), range(0, 7, steps), strict=True):
        whole = sentences(lengths)
        rows = slice(start, start + len(window))
        expected = gradients(stepper_of(Tagger()), [(whole[0][rows], whole[1][rows])])
        found = gradients(stepper_of(Tagger()), window)

        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        for name, gradient in expected.by_name.items():
            torch.testing.assert_close(found.by_name[name], gradient)


def test_row_078_a_mean_whose_normaliser_is_not_known_is_found() -> None:
    """A loss of the user's own may be a mean over tokens: then it is not split."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    window = [sentences([8, 1, 2, 7, 3, 1, 3, 8])]
    split = Config(batch_size=4, accumulation_steps=2)

    own = check(
        stepper_of(Tagger(), loss_fn=loss_fn), window, config=split, baseline=Config(batch_size=8)
    )
    ours = check(stepper_of(Tagger()), window, config=split, baseline=Config(batch_size=8))

    assert isinstance(own, Invalid)
    assert isinstance(ours, Measured)


def test_row_079_frozen_inputs_keep_their_blocks_trained() -> None:
    """Reentrant checkpointing gives no gradient where no input has one: nothing was trained."""
    model = Tagger()
    batch = sentences([8, 3, 5, 8])
    expected = gradients(stepper_of(model), [batch])
    with checkpointed(model, find_blocks(model)):
        found = gradients(stepper_of(model), [batch])

    assert find_blocks(model) == ["blocks.0", "blocks.1"]
    weights = [name for name in expected.by_name if name.startswith("blocks")]
    assert len(weights) == 8
    for name in weights:
        torch.testing.assert_close(found.by_name[name], expected.by_name[name])
        assert float(found.by_name[name].abs().sum()) > 0


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_row_079_a_reentrant_checkpoint_would_be_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The guard compares gradients, whatever it is that lost them."""
    model = Tagger()

    def reentrant(block: nn.Module) -> Any:
        forward = block.forward
        return lambda value: checkpoint(forward, value, use_reentrant=True)

    monkeypatch.setattr("autotune.step.checkpointing._WHOLE", (reentrant, reentrant))
    config, baseline = Config(batch_size=8, checkpointing="full"), Config(batch_size=8)

    outcome = check(
        stepper_of(model),
        [sentences([8, 3, 5, 8])],
        config=config,
        baseline=baseline,
        blocks=find_blocks(model),
    )

    assert isinstance(outcome, Invalid)
    assert "blocks" in outcome.reason


@pytest.mark.slow
def test_row_080_checkpointed_blocks_train_under_data_parallel(tmp_path: Path) -> None:
    """Reentrant checkpointing marked parameters ready twice where unused ones are looked for."""
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=30),
    )
    try:
        model = Tagger()
        expected = gradients(stepper_of(model), [sentences([8, 3])])
        parallel = DistributedDataParallel(model, find_unused_parameters=True)
        with checkpointed(model, find_blocks(model)):
            found = gradients(stepper_of(parallel), [sentences([8, 3])])
    finally:
        torch.distributed.destroy_process_group()

    for name, gradient in expected.by_name.items():
        torch.testing.assert_close(found.by_name[f"module.{name}"], gradient)


@pytest.mark.parametrize("newer", [True, False])
def test_row_082_switches_of_tf32_are_put_back_without_being_mixed(*, newer: bool) -> None:
    """Where older and newer ones disagree, PyTorch raises whenever one of them is read."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.allow_tf32, matmul.fp32_precision

    with borrowed(None):
        if newer:
            matmul.fp32_precision = "tf32"
        else:
            matmul.allow_tf32 = True

    assert (matmul.allow_tf32, matmul.fp32_precision) == before


@pytest.mark.parametrize(("capability", "choices"), [((7, 5), ("off", "fp16")), ((8, 0), None)])
def test_row_083_simulated_emulated_bf16_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], choices: Any
) -> None:
    """A Turing GPU says that it supports bf16, and computes it slowly."""

    def is_supported(*, including_emulation: bool = True) -> bool:
        return including_emulation or capability >= (8, 0)

    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    card: Any = SimpleNamespace(_device=0)
    native = CudaDevice._native_precisions(card)
    space = Simulation(workload=workload(), device=cuda(native_precisions=native)).task.space

    assert space.choices("amp") == (choices or ("off", "bf16", "fp16"))


def test_row_110_more_memory_than_was_predicted_is_found_before_it_is_returned() -> None:
    """Compiled steps and CUDA graphs need more than eager ones: a cell is measured by itself."""
    greedy = landscape(
        compute_seconds=lambda config: 0.01 if config.amp == "off" else 0.004,
        peak_bytes=lambda c: (300 + 8 * c.batch_size * (1 if c.amp == "off" else 4)) * MIB,
    )
    simulation = Simulation(landscape=greedy, limit_bytes=1024 * MIB, global_batch=32)

    decision = simulation.run()

    assert greedy.peak_bytes(decision.config) <= 1024 * MIB
    verified = [t for t in simulation.trials if t.phase == "verify" and t.measured]
    assert decision.config in {trial.config for trial in [*verified, decision.baseline]}


@pytest.mark.parametrize("goal", ["throughput", "memory"])
def test_row_112_a_ladder_that_is_not_monotonic_is_measured(goal: Any) -> None:
    """A smaller memory budget was seen to need more: each rung's peak is its own."""
    odd = {"full": 1.5, "alternate": 0.6, "selective": 0.9}

    def peak(config: Config) -> float:
        return recomputing(config, share=1.0) * odd.get(config.checkpointing, 1.0)

    facts = workload(
        blocks=("layers.0", "layers.1", "layers.2", "layers.3"),
        checkpointing=("selective", "alternate", "full"),
    )
    simulation = Simulation(
        landscape=landscape(peak_bytes=peak), workload=facts, limit_bytes=900 * MIB, goal=goal
    )

    decision = simulation.run()

    assert peak(decision.config) <= 900 * MIB
    assert decision.config.checkpointing != "full"
    assert decision.config in {t.config for t in simulation.trials if t.measured}
