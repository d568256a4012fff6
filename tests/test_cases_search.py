"""Public bug reports on searches for a batch size and on timing, each a test named by its row.

Rows are those of a study of tools like ours: Lightning, Accelerate, Ultralytics, YOLOv5, Ludwig,
TorchSim, PyTorch.
"""

import math
from pathlib import Path

import pytest
from simulations import MIB, Simulation, cuda, landscape, workload
from workloads import quick_launches, write_script

from autotune.device.cpu import CpuDevice
from autotune.outcome import Measured, Request
from autotune.space import Config
from autotune.trial.launch import attempt
from autotune.workload import load_script

FEW, MANY = 250, 1000
"""Launches that a search never needs: of a small data set; of one without an end or a limit."""


def test_row_001_no_batch_is_larger_than_the_data_set() -> None:
    """Lightning climbed to 67 million: each trial was the same single batch."""
    simulation = Simulation(workload=workload(dataset_length=20), global_batch="free")
    decision = simulation.run()

    assert max(trial.config.batch_size for trial in simulation.trials) <= 20
    assert decision.config.samples_per_optimizer_step <= 20


def test_row_002_a_small_data_set_takes_little_time() -> None:
    """Lightning doubled for ten minutes past its length."""
    small = Simulation(workload=workload(dataset_length=8), global_batch="free", time_seconds=None)
    small.run()

    assert small.task.space.splits()[-1] == (8, 1)
    assert small.budget.launches < FEW


@pytest.mark.parametrize("trials", range(3, 16))
def test_row_003_what_is_returned_has_run(trials: int) -> None:
    """Lightning returned a size twice as large as the last one that ran, when its trials ended."""
    simulation = Simulation(trials=trials, global_batch="free")
    decision = simulation.run()

    ran = {trial.config for trial in simulation.trials if trial.measured}
    assert decision.config in ran


def test_row_005_steps_are_counted_from_now(tmp_path: Path) -> None:
    """A finder that ran after some training took an absolute number of steps, and ran none."""
    trained = "self.register_buffer('seen', torch.tensor(10_000))"
    path = Path(write_script(tmp_path))
    path.write_text(
        path.read_text().replace("super().__init__()", f"super().__init__(); {trained}")
    )
    request = Request(purpose="train", config=Config(batch_size=8), cycles=3)
    with quick_launches():
        report = attempt(load_script(str(path)), CpuDevice(), request)

    assert isinstance(report.outcome, Measured)
    assert report.launch is not None
    assert len(report.launch.step_seconds) >= 3


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7])
def test_row_006_small_sizes_grow(length: int) -> None:
    """TorchSim multiplied by 1.2 and rounded down: 1, 1, 1, ... without an end."""
    simulation = Simulation(workload=workload(dataset_length=length), global_batch="free")
    sizes = [size for size, _ in simulation.task.space.splits()]

    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert simulation.run().config.batch_size in sizes


@pytest.mark.slow
def test_row_007_a_search_ends_though_nothing_limits_it() -> None:
    """Ludwig's never did: no cap was met, and every batch took as long."""
    flat = landscape(compute_seconds=lambda _: 0.01, peak_bytes=lambda _: 300 * MIB)
    endless = Simulation(
        landscape=flat,
        workload=workload(dataset_length=None),
        global_batch="free",
        limit_bytes=2**50,
        time_seconds=None,
    )
    endless.run()

    assert math.isinf(endless.budget.time_seconds)
    assert endless.budget.launches < MANY


@pytest.mark.parametrize(("varies", "choices"), [(True, (False,)), (False, (False, True))])
def test_row_107_cudnn_does_not_search_where_shapes_vary(
    varies: bool, choices: tuple[bool, ...]
) -> None:
    """Each new shape starts a search of its own, slow and with a spike of memory."""
    facts = workload(varies_in_shape=varies, has_convolutions=True)
    space = Simulation(workload=facts, device=cuda()).task.space

    assert space.choices("cudnn_benchmark") in (choices, () if varies else choices)
    assert ("cudnn_benchmark" in space.left_out) == varies
