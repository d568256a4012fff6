"""The product as its users run it: the command as a process, on small workload scripts."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil

FILES = ("config.json", "report.html", "report.md", "study.db", "train.py", "trials.jsonl")
"""What a run leaves behind."""

MARK = "AUTOTUNE_TEST_MARK"
"""Environment variable that every process of a run inherits, by which it is found again."""

HANGS_SECONDS = 150.0
"""A command that takes so long is stuck: no budget here is above 30 s."""

GOODBYE_SECONDS = 5.0
"""Within which no process of an ended run may be left."""

TINY = """
import os, signal, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
INPUTS = torch.randn(512, 16)
TARGETS = (INPUTS[:, :4].sum(1) > 0).long()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, inputs):
        return self.layers(inputs)

def model_fn():
    return Net()

def loader_fn(batch_size=32, num_workers=0):
    return DataLoader(TensorDataset(INPUTS, TARGETS), batch_size, True, num_workers=num_workers)
"""
"""A workload that trains in no time; what a test adds below it takes the place of a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that has ended: what it said and what it left.

    Args:
        code: Its exit code; minus the signal's number where a signal ended it.
        stdout: What it printed.
        stderr: What it said beside that.
        seconds: How long it took.
        out: Its folder of results.
        left: Processes of the run that were still there some seconds later.
    """

    code: int
    stdout: str
    stderr: str
    seconds: float
    out: Path
    left: list[str] = field(default_factory=list)

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout; anything beside it fails the test."""
        document: dict[str, Any] = json.loads(self.stdout)
        return document

    @property
    def error(self) -> dict[str, str]:
        """What the document says went wrong."""
        error: dict[str, str] = self.document["error"]
        return error

    @property
    def config(self) -> dict[str, Any]:
        """The answer: knob → value."""
        config: dict[str, Any] = self.document["config"]
        return config

    @property
    def trials(self) -> list[dict[str, Any]]:
        """The records in `trials.jsonl`, in order."""
        return read_trials(self.out)

    def outcomes(self, **knobs: object) -> list[str]:
        """Return how the trials ended whose config has these values."""
        return [trial["outcome"] for trial in self.trials if knobs.items() <= trial["config"].items()]


def read_trials(out: Path) -> list[dict[str, Any]]:
    """Return the records of a folder's `trials.jsonl`."""
    lines = (out / "trials.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def write_workload(folder: Path, extra: str = "", *, name: str = "tiny") -> Path:
    """Write the tiny workload with what a test adds to it; return the script's path."""
    path = folder / f"{name}.py"
    path.write_text(TINY + dedent(extra), "utf-8")
    return path


def autotune(
    script: Path, *options: str, command: Sequence[str] = (), out: Path | None = None
) -> Ended:
    """Run `python -m autotune SCRIPT --json …` to its end.

    Args:
        script: The workload.
        options: Of the command line.
        command: What the command line is run by, such as `unshare`.
        out: Folder of the results; beside the script by default.
    """
    out = out or script.parent / "out"
    with started(script, "--json", *options, command=command, out=out) as process:
        return wait(process, out)


def python(*arguments: str, cwd: Path, source: str | None = None) -> Ended:
    """Run Python with these arguments to its end; `source` goes to its stdin."""
    with _started([sys.executable, *arguments], cwd=cwd, has_stdin=source is not None) as process:
        return wait(process, cwd, source=source)


@contextmanager
def started(
    script: Path, *options: str, out: Path, command: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Start the command in a session of its own; end what is left of it afterwards."""
    line = [*command, sys.executable, "-m", "autotune", str(script), "--out", str(out), *options]
    with _started(line, cwd=script.parent) as process:
        yield process


@contextmanager
def _started(
    line: Sequence[str], *, cwd: Path, has_stdin: bool = False
) -> Iterator[subprocess.Popen[str]]:
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        line,
        cwd=cwd,
        env=environment() | {MARK: mark},
        stdin=subprocess.PIPE if has_stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )
    process.mark = mark  # type: ignore[attr-defined]  # by which `wait` finds what it started
    try:
        yield process
    finally:
        for each in processes_of(mark):
            each.kill()
        process.communicate()


def environment() -> dict[str, str]:
    """Return our environment without what a test run adds to it, such as coverage's hooks."""
    return dict(os.environ)


def wait(process: subprocess.Popen[str], out: Path, *, source: str | None = None) -> Ended:
    """Wait for a command; say what it said, and which of its processes outlived it."""
    begin = time.monotonic()
    try:
        stdout, stderr = process.communicate(source, timeout=HANGS_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        raise AssertionError(f"stuck after {HANGS_SECONDS} s: {stdout}\n{stderr}") from None
    return Ended(
        code=process.returncode,
        stdout=stdout,
        stderr=stderr,
        seconds=time.monotonic() - begin,
        out=out,
        left=names_of_living(process.mark),  # type: ignore[attr-defined]  # set in `_started`
    )


def names_of_living(mark: str) -> list[str]:
    """Return the command lines of a run's processes that do not go away in time."""
    _, alive = psutil.wait_procs(processes_of(mark), timeout=GOODBYE_SECONDS)
    return [" ".join(each.cmdline()) for each in alive]


def processes_of(mark: str) -> list[psutil.Process]:
    """Return all processes that inherited a mark; one that nobody waits for is gone."""
    return [each for each in psutil.process_iter() if _mark_of(each) == mark]


def _mark_of(process: psutil.Process) -> str | None:
    try:
        environ: Mapping[str, str] = process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return None
    return environ.get(MARK)
