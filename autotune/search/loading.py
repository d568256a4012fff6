"""Phase D: what the loader alone delivers, drained at the best size, by number of workers.

Without workers first, then with one; then a jump to as many as should feed the device with 30 % to
spare, and up from there while more workers still bring more and the loader is what binds.
"""

import math
from dataclasses import dataclass

from autotune.outcome import Measured
from autotune.search.launcher import Ask, Launcher
from autotune.search.plan import Plan
from autotune.space import Config

HEADROOM = 1.3
"""So many times the workers that the device needs: their start and uneven samples (METHOD D.1)."""

LEAST_GAIN = 1.03
"""More workers that bring less than this are not followed further."""

LEAST_FETCHES = 6
"""Batches that are drained, beside two of each worker: fewer are those made ahead (METHOD C.2)."""

FAST_ENOUGH = 0.7
"""A loader that takes less than this share of the device's time does not bind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Seconds per sample of the loader by number of workers, as far as it was measured.

    Args:
        seconds: Workers → seconds per sample.
        broken_from: So many workers crash or hang; infinite where none did.
    """

    seconds: dict[int, float]
    broken_from: float = math.inf

    def predicted(self, compute_seconds: float, num_workers: int) -> float:
        """Return seconds per sample end to end: good enough to rank by, no more.

        Loading and computing overlap where there are workers, and add up where there are none.
        """
        load = self.seconds.get(num_workers)
        if load is None:
            known = [w for w in self.seconds if w]
            nearest = min(known, key=lambda w: abs(w - num_workers), default=0)
            load = self.seconds.get(nearest, 0.0)
        return max(compute_seconds, load) if num_workers else compute_seconds + load

    def binds(self, compute_seconds: float) -> bool:
        """Whether even the best number of workers leaves the device waiting."""
        return bool(self.seconds) and min(self.seconds.values()) > FAST_ENOUGH * compute_seconds


def drain(
    launcher: Launcher, plan: Plan, *, at: Config, compute_seconds: float, known: Loading
) -> Loading:
    """Return what the loader delivers with 0, 1, … workers at a size.

    Args:
        launcher: What runs it.
        plan: What can be afforded.
        at: The config whose batches are loaded.
        compute_seconds: Seconds per sample that the device takes.
        known: What was found out for a slower device; it is gone on from there.

    Raises:
        BudgetSpent: If nothing more may be launched.
    """
    space = launcher.task.space
    counts = [int(w or 0) for w in space.choices("num_workers")]
    seconds, broken_from = dict(known.seconds), known.broken_from
    workers = min(counts, default=None)
    if seconds:
        workers = _next_count(seconds, counts, compute_seconds=compute_seconds)
    while workers is not None:
        config = space.with_workers(at, workers)
        cycles = math.ceil((2 * workers + LEAST_FETCHES) / config.accumulation_steps)
        if not plan.affords(plan.cost(config, "loader", cycles=cycles), phase="D"):
            break
        ask = Ask(config=config, purpose="loader", phase="D", cycles=cycles)
        outcome = launcher.run(ask).outcome
        rate = outcome.measurement.samples_per_second if isinstance(outcome, Measured) else None
        if not rate:
            broken_from = workers
            break
        seconds[workers] = 1 / rate
        workers = _next_count(seconds, counts, compute_seconds=compute_seconds)
    return Loading(seconds=seconds, broken_from=broken_from)


def _next_count(
    seconds: dict[int, float], counts: list[int], *, compute_seconds: float
) -> int | None:
    """Return the number of workers to look at next; None where there is nothing to gain."""
    last = max(seconds)
    larger = [count for count in counts if count > last]
    if not larger or not _may_gain(seconds, compute_seconds=compute_seconds):
        return None
    if last > 1:
        return larger[0]
    wanted = HEADROOM * seconds[1] / compute_seconds if 1 in seconds else 1
    return next((count for count in larger if count >= wanted), larger[-1])


def _may_gain(seconds: dict[int, float], *, compute_seconds: float) -> bool:
    """Whether more workers than were measured may bring more."""
    last = max(seconds)
    if last == 0:
        return True
    if seconds[last] <= FAST_ENOUGH * compute_seconds:
        return False
    fewer = [count for count in seconds if count < last]
    return last == 1 or not fewer or seconds[max(fewer)] > LEAST_GAIN * seconds[last]
