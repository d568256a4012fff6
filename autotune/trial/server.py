"""A process that has imported everything and forks a child for each launch.

Run as `python -m autotune.trial.server`: JSON lines come in on stdin and go out on the first
stdout. It never runs an operation of torch, since a process that has used intra-op threads
hangs its forked children, and never touches a device. `multiprocessing`'s forkserver would
import `__main__` again, start daemons and fix the start method of loader workers (DESIGN 4).
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

POLL_SECONDS = 0.01
"""How often a running child is looked at; a launch takes 30 times as long at least."""

PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when its parent ends (prctl(2))."""


def main() -> None:
    """Import what is asked for, then fork a child for each line that comes in."""
    channel = _claim_stdout()
    hello = json.loads(sys.stdin.readline() or "{}")
    sys.path[:] = hello["path"]
    failed = preload(hello["preload"])
    gc.collect()
    gc.freeze()  # what is imported stays: no collection in a launch walks it, or copies its pages
    _say(channel, {"event": "ready", "can_fork": can_fork(), "failed": failed})
    while line := sys.stdin.readline():
        order = json.loads(line)
        if not order["forks"]:
            _become_launch(order)
            return
        child = os.fork()
        if child == 0:
            channel.close()
            _become_launch(order)
            return
        _say(channel, {"event": "started", "pid": child})
        status = _await(child)
        if status is None:
            return
        _say(channel, {"event": "ended", "exit_code": os.waitstatus_to_exitcode(status)})


def _claim_stdout() -> TextIO:
    """Return a channel on the first stdout, and send what user code prints to stderr."""
    sys.stdout.flush()
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def _say(channel: TextIO, event: Mapping[str, Any]) -> None:
    channel.write(json.dumps(event) + "\n")
    channel.flush()


def preload(modules: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Import modules and look up names in them, since some load lazily.

    Returns:
        Module → why it could not be imported. That is no failure yet: the launch will say so in
        the user's own words if it needs it.
    """
    failed: dict[str, str] = {}
    for name, attributes in modules.items():
        try:
            module = importlib.import_module(name)
            for attribute in attributes:
                getattr(module, attribute, None)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a library's import, not ours
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


def can_fork() -> bool:
    """Whether a forked child would work: there is fork, and no import touched the driver."""
    torch = sys.modules.get("torch")
    return hasattr(os, "fork") and not (torch is not None and torch.cuda.is_initialized())


def _await(child: int) -> int | None:
    """Return the child's wait status; None, the child ended, if whoever ordered it is gone."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
        if readable:  # nothing is ordered while a launch runs: this is the end of the pipe
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None


def _become_launch(order: Mapping[str, str]) -> None:
    """Be the launch: own process group, own log, ended with the server, answer written whole."""
    with contextlib.suppress(PermissionError):  # a fresh interpreter leads its group already
        os.setsid()
    _die_with_parent()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from autotune.trial.child import answer_order  # noqa: PLC0415  # torch, where it is needed

    answer_order(Path(order["order"]), Path(order["answer"]))
    sys.stdout.flush()
    sys.stderr.flush()


def _die_with_parent() -> None:
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before this was asked for
        time.sleep(0)
        signal.raise_signal(signal.SIGKILL)


if __name__ == "__main__":
    main()
