"""What becomes of a device's memory while a launch runs, and what it makes of the outcome."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from workloads import quick_launches

from autotune.device.cpu import CpuDevice
from autotune.outcome import Crashed, Invalid, Measured, Measurement, Outcome, OutOfMemory, Request
from autotune.space import Config
from autotune.trial.launch import attempt
from autotune.trial.measure import Cycle
from autotune.trial.pressure import (
    CLIFF,
    FEWEST_CYCLES,
    SPILLED_BYTES,
    TAKEN_BYTES,
    Pressure,
    cliff,
)
from autotune.workload import live_workload


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """What is computed here is small."""
    with quick_launches():
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressed(CpuDevice):
    """A CPU with figures that a test gives: before a launch, and after it."""

    spilled: list[int] = field(default_factory=lambda: [0, 0])
    others: list[int] = field(default_factory=lambda: [0, 0])

    def spilled_bytes(self) -> int:
        """Return the next figure."""
        return self.spilled.pop(0)

    def others_bytes(self) -> int | None:
        """Return the next figure."""
        return self.others.pop(0)


def launched(device: CpuDevice, *, limit_bytes: int | None = None) -> Outcome:
    """Return how a small launch on a device ended."""
    workload = live_workload(
        nn.Linear(4, 4), lambda batch_size: [(torch.ones(batch_size, 4),) * 2] * 4
    )
    request = Request(purpose="memory", config=Config(batch_size=2), limit_bytes=limit_bytes)
    return attempt(workload, device, request).outcome


def test_a_launch_that_spilled_measured_nothing() -> None:
    """It ran to its end, and slower than the device is."""
    outcome = launched(Pressed(spilled=[5, 5 + SPILLED_BYTES]))

    assert isinstance(outcome, Invalid)
    assert "swapped out" in outcome.reason


def test_what_was_there_before_is_not_held_against_a_launch() -> None:
    """Nor what is less than a rounding."""
    outcome = launched(Pressed(spilled=[2**40, 2**40 + SPILLED_BYTES - 1], others=[2**40, 2**40]))

    assert isinstance(outcome, Measured)
    assert outcome.reason == ""


@pytest.mark.parametrize("limit_bytes", [None, 100])
def test_others_that_took_more_are_named(limit_bytes: int | None) -> None:
    """Whether the launch ran to its end or out of memory."""
    outcome = launched(Pressed(others=[0, TAKEN_BYTES]), limit_bytes=limit_bytes)

    assert isinstance(outcome, OutOfMemory if limit_bytes else Measured)
    assert "other processes took 256.0 MiB more" in outcome.reason


def test_a_crash_stays_what_it_is() -> None:
    """Memory does not explain it."""
    crashed = Crashed(reason="of something else")

    assert Pressure(Pressed(spilled=[0, 2**40], others=[0, 2**40])).judged(crashed) == crashed


def test_an_unknown_figure_says_nothing() -> None:
    """Most machines do not tell what others have."""
    ran = launched(CpuDevice())

    assert isinstance(ran, Measured)
    assert isinstance(ran.measurement, Measurement)
    assert ran.reason == ""


def cycles_of(seconds: list[float], *, work: int = 8) -> list[Cycle]:
    """Return cycles that took so long, without a wait."""
    return [Cycle(seconds=each, wait_seconds=0.0, samples=4, work_bytes=work) for each in seconds]


@given(st.lists(st.floats(0.01, 10), min_size=FEWEST_CYCLES, max_size=30))
def test_a_steady_machine_has_no_cliff(seconds: list[float]) -> None:
    """Whatever the steps take, as long as the last are not all slower than the first."""
    assert not cliff(cycles_of([*seconds, min(seconds)]))


@given(st.floats(0.001, 10), st.floats(CLIFF * 1.01, 100), st.integers(3, 10))
def test_a_cliff_is_seen_on_any_scale(first: float, times: float, half: int) -> None:
    """Unless the work differs from step to step."""
    cycles = cycles_of([first] * half + [first * times] * half)

    assert "times as slow" in cliff(cycles)
    assert not cliff([*cycles, *cycles_of([first * times], work=9)])


def test_no_time_at_all_is_no_cliff() -> None:
    """A clock may stand still."""
    assert not cliff(cycles_of([0.0] * 8))
