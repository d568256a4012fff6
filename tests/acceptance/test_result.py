"""What `fit` returns, and what can be done with it (DESIGN 2.2)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autotune
from acceptance.product import FILES, read_trials
from autotune.errors import OptionInvalid
from autotune.result import Result

pytestmark = pytest.mark.slow

SMALLEST: dict[str, list[Any]] = {"num_workers": [0], "amp": ["off"]}
"""Knobs that these tests are not about."""

WIDTH = 256


def model_fn() -> nn.Module:
    """Return a small classifier of 16 numbers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))


def loader_fn(batch_size: int = 32, num_workers: int = 0) -> DataLoader[tuple[Tensor, ...]]:
    """Return batches of 512 samples whose class can be learned."""
    inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    return DataLoader(data, batch_size, shuffle=True, num_workers=num_workers)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of a batch."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def fit_briefly(loader_fn: Callable[..., Any], **arguments: Any) -> Result:
    """Run `fit` in this process, with few launches."""
    given: dict[str, Any] = {"space": SMALLEST, "isolate": False, "trials": 5, "progress": False}
    return autotune.fit(model_fn, loader_fn, **given | arguments)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """The caller's model."""
    return model_fn()


@pytest.fixture(scope="module")
def result(model: nn.Module) -> Result:
    """A run on live objects in this very process, with a baseline and a space of the caller's."""
    return autotune.fit(
        model,
        loader_fn,
        baseline={"batch_size": 16, "accumulation_steps": 2},
        space={**SMALLEST, "batch_size": [8, 16, 32]},
        isolate=False,
        trials=8,
        time_budget="60s",
        progress=False,
    )


def test_the_baseline_is_what_was_given(result: Result) -> None:
    """What is missing in it is PyTorch's default, and its effective batch is kept."""
    assert result.baseline.config == autotune.Config(batch_size=16, accumulation_steps=2)
    assert {trial.config.samples_per_optimizer_step for trial in result.trials} == {32}


def test_the_space_narrows_the_search(result: Result) -> None:
    """Nothing is tried that is not in it."""
    configs = [trial.config for trial in result.trials]

    assert {config.batch_size for config in configs} <= {8, 16, 32}
    assert {(config.num_workers, config.amp) for config in configs} == {(0, "off")}


def test_a_result_tells_its_answer(result: Result) -> None:
    """Verdict, config, baseline, best and trials are there to be read."""
    assert result.verdict in {"tuned", "keep", "unconfirmed"}
    assert result.config in {trial.config for trial in result.trials}
    assert result.best is None or result.best.config == result.config
    assert isinstance(result.trials, tuple)
    assert "batch" in result.config.describe()


def test_a_config_round_trips(result: Result) -> None:
    """`to_dict` holds every knob, and makes the same config again."""
    document = json.loads(json.dumps(result.config.to_dict()))

    assert autotune.Config.from_dict(document) == result.config


def test_launches_here_are_told(result: Result, tmp_path: Path) -> None:
    """That the caller's process was used is a line of the report."""
    files = result.save(tmp_path / "mine")

    assert "caller's process" in files["report.md"].read_text("utf-8")


def test_save_writes_all_files(result: Result, tmp_path: Path) -> None:
    """The same six, wherever they are wanted, and as often."""
    files = result.save(tmp_path / "mine")
    again = result.save(tmp_path / "other")

    assert sorted(files) == sorted(FILES) == sorted(again)
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == sorted(FILES)
    assert len(read_trials(tmp_path / "other")) == len(result.trials)


def test_load_reads_the_saved_config(result: Result, tmp_path: Path) -> None:
    """`autotune.load(config.json)` is the answer."""
    files = result.save(tmp_path)

    assert autotune.load(files["config.json"]) == result.config


def test_the_loader_has_the_tuned_settings(result: Result) -> None:
    """Its batches are of the tuned size."""
    inputs, _ = next(iter(result.loader()))

    assert len(inputs) == result.config.batch_size


def test_train_trains_the_callers_model(result: Result, model: nn.Module) -> None:
    """The written loop, run here and in place: a mean loss for each epoch, and it falls."""
    before = [each.clone() for each in model.parameters()]

    losses = result.train(epochs=4)

    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert not all(map(torch.equal, before, model.parameters()))


def test_apply_makes_steps_of_a_loop_of_ones_own(result: Result) -> None:
    """One optimizer step a window; flags and modes are put back on exit."""
    model = model_fn().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    threads = torch.get_num_threads()

    with autotune.apply(result.config, model, optimizer=optimizer) as step:
        losses = [float(step(window, loss_fn)) for window in step.windows(result.loader())]

    assert len(losses) == 512 // result.config.samples_per_optimizer_step
    assert losses[-1] < losses[0]
    assert torch.get_num_threads() == threads
    assert not model.training


def test_the_goal_memory_takes_no_more_than_it_needs() -> None:
    """The answer has the smallest peak of those that keep most of the speed."""
    result = autotune.fit(
        model_fn,
        loader_fn,
        baseline={"batch_size": 512},
        space={**SMALLEST, "batch_size": [512, 64]},
        goal="memory",
        isolate=False,
        trials=8,
        time_budget="60s",
        progress=False,
    )

    peaks = [trial.measured.peak_bytes or 0 for trial in result.trials if trial.measured]
    assert result.measured is not None
    assert result.measured.peak_bytes is not None
    assert 0 < result.measured.peak_bytes <= max(peaks)
    assert json.loads(result.files["config.json"].read_text("utf-8"))["global_batch"] == 512


def test_a_baseline_that_does_not_divide_the_global_batch_is_lowered() -> None:
    """Of the factory's default of 32, 48 has 24 as the largest divisor below."""
    result = fit_briefly(loader_fn, global_batch=48)

    assert result.baseline.config == autotune.Config(batch_size=24, accumulation_steps=2)
    assert {trial.config.samples_per_optimizer_step for trial in result.trials} == {48}


def test_a_fixed_batch_size_needs_no_parameter() -> None:
    """A factory without `batch_size` is fine where the user fixed the one it has built in."""
    space = {**SMALLEST, "batch_size": [20]}

    result = fit_briefly(lambda: loader_fn(20), space=space)

    assert {trial.config.batch_size for trial in result.trials} == {20}
    assert result.config.samples_per_optimizer_step == 20


@pytest.mark.parametrize("is_last_dropped", [False, True])
def test_a_data_set_smaller_than_the_batch_works(is_last_dropped: bool) -> None:
    """Ten samples and a stated batch of 32: what can be filled is tuned."""

    def few(batch_size: int = 32) -> DataLoader[tuple[Tensor, ...]]:
        data = TensorDataset(torch.randn(10, 16), torch.zeros(10).long())
        return DataLoader(data, batch_size, shuffle=True, drop_last=is_last_dropped)

    result = fit_briefly(few)

    assert result.verdict in {"tuned", "keep", "unconfirmed"}
    assert all(trial.config.batch_size <= 10 for trial in result.trials)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"goal": "fame"}, "fame"),
        ({"space": {"bathc_size": [8]}}, "bathc_size"),
        ({"global_batch": 0}, "0"),
        ({"memory": "much"}, "much"),
        ({"time_budget": "soon"}, "soon"),
        ({"baseline": {"batch_size": 24}, "global_batch": 32}, "24"),
        ({"baseline": {"width": 3, "batch_size": 8}}, "width"),
    ],
)
def test_an_argument_that_means_nothing_is_refused(arguments: dict[str, Any], word: str) -> None:
    """The error names it, says what would be right, and is a ValueError as well."""
    with pytest.raises(OptionInvalid, match=word) as caught:
        autotune.fit(model_fn, loader_fn, isolate=False, progress=False, **arguments)

    assert caught.value.exit_code == 2
    assert isinstance(caught.value, ValueError)


def test_two_arguments_are_positional() -> None:
    """Everything else is given by keyword, so that a call reads by itself."""
    with pytest.raises(TypeError, match="positional"):
        autotune.fit(model_fn, loader_fn, None)  # type: ignore[call-arg]  # this is the test
