"""Predicted peaks that learn from measured ones."""

from dataclasses import replace
from typing import Any

import pytest
from simulations import MIB, Simulation, cuda, forecast_of, ramp, workload

from autotune.memory.forecast import HIDDEN_MARGIN
from autotune.memory.foretold import Forecast
from autotune.search.foresight import Foresight, question_of
from autotune.search.task import Task
from autotune.space import Config

BASE = Config(batch_size=32)
BF16 = replace(BASE, amp="bf16")


def task(limit_mib: int = 1024, *, margin: float = 0.05, **setting: Any) -> Task:
    """A task whose peaks were predicted as they are on the simulated machine."""
    plain = Simulation(limit_bytes=limit_mib * MIB, **setting).task
    return replace(plain, forecast=forecast_of(plain, ramp, margin=margin))


def peak_bytes(config: Config) -> int:
    """The true peak."""
    return int(ramp(config))


def test_a_prediction_says_what_fits_and_what_does_not() -> None:
    """Up to its margin; between there and the limit it is not sure."""
    needed = peak_bytes(BASE) / MIB
    roomy, close, small = (Foresight(task(int(needed * by))) for by in (1.2, 1.03, 0.9))

    assert (roomy.fits(BASE), roomy.is_over(BASE)) == (True, False)
    assert (close.fits(BASE), close.is_over(BASE)) == (False, False)
    assert (small.fits(BASE), small.is_over(BASE)) == (False, True)


def test_without_a_prediction_nothing_is_said() -> None:
    """Neither that it fits nor that it does not."""
    empty = Foresight(replace(task(), forecast=Forecast()))

    assert empty.peak_bytes(BASE) is None
    assert not empty.fits(BASE)
    assert not empty.is_over(BASE)


def test_a_measured_peak_corrects_its_cell() -> None:
    """By the ratio at the largest batch, and the margin shrinks."""
    foresight = Foresight(task(int(peak_bytes(BASE) / MIB * 1.03)))
    smaller = replace(BASE, batch_size=16)
    foresight.learn(BASE, peak_bytes(BASE))
    foresight.learn(smaller, int(peak_bytes(smaller) * 0.9))

    assert foresight.peak_bytes(BASE) == peak_bytes(BASE)
    assert foresight.fits(BASE)


def test_the_first_ratio_corrects_cells_that_were_not_measured() -> None:
    """Where samples differ in size every cell is off by about as much; their margins stay."""
    foresight = Foresight(task(int(peak_bytes(BF16) / MIB * 1.03)))
    foresight.learn(BASE, int(peak_bytes(BASE) * 0.9))

    assert foresight.peak_bytes(BF16) == pytest.approx(0.9 * peak_bytes(BF16), abs=1)
    assert foresight.fits(BF16)  # 0.9 × 1.05 < 1.03


@pytest.mark.parametrize(("ratio", "is_known"), [(0.7, False), (0.9, True), (1.3, False)])
def test_a_cell_that_is_not_understood_is_measured(ratio: float, is_known: bool) -> None:
    """A prediction that is far off says nothing of its cell."""
    foresight = Foresight(task())
    foresight.learn(BASE, int(peak_bytes(BASE) * ratio))

    assert (foresight.peak_bytes(BASE) is not None) == is_known


def test_a_hidden_workspace_may_be_large() -> None:
    """Of a recurrent layer a trace does not see up to a fifth."""
    foresight = Foresight(task(margin=HIDDEN_MARGIN))
    foresight.learn(BASE, int(peak_bytes(BASE) * 1.28))

    assert foresight.peak_bytes(BASE) == pytest.approx(1.28 * peak_bytes(BASE), rel=1e-6)


def test_memory_that_runs_out_where_it_was_said_to_fit_ends_belief() -> None:
    """The rest of the cell is measured; where it was not said to fit nothing is new."""
    fitting, close = Foresight(task()), Foresight(task(int(peak_bytes(BASE) / MIB * 1.03)))
    fitting.learn_excess(BASE)
    close.learn_excess(BASE)

    assert fitting.peak_bytes(BASE) is None
    assert close.peak_bytes(BASE) == peak_bytes(BASE)


def test_on_cuda_a_prediction_has_to_be_clearly_over() -> None:
    """It was traced as on a CPU: within a tenth a launch decides."""
    limit = peak_bytes(BASE) / MIB / 1.07
    cpu, gpu = Foresight(task(int(limit))), Foresight(task(int(limit), device=cuda()))

    assert cpu.is_over(BASE)
    assert not gpu.is_over(BASE)


def test_the_baseline_is_asked_for_first() -> None:
    """Then its own cell's sizes, the other precisions, and at last all that recompute."""
    question = question_of(task(workload=workload(blocks=("a", "b"))), seconds=2.0)
    first, *_, last = [cell for cell, _ in question.cells]

    assert (first.amp, first.checkpointing) == ("off", "off")
    assert last.checkpointing == "full"
    assert {cell.amp for cell, _ in question.cells} == {"off", "bf16"}


def test_what_recomputes_less_is_asked_for_last() -> None:
    """When it is known what the most gives."""
    facts = workload(blocks=("a", "b"), checkpointing=("selective", "full"))
    question = question_of(task(workload=facts), seconds=2.0)
    kinds = [cell.checkpointing for cell, _ in question.cells]

    assert sorted(kinds, key=["off", "full", "selective"].index) == kinds
    assert "selective" in kinds


@pytest.mark.parametrize("limit_mib", [420, 520, 700])
def test_a_search_that_foresees_meets_no_out_of_memory(limit_mib: int) -> None:
    """But for the baseline's own; and it launches less for memory than one that has to find out."""
    blind = Simulation(limit_bytes=limit_mib * MIB, workload=workload(blocks=("a", "b")))
    forecast = forecast_of(blind.task, ramp)
    seeing = Simulation(
        limit_bytes=limit_mib * MIB, workload=workload(blocks=("a", "b")), forecast=forecast
    )

    decisions = [each.run() for each in (blind, seeing)]

    out = [trial.config for trial in seeing.ended("out_of_memory")]
    assert set(out) <= {seeing.task.baseline}
    assert decisions[1].config.batch_size == decisions[0].config.batch_size
    assert memory_launches(seeing) < memory_launches(blind)


def memory_launches(simulation: Simulation) -> int:
    """Launches that were made for the memory of a config alone."""
    return sum(t.study == "memory" and t.outcome.name != "skipped" for t in simulation.trials)


def test_a_baseline_is_run_whatever_is_predicted() -> None:
    """How it ends is its outcome; what is smaller and predicted to be over is not run."""
    plain = Simulation(limit_bytes=400 * MIB)
    simulation = Simulation(limit_bytes=400 * MIB, forecast=forecast_of(plain.task, ramp))

    decision = simulation.run()

    assert [t.config.batch_size for t in simulation.ended("out_of_memory")] == [32]
    assert decision.baseline.outcome.name == "out_of_memory"
    assert decision.reference.batch_size == 8
