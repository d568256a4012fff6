"""Peaks predicted in a launch, for all that may be tried, against launches that measure them."""

from pathlib import Path

import pytest
from workloads import quick_launches, write_script

from autotune.device.cpu import CpuDevice
from autotune.memory.forecast import Cell
from autotune.memory.foretold import Forecast, Question
from autotune.outcome import Measured, Request
from autotune.trial.foretell import foretell
from autotune.trial.inprocess import InProcess
from autotune.trial.isolate import ALWAYS_LOADED, Isolated
from autotune.trial.launch import attempt
from autotune.trial.order import Source
from autotune.workload import Workload, load_script

CELLS = (
    (Cell(), (8, 16)),
    (Cell(is_accumulated=True), (2, 4)),
    (Cell(amp="bf16"), (8,)),
)
READS_VALUES = "value = value * value.sum().item()"


def question(seconds: float = 60.0) -> Question:
    """What is asked of the small script."""
    return Question(cells=CELLS, limit_bytes=2**30, seconds=seconds)


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    """The small script's."""
    return load_script(write_script(tmp_path))


def test_what_is_predicted_is_what_a_launch_measures(workload: Workload) -> None:
    """To the byte, in every cell and at every size that was asked for."""
    forecast = foretell(workload, question(), device_kind="cpu")
    device = CpuDevice()

    with quick_launches():
        for cell, sizes in CELLS:
            for size in sizes:
                config = cell.config(size)
                outcome = attempt(
                    workload, device, Request(purpose="memory", config=config)
                ).outcome
                assert isinstance(outcome, Measured)
                estimate = forecast.predict(config)
                assert estimate is not None
                assert estimate.peak_bytes == outcome.measurement.peak_bytes
    assert forecast.untraced == {}


def test_time_that_is_over_begins_no_further_cell(workload: Workload) -> None:
    """What was predicted until then is of use."""
    ticks = iter([0.0, 1.0, 3.0, 4.0])
    forecast = foretell(workload, question(2.0), device_kind="cpu", clock=lambda: next(ticks))

    assert set(forecast.peaks) == {Cell()}
    assert forecast.seconds == 4.0


def test_what_cannot_be_traced_says_why(tmp_path: Path) -> None:
    """A step that reads a value gets no prediction, cell by cell."""
    workload = load_script(write_script(tmp_path, forward=READS_VALUES))
    forecast = foretell(workload, question(), device_kind="cpu")

    assert forecast.peaks == {}
    assert set(forecast.untraced) == {cell for cell, _ in CELLS}
    assert all("reads the value" in reason for reason in forecast.untraced.values())


@pytest.mark.slow
def test_here_or_in_a_launch_it_is_the_same(tmp_path: Path, workload: Workload) -> None:
    """A forecast made in another process comes back whole."""
    source = Source(script=write_script(tmp_path))
    with InProcess(workload, device="cpu") as here:
        expected = here.foretell(question())
    with Isolated(source, device="cpu", preload={n: [] for n in ALWAYS_LOADED}) as runner:
        found = runner.foretell(question())

    assert found.peaks == expected.peaks
    assert found.untraced == expected.untraced


@pytest.mark.slow
def test_a_model_that_hangs_costs_its_time(tmp_path: Path) -> None:
    """Twice what it was given; then nothing is predicted, and that is said."""
    script = write_script(tmp_path, top="def model_fn():\n    time.sleep(600)")
    with Isolated(Source(script=script), device="cpu", preload={}) as runner:
        found = runner.foretell(question(0.5))

    assert found == Forecast(
        untraced={cell: "tracing it gave no answer within 1.0 s" for cell, _ in CELLS}
    )
