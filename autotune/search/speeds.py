"""Phase A, time: seconds per sample of batch sizes and precisions, without a loader.

A pass over every fourth size of the whole feasible range; every second one beside those that are
not hopeless; then the neighbours of all within 12 % of the best. A coarser sweep with an early stop
misses a dip between its points, and what a cell is worth is judged by that cell alone (METHOD.md
F.2 and F.3).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from statistics import fmean, geometric_mean

from autotune.search.choice import needs
from autotune.search.costs import LIMIT_FLOOR_SECONDS, WARM_UP_CYCLES
from autotune.search.estimates import DIP, estimated_seconds
from autotune.search.fits import Fits
from autotune.search.launcher import Ask, Launcher
from autotune.search.plan import Plan
from autotune.search.proposals import beside, with_size_of
from autotune.search.sizes import without_checkpointing
from autotune.space import Config

CLOSE = 1.12
"""Sizes this close to the best have their neighbours measured too (METHOD.md F)."""

STRIDES = (4, 8, 16, 32)
"""Every so many sizes are measured first: the first stride that the budget allows."""

HOPELESS = 2.0
"""A size that takes so many times as long as the best is not waited for, and those beside it are
not looked at: no dip is known to be deeper."""

COSTLY = 3.0
"""Sizes that take so many times as long for a sample as the reference wait until the others are
done: they are slow unless the law of time has a dip there."""

DOUBLE = 2
"""A size says something of those up to twice as large."""

SURPRISE = 0.97
"""A checkpointed size is surprisingly fast that takes less than this share of its time without
checkpointing: launches differ by a few percent, and recomputing costs up to a third."""

CLEARLY = 0.997
"""A switch pays that takes less than this share of the time: what pays less is a tie."""

CLEAR = 0.04
"""Log ratio that one pair of launches shows beyond doubt, and more pairs where it is smaller by the
square root of their number: launches differ by 1 to 2 %."""

MOST_PAIRS = 3
"""An effect that so many pairs do not show is not worth a further one."""

LONG_CYCLE_SECONDS = 5.0
"""Where an optimizer step takes longer, it is a long accumulation, and a part of it will do."""

LEAST_ACCUMULATED = 2
"""Such a part holds so many micro-batches of the largest size, and more of smaller ones."""

PASS_SHARE = 0.6
"""The first pass may use this share of the phase's time; the neighbours have the rest."""


class Speeds:
    """Seconds per sample of configs without their loader, as measured.

    Args:
        launcher: What runs them.
        fits: What is known of memory.
        plan: What can be afforded.
        reference: The config whose loader settings all have here.
    """

    def __init__(self, launcher: Launcher, fits: Fits, *, plan: Plan, reference: Config) -> None:
        self._launcher = launcher
        self._fits = fits
        self._plan = plan
        self._reference = reference
        self.seconds: dict[Config, float] = {}
        self._given_up: set[Config] = set()
        self._failed: set[Config] = set()
        self._samples: int | None = None

    def core(self, config: Config) -> Config:
        """Return a config with the reference's loader: what is timed here knows no other."""
        return replace(
            config,
            num_workers=self._reference.num_workers,
            prefetch_factor=self._reference.prefetch_factor,
            persistent_workers=self._reference.persistent_workers,
            pin_memory=self._reference.pin_memory,
        )

    def of(self, config: Config) -> float:
        """Return seconds per sample; infinite where they were not measured."""
        return self.seconds.get(self.core(config), math.inf)

    def ranked(self) -> list[Config]:
        """Return what was measured, the fastest first."""
        return sorted(self.seconds, key=lambda config: (self.seconds[config], *needs(config)))

    def plainest(self, configs: Iterable[Config]) -> Config:
        """Return that of some configs which needs least, of those about as fast as the fastest."""
        configs = list(configs)
        enough = min(map(self.of, configs)) / CLEARLY
        near = [config for config in configs if self.of(config) <= enough]
        return min(near, key=lambda config: (*needs(config), self.of(config)))

    @property
    def best_seconds(self) -> float:
        """Seconds per sample of the fastest; infinite before there is one."""
        return min(self.seconds.values(), default=math.inf)

    def estimate(self, config: Config) -> float:
        """Return seconds per sample, where they were not measured as they are likely at best."""
        return estimated_seconds(self.seconds, self.core(config))

    def is_hopeless(self, cell: Config, *, within: int) -> bool:
        """Whether sizes of a cell near to any other were timed, and all take far too long.

        Args:
            cell: A config of the cell.
            within: The largest size that is of interest.
        """
        timed = {c.batch_size: s for c, s in self.seconds.items() if with_size_of(cell, c) == c}
        is_near = bool(timed) and max(timed) * DOUBLE >= within
        return is_near and min(timed.values()) > HOPELESS * self.best_seconds

    def gains_by_checkpointing(self, amp: str) -> bool:
        """Whether a size of a precision is faster with checkpointing, against all expectation."""
        return any(
            seconds < SURPRISE * self.seconds.get(without_checkpointing(config), 0.0)
            for config, seconds in self.seconds.items()
            if config.amp == amp and config.checkpointing != "off"
        )

    def measure(self, config: Config, *, phase: str = "A") -> float | None:
        """Return seconds per sample by a launch where that is not known; None if there are none.

        Raises:
            BudgetSpent: If nothing more may be launched.
        """
        core = self.core(config)
        if core not in self.seconds and core not in self._failed and self._may_time(core):
            seconds = self._launched(core, phase=phase)
            if seconds is None:
                self._failed.add(core)
            else:
                self.seconds[core] = seconds
        return self.seconds.get(core)

    def compare(self, base: Config, other: Config, *, phase: str = "B") -> float | None:
        """Return the log ratio of another config's time to a base's; None where it has none.

        One launch of the other, if the effect is clear; pairs of both where it is near the noise.

        Raises:
            BudgetSpent: If nothing more may be launched.
        """
        if None in {self.measure(base, phase=phase), self.measure(other, phase=phase)}:
            return None
        pairs = [(self.of(base), self.of(other))]
        base, other = self.core(base), self.core(other)
        while len(pairs) < MOST_PAIRS and abs(_ratio(pairs)) < CLEAR / math.sqrt(len(pairs)):
            pair = (self._timed_again(base, phase=phase), self._timed_again(other, phase=phase))
            if any(map(math.isnan, pair)):
                break
            pairs.append(pair)
        self.seconds[base] = geometric_mean(own for own, _ in pairs)
        self.seconds[other] = self.seconds[base] * math.exp(_ratio(pairs))
        return _ratio(pairs)

    def _timed_again(self, core: Config, *, phase: str) -> float:
        """Return seconds per sample by a further launch; not a number where it gave none."""
        if not self._may_time(core):
            return math.nan
        return self._launched(core, phase=phase) or math.nan

    def _may_time(self, core: Config) -> bool:
        """Whether a launch can be had, and is not wasted."""
        asked = self._asked(core)
        if self._plan.is_dear(asked, "compute", cycles=self._plan.exploring_cycles(asked)):
            return False
        return self._fits.may_run(core) and self._plan.affords(self._cost([core]), phase="A")

    def _launched(self, core: Config, *, phase: str) -> float | None:
        """Return seconds per sample by a launch; None where it gave none."""
        asked = self._asked(core)
        plan = self._plan
        cycles = plan.exploring_cycles(asked) if phase == "A" else plan.cycles_of(asked)
        ask = Ask(
            config=asked,
            purpose="compute",
            phase=phase,
            cycles=cycles,
            most_seconds=self._most_seconds(asked, cycles),
        )
        rate = self._launcher.run(ask).samples_per_second
        return 1 / rate if rate else None

    def _asked(self, core: Config) -> Config:
        """Return what is launched for a config: a part of its cycle, where that lasts long."""
        if self._samples is None or core.samples_per_optimizer_step <= self._samples:
            return core
        return replace(core, accumulation_steps=max(self._samples // core.batch_size, 1))

    def _shorten(self, ladders: Sequence[Sequence[Config]]) -> None:
        """Time fewer samples a step, where one of the reference is long: as many of each config.

        Then what the optimizer takes is the same for all, so that they still compare.
        """
        sizes = [config.batch_size for ladder in ladders for config in ladder]
        is_long = self._launcher.costs.cycle_seconds(self._reference) > LONG_CYCLE_SECONDS
        if is_long and sizes and self._samples is None:
            self._samples = LEAST_ACCUMULATED * max(sizes)

    def _most_seconds(self, core: Config, cycles: int) -> float:
        """Return after which time a size is surely far from the best."""
        costs = self._launcher.costs
        samples = core.samples_per_optimizer_step * self._launcher.task.space.world_size
        slow = HOPELESS * self.best_seconds * samples * (cycles + WARM_UP_CYCLES)
        return LIMIT_FLOOR_SECONDS + costs.start_seconds + slow

    def sweep(self, ladders: Sequence[Sequence[Config]]) -> None:
        """Measure some sizes of each ladder, then the neighbours of all that are close.

        Small sizes whose optimizer step takes far longer than the reference's come last.
        """
        self._given_up.clear()
        self._shorten(ladders)
        cheap = list(map(self._cheap, ladders))
        for config in chain(self._first_pass(cheap), _in_turns(ladders, STRIDES[0])):
            self.measure(config)
        for ladder in ladders:
            self._time_largest(ladder)
        self.close_in([ladder[::-1][::2][::-1] for ladder in ladders], reach=HOPELESS)
        for reach in (CLOSE, DIP):
            self.close_in(ladders, reach=reach)

    def _time_largest(self, ladder: Sequence[Config]) -> None:
        """Measure the largest size of a ladder that can be had, where none was measured."""
        if not any(self.core(config) in self.seconds for config in ladder):
            next(filter(self.measure, reversed(ladder)), None)

    def _cheap(self, ladder: Sequence[Config]) -> list[Config]:
        usual = COSTLY * self._sample_cost(self._reference)
        return [config for config in ladder if self._sample_cost(config) <= usual]

    def _sample_cost(self, config: Config) -> float:
        return self._cost([config]) / self._asked(config).samples_per_optimizer_step

    def close_in(
        self, ladders: Sequence[Sequence[Config]], *, reach: float = CLOSE, phase: str = "A"
    ) -> None:
        """Measure the neighbours of all sizes within reach of the best, until none is left."""
        while missing := self._neighbours(ladders, reach):
            if self.measure(missing[0], phase=phase) is None:
                self._given_up.add(missing[0])

    def _first_pass(self, ladders: Sequence[Sequence[Config]]) -> list[Config]:
        """Return every n-th size from the top of each ladder, of the least affordable n."""
        chosen: list[Config] = []
        for stride in STRIDES:
            chosen = _in_turns(ladders, stride)
            if self._affords_pass([c for c in chosen if self.core(c) not in self.seconds]):
                break
        return chosen

    def _affords_pass(self, unknown: Sequence[Config]) -> bool:
        """Whether sizes can be timed, and as much is left for the neighbours of the best."""
        has_launches = len(unknown) <= PASS_SHARE * self._plan.spare_launches("A")
        return has_launches and self._cost(unknown) <= PASS_SHARE * self._plan.spare_seconds("A")

    def _cost(self, configs: Iterable[Config]) -> float:
        plan = self._plan
        asked = map(self._asked, configs)
        return sum(plan.cost(c, "compute", cycles=plan.exploring_cycles(c)) for c in asked)

    def _neighbours(self, ladders: Sequence[Sequence[Config]], reach: float) -> list[Config]:
        """Return what was not yet tried beside sizes within reach of the best, best first."""
        pairs = sorted(chain.from_iterable(map(_pairs, ladders)), key=lambda pair: self.of(pair[0]))
        timed = [pair for pair in pairs if not math.isinf(self.of(pair[0]))]
        close = [pair for pair in timed if self.of(pair[0]) <= reach * self.best_seconds]
        return [neighbour for _, neighbour in close if self._is_open(neighbour)]

    def _is_open(self, config: Config) -> bool:
        """Whether a config was neither timed nor given up."""
        return self.core(config) not in self.seconds and config not in self._given_up


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the mean log ratio of pairs of times."""
    return fmean(math.log(other / base) for base, other in pairs)


def _pairs(ladder: Sequence[Config]) -> Iterator[tuple[Config, Config]]:
    """Yield each size of a ladder with the one below it and the one above it."""
    for place, config in enumerate(ladder):
        for neighbour in beside(ladder, place):
            yield config, neighbour


def _in_turns(ladders: Sequence[Sequence[Config]], stride: int) -> list[Config]:
    """Return every so many sizes of each ladder from the top down, the ladders taking turns.

    Where time ends early, each has had its largest.
    """
    picks = [ladder[::-1][::stride] for ladder in ladders]
    return [config for row in zip_longest(*picks) for config in row if config is not None]
