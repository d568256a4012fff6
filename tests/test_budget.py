"""The budget: time and launches that may be used."""

import math

import pytest

from autotune.errors import NothingVerified
from autotune.search.budget import Budget, BudgetSpent
from autotune.testing import SimulatedClock


def test_time_runs_from_when_it_is_made() -> None:
    """What is left falls as the clock moves, and never below zero."""
    clock = SimulatedClock()
    clock.advance(100)
    budget = Budget(time_seconds=60, clock=clock)

    clock.advance(45)

    assert (budget.elapsed_seconds, budget.remaining_seconds) == (45, 15)
    assert budget.consumed == pytest.approx(0.75)
    clock.advance(100)
    assert (budget.remaining_seconds, budget.is_done, budget.consumed) == (0, True, 1)


def test_launches_are_counted_until_there_are_no_more() -> None:
    """The launch after the last is refused, and that is an end with nothing verified."""
    budget = Budget(trials=2)
    budget.count_launch()
    budget.give_back_launch()
    budget.count_launch()
    budget.count_launch()

    with pytest.raises(BudgetSpent) as caught:
        budget.count_launch()

    assert isinstance(caught.value, NothingVerified)
    assert (budget.launches, budget.remaining_launches, budget.consumed) == (2, 0, 1)


def test_without_limits_it_never_ends() -> None:
    """Neither time nor launches run out, and nothing is consumed."""
    budget = Budget(clock=SimulatedClock())

    assert budget.remaining_seconds == budget.remaining_launches == math.inf
    assert (budget.consumed, budget.is_done) == (0, False)
