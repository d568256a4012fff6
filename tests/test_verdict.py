"""The measured ratio that a verdict rests on."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.verdict import Estimate


def estimate(value: float) -> Estimate:
    """Return a ratio of ten pairs."""
    return Estimate(value=value, low=value - 0.03, high=value + 0.03, pairs=10, is_confirmed=True)


@given(value=st.floats(0.01, 100))
def test_an_estimate_round_trips(value: float) -> None:
    """What `config.json` holds is all of it."""
    document = json.loads(json.dumps(estimate(value).to_dict()))

    assert Estimate(**document) == estimate(value)


@pytest.mark.parametrize(("value", "expected"), [(1.02, True), (1.0, False), (0.9, False)])
def test_only_what_is_faster_is_a_gain(value: float, expected: bool) -> None:
    """A rival at the baseline's own speed wins nothing back."""
    assert estimate(value).is_gain is expected
