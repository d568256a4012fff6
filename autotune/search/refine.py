"""Phase F: around the leader, then wherever Optuna's sampler sees promise.

Neighbours of the leader first; then proposals of TPE, warmed with every end-to-end trial so far:
within two positions of the leader, and at last in the whole space, which cures what the phases
before were blind to. Each is vetoed by the memory law or by its own measured time, checked, and
raced against the leader.
"""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from operator import attrgetter

from autotune.search.choice import needs
from autotune.search.phases import Explorer
from autotune.search.proposals import neighbours
from autotune.search.race import LEAST_ROUNDS, TIE, Rules, Standing
from autotune.search.speeds import CLOSE
from autotune.search.studies import Studies
from autotune.space import Config

CHALLENGERS = 2
"""So many race the leader at a time: it need not be launched anew for each."""

ROUNDS = 3
"""A challenger that is not clearly faster after three rounds is not worth more."""

PROPOSALS = 12
"""Proposals from the box around the leader, and again from the whole space (METHOD.md D.1)."""

PATIENCE = 2
"""After so many races with proposals, one after the other, that the leader survives, no further one
is expected to gain what could be claimed."""

FOLLOWED = 0.005
"""Log ratio by which a challenger must be faster to lead: by less, noise would lead from one to the
next, and ties that are broken by what a config needs would add up."""


class Refinement:
    """Challenges the leader until nothing promising, or no time, is left.

    Args:
        explorer: What has found the leader.
        studies: Whose sampler proposes; None proposes neighbours only.
    """

    def __init__(self, explorer: Explorer, *, studies: Studies | None) -> None:
        self._explorer = explorer
        self._studies = studies
        self._tried = {standing.config for standing in explorer.standings}
        self._proposed = {True: 0, False: 0}
        self._survived = self._asked = 0
        self._equals: list[Standing] = []

    @property
    def leader(self) -> Config:
        """Return the best config so far."""
        return self._explorer.standings[0].config

    def run(self) -> None:
        """Race challengers against the leader; the explorer's standings follow.

        Raises:
            BudgetSpent: If nothing more may be launched.
        """
        try:
            while self._explorer.plan.runs("F") and self._survived < PATIENCE:
                challengers = list(islice(self._challengers(), CHALLENGERS))
                if not challengers or not self._affords(challengers):
                    return
                self._challenge(challengers)
        finally:
            self._take_the_least_needy()

    def _challenge(self, challengers: list[Config]) -> None:
        explorer, leader = self._explorer, self.leader
        rules = Rules.of(explorer.launcher.task.goal, phase="F", most_rounds=ROUNDS)
        found = explorer.race([leader, *challengers], rules=rules)
        if found and found[0].rounds:
            self._follow(found)
        has_proposals = sum(self._proposed.values()) > self._asked
        self._asked = sum(self._proposed.values())
        self._survived = self._survived + has_proposals if self.leader == leader else 0

    def _follow(self, found: list[Standing]) -> None:
        """Put the leader first, the one before or a challenger that is clearly better."""
        best = self._best(found)
        if best.config != self.leader:
            self._equals.clear()
        self._equals += filter(partial(_is_equal, best), found)
        older = [old for old in self._explorer.standings if old.config != best.config]
        self._explorer.standings = [best, *older]
        self._explorer.plan.pick = self.leader

    def _best(self, found: list[Standing]) -> Standing:
        if self._explorer.launcher.task.saves_memory:
            return found[0]
        fastest = min(found, key=attrgetter("loss"))
        own = next((standing for standing in found if standing.config == self.leader), fastest)
        return fastest if fastest.loss + FOLLOWED < own.loss else own

    def _take_the_least_needy(self) -> None:
        """Put first who needs least of those as fast as the leader, once and at the end."""
        if self._equals and not self._explorer.launcher.task.saves_memory:
            least = min(self._equals, key=lambda standing: needs(standing.config))
            older = [old for old in self._explorer.standings if old.config != least.config]
            self._explorer.standings = [least, *older]
            self._explorer.plan.pick = self.leader

    def _challengers(self) -> Iterator[Config]:
        """Yield configs that may race, each once."""
        leader = self.leader
        for config in self._candidates(leader):
            if config in self._tried or self._is_vetoed(config):
                continue
            self._tried.add(config)
            if self._explorer.admits(config, phase="F"):
                yield config

    def _candidates(self, leader: Config) -> Iterator[Config]:
        space = self._explorer.launcher.task.space
        yield from neighbours(space, leader)
        if self._studies is not None:
            for is_boxed in (True, False):
                yield from self._proposals(self._studies, leader, is_boxed=is_boxed)

    def _proposals(self, studies: Studies, leader: Config, *, is_boxed: bool) -> Iterator[Config]:
        """Yield what the sampler proposes, until it has nothing new or was asked often enough."""
        while self._proposed[is_boxed] < PROPOSALS:
            self._proposed[is_boxed] += 1
            config = studies.propose(
                leader, tried=self._tried, is_vetoed=self._is_vetoed, is_boxed=is_boxed
            )
            if config is None:
                return
            yield config

    def _is_vetoed(self, config: Config) -> bool:
        """Whether a config cannot race, or its step alone takes longer than the leader in all."""
        known = self._explorer.known
        too_slow = CLOSE * known.predicted(self.leader)
        own = known.speeds.seconds.get(known.speeds.core(config), 0.0)
        return not known.may_race(config) or own > too_slow

    def _affords(self, challengers: list[Config]) -> bool:
        plan = self._explorer.plan
        seconds = sum(plan.cost(config, "train") for config in (self.leader, *challengers))
        return plan.affords(ROUNDS * seconds, phase="F", launches=ROUNDS * (1 + len(challengers)))


def _is_equal(leader: Standing, other: Standing) -> bool:
    """Whether enough rounds show that another config is as fast as the leader."""
    return other.rounds >= LEAST_ROUNDS and abs(other.loss - leader.loss) <= TIE
