"""Which of those that raced is the pick."""

import math
from dataclasses import replace

from simulations import Simulation, landscape

from autotune.outcome import Measured, Measurement, Trial
from autotune.search.choice import in_order, needs
from autotune.search.fits import Fits
from autotune.search.race import Standing
from autotune.space import Config, Goal

BASE = Config(batch_size=32)
SMALL = Config(batch_size=8, accumulation_steps=4)
FED = BASE.with_workers(2)


def standing(config: Config, loss: float) -> Standing:
    """A standing of three rounds."""
    seen = Measured(measurement=Measurement(samples_per_second=1))
    trial = Trial(number=0, study="e2e", phase="E", config=config, outcome=seen)
    return Standing(config=config, loss=loss, rounds=3, trial=trial)


def order(*standings: Standing, goal: Goal = "throughput") -> list[Config]:
    """Return configs in the order of a choice, with peaks measured."""
    launcher = Simulation(landscape=landscape()).launcher()
    fits = Fits(launcher)
    for found in standings:
        fits.weigh(found.config)
    return [s.config for s in in_order(standings, goal=goal, fits=fits)]


def test_the_fastest_comes_first() -> None:
    """Where one is clearly faster, what it needs does not matter."""
    assert order(standing(BASE, 0.05), standing(FED, 0.0)) == [FED, BASE]


def test_equals_are_ordered_by_what_they_need() -> None:
    """Within 0.3 % the fewest workers, full precision, no recomputing, the smaller batch."""
    bf16 = replace(BASE, amp="bf16")

    found = order(standing(FED, 0.0), standing(bf16, 0.0028), standing(BASE, 0.0029))

    assert found == [BASE, bf16, FED]
    full = replace(SMALL, checkpointing="full")
    assert needs(SMALL) < needs(BASE) < needs(full) < needs(bf16) < needs(FED)


def test_one_that_did_not_finish_is_no_choice() -> None:
    """Whoever failed in the race is not in the order."""
    assert order(standing(BASE, 0.0), standing(FED, math.inf)) == [BASE]
    assert order() == []


def test_less_memory_wins_among_those_that_keep_their_throughput() -> None:
    """4 % slower at 236 MiB is before the fastest; 6 % slower is not."""
    kept = order(standing(BASE, 0.0), standing(SMALL, 0.04), goal="memory")
    lost = order(standing(BASE, 0.0), standing(SMALL, 0.06), goal="memory")

    assert kept == [SMALL, BASE]
    assert lost == [BASE, SMALL]
