"""The plan of a budget."""

from typing import Any

import pytest
from simulations import Simulation, landscape, workload

from autotune.outcome import Measurement
from autotune.search.fits import Fits
from autotune.search.footing import find_footing
from autotune.search.launcher import Launcher
from autotune.search.plan import FEWEST_CYCLES, MOST_CYCLES, Phase, Plan
from autotune.space import Config


def planned(**setting: Any) -> tuple[Plan, Launcher]:
    """Return the plan after phase 0 of a search."""
    launcher = Simulation(**setting).launcher()
    footing = find_footing(launcher, Fits(launcher))
    return Plan(launcher, footing.reference.config), launcher


def slow(times: float) -> dict[str, Any]:
    """A landscape so many times as slow."""
    return {
        "landscape": landscape(
            compute_seconds=lambda _: 0.0156 * times, loader_seconds=lambda _: 0.0
        )
    }


@pytest.mark.parametrize(
    ("times", "cycles", "skipped"),
    [
        (1, MOST_CYCLES, ""),
        (2.5, FEWEST_CYCLES, ""),
        (3, FEWEST_CYCLES, "F"),
        (3.5, FEWEST_CYCLES, "FE"),
        (5, FEWEST_CYCLES, "FED"),
    ],
)
def test_the_verdict_is_reserved_first(times: float, cycles: int, skipped: str) -> None:
    """A slower step shortens the launches, then gives up F, E and D, in this order."""
    plan, _ = planned(**slow(times))

    phases: tuple[Phase, ...] = ("D", "E", "F")
    given_up = {phase for phase in phases if not plan.runs(phase)}
    assert plan.cycles == cycles
    assert given_up == set(skipped)


def test_a_step_of_a_twelfth_of_the_budget_is_too_long() -> None:
    """Then only memory can be found out; just below, more can."""
    assert planned(**slow(40), time_seconds=200)[0].is_tight
    assert not planned(**slow(20), time_seconds=200)[0].is_tight


def test_short_steps_are_measured_for_a_second() -> None:
    """Ten cycles of a few milliseconds are below what a scheduler does to them."""
    plan, _ = planned(**slow(0.1))

    assert plan.cycles == pytest.approx(20, abs=1)


def test_what_is_reserved_cannot_be_spent() -> None:
    """A phase may use what nothing later needs, and asking for more is remembered."""
    plan, launcher = planned()
    left = launcher.budget.remaining_seconds

    spare = plan.spare_seconds("F")

    assert spare == pytest.approx(left - plan.reserve_seconds())
    assert plan.affords(spare - 1, phase="F")
    refused = [plan.has_refused, plan.affords(spare + 1, phase="F"), plan.has_refused]
    assert refused == [False, False, True]
    assert plan.spare_seconds("A") < plan.spare_seconds("E") == spare


def test_launches_are_reserved_as_time_is() -> None:
    """Nine launches are the verdict's and the verification's."""
    plan, launcher = planned(trials=30)

    free = int(launcher.budget.remaining_launches) - 9

    assert plan.affords(0, phase="F", launches=free)
    assert not plan.affords(0, phase="F", launches=free + 1)
    assert not planned(trials=10)[0].has_verdict


def test_a_released_verdict_leaves_its_time_to_the_search() -> None:
    """What is kept then is one verified and timed launch of the pick."""
    plan, _ = planned()
    before = plan.spare_seconds("A")

    plan.release_verdict()

    assert plan.spare_seconds("A") > before
    assert not plan.has_verdict


def test_without_limits_everything_is_affordable() -> None:
    """No time and no number of launches is too much."""
    plan, _ = planned(time_seconds=None)

    assert plan.cycles == MOST_CYCLES
    assert plan.affords(1e9, phase="A", launches=10**6)


def test_long_accumulations_are_timed_for_few_cycles() -> None:
    """Where one cycle holds micro-batches enough, and lasts long enough, one will do."""
    plan, _ = planned(**slow(10), global_batch=64, baseline={"batch_size": 2}, time_seconds=3600)
    small = Config(batch_size=2, accumulation_steps=32)
    large = Config(batch_size=64)

    assert plan.cycles_of(small) == plan.exploring_cycles(small) == 1
    assert plan.cycles_of(large) > 1


def test_rivals_of_varying_lengths_have_as_many_cycles() -> None:
    """They are to see the same samples; others are timed for as long."""
    rivals = (Config(batch_size=2, accumulation_steps=16), Config(batch_size=32))
    fixed, _ = planned(**slow(3), time_seconds=3600)
    varying, _ = planned(**slow(3), time_seconds=3600, workload=workload(varies_in_shape=True))

    assert len(set(fixed.cycles_together(rivals).values())) == 2
    assert len(set(varying.cycles_together(rivals).values())) == 1


def test_workers_that_are_waited_for_give_three_batches_each() -> None:
    """They come in bursts, so that fewer say little; where the step is slower, none need be."""
    plan, launcher = planned(time_seconds=3600)
    fed = Config(batch_size=32).with_workers(8)
    before = plan.cycles_of(fed)

    launcher.costs.learn(fed, "loader", cycles=9, wall=9.0, seen=Measurement(samples_per_second=32))

    assert before == MOST_CYCLES
    assert plan.cycles_of(fed) == 20  # of 24 those that last 20 s
