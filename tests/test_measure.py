"""Tests of autotune/trial/measure.py: whole cycles are timed, and what they wait for."""

import time
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from autotune.space import Config
from autotune.step.batch import count_samples
from autotune.trial.measure import Cycle, drain, endless, skip_windows, summarise, time_cycles

NEVER = float("inf")


class Clock:
    """A clock that goes on only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def pass_time(self, seconds: float) -> None:
        """Go on by so many seconds."""
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that stands still unless it is told to go on."""
    return Clock(monkeypatch)


def batches_of(*sizes: int) -> list[Tensor]:
    """Return batches of so many samples."""
    return [torch.zeros(size, 2) for size in sizes]


def loader_of(samples: int, *, batch_size: int, drop_last: bool = False) -> "DataLoader[Any]":
    """Return a loader of so many samples."""
    return DataLoader(TensorDataset(torch.zeros(samples, 2)), batch_size, drop_last=drop_last)


def cycle_of(seconds: float, *, samples: int = 4, wait: float = 0.0, work: int = 8) -> Cycle:
    """Return a cycle that took so long."""
    return Cycle(seconds=seconds, wait_seconds=wait, samples=samples, work_bytes=work)


@given(
    samples=st.integers(1, 20),
    batch_size=st.integers(1, 8),
    steps=st.integers(1, 5),
    drops=st.booleans(),
)
def test_epochs_follow_one_another(
    samples: int, batch_size: int, steps: int, *, drops: bool
) -> None:
    """Each is cut into whole windows and a shorter last one; none if there is no batch."""
    loader = loader_of(samples, batch_size=batch_size, drop_last=drops)
    epoch = len(loader)
    stream = endless(loader, steps)

    windows = [len(window) for window, _ in zip(stream, range(2 * epoch + 1), strict=False)]

    expected = [steps] * (epoch // steps) + [epoch % steps] * (epoch % steps > 0)
    assert windows == (expected * (2 * epoch + 1))[: len(windows)]
    assert len(windows) == (2 * epoch + 1 if epoch else 0)


def test_closing_the_stream_lets_the_loader_go() -> None:
    """Its iterator is dropped, and workers with it."""
    ended: list[str] = []

    class Loader:
        def __iter__(self) -> Iterator[Tensor]:
            try:
                yield from repeat(torch.zeros(1))
            finally:
                ended.append("loader")

    stream = endless(Loader(), 2)
    next(stream)
    before = list(ended)
    stream.close()

    assert (before, ended) == ([], ["loader"])


def test_a_cycle_is_timed_with_its_wait_apart(clock: Clock) -> None:
    """From the wish for data until the device is done."""

    def stream() -> Iterator[list[Tensor]]:
        for sizes in ((3, 3), (3, 1)):
            clock.pass_time(0.5)
            yield batches_of(*sizes)

    cycles = time_cycles(
        stream(),
        lambda _: clock.pass_time(2.0),
        cycles=2,
        count=count_samples,
        synchronize=lambda: clock.pass_time(0.25),
        deadline=NEVER,
    )

    assert clock.now == 100.0 + 0.25 + 2 * 2.75  # what was asked before has to be done first
    assert cycles == [
        Cycle(seconds=2.75, wait_seconds=0.5, samples=6, work_bytes=6 * 2 * 4),
        Cycle(seconds=2.75, wait_seconds=0.5, samples=4, work_bytes=4 * 2 * 4),
    ]


@pytest.mark.parametrize(
    ("deadline", "left", "expected"),
    [(NEVER, 99, 5), (NEVER, 3, 3), (102.5, 99, 3), (0.0, 99, 1), (NEVER, 0, 0)],
    ids=["as many as asked for", "no more windows", "no more time", "late already", "no data"],
)
def test_timing_ends(clock: Clock, deadline: float, left: int, expected: int) -> None:
    """When it has enough, when data or time is over; one cycle is timed in any case."""
    windows = (batches_of(2) for _ in range(left))

    cycles = time_cycles(
        windows,
        lambda _: clock.pass_time(1.0),
        cycles=5,
        count=count_samples,
        synchronize=lambda: None,
        deadline=deadline,
    )

    assert len(cycles) == expected


def test_skipped_windows_are_pulled() -> None:
    """So that nothing is in the queue that was made while nobody waited."""
    stream = iter([batches_of(size) for size in range(1, 6)])

    skip_windows(stream, 3)

    assert [len(window[0]) for window in stream] == [4, 5]


@pytest.mark.parametrize(("workers", "first"), [(0, 1), (1, 4), (3, 6)])
def test_a_loader_is_drained_batch_by_batch(clock: Clock, workers: int, first: int) -> None:
    """What its workers made while they started is left out."""

    def stream() -> Iterator[Tensor]:
        for size in range(1, 20):
            clock.pass_time(float(size))
            yield torch.zeros(size, 2)

    config = Config(batch_size=4).with_workers(workers)
    cycles = drain(stream(), config, batches=2, count=count_samples, deadline=NEVER)

    assert cycles == [
        Cycle(seconds=size, wait_seconds=size, samples=size, work_bytes=size * 8)
        for size in (first, first + 1)
    ]


def test_draining_ends_in_time(clock: Clock) -> None:
    """After the batch that passes the deadline; what the caller does meanwhile does not count."""

    def stream() -> Iterator[Tensor]:
        while True:
            clock.pass_time(1.0)
            yield torch.zeros(1, 2)

    cycles = drain(stream(), Config(batch_size=1), batches=99, count=count_samples, deadline=103.5)

    assert [cycle.seconds for cycle in cycles] == [1.0] * 4


def test_even_cycles_are_told_by_their_median() -> None:
    """One stall does not move it."""
    cycles = [cycle_of(seconds) for seconds in (1.0, 1.0, 9.0)]

    measured = summarise(
        cycles, Config(batch_size=2, accumulation_steps=2).with_workers(2), has_queue=False
    )

    assert measured.samples_per_second == 4.0
    assert measured.optimizer_step_seconds == 1.0
    assert measured.step_seconds == 0.5
    assert measured.samples_per_optimizer_step == 4


def test_bursts_are_evened_out_in_blocks() -> None:
    """Two workers give two batches at a time; one stall of three such pairs moves nothing."""
    seconds = (0.1, 0.9, 0.1, 0.9, 5.0, 0.9)
    config = Config(batch_size=4).with_workers(2)

    waited = [cycle_of(each, wait=each / 2) for each in seconds]
    measured = summarise(waited, config, has_queue=True)

    assert measured.optimizer_step_seconds == pytest.approx(0.5)


def test_a_queue_that_is_never_waited_for_makes_no_bursts() -> None:
    """Then the median of the cycles counts, which one stall does not move."""
    config = Config(batch_size=4).with_workers(8)

    measured = summarise([cycle_of(s) for s in (0.5, 0.5, 5.0, 0.5)], config, has_queue=True)

    assert measured.optimizer_step_seconds == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("cycles", "workers"),
    [
        ([cycle_of(1.0), cycle_of(1.0, samples=2), cycle_of(2.0)], 0),
        ([cycle_of(1.0, samples=2), cycle_of(1.0, work=9), cycle_of(2.0)], 0),
        ([cycle_of(s, samples=2, wait=s / 2) for s in (0.1, 0.1, 2.2)], 2),
    ],
    ids=["a short last batch", "lengths", "bursts"],
)
def test_uneven_cycles_are_told_by_their_total(cycles: list[Cycle], workers: int) -> None:
    """Ten samples in four seconds, or six in 2.4, in whatever portions they come."""
    config = Config(batch_size=4).with_workers(workers)
    measured = summarise(cycles, config, has_queue=workers > 0)

    assert measured.samples_per_second == pytest.approx(2.5)
    assert measured.step_seconds == pytest.approx(4 / 2.5)


@given(
    seconds=st.lists(st.floats(0.01, 100), min_size=1, max_size=20),
    share=st.floats(0, 1),
    workers=st.integers(0, 2),
)
def test_a_rate_lies_between_those_of_the_cycles(
    seconds: list[float], share: float, workers: int
) -> None:
    """And the share of waiting is one."""
    cycles = [cycle_of(each, wait=each * share) for each in seconds]

    config = Config(batch_size=4).with_workers(workers)
    measured = summarise(cycles, config, has_queue=workers > 0)

    rates = [4 / each for each in seconds]
    assert measured.samples_per_second is not None
    assert measured.data_wait_share is not None
    assert min(rates) * 0.999 <= measured.samples_per_second <= max(rates) * 1.001
    assert measured.data_wait_share == pytest.approx(share)
