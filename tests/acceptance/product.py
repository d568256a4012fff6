"""The product as its users run it: the command as a process, on small workload scripts."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

from autotune import version

OUR_FOLDER = f"{Path(version.__file__).parent}{os.sep}"
"""Where the frames of our own code are, which no user wants to see."""

FILES = ("config.json", "report.html", "report.md", "study.db", "train.py", "trials.jsonl")
"""What a run leaves behind."""

JOURNAL = "launches.jsonl"
"""What a run leaves beside them for the next run in the same folder."""

UNHURRIED = ("--trials", "40", "--time-budget", "90s")
"""Launches end such a run, not the clock: a machine with other work comes to the same answer."""

BRIEFLY = ("--trials", "8", "--time-budget", "60s")
"""Options of a run that need not go far: bounded by launches, it goes as far on any machine."""

MARK = "AUTOTUNE_TEST_MARK"
"""Environment variable that every process of a run inherits, by which it is found again."""

HANGS_SECONDS = 150.0
"""A command that takes so long is stuck: no budget here is above 30 s."""

GOODBYE_SECONDS = 5.0
"""Within which no process of an ended run may be left."""

POLL_SECONDS = 0.05
"""Between two looks at a file that a run writes."""

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
        return [
            trial["outcome"] for trial in self.trials if knobs.items() <= trial["config"].items()
        ]


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
    with started(script, "--json", *options, command=command, out=out) as run:
        return run.wait()


def python(*arguments: str, cwd: Path, source: str = "") -> Ended:
    """Run Python with these arguments to its end; `source` goes to its stdin."""
    with _started([sys.executable, *arguments], cwd=cwd, out=cwd / "out") as run:
        return run.wait(source)


@contextmanager
def started(
    script: Path, *options: str, command: Sequence[str] = (), out: Path | None = None
) -> "Iterator[Running]":
    """Start the command; end what is left of it afterwards."""
    out = out or script.parent / "out"
    line = [*command, sys.executable, "-m", "autotune", str(script), "--out", str(out), *options]
    with _started(line, cwd=script.parent, out=out) as run:
        yield run


@contextmanager
def _started(line: Sequence[str], *, cwd: Path, out: Path) -> "Iterator[Running]":
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        line,
        cwd=cwd,
        env=os.environ | {MARK: mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # as a terminal gives each command a group of its own
    )
    try:
        yield Running(process=process, mark=mark, out=out)
    finally:
        for each in processes_of(mark):
            each.kill()
        process.communicate()


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A command that was started.

    Args:
        process: Its first process.
        mark: By which all of its processes are found.
        out: Its folder of results.
    """

    process: subprocess.Popen[str]
    mark: str
    out: Path

    def wait(self, source: str = "") -> Ended:
        """Wait for its end; say what it said, and which of its processes outlived it."""
        begin = time.monotonic()
        try:
            stdout, stderr = self.process.communicate(source, timeout=HANGS_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"stuck after {HANGS_SECONDS} s")
        return Ended(
            code=self.process.returncode,
            stdout=stdout,
            stderr=stderr,
            seconds=time.monotonic() - begin,
            out=self.out,
            left=names_of_living(self.mark),
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
        return process.environ().get(MARK)
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # among them zombies
        return None


def wait_for(path: Path, *, lines: int = 0) -> None:
    """Wait until a file is there and has so many lines."""
    end = time.monotonic() + HANGS_SECONDS
    while not path.exists() or path.read_text("utf-8").count("\n") < lines:
        if time.monotonic() > end:
            pytest.fail(f"{path.name} did not come")
        time.sleep(POLL_SECONDS)
