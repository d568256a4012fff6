"""Phase F: challenges to the leader."""

from simulations import IMAGES, Simulation, affine, cuda, landscape, switched

from autotune.space import Config


def trap(config: Config) -> float:
    """A batch of 4 is by far the best, and nothing near it is good."""
    return affine(config) * (0.25 if config.batch_size == 4 else 1.0)


def test_the_leader_is_challenged_with_what_time_is_left() -> None:
    """Neighbours and proposals race it, two at a time."""
    simulation = Simulation(time_seconds=600)
    decision = simulation.run()

    challenged = [t for t in simulation.trials if t.phase == "F" and t.study == "e2e"]
    assert challenged
    assert simulation.regret(decision.config) < 0.03


def test_a_prefetch_that_pays_is_found() -> None:
    """No phase before knows of it: a neighbour of the leader does."""
    fed = landscape(
        loader_seconds=lambda c: 0.06 / max(c.num_workers, 1) / (c.prefetch_factor or 2)
    )
    decision = Simulation(landscape=fed, time_seconds=900).run()

    assert decision.config.prefetch_factor in {4, 8}


def test_proposals_reach_what_the_phases_missed() -> None:
    """With no more than a few sizes left to look at, the sampler looks at them."""
    simulation = Simulation(
        landscape=landscape(compute_seconds=trap, launch_sd=0.005),
        global_batch=64,
        time_seconds=1200,
    )

    assert simulation.run().config.batch_size == 4


def test_a_short_budget_has_no_refinement() -> None:
    """Phase F is given up first."""
    slow = landscape(compute_seconds=lambda c: 3 * affine(c))
    simulation = Simulation(landscape=slow)
    simulation.run()

    assert "F" not in {trial.phase for trial in simulation.trials}


def challenged(simulation: Simulation) -> list[Config]:
    """Return who was launched in phase F, the race's leader among them."""
    simulation.run()
    return [t.config for t in simulation.trials if t.phase == "F" and t.study == "e2e"]


def test_where_the_loader_binds_no_switch_is_tried() -> None:
    """What the step takes is hidden, so nothing of it can be gained."""
    slow = landscape(
        compute_seconds=lambda c: switched(c) / 20,
        loader_seconds=lambda c: 0.02 / max(min(c.num_workers, 2), 1) / (c.prefetch_factor or 1),
        launch_sd=0.002,
    )
    simulation = Simulation(
        landscape=slow, device=cuda(), workload=IMAGES, time_seconds=3600, has_studies=False
    )
    found = challenged(simulation)

    race = [t.config for t in simulation.trials if t.phase == "E" and t.study == "e2e"]
    assert found
    assert {c.optimizer_impl for c in found} <= {c.optimizer_impl for c in race}


def test_it_takes_no_longer_than_what_it_polishes() -> None:
    """However much time is left: at most as long as the phases before, and a race more."""
    simulation = Simulation(time_seconds=100_000)
    simulation.run()

    by_phase = dict.fromkeys("0ABCDEF", 0.0)
    for trial in simulation.trials:
        by_phase[trial.phase] = by_phase.get(trial.phase, 0.0) + trial.wall_seconds
    before = sum(by_phase[phase] for phase in "0ABCDE")
    assert 0 < by_phase["F"] <= 1.5 * before


def test_what_two_challengers_gain_is_put_together() -> None:
    """A longer queue and pinned memory each gain a little: the pick has both."""
    land = landscape(
        compute_seconds=lambda c: affine(c) / 10,
        loader_seconds=lambda c: (
            0.02
            / max(min(c.num_workers, 4), 1)
            * (0.95 if (c.prefetch_factor or 2) > 2 else 1)
            * (0.95 if c.pin_memory else 1)
        ),
        launch_sd=0.003,
    )
    decision = Simulation(landscape=land, device=cuda(), time_seconds=3600).run()

    assert decision.config.pin_memory
    assert decision.config.prefetch_factor in {4, 8}
