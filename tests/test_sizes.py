"""Phase A, memory: the largest batch size that fits."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import (
    BLOCKS,
    MIB,
    Simulation,
    fails_from,
    landscape,
    ramp,
    recomputing,
    workload,
)

from autotune.outcome import Crashed
from autotune.search.fits import Fits
from autotune.search.footing import find_footing
from autotune.search.plan import Plan
from autotune.search.sizes import NOT_NEEDED, cells, find_sizes, find_sizes_beyond
from autotune.space import Config


def climbed(simulation: Simulation, *, amp: str = "off") -> list[Config]:
    """Return the sizes that a climb from the baseline finds to fit."""
    launcher = simulation.launcher()
    fits = Fits(launcher)
    reference = find_footing(launcher, fits).reference.config
    plan = Plan(launcher, reference)
    return find_sizes(launcher, fits, plan, cell=replace(reference, amp=amp))


@settings(max_examples=60)
@given(
    static=st.integers(50, 400),
    slope=st.integers(1, 40),
    optimizer=st.integers(100, 900),
    start=st.sampled_from([1, 4, 16]),
)
def test_a_climb_finds_the_largest_size_that_fits(
    static: int, slope: int, optimizer: int, start: int
) -> None:
    """Also where small batches are flat, and with at most three launches that run out."""
    land = landscape(
        peak_bytes=lambda c: max(static + slope * c.batch_size, optimizer) * MIB, launch_sd=0.0
    )
    simulation = Simulation(
        landscape=land, limit_bytes=1000 * MIB, global_batch=128, baseline={"batch_size": start}
    )

    found = climbed(simulation)

    fitting = [size for size in (1, 2, 4, 8, 16, 32, 64, 128) if static + slope * size <= 1000]
    assert [config.batch_size for config in found] == fitting
    assert len(simulation.ended("out_of_memory", phases="A")) <= 1


def test_a_crash_costs_one_launch() -> None:
    """From batch 16 on all die: one is tried, the others are skipped."""
    crash = landscape(failure=fails_from(16, Crashed(reason="SIGSEGV")))
    simulation = Simulation(landscape=crash, global_batch=128, baseline={"batch_size": 4})

    found = climbed(simulation)

    assert [config.batch_size for config in found] == [1, 2, 4, 8]
    assert [t.config.batch_size for t in simulation.ended("crashed")] == [16]
    assert {t.config.batch_size for t in simulation.ended("skipped")} == {32, 64, 128}


def test_sizes_between_two_doublings_are_found() -> None:
    """After 16 fits and 32 does not, 24 is tried between."""
    simulation = Simulation(limit_bytes=500 * MIB, global_batch=96, baseline={"batch_size": 8})

    assert climbed(simulation)[-1].batch_size == 24


def test_another_precision_starts_from_what_fits() -> None:
    """It may fit less than the first: then it is halved down to what does."""
    fat = landscape(peak_bytes=lambda c: c.batch_size * (40 if c.amp == "bf16" else 20) * MIB)
    simulation = Simulation(landscape=fat, limit_bytes=700 * MIB)

    assert climbed(simulation, amp="bf16")[-1].batch_size == 16


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        ({}, ["off off", "bf16 off", "off full", "bf16 full"]),
        ({"amp": ["bf16"]}, ["bf16 off", "bf16 full"]),
        ({"checkpointing": ["full"]}, ["off full", "bf16 full"]),
    ],
)
def test_cells_are_precisions_with_and_without_checkpointing(
    space: dict[str, list[str]], expected: list[str]
) -> None:
    """What is not recomputed comes first, and the reference's own precision."""
    simulation = Simulation(space=space, workload=workload(blocks=BLOCKS))

    found = cells(simulation.task, simulation.task.baseline)

    assert [f"{config.amp} {config.checkpointing}" for config in found] == expected


def beyond(simulation: Simulation) -> list[Config]:
    """Return the sizes that fit with checkpointing alone, after those that fit without."""
    launcher = simulation.launcher()
    fits = Fits(launcher)
    plan = Plan(launcher, find_footing(launcher, fits).reference.config)
    baseline = simulation.task.baseline
    find_sizes(launcher, fits, plan, cell=baseline)
    cell = replace(baseline, checkpointing="full")
    return find_sizes_beyond(launcher, fits, plan, cell=cell)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.25, [16, 32, 64]), (0.9, []), (0.0, [16, 32, 64, 128])]
)
def test_a_checkpointed_cell_is_climbed_beyond_what_fits_without(
    share: float, expected: list[int]
) -> None:
    """From the largest that fits both ways to the largest that fits at all; else it is dropped."""
    land = landscape(peak_bytes=partial(recomputing, share=share))
    simulation = Simulation(
        landscape=land, workload=workload(blocks=BLOCKS), global_batch=128, limit_bytes=540 * MIB
    )

    found = beyond(simulation)

    assert [config.batch_size for config in found] == expected
    probed = [r.config for r in simulation.runner.requests if r.config.checkpointing == "full"]
    assert min(config.batch_size for config in probed) >= 16  # half of it shows the slope


def test_where_memory_does_not_bind_checkpointing_costs_nothing() -> None:
    """Not one launch: a trial that was skipped says why."""
    simulation = Simulation(workload=workload(blocks=BLOCKS))

    assert beyond(simulation) == []
    skipped = simulation.ended("skipped")
    assert [trial.config.checkpointing for trial in skipped] == ["full"]
    assert skipped[0].outcome.reason == NOT_NEEDED
    assert all(r.config.checkpointing == "off" for r in simulation.runner.requests)


def test_where_nothing_else_fits_a_checkpointed_cell_is_climbed_from_its_own() -> None:
    """Downward too, from the size of the reference."""
    land = landscape(peak_bytes=lambda c: recomputing(c) + (c.checkpointing == "off") * 800 * MIB)
    simulation = Simulation(landscape=land, workload=workload(blocks=BLOCKS), global_batch=128)

    assert [config.batch_size for config in beyond(simulation)] == [1, 2, 4, 8, 16, 32, 64, 128]


def test_a_border_is_not_met_blindly() -> None:
    """Where one size is known and twice of it may be over, half of it is measured first."""
    simulation = Simulation(
        landscape=landscape(peak_bytes=ramp), global_batch=64, limit_bytes=700 * MIB
    )
    launcher = simulation.launcher()
    fits = Fits(launcher)
    plan = Plan(launcher, find_footing(launcher, fits).reference.config)
    find_sizes(launcher, fits, plan, cell=replace(simulation.task.baseline, amp="bf16"))

    assert not simulation.ended("out_of_memory")
    assert simulation.ended("skipped")
