"""Launches in processes of their own, forked from a server that has imported everything.

Relies on `connection`: one launch at a time, each leading its own session, each answering with a
whole file or with none. Nothing here needs torch before a launch has crashed.
"""

import contextlib
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import autotune.errors
from autotune.errors import AutotuneError, WorkloadInvalid
from autotune.facts import Survey
from autotune.memory.foretold import Forecast, Question
from autotune.outcome import Crashed, Launch, Outcome, OutOfMemory, Report, Request, TimedOut
from autotune.trial.connection import FAREWELL_SECONDS, Connection
from autotune.trial.order import Order, Source, read_answer, write_order
from autotune.trial.sources import imported_libraries
from autotune.units import format_duration

SURVEY_SECONDS = 120.0
"""How long reading the workload may take, the scan for its largest samples apart."""

PREDICTION_PATIENCE = 2.0
"""A prediction begins no further cell after its time; the last one may take as long again."""

LOOK_SECONDS = 0.25
"""How often it is looked whether a launch has answered that has not ended yet."""

LOG_TAIL_LINES = 30
"""Lines of its log that a crash is shown with."""

ALWAYS_LOADED = ("torch", "torch._dynamo", "autotune.trial.child")
"""Imported by the server whatever the script needs; the first optimizer of a process imports
`torch._dynamo`, which takes a second that no launch should spend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a launch's process ended: its answer, if it gave one, or what is known without it.

    Args:
        answer: What it answered; None if it did not.
        exit_code: As `subprocess` has it; None where it had to be ended.
        log_tail: The last lines of what it printed.
    """

    answer: Mapping[str, Any] | None
    exit_code: int | None
    log_tail: str


class Isolated:
    """A runner that gives every launch a fresh process. Use it as a context manager.

    Args:
        source: Where the workload comes from.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        preload: Module → names, imported once by the server.
        start_method: How loader workers are started; None takes Python's default.
    """

    def __init__(
        self,
        source: Source,
        *,
        device: str,
        preload: Mapping[str, Sequence[str]],
        start_method: str | None = None,
    ) -> None:
        self._source = source
        self._device = device
        self._start_method = start_method
        self._folder = tempfile.TemporaryDirectory(prefix="autotune-")
        self._connection = Connection(Path(self._folder.name), preload=preload)
        self._launches = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def survey(self, *, scan_seconds: float) -> Survey:
        """Return what the workload and the device are, read in a launch of its own.

        Raises:
            AutotuneError: What the launch found wrong, under its own type.
        """
        order = self._order(scan_seconds=scan_seconds)
        limit_seconds = SURVEY_SECONDS + scan_seconds
        ended = self._launch(order, seconds=limit_seconds)
        if ended.answer is None:
            reason = f"reading the workload {_how(ended, limit_seconds)}"
            raise WorkloadInvalid(reason, hint=ended.log_tail)
        return Survey.from_dict(ended.answer["survey"])

    def foretell(self, question: Question) -> Forecast:
        """Return the peaks that are asked for; where the launch gave no answer, none and why.

        Raises:
            AutotuneError: What the launch found wrong, under its own type.
        """
        limit_seconds = question.seconds * PREDICTION_PATIENCE
        ended = self._launch(self._order(question=question), seconds=limit_seconds)
        if ended.answer is not None:
            return Forecast.from_dict(ended.answer["forecast"])
        reason = f"tracing it {_how(ended, limit_seconds)}"
        return Forecast(untraced={cell: reason for cell, _ in question.cells})

    def __call__(self, request: Request) -> Report:
        """Run a request in a fresh process; whatever it started is ended afterwards.

        Raises:
            AutotuneError: For what is no failure of the candidate.
        """
        started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        ended = self._launch(self._order(request=request), seconds=request.time_limit_seconds)
        if ended.answer is not None:
            return Report.from_dict(ended.answer["report"])
        lost = Launch(started_at=started_at, seed=request.seed)
        return Report(outcome=outcome_of(ended, request), launch=lost)

    def close(self) -> None:
        """End the server and whatever it started; remove its files."""
        self._connection.close()
        self._folder.cleanup()

    def _order(
        self,
        *,
        request: Request | None = None,
        question: Question | None = None,
        scan_seconds: float = 0.0,
    ) -> Order:
        return Order(
            source=self._source,
            device=self._device,
            request=request,
            question=question,
            scan_seconds=scan_seconds,
            start_method=self._start_method,
        )

    def _launch(self, order: Order, *, seconds: float) -> Ended:
        """Have an order carried out; raise the error that it answers with, if it does."""
        self._connection.open()
        self._launches += 1
        base = Path(self._folder.name) / str(self._launches)
        paths = {name: base.with_suffix(f".{name}") for name in ("order", "answer", "log")}
        write_order(paths["order"], order)
        with contextlib.ExitStack() as interrupted:
            interrupted.callback(self._connection.end)
            self._connection.tell({name: str(path) for name, path in paths.items()})
            exit_code = self._await(paths["answer"], seconds=seconds)
            interrupted.pop_all()
        log_tail = _tail(paths["log"]) or _tail(self._connection.log)
        ended = Ended(answer=read_answer(paths["answer"]), exit_code=exit_code, log_tail=log_tail)
        for path in paths.values():
            path.unlink(missing_ok=True)
        if ended.answer is not None and "error" in ended.answer:
            raise _as_raised(ended.answer["error"])
        return ended

    def _await(self, answer: Path, *, seconds: float) -> int | None:
        """Return how a launch ended by itself; None if its time passed, and it was ended."""
        deadline, has_answered = time.monotonic() + seconds, False
        while (left := deadline - time.monotonic()) > 0:
            event = self._connection.hear(seconds=min(left, LOOK_SECONDS))
            if event is not None:
                return int(event["exit_code"])
            if not has_answered and answer.exists():
                has_answered, deadline = True, time.monotonic() + FAREWELL_SECONDS
        self._connection.tell({"end": self._launches})
        if self._connection.hear(seconds=FAREWELL_SECONDS) is None:
            self._connection.end()  # a process that the kernel does not let go
        return None


def preload_of_script(script: str) -> dict[str, list[str]]:
    """Return the libraries that a script imports, directly or through modules beside it."""
    wanted: dict[str, list[str]] = {name: [] for name in ALWAYS_LOADED}
    for module, names in imported_libraries(Path(script)).items():
        wanted.setdefault(module, []).extend(sorted(names))
    return wanted


def outcome_of(ended: Ended, request: Request) -> Outcome:
    """Return what it means that a launch ended without an answer."""
    if ended.exit_code is None:
        return TimedOut(reason=_how(ended, request.time_limit_seconds))
    from autotune.device.oom import Failure, classify_exit  # noqa: PLC0415  # torch, only if needed

    reason = f"the launch {_how(ended, request.time_limit_seconds)}"
    match classify_exit(ended.exit_code, under_limit=request.limit_bytes is not None):
        case Failure.MEMORY:
            return OutOfMemory(reason=f"{reason}: the system was out of memory")
        case Failure.MEMORY_MAYBE:
            return OutOfMemory(reason=f"perhaps memory, perhaps not: {reason}")
        case _:
            return Crashed(reason=reason, log_tail=ended.log_tail)


def _how(ended: Ended, limit_seconds: float) -> str:
    if ended.exit_code is None:
        return f"gave no answer within {format_duration(limit_seconds)}"
    if ended.exit_code < 0:
        names = {int(each): each.name for each in signal.Signals}
        return f"was ended by {names.get(-ended.exit_code, f'signal {-ended.exit_code}')}"
    return f"ended with exit code {ended.exit_code} and no answer"


def _as_raised(error: Mapping[str, str]) -> AutotuneError:
    kind = getattr(autotune.errors, error["type"], AutotuneError)
    raised: AutotuneError = kind(error["message"], hint=error["hint"])
    return raised


def _tail(log: Path) -> str:
    if not log.exists():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])
