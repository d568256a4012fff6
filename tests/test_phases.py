"""The phases of a search, in order of value."""

from dataclasses import replace

import pytest
from simulations import Simulation, affine, device, landscape, workload

from autotune.search.fits import Fits
from autotune.search.footing import find_footing
from autotune.search.phases import Explorer
from autotune.search.plan import Plan
from autotune.space import Config


def explored(simulation: Simulation) -> Explorer:
    """Return the explorer of a simulation after its run."""
    launcher = simulation.launcher()
    fits = Fits(launcher)
    footing = find_footing(launcher, fits)
    reference, seen = footing.reference.config, footing.reference.measured
    rate = seen.samples_per_second if seen else None
    explorer = Explorer(
        launcher,
        fits,
        plan=Plan(launcher, reference),
        reference=reference,
        reference_seconds=1 / rate if rate else 1.0,
    )
    explorer.run()
    return explorer


def test_phases_follow_one_another() -> None:
    """Memory, then time, then threads, then the loader, then the race."""
    simulation = Simulation()
    explorer = explored(simulation)

    phases = list(dict.fromkeys(trial.phase for trial in simulation.trials))
    assert phases == ["0", "A", "B", "D", "E"]
    assert explorer.standings[0].config.amp == "bf16"
    assert explorer.plan.pick == explorer.standings[0].config


def test_a_loader_that_stalls_is_seen_to_first() -> None:
    """Where a step waits for data, workers are worth more than sizes."""
    stalled = landscape(loader_seconds=lambda c: 0.05 / max(c.num_workers, 1))
    simulation = Simulation(
        landscape=stalled, device=device(usable_cores=8, threads=8), time_seconds=600
    )
    explorer = explored(simulation)

    order = [t.phase for t in simulation.trials]
    sizes = [n for n, t in enumerate(simulation.trials) if t.study == "compute"]
    assert order.index("D") < sizes[1]
    assert explorer.standings[0].config.num_workers >= 4


def test_the_reference_races_where_it_might_win() -> None:
    """Within 20 % of the best prediction it is among the rivals; far behind it is spared."""
    close = landscape(compute_seconds=lambda c: affine(c, bf16=0.95))
    near, far = Simulation(landscape=close), Simulation()
    explorers = [explored(near), explored(far)]

    raced = [
        {s.config for s in explorer.standings} & {explorer.reference} for explorer in explorers
    ]
    assert raced == [{near.task.baseline}, set()]


def test_a_tight_budget_finds_out_memory_alone() -> None:
    """Where one cycle takes a tenth of it, no config but the baseline is timed."""
    slow = landscape(compute_seconds=lambda _: 0.6)
    simulation = Simulation(landscape=slow, time_seconds=200)
    explorer = explored(simulation)

    assert {trial.study for trial in simulation.trials} <= {"memory", "e2e"}
    assert explorer.standings == []


def test_what_the_verdict_does_not_need_is_searched_with() -> None:
    """With the reference best so far, the time of the verdict goes into more sizes."""
    best_small = landscape(
        compute_seconds=lambda c: 0.05 * (0.5 if c.batch_size == 64 else 1.0), launch_sd=0.005
    )
    simulation = Simulation(landscape=best_small, global_batch=64, space={"amp": ["off"]})

    explorer = explored(simulation)

    assert explorer.guess is not None
    assert explorer.guess.batch_size == 64


def test_batchnorm_has_another_split_checked_at_once() -> None:
    """Its split is most likely to disagree: then no other size is timed."""
    land = landscape(is_right=lambda c, b: c.batch_size == b.batch_size)
    simulation = Simulation(
        landscape=land, workload=workload(has_batch_norm=True, stated_batch_size=8), global_batch=64
    )
    explored(simulation)

    timed = {t.config.batch_size for t in simulation.trials if t.study == "compute"}
    assert timed == {8}
    assert len(simulation.ended("invalid")) == 1


@pytest.mark.parametrize("seed", range(4))
def test_fewer_threads_are_tried_while_they_pay(seed: int) -> None:
    """Two of eight are best; the search goes down from eight and stops at one."""

    def compute(config: Config) -> float:
        threads = config.threads or 8
        return affine(config) * {8: 1.2, 4: 1.1, 2: 1.0, 1: 1.6}[threads]

    land = landscape(compute_seconds=compute, loader_seconds=lambda _: 0.0, launch_sd=0.01)
    simulation = Simulation(
        landscape=land, device=device(usable_cores=8, threads=8), time_seconds=600, seed=seed
    )

    assert explored(simulation).standings[0].config.threads == 2


def test_a_config_that_is_known_needs_no_launch_to_be_admitted() -> None:
    """The reference is admitted whatever is left of the budget."""
    explorer = explored(Simulation())
    launched = explorer.launcher.budget.launches

    assert explorer.admits(explorer.reference, phase="E")
    assert not explorer.admits(replace(explorer.reference, amp="fp16"), phase="E")
    assert explorer.launcher.budget.launches == launched
