"""Tests of autotune/trial/agreement.py: how far gradients may be apart."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.trial.agreement import (
    EXACT,
    FLOOR,
    RELATIVE,
    ROUNDED,
    SENSITIVITY,
    SPLIT_RELATIVE,
    Gradients,
    difference,
    is_finite,
)

ONES = torch.ones(100)
REFERENCE = Gradients(loss=1.0, by_name={"weight": ONES})


def with_weight(value: torch.Tensor, *, loss: float = 1.0) -> Gradients:
    """Return gradients whose only parameter has this one."""
    return Gradients(loss=loss, by_name={"weight": value})


def test_the_same_gradients_agree() -> None:
    """Exactly, with no move to compare with, and if they are all zero."""
    zero = with_weight(ONES * 0)

    assert difference(REFERENCE, REFERENCE, moved=[], tolerance=EXACT) == ""
    assert difference(zero, zero, moved=[], tolerance=EXACT) == ""
    assert "weight" in difference(zero, REFERENCE, moved=[], tolerance=EXACT)


@given(error=st.floats(-1, 1))
def test_a_gradient_may_differ_by_a_share_of_itself(error: float) -> None:
    """Of its norm, and of the model's typical gradient, which here is the same."""
    reason = difference(REFERENCE, with_weight(ONES * (1 + error)), moved=[], tolerance=ROUNDED)

    allowed = RELATIVE + FLOOR
    assert (reason == "") == (abs(error) <= allowed) or abs(error) == pytest.approx(allowed)


@given(error=st.floats(0, 1), rounding=st.floats(0, 0.5))
def test_a_gradient_may_differ_as_rounding_moves_it(error: float, rounding: float) -> None:
    """A few times as far: the largest move counts."""
    moved = [with_weight(ONES * (1 + share * rounding)) for share in (0.1, 1.0, 0.5)]
    found = with_weight(ONES * (1 + error))

    reason = difference(REFERENCE, found, moved=moved, tolerance=ROUNDED)

    allowed = SENSITIVITY * rounding + RELATIVE + FLOOR
    assert (reason == "") == (error <= allowed) or error == pytest.approx(allowed, rel=1e-4)


@pytest.mark.parametrize(("error", "agrees"), [(0.69, True), (0.73, False)])
def test_a_vanishing_gradient_may_be_noise(error: float, *, agrees: bool) -> None:
    """Below a share of the model's typical gradient, which here is the root of a half."""
    reference = Gradients(loss=1.0, by_name={"weight": ONES, "bias": ONES * 0})
    found = Gradients(loss=1.0, by_name={"weight": ONES, "bias": ONES * error * FLOOR})

    reason = difference(reference, found, moved=[], tolerance=ROUNDED)

    assert (reason == "") == agrees


def test_the_worst_gradient_is_named() -> None:
    """With how far it is off, and how far it may be."""
    reference = Gradients(loss=1.0, by_name={"good": ONES, "bad": ONES, "worse": ONES})
    found = Gradients(loss=1.0, by_name={"good": ONES, "bad": ONES * 1.2, "worse": ONES * 1.5})

    reason = difference(reference, found, moved=[], tolerance=ROUNDED)

    assert reason == "the gradient of worse is off by 0.5 of its size, 9.6 × the allowed"


@pytest.mark.parametrize(("loss", "agrees"), [(1.04, True), (1.06, False), (0.94, False)])
def test_the_loss_has_to_agree_too(loss: float, *, agrees: bool) -> None:
    """By the same share of itself."""
    reason = difference(REFERENCE, with_weight(ONES, loss=loss), moved=[], tolerance=ROUNDED)

    assert (reason == "") == agrees


def test_moves_of_the_loss_are_allowed_for() -> None:
    """And a move that gave no number says nothing."""
    moved = [with_weight(ONES, loss=1.1), with_weight(ONES * float("nan"))]

    reason = difference(REFERENCE, with_weight(ONES, loss=1.2), moved=moved, tolerance=ROUNDED)

    assert reason == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_agrees_with_nothing(value: float) -> None:
    """Unless the reference is not finite either: then there is nothing to compare with."""
    found, lost = with_weight(ONES * value), with_weight(ONES, loss=value)

    assert not is_finite(found)
    assert difference(REFERENCE, found, moved=[], tolerance=ROUNDED).endswith("not finite")
    assert difference(REFERENCE, lost, moved=[], tolerance=ROUNDED).endswith("not finite")
    assert difference(found, REFERENCE, moved=[], tolerance=ROUNDED) == ""


@pytest.mark.parametrize("exponent", [10, 20])
def test_another_order_of_a_sum_is_within_the_tolerance(exponent: int) -> None:
    """Of so many terms of either sign, in fp32: what a split of a batch changes."""
    torch.manual_seed(0)
    terms = torch.randn(2**exponent, 4)
    whole = Gradients(loss=1.0, by_name={"weight": terms.sum(0)})
    halves = terms.reshape(2, -1, 4).sum(1)
    split = Gradients(loss=1.0, by_name={"weight": halves[0] + halves[1]})

    assert difference(whole, split, moved=[], tolerance=EXACT) == ""
    assert SPLIT_RELATIVE < RELATIVE
