"""The Optuna studies: every trial is one of theirs, and their sampler proposes."""

import logging
import math
import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from simulations import MIB, Simulation, cuda

from autotune.outcome import (
    Crashed,
    Invalid,
    Launch,
    Measured,
    Measurement,
    Outcome,
    OutOfMemory,
    Skipped,
    TimedOut,
    Trial,
)
from autotune.search.studies import (
    ASSUMED_EXCESS,
    MEMORY_CONSTRAINT,
    STUDIES,
    UNSETTLED_CONSTRAINT,
    Studies,
)
from autotune.space import Config

LIMIT = 1024 * MIB
TASK = Simulation(device=cuda()).task
FED = Config(batch_size=8, accumulation_steps=4, amp="bf16").with_workers(2)


def studies(storage: str | None = None) -> Studies:
    """Studies of a space on a GPU."""
    return Studies(
        storage, "run", space=TASK.space, baseline=TASK.baseline, limit_bytes=LIMIT, seed=3
    )


def trial(config: Config = FED, outcome: Outcome | None = None, **changes: Any) -> Trial:
    """An end-to-end trial of two launches, at 100 samples a second and half the limit."""
    seen = Measurement(samples_per_second=100, peak_bytes=LIMIT // 2, samples_per_optimizer_step=32)
    launches = tuple(
        Launch(started_at="", seed=n, step_seconds=(seconds,))
        for n, seconds in ((1, 0.32), (2, 0.4))
    )
    plain = Trial(
        number=5,
        study="e2e",
        phase="verdict",
        config=config,
        outcome=outcome or Measured(measurement=seen),
        launches=launches,
    )
    return replace(plain, **changes)


def test_a_measured_trial_is_complete_with_real_values() -> None:
    """Its parameters are the config's, its value log seconds per sample, its reports launches."""
    kept = studies()
    kept.record(trial())

    (found,) = kept.study("e2e").trials
    assert found.state == TrialState.COMPLETE
    assert found.params == FED.to_dict() | {"threads": 0}
    assert found.value == pytest.approx(-math.log(100))
    assert list(found.intermediate_values.values()) == pytest.approx(
        [math.log(0.01), math.log(0.0125)]
    )
    assert found.constraints[MEMORY_CONSTRAINT] == pytest.approx(-0.5)
    assert found.user_attrs["number"] == 5
    assert found.user_attrs["phase"] == "verdict"


@pytest.mark.parametrize(
    ("outcome", "predicted", "state", "excess"),
    [
        (OutOfMemory(reason="x"), 2 * LIMIT, TrialState.PRUNED, 1.0),
        (OutOfMemory(reason="x"), None, TrialState.PRUNED, ASSUMED_EXCESS),
        (OutOfMemory(reason="x"), LIMIT // 2, TrialState.PRUNED, ASSUMED_EXCESS),
        (Skipped(reason="x", predicted_peak_bytes=LIMIT), int(LIMIT * 1.5), TrialState.PRUNED, 0.5),
        (Skipped(reason="slower without a doubt"), None, TrialState.PRUNED, None),
        (Crashed(reason="x"), None, TrialState.FAIL, None),
        (TimedOut(reason="x"), None, TrialState.FAIL, None),
        (Invalid(reason="x"), None, TrialState.FAIL, None),
    ],
)
def test_every_other_end_has_its_state(
    outcome: Outcome, predicted: int | None, state: TrialState, excess: float | None
) -> None:
    """What does not fit is pruned with how far it is over; what failed is a failure."""
    kept = studies()
    kept.record(trial(outcome=outcome, predicted_peak_bytes=predicted))

    (found,) = kept.study("e2e").trials
    assert found.state == state
    assert found.user_attrs["outcome"] == outcome.name
    assert found.constraints.get(MEMORY_CONSTRAINT) == (
        None if excess is None else pytest.approx(excess)
    )


@pytest.mark.parametrize(("study", "value"), [("memory", 0.5), ("checks", 0.0)])
def test_each_study_has_its_objective(study: str, value: float) -> None:
    """Memory in GiB, and 0 for a check that passed."""
    kept = studies()
    kept.record(trial(study=study))

    assert kept.study(study).trials[0].value == value
    assert [len(kept.study(name).trials) for name in STUDIES].count(1) == 1


def test_the_best_trial_is_one_that_was_confirmed() -> None:
    """A race's winner is flattered by having won: faster figures there do not count."""
    kept = studies()
    lucky = Measured(measurement=Measurement(samples_per_second=500, peak_bytes=MIB))
    kept.record(trial(TASK.baseline, phase="0"))
    kept.record(trial(outcome=lucky, phase="E"), is_settled=False)

    assert kept.best_config() == TASK.baseline
    assert kept.study("e2e").best_trial.params["amp"] == "off"
    assert kept.study("e2e").trials[1].constraints[UNSETTLED_CONSTRAINT] == 1


def test_what_is_recommended_becomes_the_best_trial() -> None:
    """Where no verdict could be had, the race's figures are entered as the recommendation."""
    kept = studies()
    fast = Measured(measurement=Measurement(samples_per_second=500, peak_bytes=MIB))
    kept.record(trial(TASK.baseline, phase="0"))
    raced = trial(outcome=fast, phase="E")
    kept.record(raced, is_settled=False)

    kept.recommend(raced)
    kept.recommend(raced)

    assert kept.best_config() == FED
    assert len(kept.study("e2e").trials) == 3


def test_nothing_measured_has_no_best() -> None:
    """The nothing-fits path does not lean on a best trial."""
    assert studies().best_config() is None


def test_proposals_are_new_configs_of_the_space() -> None:
    """Neither tried nor vetoed, near the leader where asked, and the same for one seed."""
    kept, again = studies(), studies()
    for other in (kept, again):
        for n, size in enumerate((8, 16, 32)):
            config = replace(FED, batch_size=size, accumulation_steps=32 // size)
            other.record(trial(config, number=n))

    proposals = [
        other.propose(FED, tried={FED}, is_vetoed=lambda c: c.amp == "fp16", is_boxed=True)
        for other in (kept, again)
    ]

    assert proposals[0] == proposals[1]
    found = proposals[0]
    assert found is not None
    assert found in TASK.space
    assert found != FED
    assert found.amp != "fp16"
    assert 0 <= found.num_workers <= 4
    assert 2 <= found.batch_size <= 32


def test_a_space_that_is_used_up_has_no_proposal() -> None:
    """Where everything is vetoed, there is none."""
    nothing = studies().propose(FED, tried=(), is_vetoed=lambda _: True, is_boxed=False)

    assert nothing is None


def test_optunas_verbosity_is_put_back(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed, and the global setting is as the user had it."""
    optuna.logging.set_verbosity(logging.INFO)

    studies().record(trial())

    assert optuna.logging.get_verbosity() == logging.INFO
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("scheme", ["sqlite", "journal"])
def test_a_storage_continues(tmp_path: Path, scheme: str) -> None:
    """A second search of one name adds to its studies, and nothing that is in them already."""
    storage = f"{scheme}:///{tmp_path / 'study'}"
    skipped = trial(outcome=Skipped(reason="too large"), launches=())
    first, second = studies(storage), studies(storage)
    for each in (trial(), skipped):
        first.record(each)

    third = studies(storage)
    for each in (trial(), skipped, trial(launches=trial().launches[:1]), trial(phase="E")):
        third.record(each)

    assert len(second.study("e2e").trials) == 4
    assert third.best_config() == FED


def test_a_trial_is_entered_once_but_for_what_became_of_it() -> None:
    """The same launches again are no news; a race's winner that is recommended is."""
    kept = studies()
    for is_settled in (False, False, True, True):
        kept.record(trial(), is_settled=is_settled)

    found = kept.study("e2e").trials
    assert [t.constraints[UNSETTLED_CONSTRAINT] for t in found] == [1, 0]
    assert found[0].user_attrs["launched_at"] == [""] * 2


def test_a_trial_says_when_and_where_it_ran() -> None:
    """In local time as Optuna has it, with host and process."""
    began = datetime(2026, 1, 31, 12, tzinfo=UTC)
    launch = Launch(started_at=began.isoformat(), seed=1, step_seconds=(0.32,))
    kept = studies()
    kept.record(trial(launches=(launch,), wall_seconds=90.0))

    (found,) = kept.study("e2e").trials
    assert found.datetime_start == began.astimezone().replace(tzinfo=None)
    assert found.duration == timedelta(seconds=90)
    assert found.user_attrs["pid"] == os.getpid()


def test_a_config_outside_the_space_can_be_entered() -> None:
    """What a larger effective batch would give was measured beside the space."""
    kept = studies()
    kept.record(trial(replace(FED, batch_size=512), study="compute"))

    assert kept.study("compute").trials[0].params["batch_size"] == 512


def test_only_this_module_loads_optuna() -> None:
    """The decisions of a search need neither torch nor, but for their record, Optuna."""
    code = (
        "import sys; import autotune.search.race, autotune.search.confirm, autotune.memory.law;"
        "assert 'torch' not in sys.modules"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env=os.environ, capture_output=True
    )

    assert done.returncode == 0, done.stderr
