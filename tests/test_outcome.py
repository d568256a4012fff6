"""Outcomes and trials: six ways to end, each of which survives as JSON."""

import json
from typing import Any, get_args

import pytest
from hypothesis import given
from strategies import launches, measurements, outcomes, trials

from autotune.outcome import (
    SCHEMA_VERSION,
    Launch,
    Measurement,
    Outcome,
    Report,
    Trial,
    outcome_from_dict,
    outcome_to_dict,
)


def through_json(document: dict[str, Any]) -> dict[str, Any]:
    """What a reader of the file gets."""
    read: dict[str, Any] = json.loads(json.dumps(document))
    return read


@given(measurements)
def test_measurements_round_trip(measurement: Measurement) -> None:
    """What is read back equals what was written."""
    assert Measurement.from_dict(through_json(measurement.to_dict())) == measurement


@given(launches)
def test_launches_round_trip(launch: Launch) -> None:
    """What is read back equals what was written."""
    assert Launch.from_dict(through_json(launch.to_dict())) == launch


@given(outcomes)
def test_outcomes_round_trip(outcome: Outcome) -> None:
    """Every way to end is told apart and read back whole."""
    assert outcome_from_dict(through_json(outcome_to_dict(outcome))) == outcome


@given(outcomes, launches)
def test_reports_round_trip(outcome: Outcome, launch: Launch) -> None:
    """With a launch's numbers, and without."""
    for report in (Report(outcome=outcome), Report(outcome=outcome, launch=launch)):
        assert Report.from_dict(through_json(report.to_dict())) == report


@given(trials())
def test_trials_round_trip(trial: Trial) -> None:
    """A line of `trials.jsonl` holds the whole trial."""
    assert Trial.from_dict(through_json(trial.to_dict())) == trial


@given(trials())
def test_another_version_is_refused(trial: Trial) -> None:
    """A reader that does not know a version says which one it knows."""
    with pytest.raises(ValueError, match=f"version {SCHEMA_VERSION}, but has 99"):
        Trial.from_dict(trial.to_dict() | {"schema_version": 99})


def test_a_trial_ends_in_one_of_six_ways() -> None:
    """The names are those of the contract."""
    assert {kind.name for kind in get_args(Outcome)} == {
        "measured",
        "out_of_memory",
        "skipped",
        "timed_out",
        "crashed",
        "invalid",
    }
