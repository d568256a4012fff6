"""One run from survey to files: what `fit` and the command have in common."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from autotune.asking import fingerprint_of, make_task, signature
from autotune.errors import AutotuneError
from autotune.facts import UNKNOWN, Survey
from autotune.journal import Journal, remembering, set_aside
from autotune.machine import machine_of, versions
from autotune.memory.foretold import Forecast, Question
from autotune.options import Options
from autotune.outcome import Report, Request, Trial
from autotune.output.files import JOURNAL, RECORDS, STUDY, TRIALS, OutFolder, TrialLog
from autotune.output.terminal import Progress
from autotune.output.worst_case import worst_cases
from autotune.output.write import write_all
from autotune.result import KeptFolder, Result
from autotune.search.budget import Budget
from autotune.search.foresight import question_of
from autotune.search.remarks import on_itself
from autotune.search.search import Decision, Search
from autotune.search.studies import Studies
from autotune.search.task import Task
from autotune.summary import Summary
from autotune.trial.isolate import Isolated, preload_of_script
from autotune.trial.order import Source, refuse_inside_launch

if TYPE_CHECKING:
    from autotune.workload import Workload

FAREWELL_SECONDS = 3.0
"""Kept of the budget for writing the files: the pictures take most of it."""


PREDICTION_SHARE = 0.05
"""Of the budget, for tracing the workload's memory: what it saves of launches is of that order."""

SURVEY_LAUNCHES = 1
"""Launches that run user code before the search begins."""


class SurveyingRunner(Protocol):
    """A runner that can also say what the workload is: `Isolated` or `InProcess`."""

    def survey(self, *, scan_seconds: float) -> Survey:
        """Return what the workload and the device are."""
        ...

    def foretell(self, question: Question) -> Forecast:
        """Return the peaks that traces of the workload predict."""
        ...

    def __call__(self, request: Request) -> Report:
        """Run a request."""
        ...


@contextmanager
def open_script(script: str, *, device: str | None) -> Iterator[Isolated]:
    """Open a runner whose launches have processes of their own, for a script's workload.

    Raises:
        WorkloadInvalid: If a search of a script that is being tuned asks for it.
    """
    refuse_inside_launch()
    preload = preload_of_script(script)
    with Isolated(Source(script=script), device=device or "auto", preload=preload) as runner:
        yield runner


@dataclass(slots=True, kw_only=True)
class _Files:
    """Where a run writes: the folder that was named, or one that the result keeps until saved."""

    out: OutFolder
    kept: KeptFolder | None = None

    @classmethod
    def of(cls, out: str | None) -> "_Files":
        if out is not None:
            return cls(out=OutFolder(out))
        kept = KeptFolder()
        return cls(out=OutFolder(kept.path), kept=kept)


class Run:
    """One run from survey to files.

    Args:
        runner: Runs launches, and says what the workload is.
        options: What was asked for.
        live_workload: The caller's objects; None where the workload came from a script.
        script: The script; None for live objects.
        notes: What a reader must know of how launches are run.
        command: What made the run, for the report.
    """

    def __init__(
        self,
        runner: SurveyingRunner,
        options: Options,
        *,
        live_workload: "Workload | None" = None,
        script: str | None = None,
        notes: tuple[str, ...] = (),
        command: str = "",
    ) -> None:
        self._started = time.monotonic()
        self._runner = runner
        self._options = options
        self._live_workload = live_workload
        self._script = script
        self._default_out = None if script is None else str(Path("reports") / Path(script).stem)
        self._notes = notes
        self._command = command
        self._trials: list[Trial] = []

    def tune(self, *, progress: bool) -> Result:
        """Survey, search, write; return the result.

        Raises:
            AutotuneError: As `tune.fit` lists.
            KeyboardInterrupt: If it was interrupted before anything was verified.
        """
        files = None if self._options.out is None else _Files.of(self._options.out)
        survey = self._runner.survey(scan_seconds=self._options.scan_seconds)
        options = self._options.over(survey.workload.options)
        files = files or _Files.of(options.out or self._default_out)
        with files.out.locked():
            journal = self._journal(files.out, survey, is_fresh=bool(options.fresh))
            task = make_task(survey, options, largest_samples=journal.largest_samples)
            with Progress(is_quiet=not progress) as watch:
                task = replace(task, forecast=self._forecast(task, options, journal))
                decision = self._search(task, options, files.out, journal, watch)
            summary = self._summary(task, options, decision)
            written = write_all(summary, files.out)
        records = {name: files.out.file(name) for name in RECORDS if files.out.file(name).exists()}
        return Result(
            summary=summary,
            files=written | records,
            live_workload=self._live_workload,
            folder=files.kept,
        )

    def _journal(self, out: OutFolder, survey: Survey, *, is_fresh: bool) -> Journal:
        """Open the launches of earlier runs in the folder; say what they are worth now."""
        found = fingerprint_of(survey)
        is_known = found["source"] != UNKNOWN
        path = out.file(JOURNAL)
        if (is_fresh or not is_known) and path.exists():
            set_aside(path)
        journal = Journal(path, found, largest_samples=survey.workload.largest_samples)
        out.start_run(is_continued=journal.found > 0)
        if journal.changes:
            changed = ", ".join(journal.changes)
            self._notes += (f"earlier launches lie beside, unused, since this changed: {changed}",)
        elif not is_known:
            self._notes += (
                "a later run will not use these launches: the source of the objects is unknown",
            )
        return journal

    def _search(
        self, task: Task, options: Options, out: OutFolder, journal: Journal, watch: Progress
    ) -> Decision:
        """Return the search's decision; after an interrupt the best that was verified by then."""
        log = TrialLog(out.file(TRIALS))
        studies = Studies(
            options.storage or f"sqlite:///{out.file(STUDY).resolve()}",
            options.study_name or signature(task),
            space=task.space,
            baseline=task.baseline,
            limit_bytes=task.limit_bytes,
            seed=task.seed,
        )
        search = Search(
            task,
            remembering(self._runner, journal, clock=time.monotonic),
            budget=self._budget(options),
            record=lambda trial: self._record(trial, log),
            watch=watch,
            studies=studies,
        )
        try:
            return search.explained(search.run())
        except KeyboardInterrupt:
            decision = search.interrupted()
            if decision is None:
                raise
            return decision

    def _forecast(self, task: Task, options: Options, journal: Journal) -> Forecast:
        """Return the peaks that traces predict; none where the workload cannot be traced."""
        question = question_of(task, seconds=PREDICTION_SHARE * options.time_seconds)
        try:
            return journal.foretold(question, self._runner.foretell)
        except AutotuneError as error:  # its launches will show whether anything is wrong with it
            return Forecast(untraced={cell: str(error) for cell, _ in question.cells})

    def _record(self, trial: Trial, log: TrialLog) -> None:
        self._trials.append(trial)
        log.append(trial)

    def _budget(self, options: Options) -> Budget:
        """Return what is left of the budget; the survey was a launch that ran user code."""
        spent = time.monotonic() - self._started
        seconds = max(options.time_seconds - spent - FAREWELL_SECONDS, 0.0)
        trials = None if options.trials is None else options.trials - SURVEY_LAUNCHES
        return Budget(time_seconds=seconds, trials=trials)

    def _summary(self, task: Task, options: Options, decision: Decision) -> Summary:
        return Summary(
            verdict=decision.verdict,
            config=decision.config,
            measured=decision.measured,
            baseline=decision.baseline,
            best_at_baseline_batch=decision.best_at_baseline_batch,
            reference=decision.reference,
            speedup=decision.speedup,
            global_batch=decision.config.samples_per_optimizer_step * task.space.world_size,
            is_global_batch_free=task.space.global_batch is None,
            limit_bytes=task.limit_bytes,
            goal=task.goal,
            trials=tuple(self._trials),
            workload=task.workload,
            device=task.device,
            machine=machine_of(task.device),
            versions=versions(),
            left_out=task.space.left_out,
            notes=(*decision.notes, *on_itself(task.workload), *self._notes),
            command=self._command,
            script=self._script,
            seed=task.seed,
            time_budget_seconds=options.time_seconds,
            wall_seconds=time.monotonic() - self._started,
            worst_case=worst_cases(task.workload),
            effects=decision.effects,
            forecast=task.forecast,
        )
