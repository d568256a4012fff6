"""Phase F: around the leader, then wherever Optuna's sampler sees promise.

Neighbours of the leader first, and what those that gained make together; then proposals of TPE,
warmed with every end-to-end trial so far: within two positions of the leader, and at last in the
whole space, which cures what the phases before were blind to. Each is vetoed by the memory law, or
where what was measured of its step and its loader leaves nothing to gain; checked, and raced
against the leader. It ends where a further race could not pay.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from autotune.search.choice import has_finished, in_order
from autotune.search.costs import NEARLY
from autotune.search.phases import Explorer
from autotune.search.proposals import moves, neighbours, with_size_of, with_value
from autotune.search.race import TIE, Rules, Standing
from autotune.search.rivals import BARELY
from autotune.search.studies import Studies
from autotune.space import Config

CHALLENGERS = 3
"""So many race the leader at a time: it need not be launched anew for each."""

ROUNDS = 3
"""A challenger that is not clearly faster after three rounds is not worth more."""

PROPOSALS = 12
"""Proposals from the box around the leader, and again from the whole space (METHOD.md D.1)."""

PATIENCE = 1
"""After so many races with proposals, one after the other, that the leader survives, no further one
is expected to gain what could be claimed."""

FOLLOWED = 0.003
"""Log ratio by which a challenger must be faster to lead: by less, noise would lead from one to the
next."""

UNLIKELY = 1.05
"""What is predicted to be so much slower than the leader does not race: predictions by launches of
the step and of the loader are that near where one of them binds."""

WITHIN = 1.01
"""As above for a config with the leader's loader, whose step was timed in pairs with another's."""

COPIED_BYTES_PER_SECOND = 2e9
"""Any machine copies so fast from memory that is not pinned to its device."""

REFINING_SHARE = 0.8
"""Of the time that the phases before took, what this one may take: it polishes what they found."""


class Refinement:
    """Challenges the leader until nothing promising, or no time, is left.

    Args:
        explorer: What has found the leader.
        studies: Whose sampler proposes; None proposes neighbours only.
    """

    def __init__(self, explorer: Explorer, *, studies: Studies | None) -> None:
        self._explorer = explorer
        self._studies = studies
        self._standings = {standing.config: standing for standing in explorer.standings}
        self._tried = set(self._standings)
        self._proposed = {True: 0, False: 0}
        self._survived = self._asked = 0
        self._end = (1 + REFINING_SHARE) * explorer.launcher.spent_seconds

    @property
    def leader(self) -> Config:
        """Return the best config so far."""
        return self._explorer.standings[0].config

    def run(self) -> None:
        """Race challengers against the leader; the explorer's standings follow.

        Raises:
            BudgetSpent: If nothing more may be launched.
        """
        self._lead_by_speed()
        try:
            while self._explorer.plan.runs("F") and self._survived < PATIENCE:
                challengers = list(islice(self._challengers(), CHALLENGERS))
                if not challengers or not self._affords(challengers):
                    return
                self._challenge(challengers)
        finally:
            self._settle()

    def _challenge(self, challengers: list[Config]) -> None:
        explorer, leader = self._explorer, self.leader
        rules = Rules.of(explorer.launcher.task.goal, phase="F", most_rounds=ROUNDS)
        for standing in explorer.race([leader, *challengers], rules=rules):
            self._standings[standing.config] = standing
        self._lead_by_speed()
        has_proposals = sum(self._proposed.values()) > self._asked
        self._asked = sum(self._proposed.values())
        self._survived = self._survived + has_proposals if self.leader == leader else 0

    def _ranked(self) -> list[Standing]:
        """Return who raced to its end, with its loss by all rounds to the fastest."""
        levels = self._explorer.rounds.levels()
        finished = [s for s in self._standings.values() if has_finished(s)]
        fastest = levels.fastest(standing.config for standing in finished)
        if fastest is None:
            return finished
        return [replace(s, loss=levels.loss(s.config, fastest)) for s in finished]

    def _lead_by_speed(self) -> None:
        """Put first the fastest by all rounds, or who led before if that is as fast."""
        ranked = sorted(self._ranked(), key=self._place)
        if ranked:
            self._explorer.standings = ranked
            self._explorer.plan.pick = self.leader

    def _place(self, standing: Standing) -> float:
        is_leader = standing.config == self.leader
        return standing.loss - FOLLOWED * is_leader

    def _settle(self) -> None:
        """Put first who needs least of those as fast as the fastest, once and at the end."""
        explorer = self._explorer
        goal = explorer.launcher.task.goal
        if ranked := in_order(self._ranked(), goal=goal, fits=explorer.fits):
            explorer.standings = ranked
            explorer.plan.pick = self.leader

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
        yield from self._combined(leader)
        yield from neighbours(space, leader)
        if self._studies is not None:
            for is_boxed in (True, False):
                yield from self._proposals(self._studies, leader, is_boxed=is_boxed)

    def _combined(self, leader: Config) -> Iterator[Config]:
        """Yield the leader with what made others as good as it that differ from it in one knob."""
        space = self._explorer.launcher.task.space
        close = [s.config for s in self._ranked() if s.loss <= TIE]
        for other in close:
            for knob, value in moves(space, leader, other):
                yield with_value(space, leader, knob=knob, value=value)

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
        """Whether a config cannot race, or has nothing to gain by what is known of its parts."""
        known, leader = self._explorer.known, self.leader
        if not known.may_race(config) or not known.fits_plainly(config):
            return True
        if self._explorer.launcher.task.saves_memory:
            return False
        computing = known.speeds.estimate(config)
        whole = known.assumed(config, computing)
        slack = UNLIKELY if config.num_workers or not known.hides_loading(leader) else BARELY
        if whole > slack * known.predicted(leader):
            return True
        if known.hides_computing(leader) and self._differs_by_what_is_hidden(config, leader):
            return True
        is_same_step = known.speeds.core(config) == known.speeds.core(leader)
        if is_same_step:
            return self._is_loader_idle(config, leader)
        is_step_alone = _loader_of(config) == _loader_of(leader)
        is_step_alone |= self._is_loader_idle(config, leader)
        return is_step_alone and computing > WITHIN * known.speeds.of(leader)

    def _is_loader_idle(self, config: Config, leader: Config) -> bool:
        """Whether the loaders of two configs are fast enough for what they load to be hidden."""
        known = self._explorer.known
        if known.task.device.kind == "cpu" or not known.loading.seconds:
            return False
        seconds = known.speeds.of(leader)
        is_copied_alike = config.pin_memory == leader.pin_memory
        if not is_copied_alike and not _is_copy_short(known.task.workload.sample_bytes, seconds):
            return False
        most = NEARLY * seconds
        return all(
            c.num_workers and known.loading.load_seconds(c.num_workers) < most
            for c in (config, leader)
        )

    def _differs_by_what_is_hidden(self, config: Config, leader: Config) -> bool:
        """Whether a config steps otherwise, beside its size, or copies otherwise."""
        known = self._explorer.known
        copies = config.pin_memory != leader.pin_memory and known.hides_copying(leader)
        own = with_size_of(known.speeds.core(config), leader)
        return copies or own != known.speeds.core(leader)

    def _affords(self, challengers: list[Config]) -> bool:
        plan = self._explorer.plan
        seconds = sum(plan.cost(config, "train") for config in (self.leader, *challengers))
        if self._explorer.launcher.spent_seconds + seconds > self._end:
            return False
        return plan.affords(ROUNDS * seconds, phase="F", launches=ROUNDS * (1 + len(challengers)))


def _is_copy_short(sample_bytes: int, seconds: float) -> bool:
    """Whether copying a sample to the device takes next to nothing of its time, pinned or not."""
    return 0 < sample_bytes <= TIE * seconds * COPIED_BYTES_PER_SECOND


def _loader_of(config: Config) -> tuple[object, ...]:
    return (config.num_workers, config.prefetch_factor, config.pin_memory)
