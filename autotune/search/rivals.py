"""Who races: the best few combinations of a size and a number of loader workers, by prediction.

Predictions only rank. On a CPU the loader takes cores from the step, so that `max(compute, load)`
was wrong by half (METHOD.md C); what is fastest is decided by running it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from autotune.search.fits import Fits, cell_of
from autotune.search.loading import Loading
from autotune.search.numerics import Guard
from autotune.search.proposals import beside
from autotune.search.sizes import without_checkpointing
from autotune.search.speeds import CLOSE, Speeds
from autotune.search.switches import without_switches
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

    def sizes(self) -> list[Config]:
        """Return the sizes that were timed and whose gradients may be used, the fastest first."""
        return [size for size in self.speeds.ranked() if self.guard.allows(size)]

    def plainest_sizes(self) -> list[Config]:
        """Return of the sizes each once: those that differ in switches alone as suits them."""
        alike: dict[Config, list[Config]] = {}
        for size in self.sizes():
            alike.setdefault(without_switches(size), []).append(size)
        return sorted(map(self.speeds.plainest, alike.values()), key=self.speeds.of)

    def may_race(self, config: Config) -> bool:
        """Whether nothing that is known speaks against a config."""
        return self._is_eligible(config) and self._can_run(config) and self.guard.allows(config)

    def may_challenge(self, config: Config) -> bool:
        """Whether a config may race, and is not the reference."""
        return config != self.reference and self.may_race(config)

    def is_outdone(self, config: Config) -> bool:
        """Whether a config recomputes what fits without, and nothing showed that to be faster."""
        if not self.task.only_recomputes(config):
            return False
        is_slower = not self.speeds.gains_by_checkpointing(config.amp)
        return is_slower and self._fits_plain(without_checkpointing(config))

    def _fits_plain(self, plain: Config) -> bool:
        return self.guard.allows(plain) and self.fits.state(plain) == "fits"

    def _is_eligible(self, config: Config) -> bool:
        """Whether a config is the reference, or one of the space that nothing outdoes."""
        if config == self.reference:
            return True
        return config in self.task.space and not self.is_outdone(config)

    def _can_run(self, config: Config) -> bool:
        """Whether neither memory nor the loader is known to fail."""
        return self.loading.is_sound(config.num_workers) and self.fits.may_run(config)


def rivals(known: Knowledge) -> list[Config]:
    """Return who is worth racing, the most promising first; the reference is not among them."""
    found = dict.fromkeys(filter(known.may_challenge, _promising(known)))
    return list(found)[:MOST_RIVALS]


def fast_enough(known: Knowledge) -> list[Config]:
    """Return the sizes that keep 95 % of the best throughput, the fastest first."""
    seconds = {size: known.predicted(best_workers(known, size)) for size in known.sizes()}
    most = min(seconds.values(), default=0.0) / KEPT_THROUGHPUT
    return [size for size in seconds if seconds[size] <= most]


def best_workers(known: Knowledge, size: Config) -> Config:
    """Return a size with the fewest workers that are predicted to be as good as any."""
    space = known.task.space
    size = space.with_allowed_knobs(size)
    if known.task.has_choice("pin_memory"):  # nearly always better; the race has one without
        size = replace(size, pin_memory=True)
    options = [space.with_workers(size, count) for count in known.loading.sound_counts]
    options = [option for option in options if space.has_room(option)]
    return _first_as_good(known, options) if options else _with_any_workers(known, size)


def _first_as_good(known: Knowledge, options: Sequence[Config]) -> Config:
    """Return the first of some configs that is predicted to be as good as any."""
    best = min(map(known.predicted, options))
    return next(option for option in options if known.predicted(option) <= SAME * best)


def _with_any_workers(known: Knowledge, size: Config) -> Config:
    """Return a size with the reference's workers, or the fewest where the space has not those."""
    counts = known.task.worker_counts
    if not counts or size.num_workers in counts:
        return size
    return known.task.space.with_workers(size, counts[0])


def _sizes(known: Knowledge) -> list[Config]:
    """Return the sizes worth racing: the fastest few, or the leanest few that are fast enough."""
    ranked = [size for size in known.plainest_sizes() if not known.is_outdone(size)]
    return _leanest(known, ranked) if known.task.saves_memory else _fastest(known, ranked)


def _fastest(known: Knowledge, ranked: Sequence[Config]) -> list[Config]:
    within = CLOSE * min(map(known.speeds.of, ranked), default=0.0)
    return [size for size in ranked if known.speeds.of(size) <= within][:MOST_SIZES]


def _leanest(known: Knowledge, ranked: Sequence[Config]) -> list[Config]:
    """Return the fastest size, and those that need least of those that are fast enough."""
    leanest = sorted(fast_enough(known), key=known.fits.peak_of)
    return list(dict.fromkeys([*ranked[:1], *leanest]))[: MOST_SIZES + 1]


def _promising(known: Knowledge) -> Iterator[Config]:
    """Yield combinations, the most promising first."""
    best = [best_workers(known, size) for size in _sizes(known)]
    yield from best
    if best:
        yield from _variations(known, best[0])


def _variations(known: Knowledge, first: Config) -> Iterator[Config]:
    """Yield what a prediction is not sure to be worse than the config that it holds to be best."""
    yield from _other_workers(known, first)
    yield from _spared_threads(known.task, first)
    yield from _larger(known, first)
    if known.task.has_choice("pin_memory"):
        yield replace(first, pin_memory=not first.pin_memory)


def _larger(known: Knowledge, first: Config) -> Iterator[Config]:
    """Yield the fastest larger batch, where the loader binds: its cost per batch may be why."""
    if known.loading.binds(known.speeds.of(first)):
        larger = (size for size in known.speeds.ranked() if _is_larger(size, first))
        for size in islice(larger, 1):
            yield best_workers(known, size)


def _is_larger(size: Config, first: Config) -> bool:
    """Whether a size is a larger one of the same cell."""
    return cell_of(size) == cell_of(first) and size.batch_size > first.batch_size


def _other_workers(known: Knowledge, first: Config) -> Iterator[Config]:
    """Yield a config with none, one more and one fewer of the workers that can be had."""
    counts = known.task.worker_counts
    if first.num_workers in counts:
        yield from _without_workers(known, first)
        for count in reversed(beside(counts, counts.index(first.num_workers))):
            yield known.task.space.with_workers(first, count)


def _without_workers(known: Knowledge, first: Config) -> Iterator[Config]:
    """Yield a config without its workers, where that is not predicted to be far slower."""
    alone = known.task.space.with_workers(first, 0)
    is_choice = first.num_workers > 0 and 0 in known.task.worker_counts
    if is_choice and known.predicted(alone) <= NO_WORKER_SHARE * known.predicted(first):
        yield alone


def _spared_threads(task: Task, config: Config) -> Iterator[Config]:
    """Yield a config that leaves a core of the CPU it trains on to each of its workers."""
    if task.device.kind == "cpu" and config.num_workers:
        threads = _most_threads(task, within=max(task.device.usable_cores - config.num_workers, 1))
        if threads not in {None, task.threads_of(config)}:
            yield replace(config, threads=threads)


def _most_threads(task: Task, *, within: int) -> int | None:
    """Return the most threads that may be tried and are not more than so many cores."""
    counts = (count for count in task.space.choices("threads") if isinstance(count, int))
    return max((count for count in counts if count <= within), default=None)
