"""Phase D: what the loader alone delivers, drained at the best size, by number of workers.

Without workers first, then with one; then a jump to as many as should feed the device with 30 % to
spare, and up from there while more workers still bring more and the loader is what binds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from autotune.search.launcher import Ask, Launcher
from autotune.search.plan import Plan
from autotune.search.task import Task
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
        load = self._load_seconds(num_workers)
        return max(compute_seconds, load) if num_workers else compute_seconds + load

    def binds(self, compute_seconds: float) -> bool:
        """Whether even the best number of workers leaves the device waiting."""
        return bool(self.seconds) and min(self.seconds.values()) > FAST_ENOUGH * compute_seconds

    @property
    def sound_counts(self) -> list[int]:
        """The numbers of workers that were measured and neither crash nor hang, ascending."""
        return [count for count in sorted(self.seconds) if self.is_sound(count)]

    @property
    def is_broken(self) -> bool:
        """Whether some number of workers crashes or hangs."""
        return self.broken_from < math.inf

    def is_sound(self, num_workers: int) -> bool:
        """Whether so many workers are not known to crash or hang."""
        return num_workers < self.broken_from

    def with_drained(self, num_workers: int, rate: float | None) -> Self:
        """Return what is known after a drain gave so many samples per second; None if it failed."""
        if not rate:
            return replace(self, broken_from=num_workers)
        return replace(self, seconds={**self.seconds, num_workers: 1 / rate})

    def next_count(self, counts: Sequence[int], *, compute_seconds: float) -> int | None:
        """Return the number of workers to look at next; None where there is nothing to gain.

        Args:
            counts: What may be looked at, ascending.
            compute_seconds: Seconds per sample that the device takes.
        """
        larger = [count for count in counts if count > self._most]
        if not larger or not self._may_gain(compute_seconds):
            return None
        least = self._least_worth_a_look(compute_seconds)
        return min((count for count in larger if count >= least), default=larger[-1])

    @property
    def _most(self) -> int:
        """The most workers that were measured; -1 before any were."""
        return max(self.seconds, default=-1)

    def _load_seconds(self, num_workers: int) -> float:
        """Return seconds per sample of the loader, by the nearest number where it has workers."""
        if num_workers in self.seconds:
            return self.seconds[num_workers]
        known = [count for count in self.seconds if count]
        nearest = min(known, key=lambda count: abs(count - num_workers), default=0)
        return self.seconds.get(nearest, 0.0)

    def _may_gain(self, compute_seconds: float) -> bool:
        """Whether more workers than were measured may bring more."""
        if self.is_broken:
            return False
        if self._most <= 0:
            return True
        return self._has_gained() and self.seconds[self._most] > FAST_ENOUGH * compute_seconds

    def _has_gained(self) -> bool:
        """Whether the last step to more workers paid; one worker says nothing of two."""
        *fewer, most = sorted(self.seconds)
        if most == 1 or not fewer:
            return True
        return self.seconds[fewer[-1]] > LEAST_GAIN * self.seconds[most]

    def _least_worth_a_look(self, compute_seconds: float) -> float:
        """Return the next number of workers, or after one that which should feed the device."""
        if self._most == 1:
            return HEADROOM * self.seconds[1] / compute_seconds
        return self._most + 1


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
    task, found = launcher.task, known
    space = task.space
    counts = [n for n in task.worker_counts if space.has_room(space.with_workers(at, n))]
    while (workers := found.next_count(counts, compute_seconds=compute_seconds)) is not None:
        ask = _drained(task, at, workers)
        if not plan.affords(plan.cost(ask.config, "loader", cycles=ask.cycles), phase="D"):
            break
        found = found.with_drained(workers, launcher.run(ask).samples_per_second)
    return found


def _drained(task: Task, at: Config, num_workers: int) -> Ask:
    """Return what is asked of a loader with so many workers: batches enough beyond its queue."""
    config = task.space.with_workers(at, num_workers)
    cycles = math.ceil((2 * num_workers + LEAST_FETCHES) / config.accumulation_steps)
    return Ask(config=config, purpose="loader", phase="D", cycles=cycles)
