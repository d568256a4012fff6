"""Phase E: a race of the best few, by rounds of one launch each on the same data.

Rivals of a round share the data's order and are launched in random order; what counts is the level
of their log times over all rounds that were run, of this race and of those before. A race only
chooses: its winner is flattered by having won, so its figures claim nothing (METHOD.md D.3).
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from autotune.outcome import Trial
from autotune.search.launcher import Ask, Entry, Launcher, windows_ahead
from autotune.search.plan import Phase, Plan
from autotune.search.rounds import Levels, Rounds
from autotune.search.task import KEPT_THROUGHPUT
from autotune.space import Config, Goal

ERRORS_FOR_LOSS = 2.0
"""A rival is out that is slower by more than a tie, and by so many standard errors more."""

TIE = 0.003
"""Configs within this of the fastest are as good: the one that needs least is taken."""

LEAST_ROUNDS = 3
"""Rounds after which a tie is believed."""

WORTH_A_ROUND = 0.0015
"""Log ratio: where no rival is expected to gain more by turning out to be the fastest, a further
round is not worth its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a config came out of a race.

    Args:
        config: What raced.
        loss: Log ratio of its time to the leader's by all rounds; infinite where it has none.
        rounds: Rounds it ran.
        trial: Its trial.
    """

    config: Config
    loss: float
    rounds: int
    trial: Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a race is run.

    Args:
        phase: Which phase races.
        most_rounds: It ends after so many rounds.
        slack: Log ratio that a rival may lose by and still be of use: above 0 where the goal is
            memory.
    """

    phase: Phase
    most_rounds: int = 6
    slack: float = 0.0

    @classmethod
    def of(cls, goal: Goal, *, phase: Phase, most_rounds: int = 6) -> "Rules":
        """Return the rules of a goal's race."""
        slack = -math.log(KEPT_THROUGHPUT) if goal == "memory" else 0.0
        return cls(phase=phase, most_rounds=most_rounds, slack=slack)


class Race:
    """A race between configs.

    Args:
        launcher: What runs them.
        plan: What can be afforded, and how long a launch is.
        rules: How it is run.
        rounds: What earlier races saw, which counts too; learns.
    """

    def __init__(
        self, launcher: Launcher, plan: Plan, *, rules: Rules, rounds: Rounds | None = None
    ) -> None:
        self._launcher = launcher
        self._plan = plan
        self._rules = rules
        self._rounds = Rounds() if rounds is None else rounds
        self._told: tuple[object, ...] = ()
        self._random = random.Random()  # noqa: S311  # an order, not a secret
        self._ran: Counter[Config] = Counter()
        self._failed: set[Config] = set()
        self._out: set[Config] = set()

    def run(
        self, configs: Iterable[Config], *, may_run: Callable[[Config], bool]
    ) -> list[Standing]:
        """Return how each config came out, the fastest first.

        Args:
            configs: Who races.
            may_run: Whether a config is still worth a launch; asked before each.
        """
        rivals = list(dict.fromkeys(configs))
        self._told = ("race", self._rules.phase, *rivals)
        self._random.seed(repr((self._launcher.task.seed, self._told)))
        with self._launcher.racing(self._asks(rivals)) as entries:
            for _ in range(self._rules.most_rounds):
                running = [entry for entry in entries if entry.ask.config not in self._out]
                if self._is_decided(running) or not self._can_run_round(running):
                    break
                self._run_round(running, may_run)
                self._eliminate(running)
        return self._standings(entries)

    def _asks(self, rivals: Sequence[Config]) -> Iterator[Ask]:
        cycles = self._plan.cycles_together(rivals)
        for config in rivals:
            yield Ask(
                config=config,
                purpose="train",
                phase=self._rules.phase,
                cycles=cycles[config],
                skip_windows=windows_ahead(rivals),
            )

    def _run_round(self, entries: list[Entry], may_run: Callable[[Config], bool]) -> None:
        """Launch each rival once, in random order, on the same data."""
        seed = self._launcher.new_seed(*self._told)
        times: dict[Config, float] = {}
        for entry in self._random.sample(entries, len(entries)):
            config = entry.ask.config
            time = self._launcher.timed(entry, seed=seed) if may_run(config) else None
            if time is None:
                self._failed.add(config)
            else:
                times[config] = time
        self._out |= self._failed
        self._ran.update(times.keys())
        self._rounds.add(times)

    def _can_run_round(self, entries: list[Entry]) -> bool:
        seconds = sum(self._plan.cost(entry.ask.config, "train") for entry in entries)
        return self._plan.affords(seconds, phase=self._rules.phase, launches=len(entries))

    def _leader(self, levels: Levels) -> Config | None:
        """Return the fastest of those that ran every round so far."""
        return levels.fastest(config for config in self._ran if config not in self._out)

    def _eliminate(self, entries: list[Entry]) -> None:
        """Put out who is beaten."""
        levels = self._rounds.levels()
        leader = self._leader(levels)
        if leader is not None:
            running = (entry.ask.config for entry in entries)
            self._out |= {c for c in running if self._is_beaten(c, leader, levels)}

    def _is_beaten(self, config: Config, leader: Config, levels: Levels) -> bool:
        if config == leader or config in self._out:
            return config in self._out
        loss = levels.loss(config, leader) - self._rules.slack
        return loss - ERRORS_FOR_LOSS * levels.error(config, leader) > TIE

    def _is_decided(self, entries: list[Entry]) -> bool:
        """Whether one is left, or nobody left is expected to be worth another round."""
        levels = self._rounds.levels()
        leader = self._leader(levels)
        if leader is None:
            return not entries
        rivals = [entry.ask.config for entry in entries if entry.ask.config != leader]
        if self._rules.slack:
            return not rivals
        return all(self._is_settled(config, leader, levels) for config in rivals)

    def _is_settled(self, config: Config, leader: Config, levels: Levels) -> bool:
        """Whether a rival is as good as the leader, or is not expected to turn out any better."""
        if self._ran[config] < min(LEAST_ROUNDS, self._rules.most_rounds):
            return False
        loss, error = levels.loss(config, leader), levels.error(config, leader)
        return loss <= TIE or expected_gain(loss, error) <= WORTH_A_ROUND

    def _standings(self, entries: list[Entry]) -> list[Standing]:
        levels = self._rounds.levels()
        leader = self._leader(levels)
        found = [
            self._standing(entry.trial, levels, leader)
            for entry in entries
            if entry.trial is not None
        ]
        return sorted(found, key=lambda standing: (standing.loss, -standing.rounds))

    def _standing(self, trial: Trial, levels: Levels, leader: Config | None) -> Standing:
        has_finished = trial.measured and leader and trial.config not in self._failed
        loss = levels.loss(trial.config, leader) if has_finished and leader else math.inf
        rounds = self._ran[trial.config]
        return Standing(config=trial.config, loss=loss, rounds=rounds, trial=trial)


def expected_gain(loss: float, error: float) -> float:
    """Return by how much a rival is expected to be faster, where it is, and else 0.

    The expected improvement of a normal law (Jones, Schonlau and Welch, J. Global Optim. 13, 1998).

    Args:
        loss: How much slower it seems to be.
        error: Standard error of that.
    """
    distance = loss / error
    density = math.exp(-(distance**2) / 2) / math.sqrt(2 * math.pi)
    return error * (density - distance * math.erfc(distance / math.sqrt(2)) / 2)
