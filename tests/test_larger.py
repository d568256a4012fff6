"""What a larger effective batch would give."""

import re
from typing import Any

import pytest
from simulations import MIB, Simulation, landscape, workload

from autotune.outcome import Request


def noted(**setting: Any) -> tuple[str, list[Request], Simulation]:
    """Return the line, the launches that it took, and the search."""
    simulation = Simulation(has_studies=False, **setting)
    decision = simulation.run()
    notes = [note for note in decision.notes if "global batch of" in note]
    assert len(notes) <= 1
    kept = simulation.task.space.global_batch or 2**40
    beyond = [r for r in simulation.runner.requests if r.config.samples_per_optimizer_step > kept]
    return (notes[0] if notes else ""), beyond, simulation


def steep(**changes: Any) -> dict[str, Any]:
    """A device that large batches suit: twice as many samples are half as dear again."""
    land = landscape(compute_seconds=lambda c: 0.004 * (1 + 64 / c.batch_size), launch_sd=0.002)
    return {"landscape": land, "time_seconds": 900, "limit_bytes": 2**34} | changes


def test_the_best_of_twice_and_four_times_as_much_is_told() -> None:
    """With the ratio of the times without a loader; by two cheap launches for each."""
    note, beyond, simulation = noted(**steep())

    ratio = (1 + 64 / 32) / (1 + 64 / 128)
    assert note.startswith("a global batch of 128 would give about ")
    told = re.search(r"about (\d\.\d\d) times the samples/s", note)
    assert told is not None
    assert float(told[1]) == pytest.approx(ratio, rel=0.02)
    assert "not tried end to end; it changes the effective batch" in note
    assert {r.purpose for r in beyond} == {"memory", "compute"}
    assert len(beyond) == 4
    assert simulation.trials[-1].phase == "F"


def test_more_batches_are_looked_at_where_a_larger_one_does_not_fit() -> None:
    """Then there is nothing to gain but the optimizer's share."""
    note, beyond, simulation = noted(**steep(limit_bytes=560 * MIB))

    assert "a global batch of 64 would give about 1.0" in note
    assert not simulation.ended("out_of_memory", phases="F") or beyond
    assert all(r.config.batch_size <= 32 for r in beyond if r.purpose == "compute")


@pytest.mark.parametrize(
    "setting",
    [
        steep(global_batch="free"),
        steep(workload=workload(stated_batch_size=None)),
        steep(workload=workload(dataset_length=60)),
        steep(time_seconds=60),
        steep(trials=12),
    ],
    ids=["free", "not stated", "few samples", "no time", "no launches"],
)
def test_no_line_where_it_is_not_asked_or_not_to_be_had(setting: dict[str, Any]) -> None:
    """A free batch is as large as it should be; a short budget is for the answer."""
    note, beyond, _ = noted(**setting)

    assert note == ""
    assert beyond == []


def test_the_answer_keeps_the_global_batch() -> None:
    """What was looked at beside the space is never returned."""
    _, _, simulation = noted(**steep())

    assert simulation.search.interrupted() is not None
    decided = simulation.search.interrupted()
    assert decided is not None
    assert decided.config.samples_per_optimizer_step == 32
