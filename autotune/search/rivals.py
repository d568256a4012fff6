"""Who races: the best few combinations of a size and a number of loader workers, by prediction.

Predictions only rank. On a CPU the loader takes cores from the step, so that `max(compute, load)`
was wrong by half (METHOD.md C); what is fastest is decided by running it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from autotune.knobs import IN_PART
from autotune.search.costs import NEARLY
from autotune.search.fits import Fits, cell_of
from autotune.search.loading import Loading
from autotune.search.numerics import Guard
from autotune.search.proposals import beside, without_switches
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

RESOLVED = 1.05
"""Sizes further apart than this without a loader are told apart by that, where no loader binds; but
on a CPU, whose launches differ by 4 % on their own (METHOD.md C.1)."""

HIDDEN = 0.5
"""A loader that takes less of the step's time than this is hidden by it: nothing about the loader
can change the whole; and the other way round."""

BARELY = 1.005
"""Loading in the training process is as good where it is predicted to cost no more than this."""

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
        return self.assumed(config, self.speeds.of(config))

    def assumed(self, config: Config, computing: float) -> float:
        """Return the same where a step takes so many seconds per sample."""
        return self.loading.predicted(computing, config.num_workers, is_pinned=config.pin_memory)

    def hides_loading(self, config: Config) -> bool:
        """Whether the device takes so long that nothing about a config's loader can matter."""
        loading = self.loading.load_seconds(config.num_workers)
        is_known = bool(self.loading.seconds) and config.num_workers > 0
        return is_known and loading < HIDDEN * self.speeds.of(config)

    def hides_computing(self, config: Config) -> bool:
        """Whether the loader takes so long that nothing about a config's step can matter."""
        loading = self.loading.load_seconds(config.num_workers)
        return config.num_workers > 0 and self.speeds.of(config) < HIDDEN * loading

    def hides_copying(self, config: Config) -> bool:
        """Whether the same is true of copying to the device, and of the thread that pins."""
        loading = self.loading.load_seconds(config.num_workers)
        return self.hides_computing(config) and self.loading.pinned_seconds < NEARLY * loading

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

    def fits_plainly(self, config: Config) -> bool:
        """Whether a config is known to fit with its switches left alone, as borders are found."""
        return self.fits.state(without_switches(config)) == "fits"

    def is_outdone(self, config: Config) -> bool:
        """Whether a config recomputes what fits without, and nothing showed that to be faster."""
        if not self.task.only_recomputes(config):
            return False
        return any(self._is_outdone_by(config, other) for other in self.task.cheaper(config))

    def _is_outdone_by(self, config: Config, other: Config) -> bool:
        """Whether the same with less recomputed may be used, and is not known to be slower.

        Blocks that are recomputed whole have to be timed to know: to keep some results takes Python
        at each operator.
        """
        seconds, less = self.speeds.of(config), self.speeds.of(other)
        if other.checkpointing == "off":
            is_slower = not self.speeds.gains_by_checkpointing(config.amp)
        elif other.checkpointing in IN_PART and config.checkpointing not in IN_PART:
            is_slower = less <= seconds < math.inf
        else:
            is_slower = less <= seconds
        return is_slower and self.guard.allows(other) and self.fits.state(other) == "fits"

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
    options = [space.with_workers(size, count) for count in known.loading.sound_counts]
    options = [option for option in options if space.has_room(option)]
    best = _first_as_good(known, options) if options else _with_any_workers(known, size)
    return _pinned(known, best) if known.task.has_choice("pin_memory") else best


def _pinned(known: Knowledge, config: Config) -> Config:
    """Return a config with pinned memory, unless the thread that copies is what binds.

    It is nearly always better; the race has one with the other where the loader matters.
    """
    pinned = replace(config, pin_memory=True)
    plain = replace(config, pin_memory=False)
    return pinned if known.predicted(pinned) <= SAME * known.predicted(plain) else plain


def _first_as_good(known: Knowledge, options: Sequence[Config]) -> Config:
    """Return the first of some configs that is predicted to be as good as any."""
    best = min(map(known.predicted, options))
    enough = {option: SAME if option.num_workers else BARELY for option in options}
    return next(option for option in options if known.predicted(option) <= enough[option] * best)


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
    best = min(map(known.speeds.of, ranked), default=0.0)
    is_unsure = known.task.device.kind == "cpu" or known.loading.binds(best)
    within = (CLOSE if is_unsure else RESOLVED) * best
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
    if known.task.device.kind == "cpu" or not known.hides_loading(first):
        yield from _other_workers(known, first)
        fed = next(_with_workers(known, first), first)
        if known.task.has_choice("pin_memory") and not known.hides_copying(first):
            yield from (replace(each, pin_memory=not each.pin_memory) for each in (fed, first))
    yield from _fetched_further(known, first)
    yield from _spared_threads(known.task, first)
    yield from _larger(known, first)


def _fetched_further(known: Knowledge, first: Config) -> Iterator[Config]:
    """Yield the longest queue where the loader is waited for: it evens out what samples take."""
    loading = known.loading.load_seconds(first.num_workers)
    most = max((int(n or 0) for n in known.task.space.choices("prefetch_factor")), default=0)
    is_waited_for = first.num_workers > 0 and loading > NEARLY * known.speeds.of(first)
    if is_waited_for and most > (first.prefetch_factor or 0):
        yield replace(first, prefetch_factor=most)


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
        yield from _with_workers(known, first)
        for count in reversed(beside(counts, counts.index(first.num_workers))):
            other = known.task.space.with_workers(first, count)
            if known.predicted(other) <= CLOSE * known.predicted(first):
                yield other


def _without_workers(known: Knowledge, first: Config) -> Iterator[Config]:
    """Yield a config without its workers, where that is not predicted to be far slower."""
    alone = known.task.space.with_workers(first, 0)
    is_choice = first.num_workers > 0 and 0 in known.task.worker_counts
    if is_choice and known.predicted(alone) <= NO_WORKER_SHARE * known.predicted(first):
        yield alone


def _with_workers(known: Knowledge, first: Config) -> Iterator[Config]:
    """Yield a config without workers with the best number of them, if that is not far off."""
    counts = [count for count in known.loading.sound_counts if count]
    if first.num_workers == 0 and counts:
        options = [known.task.space.with_workers(first, count) for count in counts]
        if known.task.has_choice("pin_memory"):
            options = [_pinned(known, option) for option in options]
        fed = min(options, key=known.predicted)
        if known.predicted(fed) <= NO_WORKER_SHARE * known.predicted(first):
            yield fed


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
