"""The launch server as its caller sees it: started when needed, told, heard, and ended.

Relies on `server`, which answers every order with one event. Nothing here needs torch.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from autotune.errors import AutotuneError
from autotune.units import format_duration

START_SECONDS = 180.0
"""How long the server may import; a large library on a cold disk takes a minute."""

FAREWELL_SECONDS = 3.0
"""How long a process that was asked to end may take; it then is ended without being asked."""

SWEEPS = 5
"""Rounds of ending a process's descendants before itself; only a server that hangs needs any."""

ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
"""Set before torch is imported, where the user has not: threads that spin while they wait take
the cores from loader workers, and tokenizers' own threads do not survive a fork."""


class Connection:
    """A launch server, and the pipes to it.

    Args:
        folder: Where the server's log goes; the server removes it when it is closed, or when
            this process is killed.
        preload: Module → names, imported once by the server.
    """

    def __init__(self, folder: Path, *, preload: Mapping[str, Sequence[str]]) -> None:
        self.log = folder / "server.log"
        self.can_fork = hasattr(os, "fork")
        self._folder = folder
        self._preload = preload
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int | None:
        """The server's process number; None while none runs."""
        return self._process.pid if self._process is not None else None

    def open(self) -> None:
        """Start the server unless it runs; without fork where an import touched the driver.

        Raises:
            AutotuneError: If it does not start.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.end()
        is_able = self._start()["can_fork"]
        if self.can_fork and not is_able:
            self.end()  # it holds memory of the device
            self.can_fork = False
            self._start()

    def tell(self, line: Mapping[str, Any]) -> None:
        """Send a line; whether a server that ended meanwhile has read it, `hear` tells."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(line) + "\n")
                self._process.stdin.flush()

    def hear(self, *, seconds: float) -> dict[str, Any] | None:
        """Return the server's next event, its own end included; None if none came in time."""
        process = self._process
        if process is None or process.stdout is None:
            return None
        if not wait([process.stdout.fileno()], seconds):
            return None
        line = process.stdout.readline()
        if line:
            event: dict[str, Any] = json.loads(line)
            return event
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(FAREWELL_SECONDS)
        self.end()
        return {"event": "ended", "exit_code": process.returncode}

    def close(self) -> None:
        """Ask the server to end what it started, and itself."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(FAREWELL_SECONDS)
        self.end()

    def end(self) -> None:
        """End the server and whatever it started, at once."""
        process, self._process = self._process, None
        if process is None:
            return
        _end_tree(process.pid)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _start(self) -> dict[str, Any]:
        """Start the server and return how it greets."""
        path = [entry or str(Path.cwd()) for entry in sys.path]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "autotune.trial.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # the terminal's Ctrl-C is for us to pass on
                env=ENVIRONMENT | os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            )
        preload = self._preload if self.can_fork else {}
        forks = {"forks": self.can_fork, "folder": str(self._folder)}
        self.tell({"path": path, "preload": preload} | forks)
        with contextlib.ExitStack() as failed:
            failed.callback(self.end)
            event = self.hear(seconds=START_SECONDS)
            if event is not None and event["event"] == "ready":
                failed.pop_all()
                return event
        reason = f"did not start within {format_duration(START_SECONDS)}"
        if event is not None:
            reason = f"ended with exit code {event['exit_code']} before it was ready"
        hint = self.log.read_text(encoding="utf-8", errors="replace")
        raise AutotuneError(f"the launch server {reason}", hint=hint)


def _end_tree(pid: int) -> None:
    """End a process and its descendants, those that left its group included."""
    for _ in range(SWEEPS):
        found = _descendants(pid)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if not found:
            break
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[psutil.Process]:
    """Return what a process has started and has not ended, as far as it can be known."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(pid).children(recursive=True)
        return [child for child in children if child.is_running()]
    return []
