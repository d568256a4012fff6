"""The memory law: bounds that hold whatever the convex curve between its points."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.memory.law import MemoryLaw, Prediction, Split

lines = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**5)), min_size=1, max_size=4)
sizes = st.lists(st.integers(1, 200), min_size=1, max_size=6, unique=True)


def peak_of(pieces: list[tuple[int, int]], size: int) -> int:
    """Return the maximum of some lines: what a peak is, the highest of its moments."""
    return max(base + slope * size for base, slope in pieces)


def law_of(pieces: list[tuple[int, int]], measured: list[int], *, gradients: int = 0) -> MemoryLaw:
    """Return the law of some measured sizes, all accumulated."""
    law = MemoryLaw(gradient_bytes=gradients)
    for size in measured:
        split = Split(batch_size=size, is_accumulated=True)
        law = law.with_peak(split, peak_of(pieces, size) + gradients)
    return law


@given(pieces=lines, measured=sizes, wanted=st.integers(1, 300))
def test_the_bounds_hold_on_every_convex_curve(
    pieces: list[tuple[int, int]], measured: list[int], wanted: int
) -> None:
    """The true peak lies between lower and upper bound, wherever the points are."""
    law, split = law_of(pieces, measured), Split(batch_size=wanted, is_accumulated=True)
    true = peak_of(pieces, wanted)

    assert law.lower_bytes(split) <= true * (1 + 1e-9) + 1e-6
    assert true <= law.upper_bytes(split) * (1 + 1e-9) + 1e-6


@given(pieces=lines, measured=sizes, wanted=st.integers(1, 300), gradients=st.integers(0, 10**6))
def test_the_bounds_hold_where_gradients_are_kept_or_not(
    pieces: list[tuple[int, int]], measured: list[int], wanted: int, gradients: int
) -> None:
    """What was measured with accumulation bounds what runs without, within the gradients."""
    law, split = law_of(pieces, measured, gradients=gradients), Split(batch_size=wanted)
    true = peak_of(pieces, wanted)

    assert law.lower_bytes(split) <= true * (1 + 1e-9) + 1e-6
    assert true <= law.upper_bytes(split) * (1 + 1e-9) + 1e-6


@given(pieces=lines, measured=sizes, wanted=st.integers(1, 300), limit=st.integers(1, 10**7))
def test_what_must_be_over_is_over(
    pieces: list[tuple[int, int]], measured: list[int], wanted: int, limit: int
) -> None:
    """A size that is ruled out truly does not fit, and one that surely fits does."""
    law, split = law_of(pieces, measured), Split(batch_size=wanted, is_accumulated=True)
    true = peak_of(pieces, wanted)

    assert not law.must_be_over(limit, split) or true > limit * (1 - 1e-9) - 1e-6
    assert not law.surely_fits(limit, split) or true <= limit * (1 + 1e-9) + 1e-6


def test_flat_small_batches_say_nothing_of_the_ramp() -> None:
    """Two equal peaks leave every larger size open (METHOD.md F.1)."""
    law = MemoryLaw().with_peak(Split(batch_size=1), 500).with_peak(Split(batch_size=2), 500)

    assert law.predict(Split(batch_size=64)) == Prediction(kind="at_least", peak_bytes=500)
    assert not law.surely_fits(10**9, Split(batch_size=64))
    assert not law.must_be_over(501, Split(batch_size=64))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (2, Prediction(kind="measured", peak_bytes=200)),
        (3, Prediction(kind="at_most", peak_bytes=300)),
        (1, Prediction(kind="at_most", peak_bytes=200)),
        (8, Prediction(kind="at_least", peak_bytes=800)),
    ],
)
def test_a_prediction_says_how_it_was_got(size: int, expected: Prediction) -> None:
    """Measured, bounded between points and below, or bounded from below beyond them."""
    law = MemoryLaw().with_peak(Split(batch_size=2), 200).with_peak(Split(batch_size=4), 400)

    assert law.predict(Split(batch_size=size)) == expected


def test_an_empty_law_predicts_nothing() -> None:
    """Without a peak there is no bound."""
    assert MemoryLaw().predict(Split(batch_size=1)) == Prediction(kind="unknown", peak_bytes=None)


def test_a_size_that_ran_out_rules_out_larger_ones() -> None:
    """The limit that was passed is a lower bound for it and for all above, and for no other."""
    law = MemoryLaw().with_excess(Split(batch_size=16), 1000)

    assert law.must_be_over(1000, Split(batch_size=32))
    assert not law.must_be_over(1001, Split(batch_size=32))
    assert not law.must_be_over(1000, Split(batch_size=8))


def test_the_largest_peak_of_a_split_counts() -> None:
    """A second look that saw less does not lower the law; running out overrides it."""
    split = Split(batch_size=4)
    law = MemoryLaw().with_peak(split, 400).with_peak(split, 380)

    assert law.predict(split).peak_bytes == 400
    assert law.with_excess(split, 350).must_be_over(350, split)


def test_an_allocators_rounding_is_no_ramp() -> None:
    """Reserved bytes that grow by a segment between two sizes prove nothing."""
    exact = MemoryLaw().with_peak(Split(batch_size=1), 100).with_peak(Split(batch_size=2), 120)
    rounded = MemoryLaw(peaks=exact.peaks, rounding_bytes=20)

    assert exact.must_be_over(500, Split(batch_size=64))
    assert not rounded.must_be_over(500, Split(batch_size=64))
