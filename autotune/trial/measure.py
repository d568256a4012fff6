"""Timing of whole accumulation cycles: the loader starts with an empty queue, waits apart."""

import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from autotune.outcome import Measurement
from autotune.space import Config
from autotune.step.window import windows
from autotune.trial.largest import batch_bytes

PATIENCE = 0.75
"""Share of a launch's time limit after which it stops timing and answers with what it has."""

WAITING = 0.03
"""Share of the time that a loader is waited for below which its bursts cannot be seen."""

LEAST_BLOCKS = 3
"""With fewer blocks of cycles their median is no better than their mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """One optimizer step, timed.

    Args:
        seconds: All of it, the wait for data included.
        wait_seconds: How long the loader was waited for.
        samples: Samples in its window.
        work_bytes: Bytes of its batches: a measure of its work where lengths vary.
    """

    seconds: float
    wait_seconds: float
    samples: int
    work_bytes: int


def endless(loader: Iterable[Any], accumulation_steps: int) -> Generator[list[Any], None, None]:
    """Yield windows of one epoch after another, for ever; an epoch without a batch ends it."""
    while True:
        is_empty = True
        for window in windows(loader, accumulation_steps):
            is_empty = False
            yield window
        if is_empty:
            return


def time_cycles(
    stream: Iterator[list[Any]],
    step: Callable[[Sequence[Any]], object],
    *,
    cycles: int,
    count: Callable[[Any], int],
    synchronize: Callable[[], None],
    deadline: float,
) -> list[Cycle]:
    """Time so many optimizer steps, fewer if the deadline (monotonic seconds) passes first."""
    timed: list[Cycle] = []
    synchronize()
    while len(timed) < cycles and (not timed or time.monotonic() < deadline):
        start = time.perf_counter()
        window = next(stream, None)
        if window is None:
            break
        loaded = time.perf_counter()
        step(window)
        synchronize()
        end = time.perf_counter()
        timed.append(
            Cycle(
                seconds=end - start,
                wait_seconds=loaded - start,
                samples=sum(count(batch) for batch in window),
                work_bytes=sum(batch_bytes(batch) for batch in window),
            )
        )
    return timed


def skip_windows(stream: Iterator[list[Any]], count: int) -> None:
    """Pull windows without computing on them, so that the queue holds no head start.

    A queue that was filled while slow first steps ran makes a loader look up to 3.3 times as
    fast as it is (METHOD.md 0.4).
    """
    for _ in islice(stream, count):
        pass


def drain(
    stream: Iterator[Any],
    config: Config,
    *,
    batches: int,
    count: Callable[[Any], int],
    deadline: float,
) -> list[Cycle]:
    """Time a loader alone, batch by batch, fewer if the deadline (monotonic seconds) passes.

    The first `workers + 2` batches are pulled untimed: they were prepared while workers started.
    """
    for _ in islice(stream, config.num_workers + 2 if config.num_workers else 0):
        pass
    timed: list[Cycle] = []
    start = time.perf_counter()
    for batch in islice(stream, batches):
        end = time.perf_counter()
        timed.append(
            Cycle(
                seconds=end - start,
                wait_seconds=end - start,
                samples=count(batch),
                work_bytes=batch_bytes(batch),
            )
        )
        if time.monotonic() > deadline:
            break
        start = time.perf_counter()
    return timed


def summarise(cycles: Sequence[Cycle], config: Config, *, has_queue: bool) -> Measurement:
    """Return throughput and times of the cycles.

    Cycles of equal work are summed up by their median, which one stall does not move; where
    workers are waited for, and give batches in bursts, by the median of blocks that even these out;
    where lengths vary, or blocks would be short, by their total (METHOD.md B.3 and D.1).

    Args:
        cycles: What was timed.
        config: What ran.
        has_queue: Whether batches came out of workers' queues.
    """
    seconds = sum(cycle.seconds for cycle in cycles)
    samples = sum(cycle.samples for cycle in cycles)
    waited = sum(cycle.wait_seconds for cycle in cycles) / seconds
    rate = samples / seconds
    if len({(cycle.samples, cycle.work_bytes) for cycle in cycles}) == 1:
        blocks = _blocks(cycles, of=_block_length(config) if has_queue and waited > WAITING else 1)
        rate = cycles[0].samples / (statistics.median(blocks) if blocks else seconds / len(cycles))
    per_step = config.samples_per_optimizer_step / rate
    return Measurement(
        samples_per_second=rate,
        step_seconds=per_step / config.accumulation_steps,
        optimizer_step_seconds=per_step,
        data_wait_share=waited,
        samples_per_optimizer_step=config.samples_per_optimizer_step,
    )


def _block_length(config: Config) -> int:
    """Return the cycles in which each worker gives a batch at least once."""
    return -(-config.num_workers // config.accumulation_steps) or 1


def _blocks(cycles: Sequence[Cycle], *, of: int) -> list[float]:
    """Return the mean seconds of a cycle in each block of so many; none if there are few blocks."""
    starts = range(0, len(cycles) - of + 1, of)
    means = [statistics.fmean(c.seconds for c in cycles[start : start + of]) for start in starts]
    return means if of == 1 or len(means) >= LEAST_BLOCKS else []
