"""Phase D: what the loader alone delivers, drained at the best size, by number of workers.

Without workers first, then with one; then a jump to as many as should feed the device with 30 % to
spare, up from there while more workers still bring more and the loader is what binds, and down
where so many hinder each other.
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

SHORT = 1.3
"""Workers that together bring less than one by itself times their number, by this factor, hinder
each other: fewer may bring as much, or more."""

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
        pinned_seconds: Seconds per sample with pinned memory and the best number of workers, all
            others being without: one thread copies for them all. 0 where it was not measured.
    """

    seconds: dict[int, float]
    broken_from: float = math.inf
    pinned_seconds: float = 0.0

    def predicted(
        self, compute_seconds: float, num_workers: int, *, is_pinned: bool = False
    ) -> float:
        """Return seconds per sample end to end: good enough to rank by, no more.

        Loading and computing overlap where there are workers, and add up where there are none.
        """
        load = self.load_seconds(num_workers)
        if not num_workers:
            return compute_seconds + load
        return max(compute_seconds, load, self.pinned_seconds if is_pinned else 0.0)

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
            return self._lower_count(counts, compute_seconds)
        least = self._least_worth_a_look(compute_seconds)
        return min((count for count in larger if count >= least), default=larger[-1])

    def _lower_count(self, counts: Sequence[int], compute_seconds: float) -> int | None:
        """Return the next lower number of workers, where so many hinder each other."""
        best = min(filter(None, self.sound_counts), key=self.seconds.__getitem__, default=0)
        is_short = best > 1 and self.seconds[best] * best > SHORT * self.seconds.get(1, math.inf)
        lower = max((count for count in counts if 0 < count < best), default=0)
        is_worth_a_look = is_short and self.binds(compute_seconds) and lower not in self.seconds
        return lower if lower and is_worth_a_look else None

    @property
    def _most(self) -> int:
        """The most workers that were measured; -1 before any were."""
        return max(self.seconds, default=-1)

    def load_seconds(self, num_workers: int) -> float:
        """Return seconds per sample of the loader, between what was measured where it was not.

        Fewer workers than were measured take longer in proportion; more are as good.
        """
        if num_workers in self.seconds or not num_workers:
            return self.seconds.get(num_workers, 0.0)
        fewer = [count for count in self.seconds if 0 < count < num_workers]
        more = [count for count in self.seconds if count > num_workers]
        if not fewer:
            return self.seconds[min(more)] * min(more) / num_workers if more else 0.0
        nearest = max(fewer)
        if not more:
            return self.seconds[nearest]
        return max(self.seconds[nearest] * nearest / num_workers, self.seconds[min(more)])

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
    return _pinned(launcher, plan, at=at, found=found)


def _pinned(launcher: Launcher, plan: Plan, *, at: Config, found: Loading) -> Loading:
    """Return what is known after a drain with pinned memory, by the best number of workers."""
    workers = min(
        found.sound_counts, key=lambda count: (not count, found.seconds[count]), default=0
    )
    is_known = found.pinned_seconds > 0 or not launcher.task.has_choice("pin_memory")
    if is_known or not workers:
        return found
    ask = _drained(launcher.task, at, workers)
    ask = replace(ask, config=replace(ask.config, pin_memory=True))
    if not plan.affords(plan.cost(ask.config, "loader", cycles=ask.cycles), phase="D"):
        return found
    rate = launcher.run(ask).samples_per_second
    return replace(found, pinned_seconds=1 / rate if rate else math.inf)


def own_seconds(launcher: Launcher, plan: Plan, *, at: Config) -> float | None:
    """Return seconds per sample of a config's own loader; None where they cannot be had.

    Raises:
        BudgetSpent: If nothing more may be launched.
    """
    ask = replace(_drained(launcher.task, at, at.num_workers), phase="A")
    if not plan.affords(plan.cost(ask.config, "loader", cycles=ask.cycles), phase="D"):
        return None
    rate = launcher.run(ask).samples_per_second
    return 1 / rate if rate else None


def _drained(task: Task, at: Config, num_workers: int) -> Ask:
    """Return what is asked of a loader with so many workers: batches enough beyond its queue."""
    config = task.space.with_workers(at, num_workers)
    if task.has_choice("pin_memory"):
        config = replace(config, pin_memory=False)
    cycles = math.ceil((2 * num_workers + LEAST_FETCHES) / config.accumulation_steps)
    return Ask(config=config, purpose="loader", phase="D", cycles=cycles)
