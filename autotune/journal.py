"""What each launch gave, written down as soon as it ended, so that nothing is measured twice.

A line per launch, appended and synced: whoever is killed loses the launch that ran, and no other.
A search that asks for the same again gets it from here, with the time that it took.
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.memory.foretold import Forecast, Question
from autotune.outcome import (
    SCHEMA_VERSION,
    Crashed,
    Invalid,
    Measured,
    OutOfMemory,
    Report,
    Request,
    Runner,
    Skipped,
    TimedOut,
)

PATIENCE_RATIO = 1.5
"""A launch that was given up is tried again where it may now take this many times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One launch that was made.

    Args:
        limit_bytes: The memory limit that it ran under; None for none.
        time_limit_seconds: After what it would have been given up.
        wall_seconds: What it took.
        report: What it gave.
    """

    limit_bytes: int | None
    time_limit_seconds: float
    wall_seconds: float
    report: Report

    def answers(self, request: Request) -> bool:
        """Whether the request would end as this launch did, whatever its limits are."""
        match self.report.outcome:
            case Measured(measurement=seen):
                peak, limit = seen.peak_bytes, request.limit_bytes
                return peak is None or limit is None or peak <= limit
            case OutOfMemory():
                return self.limit_bytes == request.limit_bytes
            case TimedOut():
                return request.time_limit_seconds < PATIENCE_RATIO * self.time_limit_seconds
            case Crashed() | Invalid() | Skipped():
                return True


class Journal:
    """The launches that were made of one workload on one machine.

    Args:
        path: The file; begun anew where its launches are of something else.
        fingerprint: What makes launches comparable; a change of any of it makes them none.
        largest_samples: Those that a scan found now; a scan that ends by the clock may find
            others each time, so the first run's stay.

    Attributes:
        changes: What changed since the launches in the file, by name; they are kept beside.
        found: How many launches there are to recall.
        largest_samples: Those that its launches were made with.
    """

    def __init__(
        self, path: Path, fingerprint: Mapping[str, Any], *, largest_samples: Sequence[int] = ()
    ) -> None:
        self._path = path
        self._entries: dict[str, list[Entry]] = defaultdict(list)
        self._forecasts: dict[str, Forecast] = {}
        first, lines = _read(path)
        head = first.get("fingerprint", {})
        self.largest_samples = tuple(largest_samples)
        self.changes = tuple(
            name
            for name in sorted({*head, *fingerprint})
            if head and head.get(name) != fingerprint.get(name)
        )
        self.found = 0
        if self.changes or not head:
            self._begin(fingerprint)
            return
        self.largest_samples = tuple(first["largest_samples"])
        for line in lines:
            if "forecast" in line:
                self._forecasts[line["key"]] = Forecast.from_dict(line["forecast"])
            else:
                self._entries[line["key"]].append(_entry(line))
                self.found += 1

    def recall(self, request: Request) -> Entry | None:
        """Return a launch that answers the request, each once; None if there is none left."""
        waiting = self._entries[key_of(request)]
        for entry in waiting:
            if entry.answers(request):
                waiting.remove(entry)
                return entry
        return None

    def keep(self, request: Request, report: Report, *, wall_seconds: float) -> None:
        """Write down what a launch gave."""
        line = {
            "key": key_of(request),
            "limit_bytes": request.limit_bytes,
            "time_limit_seconds": request.time_limit_seconds,
            "wall_seconds": wall_seconds,
            "report": report.to_dict(),
        }
        _append(self._path, line)

    def foretold(self, question: Question, foretell: Callable[[Question], Forecast]) -> Forecast:
        """Return a prediction that was made before, or else the one made now, which is kept."""
        key = _key_of_question(question)
        if key not in self._forecasts:
            made = foretell(question)
            self._forecasts[key] = made
            _append(self._path, {"key": key, "forecast": made.to_dict()})
        return self._forecasts[key]

    def _begin(self, fingerprint: Mapping[str, Any]) -> None:
        if self._path.exists():
            set_aside(self._path)
        first = {
            "schema_version": SCHEMA_VERSION,
            "fingerprint": dict(fingerprint),
            "largest_samples": list(self.largest_samples),
        }
        _append(self._path, first)


def set_aside(path: Path) -> Path:
    """Keep a journal beside its place, under a number; return where it lies now."""
    number = 1
    while path.with_name(f"{path.stem}-{number}{path.suffix}").exists():
        number += 1
    return path.rename(path.with_name(f"{path.stem}-{number}{path.suffix}"))


def remembering(runner: Runner, journal: Journal, *, clock: Callable[[], float]) -> Runner:
    """Return a runner that asks the journal first, and writes down what it had to run.

    Args:
        runner: Runs what nobody remembers.
        journal: What was run before.
        clock: Seconds that never go back.
    """

    def run(request: Request) -> Report:
        known = journal.recall(request)
        if known is not None:
            return replace(known.report, reused_seconds=known.wall_seconds)
        began = clock()
        report = runner(request)
        journal.keep(request, report, wall_seconds=clock() - began)
        return report

    return run


def key_of(request: Request) -> str:
    """Return what two requests have in common whose launches would give the same.

    Limits are not in it: what a launch under one limit says of another is `Entry.answers`. Nor is
    the number of cycles: more of them sharpen a figure, and do not change it.
    """
    told = (
        request.purpose,
        sorted(request.config.to_dict().items()),
        sorted(request.baseline.to_dict().items()) if request.baseline else None,
        request.seed,
        request.largest_samples,
    )
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def _key_of_question(question: Question) -> str:
    """Return what two questions have in common whose answers are the same; time is not in it."""
    told = repr((question.cells, question.limit_bytes, question.largest_samples))
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _entry(line: Mapping[str, Any]) -> Entry:
    return Entry(
        limit_bytes=line["limit_bytes"],
        time_limit_seconds=line["time_limit_seconds"],
        wall_seconds=line["wall_seconds"],
        report=Report.from_dict(line["report"]),
    )


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the first line and the launches of a file; a last line without an end is ignored."""
    if not path.exists():
        return {}, []
    *lines, _unfinished = path.read_text(encoding="utf-8").split("\n")
    if not lines:
        return {}, []
    first, *rest = map(json.loads, lines)
    if first.get("schema_version") != SCHEMA_VERSION:
        return {"fingerprint": {"schema_version": first.get("schema_version")}}, []
    return first, rest


def _append(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line with one write, and wait until it is on the disk.

    A line that a kill left unfinished is ended first, so that it spoils no other.
    """
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.truncate(_end_of_last_line(path))
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _end_of_last_line(path: Path) -> int:
    content = path.read_bytes()
    return content.rfind(b"\n") + 1
