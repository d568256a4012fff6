"""The search itself: a footing, an exploration, a verified pick, a verdict.

`run_search` is the way in. `Search` is the same with its state in reach, so that whoever is
interrupted can still have the best configuration verified by then.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from autotune.errors import NothingVerified
from autotune.outcome import Measurement, Runner, Trial
from autotune.search.budget import Budget, BudgetSpent
from autotune.search.choice import has_finished
from autotune.search.confirm import (
    HARDLY_SLOWER,
    Claim,
    confirm,
)
from autotune.search.effects import effects_of
from autotune.search.fits import Fits
from autotune.search.footing import Footing, find_footing
from autotune.search.larger import larger_batch_note
from autotune.search.launcher import Ask, Launcher, Record, Watch
from autotune.search.phases import Explorer
from autotune.search.plan import VERIFY_CYCLES, Plan
from autotune.search.refine import Refinement
from autotune.search.remarks import on_growth, on_spread
from autotune.search.studies import Studies
from autotune.search.task import Event, Task
from autotune.space import Config
from autotune.summary import Effect
from autotune.verdict import Estimate, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a search decided.

    Args:
        verdict: `tuned`, `keep`, `unconfirmed` or `interrupted`.
        config: The answer.
        measured: Its figures: rate of its latest launches with a 95 % interval, peak of its
            verification.
        baseline: The baseline's trial; that of the verdict where there was one.
        reference: What it is compared with: the baseline, or its largest halving that fits.
        best: The latest end-to-end trial of the answer.
        best_at_baseline_batch: The fastest end-to-end trial with the baseline's samples per
            optimizer step, where the answer has another; None otherwise.
        speedup: The ratio measured by the verdict's pairs; None without them, and where the
            baseline does not fit.
        notes: What a reader must not miss, in sentences.
        effects: What each knob is worth around the answer.
    """

    verdict: Verdict
    config: Config
    measured: Measurement
    baseline: Trial
    reference: Config
    best: Trial
    best_at_baseline_batch: Trial | None
    speedup: Estimate | None
    notes: tuple[str, ...]
    effects: tuple[Effect, ...] = ()


def run_search(
    task: Task,
    runner: Runner,
    *,
    budget: Budget,
    record: Record = lambda _trial: None,
    watch: Watch = lambda _event: None,
    studies: Studies | None = None,
) -> Decision:
    """Return which config to use, and how sure that is.

    Args:
        task: What is asked.
        runner: What runs a config.
        budget: Time and launches that may be used; time runs from when it was made.
        record: Called with each trial as soon as it is finished.
        watch: Called when a launch begins and when it ends.
        studies: The Optuna studies that keep every trial, and propose in phase F.

    Raises:
        StepFailed: If the user's own step fails, for another reason than memory.
        WorkloadInvalid: If the workload was found wrong before its first step.
        NothingFits: If no config stays within the memory limit.
        NothingVerified: If time or launches ended before anything was verified.
    """
    return Search(task, runner, budget=budget, record=record, watch=watch, studies=studies).run()


class Search:
    """A search in progress; the arguments are those of `run_search`."""

    def __init__(
        self,
        task: Task,
        runner: Runner,
        *,
        budget: Budget,
        record: Record = lambda _trial: None,
        watch: Watch = lambda _event: None,
        studies: Studies | None = None,
    ) -> None:
        self._studies = studies
        self._launcher = Launcher(
            runner, task, budget=budget, record=record, watch=watch, studies=studies
        )
        self._fits = Fits(self._launcher)
        self._footing: Footing | None = None
        self._plan: Plan | None = None
        self._decided: Decision | None = None
        self._verified: dict[Config, Trial] = {}
        self._notes: list[str] = []

    def run(self) -> Decision:
        """Return the decision; see `run_search`."""
        footing = self._first_footing()
        self._footing = footing
        self._verified[footing.reference.config] = footing.verified
        plan = self._plan = Plan(self._launcher, footing.reference.config)
        explorer = self._explored(footing, plan)
        pick = self._verified_pick(explorer, plan)
        if pick == footing.reference.config:
            self._decided = self._keep(is_searched=plan.is_explored or bool(explorer.standings))
        else:
            self._decided = self._judged(pick, plan)
        self._decided = self._with_outlook(self._decided, explorer)
        return self._decided

    def _first_footing(self) -> Footing:
        try:
            return find_footing(self._launcher, self._fits)
        except BudgetSpent as error:
            raise NothingVerified(str(error), hint=error.hint) from error

    def explained(self, decision: Decision) -> Decision:
        """Return a decision with what each knob is worth, where it is a gain, by some launches."""
        answer, reference = decision.config, decision.reference
        if self._plan is None or decision.verdict != "tuned" or answer == reference:
            return decision
        found = effects_of(
            self._launcher, self._plan, self._fits, answer=answer, reference=reference
        )
        return replace(decision, effects=found)

    def interrupted(self) -> Decision | None:
        """Return the best config verified so far, as a decision; None where there is none.

        What was decided before is that decision.
        """
        if self._decided is not None or self._footing is None:
            return self._decided
        config = list(self._verified)[-1]
        return self._decision("interrupted", config)

    def _explored(self, footing: Footing, plan: Plan) -> Explorer:
        """Return what was found until phases or budget ended."""
        rate = footing.reference.samples_per_second
        explorer = Explorer(
            self._launcher,
            self._fits,
            plan=plan,
            reference=footing.reference.config,
            reference_seconds=1 / rate if rate else math.inf,
        )
        with suppress(BudgetSpent):
            explorer.run()
            if explorer.standings:
                Refinement(explorer, studies=self._studies).run()
        self._notes += explorer.guard.notes
        return explorer

    def _verified_pick(self, explorer: Explorer, plan: Plan) -> Config:
        """Return the best config that a fresh launch shows to hold; at last the reference."""
        for config in _candidates(explorer):
            if config in self._verified:
                return config
            may_run = explorer.known.may_race(config) and self._can_verify(config, plan)
            if may_run and self._passes(config):
                return config
        return explorer.reference

    def _passes(self, config: Config) -> bool:
        """Return whether a config passes verification, by a launch; tell where it does not."""
        ask = Ask(
            config=config,
            purpose="verify",
            phase="verify",
            cycles=VERIFY_CYCLES,
            is_needed=True,
            predicted_peak_bytes=self._fits.foretold(config),
        )
        trial = self._launcher.run(ask)
        if trial.measured:
            self._verified[config] = trial
            return True
        self._notes.append(
            f"{config.describe()} was fastest in the race, but did not pass verification: "
            f"{trial.outcome.reason}"
        )
        return False

    def _can_verify(self, config: Config, plan: Plan) -> bool:
        budget = self._launcher.budget
        cost = plan.cost(config, "verify", cycles=VERIFY_CYCLES)
        return not budget.is_done and budget.remaining_seconds >= cost

    def _judged(self, pick: Config, plan: Plan) -> Decision:
        """Return the decision that fresh pairs of launches give."""
        reference = self._reference
        claim = HARDLY_SLOWER if self._saves_memory(pick) else Claim()
        found = confirm(self._launcher, plan, reference=reference, pick=pick, claim=claim)
        self._notes += on_spread(found)
        match found.ending:
            case "won":
                return self._decision("tuned", pick, estimate=found.estimate)
            case "lost" | "failed":
                return self._decision("keep", reference, estimate=found.estimate)
            case "unfinished":
                self._notes.append("the budget ended before enough pairs of launches were run")
                answer = max(reference, pick, key=self._rate)
                return self._decision("unconfirmed", answer, estimate=found.estimate)

    def _with_outlook(self, decision: Decision, explorer: Explorer) -> Decision:
        """Return a decision with a line more on what a larger effective batch would give."""
        note = None
        if decision.verdict in {"tuned", "keep"}:
            with suppress(BudgetSpent):
                note = larger_batch_note(explorer, decision.config)
        return decision if note is None else replace(decision, notes=(*decision.notes, note))

    def _saves_memory(self, pick: Config) -> bool:
        """Whether less memory is the aim, and a pick needs less than the reference."""
        own, other = self._verified[pick], self._verified[self._reference]
        needs_less = (own.peak_bytes or 0) < (other.peak_bytes or 0)
        return self._launcher.task.saves_memory and needs_less

    def _keep(self, *, is_searched: bool) -> Decision:
        """Return the decision for the reference, which nothing was found to beat."""
        if is_searched:
            return self._decision("keep", self._reference)
        self._notes.append("the budget ended before another configuration could be raced")
        return self._decision("unconfirmed", self._reference)

    @property
    def _reference(self) -> Config:
        return self._known_footing.reference.config

    @property
    def _known_footing(self) -> Footing:
        if self._footing is None:
            raise BudgetSpent("the baseline was not measured")
        return self._footing

    def _decision(
        self, verdict: Verdict, config: Config, *, estimate: Estimate | None = None
    ) -> Decision:
        footing = self._known_footing
        best = self._latest(config) or footing.reference
        if not footing.is_baseline:
            verdict, estimate = self._without_baseline(verdict, estimate)
        if self._studies is not None and verdict != "interrupted":
            self._studies.recommend(best)
        return Decision(
            verdict=verdict,
            config=config,
            measured=self._figures(best),
            baseline=self._latest(footing.baseline.config) or footing.baseline,
            reference=footing.reference.config,
            best=best,
            best_at_baseline_batch=self._best_at_baseline_batch(config),
            speedup=estimate,
            notes=tuple(dict.fromkeys([*self._notes, *on_growth(self._verified[config])])),
        )

    def _without_baseline(
        self, verdict: Verdict, estimate: Estimate | None
    ) -> tuple[Verdict, Estimate | None]:
        """Return verdict and speed-up where the baseline does not fit, so cannot be kept."""
        reference = self._reference.describe()
        self._notes.insert(
            0,
            f"the baseline does not fit in memory; figures are compared with {reference}, "
            "the nearest to it that does",
        )
        if estimate is not None:
            self._notes.insert(
                1,
                f"against {reference} the ratio is {estimate.value:.2f} "
                f"({estimate.low:.2f} to {estimate.high:.2f}, {estimate.pairs} pairs)",
            )
        return ("tuned" if verdict == "keep" else verdict), None

    def _figures(self, best: Trial) -> Measurement:
        """Return the rate of a config's latest launches, with the memory of its verification."""
        seen = best.measured or Measurement()
        verified = self._verified[best.config].measured or Measurement()
        return replace(
            seen,
            peak_bytes=verified.peak_bytes,
            peak_allocated_bytes=verified.peak_allocated_bytes,
            peak_reserved_bytes=verified.peak_reserved_bytes,
            process_rss_bytes=verified.process_rss_bytes or seen.process_rss_bytes,
            limit_bytes=self._launcher.task.limit_bytes,
        )

    def _end_to_end(self) -> Iterator[Trial]:
        """Yield the end-to-end trials that were measured, the latest first."""
        for trial in reversed(self._launcher.trials):
            if trial.study == "e2e" and trial.measured:
                yield trial

    def _latest(self, config: Config) -> Trial | None:
        return next((trial for trial in self._end_to_end() if trial.config == config), None)

    def _rate(self, config: Config) -> float:
        trial = self._latest(config)
        return _rate_of(trial) if trial else 0.0

    def _best_at_baseline_batch(self, config: Config) -> Trial | None:
        own = self._launcher.task.baseline.samples_per_optimizer_step
        if config.samples_per_optimizer_step == own:
            return None
        rivals = (t for t in self._end_to_end() if t.config.samples_per_optimizer_step == own)
        return max(rivals, key=_rate_of, default=None)


def _candidates(explorer: Explorer) -> Iterator[Config]:
    """Yield what may be the pick, the best first: who raced, or else what is predicted best."""
    if explorer.standings:
        yield from (s.config for s in filter(has_finished, explorer.standings))
    elif explorer.guess is not None and explorer.admits(explorer.guess, phase="A"):
        yield explorer.guess


def _rate_of(trial: Trial) -> float:
    return trial.samples_per_second or 0.0


__all__ = ["Decision", "Event", "Search", "Task", "run_search"]
