"""Phase A, time: seconds per sample of batch sizes and precisions, without a loader.

A pass over every second size of the whole feasible range, then the neighbours of all within 12 %
of the best: a coarser sweep with an early stop misses a dip between its points, and what a cell is
worth is judged by that cell alone (METHOD.md F.2 and F.3).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest

from autotune.search.choice import needs
from autotune.search.costs import LIMIT_FLOOR_SECONDS, WARM_UP_CYCLES
from autotune.search.fits import Fits
from autotune.search.launcher import Ask, Launcher
from autotune.search.plan import Plan
from autotune.search.proposals import beside
from autotune.search.sizes import without_checkpointing
from autotune.space import Config

CLOSE = 1.12
"""Sizes this close to the best have their neighbours measured too (METHOD.md F)."""

DIP = 1.5
"""Of the time of its neighbours, what a size that kernels suit may spare: where time is left, the
neighbours of sizes this close to the best are measured too."""

STRIDES = (2, 4, 8, 16, 32)
"""Every so many sizes are measured first: the first stride that the budget allows."""

HOPELESS = 2.0
"""A size that takes so many times as long as the best is not waited for."""

COSTLY = 3.0
"""Sizes that take so many times as long for a sample as the reference wait until the others are
done: they are slow unless the law of time has a dip there."""

SURPRISE = 0.97
"""A checkpointed size is surprisingly fast that takes less than this share of its time without
checkpointing: launches differ by a few percent, and recomputing costs up to a third."""

CLEARLY = 0.98
"""A switch pays that takes less than this share of the time: single launches differ by 1 to 2 %,
and what pays less may still be found by a race in phase F."""

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
        if core not in self.seconds and self._may_time(core):
            self._time(core, phase=phase)
        return self.seconds.get(core)

    def _may_time(self, core: Config) -> bool:
        """Whether a launch can be had, and is not wasted."""
        if self._plan.is_dear(core, "compute", cycles=self._plan.exploring_cycles):
            return False
        return self._fits.may_run(core) and self._plan.affords(self._cost([core]), phase="A")

    def _time(self, core: Config, *, phase: str) -> None:
        cycles = self._plan.exploring_cycles
        ask = Ask(
            config=core,
            purpose="compute",
            phase=phase,
            cycles=cycles,
            most_seconds=self._most_seconds(core, cycles),
        )
        if rate := self._launcher.run(ask).samples_per_second:
            self.seconds[core] = 1 / rate

    def _most_seconds(self, core: Config, cycles: int) -> float:
        """Return after which time a size is surely far from the best."""
        costs = self._launcher.costs
        samples = core.samples_per_optimizer_step * self._launcher.task.space.world_size
        slow = HOPELESS * self.best_seconds * samples * (cycles + WARM_UP_CYCLES)
        return LIMIT_FLOOR_SECONDS + costs.start_seconds + slow

    def sweep(self, ladders: Sequence[Sequence[Config]]) -> None:
        """Measure every second size of each ladder, then the neighbours of all that are close.

        Small sizes whose optimizer step takes far longer than the reference's come last.
        """
        self._given_up.clear()
        cheap = [self._cheap(ladder) for ladder in ladders]
        for sizes in (self._first_pass(cheap), _in_turns(ladders, STRIDES[0])):
            for config in sizes:
                self.measure(config)
            self.close_in(ladders)
        self.close_in(ladders, reach=DIP)

    def _cheap(self, ladder: Sequence[Config]) -> list[Config]:
        usual = COSTLY * self._sample_cost(self._reference)
        return [config for config in ladder if self._sample_cost(config) <= usual]

    def _sample_cost(self, config: Config) -> float:
        return self._cost([config]) / config.samples_per_optimizer_step

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
        cycles = self._plan.exploring_cycles
        return sum(self._plan.cost(config, "compute", cycles=cycles) for config in configs)

    def _neighbours(self, ladders: Sequence[Sequence[Config]], reach: float) -> list[Config]:
        """Return what was not yet tried beside sizes within reach of the best, best first."""
        pairs = sorted(chain.from_iterable(map(_pairs, ladders)), key=lambda pair: self.of(pair[0]))
        close = [pair for pair in pairs if self.of(pair[0]) <= reach * self.best_seconds]
        return [neighbour for _, neighbour in close if self._is_open(neighbour)]

    def _is_open(self, config: Config) -> bool:
        """Whether a config was neither timed nor given up."""
        return self.core(config) not in self.seconds and config not in self._given_up


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
