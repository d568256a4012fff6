"""Who races: the best few combinations of a size and a number of loader workers, by prediction.

Predictions only rank. On a CPU the loader takes cores from the step, so that `max(compute, load)`
was wrong by half (METHOD.md C); what is fastest is decided by running it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autotune.search.fits import Fits, cell_of
from autotune.search.loading import Loading
from autotune.search.numerics import Guard
from autotune.search.sizes import without_checkpointing
from autotune.search.speeds import CLOSE, Speeds
from autotune.search.task import KEPT_THROUGHPUT, Task
from autotune.space import Config

MOST_RIVALS = 6
"""More rivals than this cost a race more rounds than they are worth."""

MOST_SIZES = 3
"""So many sizes enter a race: those within 12 % of the best."""

NO_WORKER_SHARE = 1.3
"""Loading in the training process races if it is predicted to take at most so many times as long
as with workers: a prediction is that far off (METHOD.md B.4, second hold-out)."""

SAME = 1.03
"""Numbers of workers that are predicted this close are as good: the fewest are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What phases A and D found out.

    Args:
        task: What the search is asked.
        fits: What is known of memory.
        speeds: Seconds per sample without a loader.
        loading: Seconds per sample of the loader.
        guard: What is known of numerics.
        reference: The config that the verdict compares with.
    """

    task: Task
    fits: Fits
    speeds: Speeds
    loading: Loading
    guard: Guard
    reference: Config

    def predicted(self, config: Config) -> float:
        """Return predicted seconds per sample, end to end; infinite where nothing is known."""
        return self.loading.predicted(self.speeds.of(config), config.num_workers)

    def may_race(self, config: Config) -> bool:
        """Whether nothing that is known speaks against a config."""
        if config != self.reference and (config not in self.task.space or self.is_outdone(config)):
            return False
        has_sound_workers = config.num_workers < self.loading.broken_from
        return self.fits.may_run(config) and self.guard.allows(config) and has_sound_workers

    def is_outdone(self, config: Config) -> bool:
        """Whether a config recomputes what fits without, and nothing showed that to be faster."""
        if config.checkpointing == "off" or self.task.goal == "memory":
            return False
        plain = without_checkpointing(config)
        is_choice = "off" in self.task.space.choices("checkpointing") and self.guard.allows(plain)
        is_slower = not self.speeds.gains_by_checkpointing(config.amp)
        return is_choice and is_slower and self.fits.state(plain) == "fits"


def rivals(known: Knowledge) -> list[Config]:
    """Return who is worth racing, the most promising first; the reference is not among them."""
    sizes = _sizes(known)
    found: list[Config] = []
    for config in _promising(known, sizes):
        if config not in found and config != known.reference and known.may_race(config):
            found.append(config)
    return found[:MOST_RIVALS]


def fast_enough(known: Knowledge) -> list[Config]:
    """Return the sizes that keep 95 % of the best throughput, the fastest first."""
    allowed = [size for size in known.speeds.ranked() if known.guard.allows(size)]
    seconds = {size: known.predicted(best_workers(known, size)) for size in allowed}
    most = min(seconds.values(), default=0.0) / KEPT_THROUGHPUT
    return [size for size in allowed if seconds[size] <= most]


def best_workers(known: Knowledge, size: Config) -> Config:
    """Return a size with the fewest workers that are predicted to be as good as any."""
    counts = [w for w in sorted(known.loading.seconds) if w < known.loading.broken_from]
    if not counts:
        return _with_any_workers(known, size)
    options = [known.task.space.with_workers(size, count) for count in counts]
    best = min(known.predicted(option) for option in options)
    return next(option for option in options if known.predicted(option) <= SAME * best)


def _with_any_workers(known: Knowledge, size: Config) -> Config:
    """Return a size with the reference's workers, or the fewest where the space has not those."""
    choices = known.task.space.choices("num_workers")
    if not choices or size.num_workers in choices:
        return size
    return known.task.space.with_workers(size, int(choices[0] or 0))


def _sizes(known: Knowledge) -> list[Config]:
    """Return the sizes worth racing: the fastest few, or the leanest few that are fast enough."""
    allowed = [size for size in known.speeds.ranked() if known.guard.allows(size)]
    ranked = [size for size in allowed if not known.is_outdone(size)]
    if not ranked:
        return []
    best = known.speeds.of(ranked[0])
    if known.task.goal == "memory":
        leanest = sorted(
            fast_enough(known), key=lambda size: known.fits.predict(size).peak_bytes or math.inf
        )
        return list(dict.fromkeys([ranked[0], *leanest]))[: MOST_SIZES + 1]
    return [size for size in ranked if known.speeds.of(size) <= CLOSE * best][:MOST_SIZES]


def _promising(known: Knowledge, sizes: list[Config]) -> Iterator[Config]:
    """Yield combinations, the most promising first."""
    if not sizes:
        return
    first = best_workers(known, sizes[0])
    yield first
    for size in sizes[1:]:
        yield best_workers(known, size)
    yield from _other_workers(known, first)
    if first.num_workers and known.task.device.kind == "cpu":
        yield from _spared_threads(known.task, first)
    yield from _larger(known, first)
    if len(known.task.space.choices("pin_memory")) > 1:
        yield replace(first, pin_memory=not first.pin_memory)


def _larger(known: Knowledge, first: Config) -> Iterator[Config]:
    """Yield the fastest larger batch, where the loader binds: its cost per batch may be why."""
    if not known.loading.binds(known.speeds.of(first)):
        return
    for size in known.speeds.ranked():
        if cell_of(size) == cell_of(first) and size.batch_size > first.batch_size:
            yield best_workers(known, size)
            return


def _other_workers(known: Knowledge, first: Config) -> Iterator[Config]:
    """Yield a config with none, one more and one fewer of the workers that can be had."""
    space = known.task.space
    counts = [int(w or 0) for w in space.choices("num_workers")]
    if first.num_workers not in counts:
        return
    alone = space.with_workers(first, 0)
    if first.num_workers and 0 in counts:
        limit = NO_WORKER_SHARE * known.predicted(first)
        if known.predicted(alone) <= limit:
            yield alone
    place = counts.index(first.num_workers)
    for other in (place + 1, place - 1):
        if 0 <= other < len(counts):
            yield space.with_workers(first, counts[other])


def _spared_threads(task: Task, config: Config) -> Iterator[Config]:
    """Yield a config that leaves a core to each of its workers."""
    left = max(task.device.usable_cores - config.num_workers, 1)
    counts = [n for n in task.space.choices("threads") if isinstance(n, int) and n <= left]
    if counts and max(counts) != task.threads_of(config):
        yield replace(config, threads=max(counts))
