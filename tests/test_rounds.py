"""What rounds of launches say of configs."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.search.rounds import Rounds
from autotune.space import Config

ONE, TWO, THREE = (Config(batch_size=size) for size in (1, 2, 3))


def of(*rounds: dict[Config, float]) -> Rounds:
    """Return rounds as told."""
    found = Rounds()
    for times in rounds:
        found.add(times)
    return found


def test_what_is_true_of_a_round_is_true_of_all_in_it() -> None:
    """A round that is slower throughout changes nothing."""
    levels = of({ONE: 0.0, TWO: 0.1}, {ONE: 5.0, TWO: 5.1}).levels()

    assert levels.fastest([TWO, ONE]) == ONE
    assert levels.loss(TWO, ONE) == pytest.approx(0.1)
    assert levels.launches[TWO] == 2


def test_two_that_never_met_are_compared_by_whom_both_met() -> None:
    """One to two and two to three make one to three."""
    levels = of({ONE: 0.0, TWO: 0.1}, {TWO: 3.0, THREE: 3.2}).levels()

    assert levels.loss(THREE, ONE) == pytest.approx(0.3)


def test_one_stall_moves_no_level_by_much() -> None:
    """A launch that took half as long again, of five: a mean would be off by 8 %."""
    rounds = [{ONE: 0.0, TWO: 0.02, THREE: 0.02} for _ in range(5)]
    rounds[2][ONE] = math.log(1.5)

    assert of(*rounds).levels().loss(TWO, ONE) == pytest.approx(0.02, abs=0.02)


def test_nothing_seen_has_no_levels() -> None:
    """Nor a fastest; and who was not seen is no match for who was."""
    assert Rounds().levels().fastest([ONE]) is None
    assert of({ONE: 0.0}).levels().loss(TWO, ONE) == math.inf


def test_the_spread_is_learnt() -> None:
    """From 2 % at first to what launches differ by; the error falls with their number."""
    source = random.Random(0)  # noqa: S311  # noise
    rounds = [{c: source.gauss(0, 0.005) for c in (ONE, TWO, THREE)} for _ in range(40)]

    few, many = of(*rounds[:2]).levels(), of(*rounds).levels()

    assert many.spread < few.spread < 0.02
    assert many.spread == pytest.approx(0.005, rel=0.4)
    assert many.error(ONE, TWO) < few.error(ONE, TWO) / 4


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=3), st.floats(-50, 50))
def test_without_noise_levels_are_exact(true: list[float], offset: float) -> None:
    """Whatever the times are relative to."""
    times = dict(zip((ONE, TWO, THREE), true, strict=True))
    shifted = {config: time + offset for config, time in times.items()}

    levels = of(times, shifted).levels()

    assert levels.loss(TWO, ONE) == pytest.approx(true[1] - true[0], abs=1e-6)
