"""The plan of a budget: the verdict is reserved first, the rest is spent in order of value.

METHOD.md, head point 1: launches have 3 to 10 cycles; where the verdict's reserve takes more than
45 % of what is left, launches are shortened, then phases F, E and D are given up, in this order.
"""

import math
from collections.abc import Sequence
from typing import Literal

from autotune.outcome import Purpose
from autotune.search.launcher import Launcher
from autotune.space import Config

Phase = Literal["A", "D", "E", "F"]

_RACED_LATER: tuple[Phase, ...] = ("A", "D")
"""Phases that leave the race what it needs."""

LEAST_PAIRS = 4
"""A verdict needs so many pairs of launches (METHOD.md D.3)."""

FEWEST_CYCLES, MOST_CYCLES = 3, 10
"""Optimizer steps that a timed launch measures (METHOD.md, head point 1)."""

SHORTEST_WINDOW_SECONDS = 1.0
"""Where ten cycles are shorter than this, more are measured: a clock and a scheduler are coarse."""

LONGEST_RUN_CYCLES = 100
"""More cycles than this are never measured in a launch."""

WINDOW_SECONDS, WINDOW_STEPS = 5.0, 20
"""A launch that has timed so long, and so many micro-batches, need not time its full cycles: a
spread between launches of 1 % is not outdone by more (METHOD.md C.1)."""

EXPLORING_SECONDS, EXPLORING_STEPS = 2.0, 10
"""The same for a launch that only ranks."""

PATIENCE = 4.0
"""So many times as long may be timed to have enough micro-batches."""

LOADER_ROUNDS = 3
"""Where a loader is waited for, each worker gives a batch so many times: they come in bursts."""

VARYING = 3.0
"""So many times as much is timed where lengths vary: samples differ by half (METHOD.md, head 3)."""

TIGHT_SHARE = 1 / 12
"""Where a cycle of the baseline takes more of the budget, only memory can be found out."""

RESERVE_SHARES: dict[Phase, float] = {"F": 0.45, "E": 0.55, "D": 0.65}
"""A phase is given up where the verdict's shortest reserve takes more of what is left."""

VERDICT_SHARE = 0.65
"""Where the verdict would take more than this, only one timed launch of the pick is reserved: with
nothing explored there is nothing to confirm. What is left in the end is spent on pairs."""

SAFETY = 1.2
"""Launches of a verdict are taken to cost this much more than expected (METHOD.md, head 1)."""

VERIFY_CYCLES = 2
"""Whole cycles of the final verification, on the largest batch."""

DEAR_SHARE = 0.1
"""An exploring launch that takes more of what is left is too slow a config to train with."""

USUAL = 1.5
"""A launch is never dear that takes at most so many times as long as the reference's."""

RACE_LAUNCHES = 6
"""Launches that the smallest race is worth: three configs, two rounds."""

FREE_LAUNCHES = 4
"""With fewer launches beside those of the verdict nothing is found that is to be confirmed."""

PHASE_LAUNCHES: dict[Phase, int] = {"F": 30, "E": 18, "D": 12}
"""With fewer launches, beside those of the verdict, a phase is given up."""

LOADER_LAUNCHES = 3
"""Launches that the shortest look at the loader is worth: no worker, one, the jump."""


class Plan:
    """Says how long launches are, and what can still be afforded.

    Args:
        launcher: What knows budget and costs.
        reference: The config that the verdict compares with.

    Attributes:
        pick: The config that is taken to be confirmed in the end.
        has_refused: Whether anything was not affordable so far.
    """

    def __init__(self, launcher: Launcher, reference: Config) -> None:
        self._launcher = launcher
        self._budget = launcher.budget
        self._costs = launcher.costs
        self._reference = reference
        self.pick = reference
        self.has_refused = False
        left = self._budget.remaining_seconds
        cycle = self._costs.cycle_seconds(reference)
        self.is_tight = not 0 < cycle <= TIGHT_SHARE * self._budget.time_seconds
        self.has_verdict = True
        self.cycles = self._fitting_cycles(left, cycle)
        share = self.reserve_seconds() / left if left else math.inf
        launches = self._budget.remaining_launches - self._kept_launches()
        self.has_verdict = share <= VERDICT_SHARE and launches >= FREE_LAUNCHES
        self._skipped = _skipped(share, launches)
        self._floor = self._half_left()

    @property
    def is_explored(self) -> bool:
        """Whether nothing had to be left out so far."""
        return not (self.is_tight or self.has_refused)

    @property
    def is_short_for_verdict(self) -> bool:
        """Whether something was not affordable while the verdict's time was kept."""
        return self.has_verdict and self.has_refused

    def cycles_of(self, config: Config) -> int:
        """Return how many optimizer steps a launch of a config measures."""
        enough = min(self.cycles, self._enough(config, WINDOW_SECONDS, WINDOW_STEPS))
        if self.cycles < MOST_CYCLES or not self._costs.waits(config):
            return enough
        rounds = LOADER_ROUNDS * math.ceil(config.num_workers / config.accumulation_steps)
        most = math.ceil(PATIENCE * WINDOW_SECONDS / self._costs.loading_seconds(config))
        return max(enough, min(rounds, most))

    def cycles_together(self, configs: Sequence[Config]) -> dict[Config, int]:
        """Return how many each of some rivals measures: as many where they need the same samples.

        Where lengths vary, rivals are to see the same (METHOD.md, head point 3).
        """
        found = {config: self.cycles_of(config) for config in configs}
        if self._launcher.task.workload.varies_in_shape:
            return dict.fromkeys(configs, max(found.values(), default=self.cycles))
        return found

    def exploring_cycles(self, config: Config) -> int:
        """Return the optimizer steps of a launch that only ranks: half, and more of short ones."""
        cycle = self._costs.cycle_seconds(config)
        short = int(EXPLORING_SECONDS / cycle) if cycle > 0 else 0
        most = max(self.cycles // 2, FEWEST_CYCLES, min(short, self.cycles, MOST_CYCLES))
        return min(most, self._enough(config, EXPLORING_SECONDS, EXPLORING_STEPS))

    def _enough(self, config: Config, seconds: float, steps: int) -> int:
        """Return the cycles that last so long and hold so many micro-batches; at least one."""
        cycle = self._costs.cycle_seconds(config)
        times = VARYING if self._launcher.task.workload.varies_in_shape else 1.0
        if cycle <= 0:
            return LONGEST_RUN_CYCLES
        longest = PATIENCE * seconds / cycle
        wanted = max(seconds / cycle, min(steps / config.accumulation_steps, longest))
        return max(math.ceil(times * wanted), 1)

    def runs(self, phase: Phase) -> bool:
        """Whether a phase is worth starting."""
        return not self.is_tight and phase not in self._skipped

    def reserve_seconds(self) -> float:
        """Return the seconds that are kept for verification and verdict."""
        verify = self.cost(self.pick, "verify", cycles=VERIFY_CYCLES)
        if not self.has_verdict:
            return SAFETY * (verify + self.cost(self.pick, "train"))
        return SAFETY * (verify + LEAST_PAIRS * self.pair_seconds(self.pick))

    def pair_seconds(self, config: Config) -> float:
        """Return what a pair of the verdict is expected to take."""
        return self.cost(config, "train") + self.cost(self._reference, "train")

    def cost(self, config: Config, purpose: Purpose, *, cycles: int | None = None) -> float:
        """Return what a launch is expected to take, in seconds."""
        return self._costs.launch_seconds(config, purpose, cycles=cycles or self.cycles_of(config))

    def affords(self, seconds: float, *, phase: Phase, launches: int = 1) -> bool:
        """Whether launches can be had, and what is kept for later is still there."""
        is_affordable = (
            self.spare_launches(phase) >= launches and self.spare_seconds(phase) >= seconds
        )
        self.has_refused |= not is_affordable
        return is_affordable

    def spare_launches(self, phase: Phase) -> float:
        """Return the launches that a phase may make: those that nothing later needs."""
        free = self._budget.remaining_launches - self._kept_launches()
        if phase not in _RACED_LATER:
            return free
        return free - (RACE_LAUNCHES if self.runs("E") else 1)  # or the check of the best guess

    def spare_seconds(self, phase: Phase) -> float:
        """Return the seconds that a phase may use: those that nothing later needs.

        Phases A and D come first in value, so each has half of what the verdict leaves in any case.
        """
        left = self._budget.remaining_seconds - self.reserve_seconds()
        later = self._later_seconds(phase)
        own = self._budget.remaining_seconds - self._floor if phase == "A" else left / 2
        return min(left, max(left - later, own)) if later else left

    def _later_seconds(self, phase: Phase) -> float:
        """Return what the phases after one need at least."""
        later = 0.0
        if phase in _RACED_LATER and self.runs("E"):
            later += RACE_LAUNCHES * self.cost(self.pick, "train")
        if phase == "A" and self.runs("D"):
            later += LOADER_LAUNCHES * self.cost(self.pick, "loader")
        return later

    def is_dear(self, config: Config, purpose: Purpose, *, cycles: int) -> bool:
        """Whether an exploring launch takes far more than the reference's, and much of the rest."""
        seconds = self.cost(config, purpose, cycles=cycles)
        usual = USUAL * self.cost(self._reference, purpose, cycles=cycles)
        is_dear = seconds > max(usual, DEAR_SHARE * self._budget.remaining_seconds)
        self.has_refused |= is_dear
        return is_dear

    def release_verdict(self) -> None:
        """Give the verdict's time to the search: nothing was found that is to be confirmed."""
        self.has_verdict = False
        self._floor = self._half_left()

    def restore_verdict(self) -> None:
        """Reserve the verdict's time again where it was given up, if there is still so much."""
        if not self.has_verdict:
            self.has_verdict = True
            self.has_verdict = self._has_reserve()

    def _has_reserve(self) -> bool:
        """Whether what is kept for later is still there."""
        has_time = self.reserve_seconds() <= self._budget.remaining_seconds
        return has_time and self._kept_launches() <= self._budget.remaining_launches

    def _half_left(self) -> float:
        """Return what is to be left of the budget when half of what the verdict leaves is used."""
        left = self._budget.remaining_seconds
        return left - max(left - self.reserve_seconds(), 0.0) / 2

    def _kept_launches(self) -> int:
        """Return the launches of the verification, and of the verdict or the pick's timing."""
        return 1 + (2 * LEAST_PAIRS if self.has_verdict else 1)

    def _fitting_cycles(self, left: float, cycle: float) -> int:
        """Return the most cycles, of 3 to 10, whose verdict stays within its share."""
        self.cycles = _wanted_cycles(cycle)
        while self.cycles > FEWEST_CYCLES and self.reserve_seconds() > RESERVE_SHARES["F"] * left:
            self.cycles -= 1
        return self.cycles


def _skipped(share: float, launches: float) -> set[Phase]:
    """Return the phases that are given up, by the verdict's share of the time and launches left."""
    lack_time = {phase for phase, most in RESERVE_SHARES.items() if share > most}
    lack_launches = {phase for phase, least in PHASE_LAUNCHES.items() if launches < least}
    return lack_time | lack_launches


def _wanted_cycles(cycle_seconds: float) -> int:
    """Return the most cycles that a launch measures: more than ten where they are very short."""
    if not 0 < cycle_seconds * MOST_CYCLES < SHORTEST_WINDOW_SECONDS:
        return MOST_CYCLES
    return min(math.ceil(SHORTEST_WINDOW_SECONDS / cycle_seconds), LONGEST_RUN_CYCLES)
