"""Runs configs through the runner, counts what they cost, and hands on each finished trial.

A trial is opened, launched once or several times, and closed; then it has its number and goes to
the record, to the Optuna studies and to those who learn from it. An interrupt passes through:
whatever was closed is recorded, and `racing` closes what was open.

What is asked of a launch depends on what is asked and never on when, so that a search that is run
again asks for the same; what an earlier run launched is free then.
"""

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from autotune.outcome import (
    STUDY_OF_PURPOSE,
    Launch,
    Measured,
    Measurement,
    Outcome,
    Purpose,
    Report,
    Request,
    Runner,
    Skipped,
    Trial,
)
from autotune.search.budget import Budget
from autotune.search.combine import combined
from autotune.search.costs import LIMIT_FLOOR_SECONDS, Costs
from autotune.search.studies import Studies
from autotune.search.task import Event, Task
from autotune.space import Config

MEMORY_CYCLES = 2
"""The peak is in the second cycle: the first one makes the optimizer's state (DESIGN 2.2)."""

DEFAULT_CYCLES = 5
"""Cycles of a timed launch where no plan says otherwise."""

LONGEST_LAUNCH_SECONDS = 24 * 3600.0
"""No launch runs for longer, budget or not: whatever waits has a limit (DESIGN 8, promise 5)."""

EXPLORING_SHARE = 0.5
"""A launch that only explores may take at most this share of what is left, if it hangs."""

FIRST_SHARE = 0.5
"""A first launch that takes more of the budget leaves nothing to tune with: it as good as hangs."""

FIRST_PATIENCE = 5.0
"""The first timed launch may take so many times as long as the untimed one before it."""

Record = Callable[[Trial], None]
Watch = Callable[[Event], None]
Listener = Callable[[Purpose, Trial], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a phase wants to know of a config.

    Args:
        config: What to run.
        purpose: What for.
        phase: Which phase asks.
        cycles: Optimizer steps to time.
        seed: Seed of the data's order; None takes that of all first launches for this purpose, of
            all second ones, ….
        against: What a `check` compares with.
        is_limited: Whether the memory limit is enforced.
        is_needed: Whether the answer depends on this launch, so that it may take all that is left.
        most_seconds: After this time its result would be of no use.
        skip_windows: Windows that are loaded and not computed on, so that rivals with queues of
            other lengths are timed on the same samples.
        predicted_peak_bytes: What the memory law said beforehand.
    """

    config: Config
    purpose: Purpose
    phase: str
    cycles: int = DEFAULT_CYCLES
    seed: int | None = None
    against: Config | None = None
    is_limited: bool = True
    is_needed: bool = False
    most_seconds: float = math.inf
    skip_windows: int = 0
    predicted_peak_bytes: int | None = None


class Entry:
    """A trial that is open: what was asked, and what its launches gave so far.

    Args:
        ask: What was asked.
        is_settled: Whether its figures may name the best trial of its study; a race only chooses,
            and the figures of a winner are flattered by its being chosen.
    """

    def __init__(self, ask: Ask, *, is_settled: bool = True) -> None:
        self.ask = ask
        self.is_settled = is_settled
        self.trial: Trial | None = None
        self.started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self.wall_seconds = 0.0
        self.outcomes: list[Outcome] = []
        self.launches: list[Launch] = []
        self.recalled = 0  # outcomes that an earlier run's launches gave

    @property
    def is_reused(self) -> bool:
        """Whether nothing had to be launched for it."""
        return 0 < self.recalled == len(self.outcomes)


class Launcher:
    """Runs what a search asks for, and keeps the books.

    Args:
        runner: What runs a config.
        task: What the search is asked.
        budget: What it may use.
        record: Called with each finished trial.
        watch: Called when a launch begins and when it ends.
        studies: The Optuna studies; None keeps none.
    """

    def __init__(
        self,
        runner: Runner,
        task: Task,
        *,
        budget: Budget,
        record: Record,
        watch: Watch,
        studies: Studies | None,
    ) -> None:
        self.task = task
        self.budget = budget
        self.costs = Costs(world_size=task.space.world_size)
        self.trials: list[Trial] = []
        self.listeners: list[Listener] = []
        self.best: tuple[Config, Measurement] | None = None
        self._runner = runner
        self._record = record
        self._watch = watch
        self._studies = studies
        self._seeds: Counter[object] = Counter()

    @property
    def spent_seconds(self) -> float:
        """Seconds that all trials so far took.

        Those of an earlier run too: a search that is continued does what it would have done.
        """
        return sum(trial.wall_seconds for trial in self.trials)

    def new_seed(self, *told: object, of: object = None) -> int:
        """Return a seed of the data's order: by what is told, and how often that was asked before.

        Args:
            told: What the launches that share the data have in common.
            of: Who asks; the first seeds of all who do are the same.
        """
        self._seeds[told, of] += 1
        text = repr((self.task.seed, told, self._seeds[told, of]))
        return zlib.crc32(text.encode()) >> 1

    def run(self, ask: Ask) -> Trial:
        """Return the trial of one launch.

        Raises:
            BudgetSpent: If nothing more may be launched.
        """
        entry = Entry(ask)
        self.launch(entry)
        return self.close(entry)

    def skip(self, ask: Ask, reason: str) -> Trial:
        """Return the trial of a config that a prediction ruled out; nothing is launched."""
        entry = Entry(ask)
        skipped = Skipped(reason=reason, predicted_peak_bytes=ask.predicted_peak_bytes)
        entry.outcomes.append(skipped)
        return self.close(entry)

    def launch(self, entry: Entry, *, seed: int | None = None) -> Outcome:
        """Launch an open trial's config once more, and return how that ended.

        Args:
            entry: The open trial.
            seed: Seed of the data's order, as its rivals have it; None takes what was asked.

        Raises:
            BudgetSpent: If nothing more may be launched.
        """
        self.budget.count_launch()
        request = self._request(entry.ask, seed)
        self._tell(entry.ask, outcome=None)
        began = self.budget.elapsed_seconds
        report = self._runner(request)
        wall = self.budget.elapsed_seconds - began
        if report.reused_seconds is not None:
            self.budget.give_back_launch()
            wall = report.reused_seconds
        self._note(entry, report, wall)
        self._tell(entry.ask, outcome=report.outcome)
        return report.outcome

    def timed(self, entry: Entry, *, seed: int) -> float | None:
        """Launch an open trial's config once more; return log seconds per sample, None without.

        Raises:
            BudgetSpent: If nothing more may be launched.
        """
        outcome = self.launch(entry, seed=seed)
        rate = outcome.measurement.samples_per_second if isinstance(outcome, Measured) else None
        return -math.log(rate) if rate else None

    def close(self, entry: Entry) -> Trial:
        """Return an open trial, which has at least one outcome, as a record handed to all."""
        trial = Trial(
            number=len(self.trials),
            study=STUDY_OF_PURPOSE[entry.ask.purpose],
            phase=entry.ask.phase,
            config=entry.ask.config,
            outcome=combined(entry.outcomes),
            predicted_peak_bytes=entry.ask.predicted_peak_bytes,
            launches=tuple(entry.launches),
            started_at=entry.started_at,
            wall_seconds=entry.wall_seconds,
            is_reused=entry.is_reused,
        )
        self.trials.append(trial)
        self._record(trial)
        if self._studies is not None:
            self._studies.record(trial, is_settled=entry.is_settled)
        for listener in self.listeners:
            listener(entry.ask.purpose, trial)
        entry.trial = trial
        return trial

    @contextmanager
    def racing(self, asks: Iterable[Ask]) -> Iterator[list[Entry]]:
        """Yield open trials that are launched in turns; closed at the end, interrupted or not."""
        entries = [Entry(ask, is_settled=False) for ask in asks]
        try:
            yield entries
        finally:
            for entry in entries:
                if entry.outcomes:
                    self.close(entry)

    def _request(self, ask: Ask, seed: int | None) -> Request:
        chosen = seed if seed is not None else ask.seed
        if chosen is None:
            chosen = self.new_seed(ask.purpose, of=ask.config)
        return Request(
            purpose=ask.purpose,
            config=ask.config,
            baseline=ask.against,
            seed=chosen,
            cycles=ask.cycles,
            limit_bytes=self.task.limit_bytes if ask.is_limited else None,
            time_limit_seconds=self._limit_seconds(ask),
            largest_samples=self.task.workload.largest_samples,
            skip_windows=ask.skip_windows,
        )

    def _limit_seconds(self, ask: Ask) -> float:
        """Return when a launch is given up: never later than the budget, and rarely so late."""
        left = min(self.budget.remaining_seconds, LONGEST_LAUNCH_SECONDS)
        limit = self.costs.limit_seconds(ask.config, ask.purpose, cycles=ask.cycles)
        if math.isinf(limit):  # nothing was timed yet
            seen = self.trials[-1].wall_seconds if self.trials else 0.0
            patience = LIMIT_FLOOR_SECONDS + FIRST_PATIENCE * seen
            return min(left, max(left * FIRST_SHARE, patience))
        if ask.is_needed:
            return left
        expected = self.costs.launch_seconds(ask.config, ask.purpose, cycles=ask.cycles)
        most = max(left * EXPLORING_SHARE, min(left, expected * 2))
        return min(limit, most, ask.most_seconds)

    def _note(self, entry: Entry, report: Report, wall: float) -> None:
        ask = entry.ask
        entry.wall_seconds += wall
        entry.outcomes.append(report.outcome)
        entry.recalled += report.reused_seconds is not None
        if report.launch is not None:
            entry.launches.append(report.launch)
        if isinstance(report.outcome, Measured):
            seen = report.outcome.measurement
            self.costs.learn(ask.config, ask.purpose, cycles=ask.cycles, wall=wall, seen=seen)
            if ask.purpose == "train" and _is_faster(seen, self.best):
                self.best = (ask.config, seen)

    def _tell(self, ask: Ask, *, outcome: Outcome | None) -> None:
        seen = outcome.measurement if isinstance(outcome, Measured) else None
        best_config, best = self.best or (None, None)
        self._watch(
            Event(
                phase=ask.phase,
                config=ask.config,
                purpose=ask.purpose,
                outcome=outcome.name if outcome else None,
                samples_per_second=seen.samples_per_second if seen else None,
                best_config=best_config,
                best=best,
                seconds_left=self.budget.remaining_seconds,
                launches=self.budget.launches,
            )
        )


def windows_ahead(configs: Iterable[Config]) -> int:
    """Return how many windows the longest of some loaders' queues holds at the start of timing.

    With workers `workers + 1` batches are pulled before anything is timed (METHOD.md 0.4).
    """
    return max(
        (
            math.ceil((config.num_workers + 1) / config.accumulation_steps)
            for config in configs
            if config.num_workers
        ),
        default=0,
    )


def _is_faster(seen: Measurement, best: tuple[Config, Measurement] | None) -> bool:
    return best is None or (seen.samples_per_second or 0) > (best[1].samples_per_second or 0)
