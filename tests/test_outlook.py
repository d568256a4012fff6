"""What a search would try, told before it is run."""

from typing import Any

import pytest
from simulations import BLOCKS, IMAGES, Simulation, cuda, workload

from autotune.search.outlook import MOST_SPLITS, expected_launches, plan_of


def told(*, time_seconds: float | None = 180.0, trials: int | None = None, **setting: Any) -> str:
    """Return the lines of a setting as one text."""
    simulation = Simulation(**setting)
    lines = plan_of(simulation.task, time_seconds=time_seconds, trials=trials)
    assert simulation.runner.requests == []
    assert all("\n" not in line for line in lines)
    return "\n".join(lines)


def test_it_says_what_would_be_tried() -> None:
    """Every knob with its values, or with why it is not tuned."""
    text = told(workload=workload(blocks=BLOCKS))

    assert "baseline: batch 32, fp32, within 1.0 GiB" in text
    assert "1 x 32, 2 x 16, 4 x 8, 8 x 4, 16 x 2, 32 x 1 (the global batch of 32 is kept)" in text
    assert "precision: fp32, bf16" in text
    assert "checkpointing: off, full (only where a batch does not fit without)" in text
    assert "loader workers: 0, 1, 2" in text
    assert "threads: default, 1" in text
    assert "not tuned: pin_memory (it needs a CUDA device)" in text


def test_every_knob_is_in_it() -> None:
    """Those of a GPU too."""
    text = told(device=cuda(), workload=workload(has_convolutions=True))

    assert "pinned memory: off, on" in text
    assert "cudnn.benchmark: off, on" in text
    assert "not tuned: checkpointing" in text


def test_ways_to_step_and_layouts_are_in_it() -> None:
    """Each value but the first costs a launch."""
    plain, varied = (Simulation(workload=facts).task for facts in (workload(), IMAGES))

    assert "channels last: off, on" in told(workload=IMAGES)
    assert "optimizer: default, foreach, fused" in told(workload=IMAGES)
    assert expected_launches(varied) == expected_launches(plain) + 1 + 2


def test_many_splits_are_shortened() -> None:
    """The first and the last of them."""
    text = told(global_batch="free")

    line = text.splitlines()[1]
    assert "…" in line
    assert line.count(" x ") == MOST_SPLITS + 1  # and the one of the name
    assert "the global batch is free" in line


@pytest.mark.parametrize(
    ("time_seconds", "trials", "expected"),
    [
        (300.0, None, "launches, fewer where time is short: at most 5 min 0 s"),
        (None, 20, "about 20 launches, fewer where time is short: at most 20"),
        (60.0, 500, "at most 500 and at most 1 min 0 s"),
        (None, None, "no limit was set"),
    ],
)
def test_it_says_how_much_at_most(
    time_seconds: float | None, trials: int | None, expected: str
) -> None:
    """The budget bounds what is expected."""
    assert expected in told(time_seconds=time_seconds, trials=trials).splitlines()[-1]


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"global_batch": "free"},
        {"workload": workload(blocks=BLOCKS), "limit_bytes": 2**29},
        {"space": {"amp": ["off"], "threads": ["default"]}, "global_batch": 64},
        {"goal": "memory"},
    ],
    ids=str,
)
def test_what_is_expected_is_about_what_comes(setting: dict[str, Any]) -> None:
    """Within a factor of two, where time does not limit the search."""
    simulation = Simulation(has_studies=False, time_seconds=900, **setting)
    expected = expected_launches(simulation.task)

    simulation.run()

    assert expected / 2 <= simulation.budget.launches <= expected * 2


def test_a_space_of_one_config_costs_little() -> None:
    """There is nothing to choose from, and nothing to confirm."""
    fixed = {"batch_size": [32], "amp": ["off"], "num_workers": [0], "threads": ["default"]}

    assert expected_launches(Simulation(space=fixed).task) < 8
