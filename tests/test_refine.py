"""Phase F: challenges to the leader."""

from simulations import Simulation, affine, landscape

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
