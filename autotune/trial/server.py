"""A process that has imported everything and starts a child for each launch.

Run as `python -m autotune.trial.server`: JSON lines come in on stdin and go out on the first
stdout. It never runs an operation of torch, since a process that has used intra-op threads
hangs its forked children, and never touches a device. `multiprocessing`'s forkserver would
import `__main__` again, start daemons and fix the start method of loader workers (DESIGN 4).

It alone ends the processes of a launch: it adopts whatever a launch leaves behind, and ends all
of it before the next one, or when whoever gives the orders is gone.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import json
import os
import select
import shutil
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

POLL_SECONDS = 0.005
"""How often a running child is looked at; a launch takes ten times as long at least."""

IDLE_SECONDS = 0.5
"""How often an idle server looks whether whoever gives the orders is still there."""

SWEEPS = 20
"""Rounds of ending what a launch left behind: what is ended may have started more meanwhile."""

SWEEP_SECONDS = 0.5
"""How long a round waits for processes to be gone; the kernel takes milliseconds."""

PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when its parent ends (prctl(2))."""

PR_SET_CHILD_SUBREAPER = 36
"""Linux: a process adopts its descendants when their parent ends (prctl(2))."""


def main() -> None:
    """Import what is asked for, then start a child for each order that comes in."""
    leaving = _Leaving()
    order = json.loads(sys.argv[1]) if len(sys.argv) > 1 else _serve_all()
    if order is not None:
        _become_launch(order)
    leaving.is_complete = True


class _Leaving:
    """Ends the process after all other exit functions, without taking the interpreter apart.

    Freeing what torch and its friends have imported takes a forked child 0.3 s, ten times as
    long as a small launch, because each freed page is copied first.
    """

    def __init__(self) -> None:
        self.is_complete = False
        atexit.register(self)  # the first to be registered is the last to be called

    def __call__(self) -> None:
        if self.is_complete:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(ValueError, OSError, AttributeError):
                    stream.flush()  # unless user code closed it
            os._exit(0)


def _serve_all() -> dict[str, Any] | None:
    """Serve until nobody gives orders; return the order in a child that was forked for it."""
    channel, parent = _claim_stdout(), os.getppid()
    hello = json.loads(_read_line())
    sys.path[:] = hello["path"]
    failed = preload(hello["preload"])
    gc.collect()
    gc.freeze()  # what is imported stays: no collection in a launch walks it, or copies its pages
    _set_process(PR_SET_CHILD_SUBREAPER, 1)
    _say(channel, {"event": "ready", "can_fork": can_fork(), "failed": failed})
    while (order := _next_order(parent)) is not None:
        launch = order | {"server": os.getpid(), "path": sys.path}
        child = _fork() if hello["forks"] else _start_fresh(launch)
        if child == 0:
            os.close(channel)
            return launch
        status = _await(child, parent)
        _end_rest(child)
        _say(channel, {"event": "ended", "exit_code": os.waitstatus_to_exitcode(status)})
    shutil.rmtree(hello["folder"], ignore_errors=True)  # whoever made it may be gone
    return None


def _claim_stdout() -> int:
    """Return a descriptor of the first stdout, and send what user code prints to stderr."""
    sys.stdout.flush()
    channel = os.dup(1)
    os.dup2(2, 1)
    return channel


def _say(channel: int, event: Mapping[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more: the end is near
        os.write(channel, json.dumps(event).encode() + b"\n")


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


def _next_order(parent: int) -> dict[str, Any] | None:
    """Return the next order; None if whoever gives them has closed the pipe, or is gone."""
    while os.getppid() == parent:
        if not _has_line(IDLE_SECONDS):
            continue
        line = _read_line()
        if not line:
            return None
        order: dict[str, Any] = json.loads(line)
        if "order" in order:  # else the wish to end a launch that has just ended by itself
            return order
    return None


def _has_line(seconds: float) -> bool:
    """Whether stdin can be read, which it also can at its end."""
    return bool(select.select([0], [], [], seconds)[0])


def _read_line() -> bytes:
    """Return a line of stdin, empty at its end; what is read ahead, `select` would not see."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        line += byte
    return bytes(line)


def _await(child: int, parent: int) -> int:
    """Return the child's wait status; it is ended on any word from its orderer, or if none is."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        if _has_line(POLL_SECONDS) or os.getppid() != parent:
            os.kill(child, signal.SIGKILL)  # not waited for yet, so that the number is still its
            _, status = os.waitpid(child, 0)
            return status


def _end_rest(launch: int) -> None:
    """End whatever a launch left: its group, what left its session, and what lost its parent."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(launch, signal.SIGKILL)
    for _ in range(SWEEPS):
        if not _has_children():
            return
        left = psutil.Process().children(recursive=True)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=SWEEP_SECONDS)


def _has_children() -> bool:
    """Whether a process is left that this one waits for; those that have ended are let go."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _fork() -> int:
    """Fork; return the child's process number, and 0 in the child."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: those of OpenBLAS know what a fork is
        return os.fork()


def _start_fresh(order: Mapping[str, Any]) -> int:
    """Start a launch in an interpreter of its own; return its process number."""
    command = [sys.executable, "-P", "-m", "autotune.trial.server", json.dumps(order)]
    return os.posix_spawn(sys.executable, command, os.environ)


def _become_launch(order: Mapping[str, Any]) -> None:
    """Be the launch: own session, own log, ended with the server, answer written whole."""
    os.setsid()
    _die_with(order["server"])
    sys.path[:] = order["path"]
    _redirect(Path(order["log"]))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.enable()  # a crash says where it happened
    from autotune.trial.child import answer_order  # noqa: PLC0415  # torch, where it is needed

    answer_order(Path(order["order"]), Path(order["answer"]))


def _redirect(log: Path) -> None:
    """Send what is printed to a log, line by line; there is nothing to read on stdin."""
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(written, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _die_with(server: int) -> None:
    """Have the kernel end this process when its parent, the server, ends."""
    _set_process(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it ended before this was asked for
        signal.raise_signal(signal.SIGKILL)


def _set_process(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main()
