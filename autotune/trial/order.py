"""What a launch in another process is told, and what it answers: whole files, nothing shared."""

import json
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import WorkloadInvalid
from autotune.memory.foretold import Question
from autotune.outcome import Request

INSIDE_LAUNCH = "AUTOTUNE_LAUNCH"
"""Environment variable that is set in a launch: no search is started inside one."""


def refuse_inside_launch() -> None:
    """Refuse to start a search inside a launch of another.

    Raises:
        WorkloadInvalid: If this process is a launch.
    """
    if INSIDE_LAUNCH in os.environ:
        raise WorkloadInvalid(
            "the workload starts a search of its own while it is being tuned",
            hint='guard the call: if __name__ == "__main__": autotune.fit(...)',
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the workload comes from; one of the two is given.

    Args:
        script: Path of a script.
        live_path: File with the live objects, as `pack` wrote them.
    """

    script: str | None = None
    live_path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One launch in another process.

    Args:
        source: What to run.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        request: What is asked for; None surveys the workload, or predicts its memory.
        question: What is to be predicted; None where nothing is.
        scan_seconds: How long a survey looks for the largest samples.
        start_method: How loader workers are started; None takes Python's default.
    """

    source: Source
    device: str
    request: Request | None = None
    question: Question | None = None
    scan_seconds: float = 5.0
    start_method: str | None = None


def write_order(path: Path, order: Order) -> None:
    """Write an order for a launch of our own to read."""
    path.write_bytes(pickle.dumps(order))


def read_order(path: Path) -> Order:
    """Return the order that `write_order` wrote.

    Raises:
        TypeError: If the file holds something else.
    """
    order = pickle.loads(path.read_bytes())  # noqa: S301  # written by the process that started us
    if not isinstance(order, Order):
        raise TypeError(f"a launch needs an Order, but found {type(order).__name__}")
    return order


def write_answer(path: Path, answer: dict[str, Any]) -> None:
    """Write an answer whole or not at all: beside its place, then renamed into it."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(answer), encoding="utf-8")
    beside.replace(path)


def read_answer(path: Path) -> dict[str, Any] | None:
    """Return the answer of a launch; None where it gave none."""
    if not path.exists():
        return None
    answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return answer
