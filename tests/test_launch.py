"""Tests of autotune/trial/launch.py: how a launch ends, whatever user code raises."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from workloads import quick_launches

from autotune.device.cpu import CpuDevice
from autotune.device.tracker import LimitExceeded
from autotune.errors import AutotuneError, OptionInvalid, WorkloadInvalid
from autotune.outcome import Crashed, Invalid, Measured, OutOfMemory, Request
from autotune.space import Config
from autotune.step.batch import BatchUnclear
from autotune.step.loss import LossUnclear
from autotune.trial.launch import attempt, end_of, reading
from autotune.trial.passes import Unusable
from autotune.workload import Workload, live_workload

TRAIN = Request(purpose="train", config=Config(batch_size=2), cycles=1, seed=7)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """What is computed here is small."""
    with quick_launches():
        yield


def workload_of(loss_fn: Callable[[nn.Module, Any], Any] | None = None, **more: Any) -> Workload:
    """Return a workload whose loss does what it is told."""
    loader_fn = more.pop("loader_fn", lambda batch_size: [torch.ones(batch_size, 4)] * 3)
    loss_fn = loss_fn or (lambda model, batch: model(batch).square().mean())
    return live_workload(lambda: nn.Linear(4, 1), loader_fn, loss_fn=loss_fn, **more)


def raising(error: BaseException) -> Callable[[nn.Module, Any], Any]:
    """Return a loss that raises."""

    def loss_fn(_model: nn.Module, _batch: Any) -> Any:
        raise error

    return loss_fn


def test_a_launch_tells_when_and_how_it_ran() -> None:
    """With its seed, the seconds of its steps, and the machine's load."""
    report = attempt(workload_of(), CpuDevice(), TRAIN)

    assert isinstance(report.outcome, Measured)
    assert report.launch is not None
    assert datetime.fromisoformat(report.launch.started_at).utcoffset() is not None
    assert (report.launch.seed, len(report.launch.step_seconds)) == (7, 1)
    assert report.launch.load is not None


def test_all_launches_start_from_the_same_weights() -> None:
    """Whatever the seed of their data."""
    seen: list[Tensor] = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        seen.append(next(model.parameters()).detach().clone())
        result: Tensor = model(batch).mean()
        return result

    for seed in (1, 2):
        attempt(workload_of(loss_fn), CpuDevice(), replace(TRAIN, purpose="memory", seed=seed))

    assert torch.equal(seen[0], seen[len(seen) // 2])


@pytest.mark.parametrize(
    ("error", "is_limited", "outcome"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), False, OutOfMemory),
        (LimitExceeded("live tensors need 8 bytes"), True, OutOfMemory),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), False, OutOfMemory),
        (MemoryError(), False, OutOfMemory),
        (RuntimeError("CUDNN_STATUS_EXECUTION_FAILED"), False, OutOfMemory),
        (RuntimeError("can't start new thread"), True, OutOfMemory),
        (RuntimeError("can't start new thread"), False, Crashed),
        (RuntimeError("CUDA error: invalid configuration argument"), False, Crashed),
        (ValueError("boom"), True, Crashed),
        (Unusable("no step ran"), False, Invalid),
    ],
)
def test_an_exception_is_an_outcome(error: Exception, is_limited: bool, outcome: type) -> None:
    """By type and text; the taxonomy is that of `device/oom`."""
    found = end_of(error, is_limited=is_limited)

    assert isinstance(found, outcome)
    assert str(error) in getattr(found, "reason", "")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("first\nsecond"), "ValueError: first"),
        (KeyError("name"), "KeyError: 'name'"),
        (AssertionError(), "AssertionError"),
        (RuntimeError("grid: invalid configuration argument"), "a size limit, not memory: Runtime"),
    ],
)
def test_a_crash_is_told_in_a_line_and_in_full(error: Exception, reason: str) -> None:
    """The user's own traceback is in the log."""
    outcome = attempt(workload_of(raising(error)), CpuDevice(), TRAIN).outcome

    assert isinstance(outcome, Crashed)
    assert outcome.reason.startswith(reason)
    assert "raise error" in outcome.log_tail
    assert not outcome.is_workload_error


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (workload_of(raising(LossUnclear("no loss is known"))), "no loss is known"),
        (workload_of(raising(BatchUnclear("no tensor"))), "no tensor"),
        (workload_of(lambda *_: 3.0), "needs one number with a gradient"),
        (workload_of(loader_fn=lambda **_: [["text"]] * 3), "has none; pass batch_size_fn"),
        (live_workload(nn.ReLU, lambda **_: []), "requires a gradient"),
        (workload_of(loader_fn=lambda **_: []), "yields nothing"),
    ],
)
def test_what_is_wrong_before_the_first_step_is_the_workloads(
    workload: Workload, reason: str
) -> None:
    """So that it is shown as the user's own error."""
    outcome = attempt(workload, CpuDevice(), TRAIN).outcome

    assert isinstance(outcome, Crashed)
    assert outcome.is_workload_error
    assert reason in outcome.reason


def test_a_deliberate_error_passes_through() -> None:
    """It is no failure of the candidate."""
    error = OptionInvalid("that means nothing", hint="try this")

    with pytest.raises(OptionInvalid) as caught:
        attempt(workload_of(raising(error)), CpuDevice(), TRAIN)

    assert caught.value is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_whoever_wants_to_leave_may(error: BaseException) -> None:
    """Only failures are caught."""
    with pytest.raises(type(error)):
        attempt(workload_of(raising(error)), CpuDevice(), TRAIN)


def test_nothing_of_a_failed_step_is_kept() -> None:
    """Neither by the exception nor by its frames (CASES.md rows 16, 38)."""
    kept: list[weakref.ref[Tensor]] = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        activations = model(batch)
        kept.append(weakref.ref(activations))
        raise RuntimeError("boom")

    attempt(workload_of(loss_fn), CpuDevice(), TRAIN)

    assert [reference() for reference in kept] == [None]


def test_what_is_raised_while_reading_is_the_workloads_fault() -> None:
    """With the user's own traceback; what is deliberate keeps its type."""
    deliberate = OptionInvalid("that means nothing")

    def read(error: Exception) -> None:
        with reading():
            raise error

    with pytest.raises(WorkloadInvalid, match="cannot be read: ValueError: boom") as caught:
        read(ValueError("boom"))
    with pytest.raises(OptionInvalid) as passed:
        read(deliberate)

    assert "raise error" in caught.value.hint
    assert isinstance(caught.value.__cause__, ValueError)
    assert passed.value is deliberate


def test_reading_without_a_failure_changes_nothing() -> None:
    """What is returned inside is returned."""

    def read() -> int:
        with reading():
            return 3
        return 4  # type: ignore[unreachable]  # not reached, as is to be shown

    assert read() == 3


def test_every_error_of_ours_may_pass() -> None:
    """Whatever its exit code."""
    with pytest.raises(AutotuneError), reading():
        raise AutotuneError("ours")
