"""The phases of a search, in order of value: stopping after any of them leaves a usable answer.

A: memory, then time without a loader · B: threads and cuDNN at the best size · C: the other cells,
set so too · D: the loader alone · E: a race of the best few · F: refinement around the leader
(METHOD.md D.1).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from autotune.search.between import find_sizes_between
from autotune.search.choice import in_order
from autotune.search.fits import Fits
from autotune.search.launcher import MEMORY_CYCLES, Launcher
from autotune.search.loading import FAST_ENOUGH, Loading, drain, own_seconds
from autotune.search.numerics import CHECK_CYCLES, Guard
from autotune.search.plan import Plan
from autotune.search.race import Race, Rules, Standing
from autotune.search.rivals import Knowledge, best_workers, fast_enough, rivals
from autotune.search.rounds import Rounds
from autotune.search.sizes import cells, find_sizes, find_sizes_beyond, without_checkpointing
from autotune.search.speeds import Speeds
from autotune.search.switches import turn_switches, walk_rivals
from autotune.space import Config

CLEARLY_FASTER = 1.2
"""Where the best rival is predicted to be this much faster, the reference need not race too."""

STALLED = 1.3
"""A step that takes so many times as long with its loader as without waits for data."""

CHEAP_BATCH_SECONDS = 0.5
"""A loader is drained at the size that trains where a batch takes no longer (METHOD.md D.1)."""

RACE_ROUNDS = 5
"""The race ends after so many rounds; phase F goes on from there."""

FEWEST_RIVALS, FEWEST_ROUNDS = 2, 2
"""Rivals are given up until so many rounds are affordable, but for the most promising."""


class Explorer:
    """Explores the space, phase by phase; what it has found is there whenever it is stopped.

    Args:
        launcher: What runs configs.
        fits: What is known of memory.
        plan: What can be afforded.
        reference: The config that the verdict compares with.
        reference_seconds: Its seconds per sample, end to end.

    Attributes:
        standings: How those came out who raced, the best first.
        rounds: What all races together say of who is faster.
        start: The reference with its knobs as the space has them; all that is tried is like it.
        guess: The config predicted to be best, while none has raced.
    """

    def __init__(
        self,
        launcher: Launcher,
        fits: Fits,
        *,
        plan: Plan,
        reference: Config,
        reference_seconds: float,
    ) -> None:
        self.launcher = launcher
        self.fits = fits
        self.plan = plan
        self.reference = reference
        self.reference_seconds = reference_seconds
        self.start = launcher.task.space.with_allowed_knobs(reference)
        self.guard = Guard(launcher, reference)
        self.speeds = Speeds(launcher, fits, plan=plan, reference=reference)
        self.loading = Loading(seconds={})
        self.standings: list[Standing] = []
        self.rounds = Rounds()
        self.guess: Config | None = None
        self._ladders: list[list[Config]] = []
        self._own_loading: float | None = None
        self._drained_size = 0

    def run(self) -> None:
        """Run phases A to E, as far as the plan affords them.

        Raises:
            BudgetSpent: If nothing more may be launched.
        """
        self._climb()
        if self.plan.is_tight:
            return
        if self._stalls():
            self._aim()
            self._load()
        self._find()
        if self._leads() and self.plan.is_short_for_verdict:
            self.plan.release_verdict()  # nothing to confirm: its time is better spent on searching
            self._find()

    def _leads(self) -> bool:
        """Whether nothing was found that would be better than the reference."""
        best = self.standings[0].config if self.standings else self.guess
        return best in {None, self.reference}

    def _find(self) -> None:
        """Time sizes, drain the loader, and race the best, as far as the plan affords it."""
        self._time()
        self._aim()
        if self.plan.runs("D") or self.loading.seconds:
            self._load()
        self._aim()
        if self.guess != self.reference:
            self.plan.restore_verdict()
        self._choose()

    def _time(self) -> None:
        """Time sizes, and at the best of them what else changes the step."""
        ladders = self._sweep()
        if best := turn_switches(self.speeds, self.launcher.task):
            task = self.launcher.task
            walk_rivals(self.speeds, ladders, task=task, best=best, reference=self.start)

    def _choose(self) -> None:
        """Race the best, or at least time the best guess."""
        if self.plan.runs("E"):
            self._race()
        if not self.standings and not self.plan.has_verdict:
            self._try_guess()

    @property
    def known(self) -> Knowledge:
        """What was found out so far."""
        return Knowledge(
            task=self.launcher.task,
            fits=self.fits,
            speeds=self.speeds,
            loading=self.loading,
            guard=self.guard,
            reference=self.reference,
        )

    def race(self, configs: list[Config], *, rules: Rules) -> list[Standing]:
        """Return how configs came out of a race, the best first."""
        race = Race(self.launcher, self.plan, rules=rules, rounds=self.rounds)
        found = race.run(configs, may_run=self.known.may_race)
        return in_order(found, goal=self.launcher.task.goal, fits=self.fits)

    def admits(self, config: Config, *, phase: str) -> bool:
        """Whether a config may race: it fits, and its gradients agree; by launches if need be."""
        if not self.known.may_race(config) or not self._can_clear(config):
            return False
        return self.guard.admits(config, phase=phase) and self.fits.probe(config, phase=phase)

    def _can_clear(self, config: Config) -> bool:
        """Whether gradients and peak of a config are known, or can be had."""
        if self.guard.knows(config) and self.fits.state(config) == "fits":
            return True
        cost = self.plan.cost(config, "check", cycles=CHECK_CYCLES)
        return self.plan.affords(cost, phase="E")

    def _climb(self) -> None:
        """Find the sizes that fit in each cell, but for those that only recompute."""
        self._try_another_split()
        start = self.start
        for cell in self._cells(only_recomputing=False):
            start = replace(start, amp=cell.amp, checkpointing=cell.checkpointing)
            ladder = self._sizes(find_sizes, start)
            self._ladders.append(ladder)
            start = [start, *ladder][-1]

    def _sweep(self) -> list[list[Config]]:
        """Time the sizes of all cells, and return them; of checkpointed ones what fits there alone.

        Where recomputing proves no slower at a size that fits both ways, all their sizes are timed.
        """
        partial = self._cells(only_recomputing=True)
        beyond = list(filter(None, (self._sizes(find_sizes_beyond, cell) for cell in partial)))
        for ladder in filter(None, self._ladders):
            self.speeds.measure(ladder[-1])
        beyond = [ladder for ladder in beyond if not self._is_hopeless(ladder)]
        ladders = [*self._ladders, *beyond, *filter(None, map(self._between, beyond))]
        self.speeds.sweep(ladders)
        for ladder in beyond:
            self.speeds.measure(ladder[0])
        return self._with_surprises(ladders, partial)

    def _between(self, ladder: list[Config]) -> list[Config]:
        """Return checkpointed sizes with less recomputed, where that fits and may be the best."""
        known = self.speeds
        found = find_sizes_between(self.launcher, self.fits, self.plan, speeds=known, beyond=ladder)
        return [config for config in found if self.guard.allows(config)]

    def _is_hopeless(self, ladder: list[Config]) -> bool:
        """Whether the same without checkpointing takes so long that this cannot be of use."""
        plain = self.speeds.core(without_checkpointing(ladder[0]))
        return self.speeds.is_hopeless(plain, within=ladder[-1].batch_size)

    def _with_surprises(
        self, ladders: list[list[Config]], partial: list[Config]
    ) -> list[list[Config]]:
        """Return ladders with all sizes of the cells where recomputing proved no slower, timed."""
        unlike = [cell for cell in partial if self.speeds.gains_by_checkpointing(cell.amp)]
        if not unlike:
            return ladders
        widened = [*ladders, *(self._sizes(find_sizes, cell) for cell in unlike)]
        self.speeds.sweep(widened)
        return widened

    def _cells(self, *, only_recomputing: bool) -> list[Config]:
        """Return the cells that only recompute what another computes, or all the others."""
        task = self.launcher.task
        found = cells(task, self.start)
        return [cell for cell in found if task.only_recomputes(cell) == only_recomputing]

    def _sizes(self, find: Callable[..., list[Config]], cell: Config) -> list[Config]:
        ladder = find(self.launcher, self.fits, self.plan, cell=cell)
        return [config for config in ladder if self.guard.allows(config)]

    def _try_another_split(self) -> None:
        """Check another split at once where BatchNorm sees the batch: most likely it disagrees."""
        task = self.launcher.task
        smaller = [s for s in task.space.splits() if s[0] < self.reference.batch_size]
        if smaller and task.is_split_suspect and not self.plan.is_tight:
            self.admits(task.with_split(self.start, smaller[-1]), phase="A")

    def _stalls(self) -> bool:
        """Whether the reference waits for its loader so much that this is to be seen to first.

        Its loader alone tells whether it may, and costs little; its step alone whether it does.
        """
        if self._is_fed():
            return False
        seconds = self.speeds.measure(self.reference)
        return seconds is not None and self.reference_seconds > STALLED * seconds

    def _is_fed(self) -> bool:
        """Whether the loader of the reference takes too little of its time for it to wait."""
        if not self.launcher.task.has_choice("num_workers") or not self.plan.runs("D"):
            return False
        seconds = own_seconds(self.launcher, self.plan, at=self.reference)
        self._own_loading = seconds
        most = 1.0 if self.reference.num_workers else STALLED - 1
        return seconds is not None and STALLED * seconds < most * self.reference_seconds

    def _aim(self) -> None:
        """Plan with the config that is predicted to be best."""
        if sizes := self.known.plainest_sizes():
            self.guess = best_workers(self.known, sizes[0])
            self.plan.pick = self.guess

    def _load(self) -> None:
        """Drain the loader: at the best size, or at the reference's where that is smaller."""
        if self.guess is None or not self.launcher.task.has_choice("num_workers"):
            return
        at = self._loaded_size(self.guess)
        if at.batch_size != self._drained_size:
            self._drained_size = at.batch_size
            self.loading = Loading(seconds={}, broken_from=self.loading.broken_from)
        self.loading = drain(
            self.launcher,
            self.plan,
            at=at,
            compute_seconds=self.speeds.of(self.guess),
            known=self.loading,
        )

    def _loaded_size(self, guess: Config) -> Config:
        """Return whose batches are loaded: the guess's, unless they take long.

        What a loader takes per batch is overstated by smaller ones (METHOD.md B.4, v2).
        """
        seconds = self._own_loading or math.inf
        if seconds * guess.batch_size <= CHEAP_BATCH_SECONDS:
            return guess
        return min(guess, self.reference, key=lambda config: config.batch_size)

    def _weigh(self) -> None:
        """Measure the peaks of all sizes that are fast enough, where memory is the aim."""
        for size in fast_enough(self.known):
            cost = self.plan.cost(size, "memory", cycles=MEMORY_CYCLES)
            if self.plan.affords(cost, phase="A"):
                self.fits.weigh(size)

    def _race(self) -> None:
        if self.launcher.task.saves_memory:
            self._weigh()
        admitted = list(self._admitted())
        if not admitted:
            return
        rules = Rules.of(self.launcher.task.goal, phase="E", most_rounds=RACE_ROUNDS)
        self._count_steps(admitted)
        self.standings = self.race(self._affordable(admitted), rules=rules)
        if self.standings:
            self.plan.pick = self.standings[0].config

    def _count_steps(self, admitted: list[Config]) -> None:
        """Let the launches without a loader count as a round, where no loader binds."""
        first, *others = admitted
        loading = self.loading.load_seconds(first.num_workers)
        if self.loading.seconds and loading < FAST_ENOUGH * self.speeds.of(first):
            alike = [first, *(c for c in others if _loader_of(c) == _loader_of(first))]
            timed = {config: self.speeds.of(config) for config in alike}
            self.rounds.add({c: math.log(s) for c, s in timed.items() if not math.isinf(s)})

    def _affordable(self, admitted: list[Config]) -> list[Config]:
        """Return who races: the best of the admitted, and the reference unless far behind."""
        racing = list(admitted)
        if self._is_reference_near(admitted):
            racing.insert(1, self.reference)
        while len(racing) > FEWEST_RIVALS and not self._affords_rounds(racing):
            racing.pop()
        return racing

    def _is_reference_near(self, admitted: list[Config]) -> bool:
        """Whether the reference may be as good as the best; always where memory is the aim."""
        best = min(map(self.known.predicted, admitted))
        return self.launcher.task.saves_memory or self.reference_seconds < CLEARLY_FASTER * best

    def _try_guess(self) -> None:
        """Time the best guess end to end, where neither race nor verdict will."""
        if self.guess is None or self.guess == self.reference:
            return
        if self.admits(self.guess, phase="A"):
            rules = Rules.of(self.launcher.task.goal, phase="E", most_rounds=1)
            self.standings = self.race([self.guess], rules=rules)

    def _affords_rounds(self, configs: list[Config]) -> bool:
        seconds = sum(self.plan.cost(config, "train") for config in configs)
        launches = FEWEST_ROUNDS * len(configs)
        return self.plan.affords(FEWEST_ROUNDS * seconds, phase="E", launches=launches)

    def _admitted(self) -> Iterator[Config]:
        """Yield rivals that pass the numerics guard, looking anew after each that does not."""
        tried: set[Config] = set()
        while rival := self._next_rival(tried):
            tried.add(rival)
            if self.admits(rival, phase="E"):
                yield rival

    def _next_rival(self, tried: set[Config]) -> Config | None:
        return next((config for config in rivals(self.known) if config not in tried), None)


def _loader_of(config: Config) -> tuple[object, ...]:
    return (config.num_workers, config.prefetch_factor, config.pin_memory)
