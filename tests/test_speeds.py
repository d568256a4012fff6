"""Phase A, time: seconds per sample without a loader."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from simulations import MIB, Simulation, affine, landscape, stepped

from autotune.search.fits import Fits
from autotune.search.footing import find_footing
from autotune.search.plan import Plan
from autotune.search.speeds import Speeds
from autotune.space import Config


def swept(simulation: Simulation) -> Speeds:
    """Return the speeds of a sweep over every fp32 size of a simulation."""
    launcher = simulation.launcher()
    fits = Fits(launcher)
    reference = find_footing(launcher, fits).reference.config
    speeds = Speeds(launcher, fits, plan=Plan(launcher, reference), reference=reference)
    task = simulation.task
    speeds.sweep([[task.with_split(reference, split) for split in task.space.splits()]])
    return speeds


def dip(config: Config) -> float:
    """A kernel that is twice as fast at 16 alone."""
    return affine(config) * (0.5 if config.batch_size == 16 else 1.0)


def falling(config: Config) -> float:
    """A device that small batches suit."""
    return 0.005 * (1 + config.batch_size / 16)


@pytest.mark.parametrize(
    "compute",
    [
        affine,
        falling,
        lambda config: 0.01 * stepped(config.batch_size, wide=8),
        lambda config: 0.01 * stepped(config.batch_size, wide=48),
    ],
)
def test_a_sweep_finds_the_fastest_size(compute: Callable[[Config], float]) -> None:
    """Rising, falling or stepped, within 3 %."""
    simulation = Simulation(
        landscape=landscape(compute_seconds=compute, launch_sd=0.002),
        global_batch=96,
        time_seconds=900,
    )
    speeds = swept(simulation)

    best = min(compute(config) for config in speeds.seconds)
    splits = simulation.task.space.splits()
    true = min(
        compute(simulation.task.with_split(simulation.task.baseline, split)) for split in splits
    )
    assert best <= 1.03 * true


def test_a_dip_beside_a_good_size_is_found() -> None:
    """Neighbours of all that are close to the best are measured too."""
    simulation = Simulation(landscape=landscape(compute_seconds=dip), global_batch=64)

    assert swept(simulation).ranked()[0].batch_size == 16


@pytest.mark.parametrize(("slow", "is_found"), [(1.4, True), (1.8, False)])
def test_a_dip_among_sizes_that_are_no_good_is_found_within_reach(
    slow: float, *, is_found: bool
) -> None:
    """Where time is left, the neighbours of all within half as much again are measured too."""

    def compute(config: Config) -> float:
        return 0.01 * {96: 1.0, 48: 1.0, 6: 0.9}.get(config.batch_size, slow)

    simulation = Simulation(
        landscape=landscape(compute_seconds=compute, launch_sd=0.0),
        global_batch=96,
        limit_bytes=2048 * MIB,
        time_seconds=3600,
    )

    assert (swept(simulation).ranked()[0].batch_size == 6) == is_found


@pytest.mark.parametrize(
    ("full", "expected"),
    [({16: 0.012}, False), ({16: 0.0099}, False), ({8: 0.009}, True), ({}, False)],
)
def test_recomputing_that_is_faster_is_a_surprise(
    full: dict[int, float], *, expected: bool
) -> None:
    """By more than launches differ, at a size that was timed both ways."""
    launcher = Simulation().launcher()
    reference = Config(batch_size=32)
    speeds = Speeds(launcher, Fits(launcher), plan=Plan(launcher, reference), reference=reference)
    for size in (8, 16):
        speeds.seconds[Config(batch_size=size)] = 0.01
    for size, seconds in full.items():
        speeds.seconds[Config(batch_size=size, checkpointing="full")] = seconds
    speeds.seconds[Config(batch_size=64, checkpointing="full")] = 0.001

    assert speeds.gains_by_checkpointing("off") == expected
    assert not speeds.gains_by_checkpointing("bf16")


def test_each_size_is_measured_once() -> None:
    """What was measured is known, whatever its loader."""
    simulation = Simulation()
    speeds = swept(simulation)
    launched = simulation.budget.launches

    config = speeds.ranked()[0]

    assert speeds.measure(config.with_workers(2)) == speeds.of(config.with_workers(2))
    assert simulation.budget.launches == launched
    assert speeds.best_seconds == speeds.of(config)


def test_a_short_budget_is_swept_coarsely() -> None:
    """It ends with something measured, the largest size among it, and time for the verdict."""
    slow = landscape(compute_seconds=lambda config: 8 * affine(config))
    simulation = Simulation(landscape=slow, global_batch=64, time_seconds=400)
    speeds = swept(simulation)

    assert any(config.batch_size == 64 for config in speeds.seconds)
    assert len(speeds.seconds) < len(simulation.task.space.splits())
    assert simulation.budget.remaining_seconds > 50


def known(seconds: dict[Config, float], **setting: Any) -> Speeds:
    """Speeds as told."""
    launcher = Simulation(**setting).launcher()
    reference = Config(batch_size=32)
    speeds = Speeds(launcher, Fits(launcher), plan=Plan(launcher, reference), reference=reference)
    speeds.seconds.update(seconds)
    return speeds


def test_an_estimate_knows_no_loader() -> None:
    """As all times here."""
    base = Config(batch_size=32)
    speeds = known({base: 0.01})

    assert speeds.estimate(base.with_workers(2)) == 0.01
    assert speeds.estimate(replace(base, checkpointing="full")) == 0.01


def test_a_cell_is_hopeless_by_sizes_near_those_of_interest() -> None:
    """Three times as slow at 32 says something of 64, and nothing of 256."""
    base = Config(batch_size=32)
    speeds = known({base: 0.03, replace(base, amp="bf16"): 0.01})

    assert speeds.is_hopeless(base, within=64)
    assert not speeds.is_hopeless(base, within=256)
    assert not speeds.is_hopeless(replace(base, amp="bf16"), within=64)


def test_a_part_of_a_long_cycle_is_timed() -> None:
    """As many samples of each size, so that what the optimizer takes is the same for all."""
    slow = landscape(compute_seconds=lambda config: 0.1 * (1 + 1 / config.batch_size))
    simulation = Simulation(
        landscape=slow,
        global_batch=256,
        limit_bytes=400 * MIB,
        time_seconds=7200,
        baseline={"batch_size": 8},
    )
    launcher = simulation.launcher()
    fits = Fits(launcher)
    reference = find_footing(launcher, fits).reference.config
    speeds = Speeds(launcher, fits, plan=Plan(launcher, reference), reference=reference)
    sizes = [simulation.task.with_split(reference, split) for split in ((4, 64), (8, 32))]

    speeds.sweep([sizes])

    asked = [r.config for r in simulation.runner.requests if r.purpose == "compute"]
    assert {config.samples_per_optimizer_step for config in asked} == {16}
    assert set(speeds.seconds) == set(sizes)
