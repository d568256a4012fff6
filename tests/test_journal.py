"""The journal: nothing is measured twice, and nothing is taken for what it is not."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.journal import Journal, key_of, remembering
from autotune.outcome import (
    Crashed,
    Invalid,
    Launch,
    Measured,
    Measurement,
    Outcome,
    OutOfMemory,
    Report,
    Request,
    TimedOut,
)
from autotune.space import Config

FINGERPRINT = {"source": "abc", "device": "a CPU"}
REQUEST = Request(
    purpose="memory", config=Config(batch_size=8), limit_bytes=100, time_limit_seconds=10.0
)


def measured(peak_bytes: int | None = None) -> Report:
    """A launch that ran to its end."""
    launch = Launch(started_at="2026-01-31T12:00:00+00:00", seed=0, step_seconds=(0.5,))
    outcome = Measured(measurement=Measurement(peak_bytes=peak_bytes, samples_per_second=3.0))
    return Report(outcome=outcome, launch=launch)


def journal_with(path: Path, *reports: Report, request: Request = REQUEST) -> Journal:
    """A journal opened anew on launches of one request."""
    first = Journal(path, FINGERPRINT)
    for report in reports:
        first.keep(request, report, wall_seconds=2.0)
    return Journal(path, FINGERPRINT)


@pytest.mark.parametrize(
    "outcome",
    [
        measured(90).outcome,
        OutOfMemory(reason="no room"),
        TimedOut(reason="no answer"),
        Crashed(reason="SIGSEGV", log_tail="…", is_workload_error=True),
        Invalid(reason="not a number"),
    ],
    ids=lambda outcome: outcome.name,
)
def test_a_launch_is_recalled_as_it_ended(tmp_path: Path, outcome: Outcome) -> None:
    """Every outcome survives the file, with the time that it took."""
    report = replace(measured(), outcome=outcome)
    entry = journal_with(tmp_path / "launches.jsonl", report).recall(REQUEST)

    assert entry is not None
    assert entry.report == report
    assert entry.wall_seconds == 2.0


def test_each_launch_is_recalled_once(tmp_path: Path) -> None:
    """Two launches of a race are two; a third has to be run."""
    journal = journal_with(tmp_path / "launches.jsonl", measured(1), measured(2))
    peaks = [entry.report.outcome for entry in iter(lambda: journal.recall(REQUEST), None)]

    assert peaks == [measured(1).outcome, measured(2).outcome]


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, purpose="verify"),
        replace(REQUEST, seed=1),
        replace(REQUEST, config=Config(batch_size=4)),
        replace(REQUEST, baseline=Config(batch_size=4)),
        replace(REQUEST, largest_samples=(3,)),
    ],
    ids=["purpose", "seed", "config", "baseline", "samples"],
)
def test_another_request_is_not_answered(tmp_path: Path, other: Request) -> None:
    """What could change the figures is part of the key."""
    assert journal_with(tmp_path / "launches.jsonl", measured(90)).recall(other) is None


@pytest.mark.parametrize(
    ("report", "limit_bytes", "is_recalled"),
    [
        (measured(90), 90, True),
        (measured(90), 89, False),
        (measured(90), None, True),
        (measured(None), 1, True),
        (Report(outcome=OutOfMemory(reason="")), 100, True),
        (Report(outcome=OutOfMemory(reason="")), 200, False),
    ],
)
def test_another_limit_is_judged_by_the_peak(
    tmp_path: Path, report: Report, limit_bytes: int | None, *, is_recalled: bool
) -> None:
    """A peak answers for each limit above it; a failure only for its own."""
    journal = journal_with(tmp_path / "launches.jsonl", report)
    asked = replace(REQUEST, limit_bytes=limit_bytes)

    assert (journal.recall(asked) is not None) == is_recalled


@pytest.mark.parametrize(("seconds", "is_recalled"), [(10.0, True), (14.9, True), (15.0, False)])
def test_a_hang_is_tried_again_with_more_time(
    tmp_path: Path, seconds: float, *, is_recalled: bool
) -> None:
    """A launch that was given up for want of time is no verdict on a longer one."""
    journal = journal_with(tmp_path / "launches.jsonl", Report(outcome=TimedOut(reason="")))
    asked = replace(REQUEST, time_limit_seconds=seconds)

    assert (journal.recall(asked) is not None) == is_recalled


def test_a_change_starts_anew_and_is_named(tmp_path: Path) -> None:
    """The old launches lie beside, under a number."""
    path = tmp_path / "launches.jsonl"
    journal_with(path, measured(90))
    changed = Journal(path, FINGERPRINT | {"source": "xyz"})

    assert changed.changes == ("source",)
    assert changed.recall(REQUEST) is None
    assert (tmp_path / "launches-1.jsonl").exists()


@pytest.mark.parametrize("kept_bytes", [1, 20, 100])
def test_a_torn_line_costs_one_launch(tmp_path: Path, kept_bytes: int) -> None:
    """A kill in mid-write loses that launch; the next line is whole."""
    path = tmp_path / "launches.jsonl"
    journal_with(path, measured(1), measured(2))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:kept_bytes])
    again = journal_with(path, measured(3))
    outcomes = [again.recall(REQUEST), again.recall(REQUEST), again.recall(REQUEST)]

    assert [entry and entry.report for entry in outcomes] == [measured(1), measured(3), None]


def test_what_is_remembered_is_not_run(tmp_path: Path) -> None:
    """The runner is asked only for what is not known, and what it gives is written down."""
    path = tmp_path / "launches.jsonl"
    ran: list[Request] = []

    def runner(request: Request) -> Report:
        ran.append(request)
        return measured(90)

    ticks = iter(range(100))
    runs = (
        remembering(runner, Journal(path, FINGERPRINT), clock=lambda: float(next(ticks)))
        for _ in range(2)
    )
    first, second = [run(REQUEST) for run in runs]

    assert len(ran) == 1
    assert (first.reused_seconds, second.reused_seconds) == (None, 1.0)


def test_limits_and_cycles_are_no_part_of_the_key() -> None:
    """A figure from more cycles is the same figure, sharper."""
    other = replace(REQUEST, limit_bytes=5, cycles=9, time_limit_seconds=1.0, skip_windows=2)

    assert key_of(other) == key_of(REQUEST)
