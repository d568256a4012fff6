"""Phase E: a race of the best few, by rounds of one launch each on the same data.

Rivals of a round share the data's order and are launched in random order; what counts is the mean
log ratio to the leader over the rounds that both ran. A race only chooses: its winner is flattered
by having won, so its figures claim nothing (METHOD.md D.3).
"""

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from autotune.outcome import Trial
from autotune.search.launcher import Ask, Entry, Launcher, windows_ahead
from autotune.search.plan import Phase, Plan
from autotune.search.task import KEPT_THROUGHPUT
from autotune.space import Config, Goal

GROSS_LOSSES = (0.08, 0.04, 0.025)
"""A rival this much slower after one, two, three rounds is out (METHOD.md D.1, row E)."""

ERRORS_FOR_LOSS = 2.0
"""From three rounds on, a rival is out whose mean loss is above so many standard errors."""

TIE = 0.01
"""Configs within this of the fastest are as good: the one that needs least is taken."""

LEAST_ROUNDS = 3
"""Rounds after which a tie is believed, and a spread means something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a config came out of a race.

    Args:
        config: What raced.
        loss: Mean log ratio of its time to the leader's; infinite where it was not measured.
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
    """

    def __init__(self, launcher: Launcher, plan: Plan, *, rules: Rules) -> None:
        self._launcher = launcher
        self._plan = plan
        self._rules = rules
        self._told: tuple[object, ...] = ()
        self._random = random.Random()  # noqa: S311  # an order, not a secret
        self._logs: dict[Config, list[float]] = {}
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
        self._logs = {config: [] for config in rivals}
        with self._launcher.racing(self._asks(rivals)) as entries:
            for _ in range(self._rules.most_rounds):
                running = [entry for entry in entries if entry.ask.config not in self._out]
                if self._is_decided(running) or not self._can_run_round(running):
                    break
                self._run_round(running, may_run)
                self._eliminate(running)
        return self._standings(entries)

    def _asks(self, rivals: Sequence[Config]) -> Iterator[Ask]:
        for config in rivals:
            yield Ask(
                config=config,
                purpose="train",
                phase=self._rules.phase,
                cycles=self._plan.cycles,
                skip_windows=windows_ahead(rivals),
            )

    def _run_round(self, entries: list[Entry], may_run: Callable[[Config], bool]) -> None:
        """Launch each rival once, in random order, on the same data."""
        seed = self._launcher.new_seed(*self._told)
        for entry in self._random.sample(entries, len(entries)):
            config = entry.ask.config
            time = self._launcher.timed(entry, seed=seed) if may_run(config) else None
            if time is None:
                self._out.add(config)
            else:
                self._logs[config].append(time)

    def _can_run_round(self, entries: list[Entry]) -> bool:
        seconds = sum(self._plan.cost(entry.ask.config, "train") for entry in entries)
        return self._plan.affords(seconds, phase=self._rules.phase, launches=len(entries))

    def _leader(self) -> Config | None:
        """Return the fastest of those that ran every round so far."""
        running = [config for config in self._logs if self._is_running(config)]
        return min(running, key=lambda config: statistics.fmean(self._logs[config]), default=None)

    def _is_running(self, config: Config) -> bool:
        """Whether a config was measured in every round so far."""
        return config not in self._out and len(self._logs[config]) > 0

    def _losses(self, config: Config, leader: Config) -> list[float]:
        """Return the log ratios to the leader, of the rounds that both ran."""
        return [
            mine - best for mine, best in zip(self._logs[config], self._logs[leader], strict=False)
        ]

    def _eliminate(self, entries: list[Entry]) -> None:
        """Put out who was measured in every round, and is beaten."""
        leader = self._leader()
        if leader is None:
            return
        running = filter(self._is_running, [entry.ask.config for entry in entries])
        self._out |= {c for c in running if self._is_beaten(self._losses(c, leader))}

    def _is_beaten(self, losses: list[float]) -> bool:
        rounds = len(losses)
        mean = statistics.fmean(losses) - self._rules.slack
        if mean > GROSS_LOSSES[min(rounds, len(GROSS_LOSSES)) - 1]:
            return True
        if rounds < LEAST_ROUNDS:
            return False
        error = statistics.stdev(losses) / math.sqrt(rounds)
        return mean - ERRORS_FOR_LOSS * error > TIE

    def _is_decided(self, entries: list[Entry]) -> bool:
        """Whether one is left, or all that are left are as good as each other."""
        leader = self._leader()
        if leader is None:
            return not entries
        if len(entries) == 1:
            return True
        return not self._rules.slack and self._are_tied(
            [self._losses(entry.ask.config, leader) for entry in entries]
        )

    def _are_tied(self, losses: list[list[float]]) -> bool:
        """Whether enough rounds show that some configs are as good as each other."""
        if min(map(len, losses)) < LEAST_ROUNDS:
            return False
        return max(map(statistics.fmean, losses)) <= TIE

    def _standings(self, entries: list[Entry]) -> list[Standing]:
        found = [self._standing(entry.trial) for entry in entries if entry.trial is not None]
        return sorted(found, key=lambda standing: (standing.loss, -standing.rounds))

    def _standing(self, trial: Trial) -> Standing:
        leader = self._leader()
        losses = self._losses(trial.config, leader) if trial.measured and leader else []
        loss = statistics.fmean(losses) if losses else math.inf
        return Standing(config=trial.config, loss=loss, rounds=len(losses), trial=trial)
