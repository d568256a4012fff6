"""Options: what was given wins over the script's, and what means nothing is refused at once."""

from dataclasses import replace
from typing import Any

import pytest
from strategies import MIB, sample_device, sample_facts

from autotune.errors import OptionInvalid
from autotune.facts import Survey
from autotune.options import CPU_MARGIN, CUDA_MARGIN, Options

GIB = 2**30


def survey(kind: str = "cpu", *, free_bytes: int = 8 * GIB, overhead_bytes: int = GIB) -> Survey:
    """A survey of a machine with so much memory."""
    device = replace(sample_device(), kind=kind, free_bytes=free_bytes)
    return Survey(workload=sample_facts(), device=device, overhead_bytes=overhead_bytes)


def test_what_is_given_wins() -> None:
    """A script's options fill in only what was not given."""
    given = Options(seed=3).over({"seed": 5, "time_budget": "90s"})

    assert (given.seed, given.time_seconds) == (3, 90.0)


def test_the_default_budget_is_ten_minutes() -> None:
    """Where nobody said anything a run takes ten minutes, and 3 % of it to scan the data."""
    assert (Options().time_seconds, Options().scan_seconds) == (600.0, 18.0)


def test_an_unknown_option_of_a_script_is_named() -> None:
    """The hint lists the options that there are."""
    with pytest.raises(OptionInvalid, match="'batchsize'") as caught:
        Options().over({"batchsize": 3})

    assert "global_batch" in caught.value.hint


@pytest.mark.parametrize(
    "wrong",
    [
        {"time_budget": "soon"},
        {"memory": "a lot"},
        {"goal": "speed"},
        {"global_batch": "all"},
        {"global_batch": 0},
        {"global_batch": True},
        {"trials": 0},
        {"seed": -1},
        {"trials": 2.5},
        {"trials": "many"},
        {"space": {"batchsize": [1]}},
    ],
    ids=str,
)
def test_what_means_nothing_is_refused(wrong: dict[str, Any]) -> None:
    """Before anything is started, with what was seen in the message."""
    seen = str(next(iter(wrong.values()))) if "space" not in wrong else "batchsize"
    with pytest.raises(OptionInvalid, match=seen):
        Options(**wrong)


def test_a_cpus_limit_leaves_what_libraries_take_and_a_margin() -> None:
    """Less the overhead seen in the first launch, less 15 % (DESIGN 2.2)."""
    limit = (1 - CPU_MARGIN) * 7 * GIB

    assert 0.93 * limit < Options().limit_bytes(survey()) <= limit


def test_a_gpus_limit_leaves_a_margin() -> None:
    """What is free now, less 5 %: the context is in the limit on CUDA."""
    limit = (1 - CUDA_MARGIN) * 8 * GIB

    assert 0.93 * limit < Options().limit_bytes(survey("cuda")) <= limit


def test_a_default_limit_stays_while_what_is_free_wavers() -> None:
    """It is rounded down, so that a second run continues the first one's studies."""
    limits = {
        Options().limit_bytes(survey(free_bytes=8 * GIB + wave * 2**20)) for wave in range(50)
    }

    assert len(limits) == 1


@pytest.mark.parametrize(("memory", "expected"), [("64MiB", 64 * MIB), ("25%", 2 * GIB), (7, 7)])
def test_a_given_limit_is_taken_as_it_is(memory: str | int, expected: int) -> None:
    """A share is of what is free now."""
    assert Options(memory=memory).limit_bytes(survey()) == expected
