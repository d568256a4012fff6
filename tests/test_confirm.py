"""The verdict: what it claims, and when it ends."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulations import Simulation, affine, landscape

from autotune.outcome import Crashed
from autotune.search.confirm import (
    HARDLY_SLOWER,
    Claim,
    Confirmation,
    confirm,
    detectable_gain,
    estimated,
    judged,
)
from autotune.search.fits import Fits
from autotune.search.footing import find_footing
from autotune.search.plan import Plan

gains = st.lists(st.floats(-0.3, 0.7), min_size=2, max_size=10)


@pytest.mark.parametrize(
    ("ratios", "ending"),
    [
        ([0.5, 0.52, 0.49], "unfinished"),
        ([0.5, 0.52, 0.49, 0.51], "won"),
        ([0.001, -0.001, 0.002, 0.0], "lost"),
        ([0.3, -0.2, 0.25, -0.1], "unfinished"),
        ([0.3, -0.2] * 5, "lost"),
        ([0.012] * 10, "lost"),
        ([0.025] * 4, "won"),
    ],
)
def test_pairs_end_the_verdict(ratios: list[float], ending: str) -> None:
    """Surely above zero and at least 2 % wins; hopeless, or ten pairs, loses; else it goes on."""
    assert judged(ratios, Claim()) == ending


def test_less_memory_may_cost_a_little_speed() -> None:
    """With less memory as the aim, 3 % slower wins and 8 % slower does not."""
    assert judged([-0.03, -0.031, -0.029, -0.03], HARDLY_SLOWER) == "won"
    assert judged([-0.08, -0.081, -0.079, -0.08], HARDLY_SLOWER) == "lost"


@given(ratios=gains)
def test_an_estimate_holds_its_own_value(ratios: list[float]) -> None:
    """The value is the geometric mean of the ratios and lies within its interval."""
    found = estimated(ratios, is_confirmed=False)

    assert found is not None
    assert found.value == pytest.approx(math.exp(math.fsum(ratios) / len(ratios)))
    assert found.low < found.value < found.high
    assert found.pairs == len(ratios)


def test_one_pair_has_no_estimate() -> None:
    """A single pair says nothing of its spread."""
    assert estimated([0.5], is_confirmed=False) is None


@pytest.mark.parametrize("gain", [0.0, 0.05, 0.6])
def test_the_interval_holds_whenever_the_pairs_were_stopped(gain: float) -> None:
    """At least 95 of 100 verdicts, stopped by their own rule, have the truth in their interval."""
    source, held = random.Random(1), 0  # noqa: S311  # noise
    for _ in range(400):
        ratios = [source.gauss(gain, 0.04) for _ in range(4)]
        while judged(ratios, Claim()) == "unfinished":
            ratios.append(source.gauss(gain, 0.04))
        found = estimated(ratios, is_confirmed=True)
        held += found is not None and found.low <= math.exp(gain) <= found.high

    assert held >= 0.95 * 400


def test_the_detectable_gain_is_that_of_the_formula() -> None:
    """(t of 0.975 + t of 0.80) × sd / √n, by hand for 5 pairs that differ by 3.8 %: 6.4 %."""
    assert detectable_gain(0.038, 5) == pytest.approx(0.0645, abs=0.001)


def confirmed(simulation: Simulation, **changes: Any) -> Confirmation:
    """Run a verdict of bf16 against the baseline of a simulation."""
    launcher = simulation.launcher()
    footing = find_footing(launcher, Fits(launcher))
    reference = footing.reference.config
    plan = Plan(launcher, reference)
    pick = replace(reference, **{"amp": "bf16", **changes})
    return confirm(launcher, plan, reference=reference, pick=pick, claim=Claim())


def test_a_verdict_is_of_fresh_pairs_on_the_same_data() -> None:
    """Each pair has one seed, both configs run each pair, and their order varies."""
    simulation = Simulation(landscape=landscape(data_sd=0.3), seed=2)
    found = confirmed(simulation)

    assert found.ending == "won"
    assert found.estimate is not None
    seconds = simulation.setting.landscape.sample_seconds
    assert found.reference is not None
    assert found.pick is not None
    true = seconds(found.reference.config) / seconds(found.pick.config)
    assert found.estimate.low < true < found.estimate.high
    seeds = [[launch.seed for launch in trial.launches] for trial in (found.reference, found.pick)]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == found.estimate.pairs
    pairs = [r.config.amp for r in simulation.runner.requests if r.purpose == "train"][1:]
    assert pairs not in (["off", "bf16"] * 4, ["bf16", "off"] * 4)


def test_no_gain_is_not_claimed() -> None:
    """A pick that is no faster is lost."""
    same = landscape(compute_seconds=lambda config: affine(config, bf16=1.0))

    assert confirmed(Simulation(landscape=same, time_seconds=600)).ending == "lost"


def test_a_budget_that_ends_before_four_pairs_leaves_it_unfinished() -> None:
    """Too few pairs are neither a win nor a loss."""
    found = confirmed(Simulation(time_seconds=25))

    assert found.ending == "unfinished"
    assert found.estimate is None or found.estimate.pairs < 4


def test_a_pick_that_fails_is_not_confirmed() -> None:
    """A crash in the verdict ends it."""

    def fails(config: object, purpose: object) -> Crashed | None:
        is_pick = getattr(config, "amp", "") == "bf16"
        return Crashed(reason="SIGSEGV") if is_pick and purpose == "train" else None

    assert confirmed(Simulation(landscape=landscape(failure=fails))).ending == "failed"
