"""Launches in processes of their own, forked from a server that has imported everything.

Relies on `server`: one launch at a time, each leading its own process group, each answering with
a whole file or with none. Nothing here needs torch.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

import autotune.errors
from autotune.errors import AutotuneError
from autotune.facts import Survey
from autotune.outcome import Crashed, Outcome, OutOfMemory, Report, Request, TimedOut
from autotune.trial.order import Order, Source, read_answer, write_order
from autotune.trial.sources import imported_names, local_sources
from autotune.units import format_duration

START_SECONDS = 180.0
"""How long the server may import; a large library on a cold disk takes a minute."""

SURVEY_SECONDS = 120.0
"""How long reading the workload may take, the scan for its largest samples apart."""

FAREWELL_SECONDS = 3.0
"""How long a launch that has answered may take to end by itself."""

LOG_TAIL_LINES = 30
"""Lines of its log that a crash is shown with."""

ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
"""Set before torch is imported, where the user has not: threads that spin while they wait take
the cores from loader workers, and tokenizers' own threads do not survive a fork."""


ALWAYS_LOADED = ("torch", "torch._dynamo", "autotune.trial.child")
"""Imported by the server whatever the script needs; the first optimizer of a process imports
`torch._dynamo`, which takes a second that no launch should spend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a launch's process ended: its answer, if it gave one, or what is known without it."""

    answer: Mapping[str, Any] | None
    exit_code: int | None
    is_timed_out: bool
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
        self._preload = preload
        self._start_method = start_method
        self._folder = tempfile.TemporaryDirectory(prefix="autotune-")
        self._server: subprocess.Popen[str] | None = None
        self._can_fork = True
        self._launches = 0
        self._child: int | None = None

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
        ended = self._launch(order, seconds=SURVEY_SECONDS + scan_seconds)
        if ended.answer is None:
            raise autotune.errors.WorkloadInvalid(
                f"reading the workload {_how(ended, SURVEY_SECONDS)}", hint=ended.log_tail
            )
        return Survey.from_dict(ended.answer["survey"])

    def __call__(self, request: Request) -> Report:
        """Run a request in a fresh process; its whole process group is ended afterwards.

        Raises:
            AutotuneError: For what is no failure of the candidate.
        """
        ended = self._launch(self._order(request=request), seconds=request.time_limit_seconds)
        if ended.answer is not None:
            return Report.from_dict(ended.answer["report"])
        return Report(outcome=outcome_of(ended, request.time_limit_seconds))

    def close(self) -> None:
        """End the server and whatever it started; remove its files."""
        self._end_child()
        if self._server is not None:
            _end_group(self._server.pid)
            self._server.wait()
            for pipe in (self._server.stdin, self._server.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
            self._server = None
        self._folder.cleanup()

    def _order(self, *, request: Request | None = None, scan_seconds: float = 0.0) -> Order:
        return Order(
            source=self._source,
            device=self._device,
            request=request,
            scan_seconds=scan_seconds,
            start_method=self._start_method,
        )

    def _launch(self, order: Order, *, seconds: float) -> Ended:
        """Have an order carried out; raise the error that it answers with, if it does."""
        server = self._running_server()
        self._launches += 1
        folder = Path(self._folder.name)
        paths = {
            name: str(folder / f"{self._launches}.{name}") for name in ("order", "answer", "log")
        }
        write_order(Path(paths["order"]), order)
        _tell(server, paths | {"forks": self._can_fork})
        try:
            ended = self._await(server, paths, seconds=seconds)
        finally:
            self._end_child()
            if not self._can_fork:
                self._end_server()
        for name in paths.values():
            Path(name).unlink(missing_ok=True)
        if ended.answer is not None and "error" in ended.answer:
            raise _as_raised(ended.answer["error"])
        return ended

    def _await(
        self, server: subprocess.Popen[str], paths: Mapping[str, str], *, seconds: float
    ) -> Ended:
        """Wait for a launch's end, its time limit, or its farewell to pass."""
        answer, log = Path(paths["answer"]), Path(paths["log"])
        deadline, exit_code, is_ended, has_answered = time.monotonic() + seconds, None, False, False
        self._child = None if self._can_fork else server.pid
        while not is_ended:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            event = _hear(server, seconds=min(left, 0.25))
            if event is None and answer.exists() and not has_answered:
                has_answered, deadline = True, time.monotonic() + FAREWELL_SECONDS
            elif event is not None and event["event"] == "started":
                self._child = event["pid"]
            elif event is not None:
                is_ended, exit_code = True, event["exit_code"]
        if not is_ended:
            self._end_child()
            _hear(server, seconds=FAREWELL_SECONDS)  # its end, which nobody asks for any more
        return Ended(
            answer=read_answer(answer),
            exit_code=exit_code,
            is_timed_out=not is_ended and not has_answered,
            log_tail=_tail(log),
        )

    def _running_server(self) -> subprocess.Popen[str]:
        if self._server is None or self._server.poll() is not None:
            self._server = self._start_server()
        return self._server

    def _start_server(self) -> subprocess.Popen[str]:
        server = subprocess.Popen(
            [sys.executable, "-m", "autotune.trial.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(Path(self._folder.name) / "server.log").open("a"),
            text=True,
            start_new_session=True,  # the terminal's Ctrl-C is for us to pass on
            env=ENVIRONMENT | os.environ | {"PYTHONPATH": os.pathsep.join(_python_path())},
        )
        _tell(server, {"path": _python_path(), "preload": self._preload})
        ready = _hear(server, seconds=START_SECONDS)
        if ready is None or ready["event"] != "ready":
            _end_group(server.pid)
            raise AutotuneError(
                f"the launch server did not start within {format_duration(START_SECONDS)}",
                hint=_tail(Path(self._folder.name) / "server.log"),
            )
        self._can_fork = ready["can_fork"]
        return server

    def _end_child(self) -> None:
        if self._child is not None:
            _end_group(self._child)
            self._child = None

    def _end_server(self) -> None:
        if self._server is not None:
            _end_group(self._server.pid)
            self._server.wait()
            self._server = None


def preload_of_script(script: str) -> dict[str, list[str]]:
    """Return the libraries that a script imports, directly or through modules beside it."""
    sources = local_sources(Path(script))
    local = {path.stem for path in sources} | {path.parent.name for path in sources}
    wanted: dict[str, list[str]] = {name: [] for name in ALWAYS_LOADED}
    for path in sources:
        for module, names in imported_names(path).items():
            if module.partition(".")[0] not in local:
                wanted.setdefault(module, []).extend(sorted(names))
    return wanted


def outcome_of(ended: Ended, limit_seconds: float) -> Outcome:
    """Return what it means that a launch ended without an answer."""
    if ended.is_timed_out:
        return TimedOut(reason=_how(ended, limit_seconds))
    if ended.exit_code == -signal.SIGKILL:  # not ours: the host ran out (CASES.md row 95)
        return OutOfMemory(reason="the launch was killed by the system, which was out of memory")
    return Crashed(reason=f"the launch {_how(ended, limit_seconds)}", log_tail=ended.log_tail)


def _how(ended: Ended, limit_seconds: float) -> str:
    if ended.is_timed_out:
        return f"gave no answer within {format_duration(limit_seconds)}"
    if ended.exit_code is not None and ended.exit_code < 0:
        return f"was ended by {signal.Signals(-ended.exit_code).name}"
    return f"ended with exit code {ended.exit_code} and no answer"


def _as_raised(error: Mapping[str, str]) -> AutotuneError:
    kind = getattr(autotune.errors, error["type"], AutotuneError)
    raised: AutotuneError = kind(error["message"], hint=error["hint"])
    return raised


def _python_path() -> list[str]:
    """Return the path that this process imports from, its current folder by name."""
    return [entry or str(Path.cwd()) for entry in sys.path]


def _tell(server: subprocess.Popen[str], line: Mapping[str, Any]) -> None:
    if server.stdin is not None:
        server.stdin.write(json.dumps(line) + "\n")
        server.stdin.flush()


def _hear(server: subprocess.Popen[str], *, seconds: float) -> dict[str, Any] | None:
    """Return the server's next event; None if none came in time."""
    if server.stdout is None or not select.select([server.stdout], [], [], seconds)[0]:
        return None
    line = server.stdout.readline()
    if not line:
        return {"event": "ended", "exit_code": server.wait(FAREWELL_SECONDS)}
    event: dict[str, Any] = json.loads(line)
    return event


def _end_group(pid: int) -> None:
    """End a process, its group, and descendants that left the group, at once."""
    strays: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        strays = psutil.Process(pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for stray in strays:
        with contextlib.suppress(psutil.NoSuchProcess):
            stray.kill()


def _tail(log: Path) -> str:
    if not log.exists():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])
