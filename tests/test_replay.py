"""Laws of two traces: every allocation is affine in the batch size."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import trace_of

from autotune.memory.replay import fit_law, largest_batch, largest_batch_of
from autotune.memory.trace import Trace, peak_bytes


def step(batch_size: int, *, fixed: int = 100, slope: int = 10) -> Trace:
    """A parameter, an activation that grows, and a temporary of the optimizer."""
    sizes = (fixed, slope * batch_size, 300)
    return trace_of(sizes, (0, 1, ~1, 2, ~2), batch_size=batch_size)


@given(st.integers(1, 10_000), st.integers(0, 1000), st.integers(0, 1000))
def test_a_law_gives_every_size_exactly(size: int, fixed: int, slope: int) -> None:
    """What is affine is replayed exactly, however far away."""
    law = fit_law(
        step(2, fixed=fixed, slope=slope),
        step(3, fixed=fixed, slope=slope),
    )

    assert law is not None
    assert law.at(size).sizes == step(size, fixed=fixed, slope=slope).sizes


def test_row_14_a_plateau_is_not_taken_for_a_slope_of_zero() -> None:
    """Both traces peak in the optimizer at 400 bytes; at 64 samples it is the activation's."""
    law = fit_law(step(2), step(3))

    assert peak_bytes(step(2)) == peak_bytes(step(3)) == 400
    assert law is not None
    assert peak_bytes(law.at(64)) == 100 + 640


@pytest.mark.parametrize(
    "other",
    [
        trace_of((100, 30, 300), (0, 1, 2, ~2, ~1), batch_size=3),
        trace_of((100, 10, 300), (0, 1, ~1, 2, ~2), batch_size=3),
        trace_of((100, 45, 300), (0, 1, ~1, 2, ~2), batch_size=3),
    ],
    ids=["another order", "one that shrinks", "one that grows faster than the batch"],
)
def test_what_is_not_affine_has_no_law(other: Trace) -> None:
    """Such a step has to be traced at each size."""
    assert fit_law(step(2), other) is None


def test_a_law_needs_whole_bytes_a_sample() -> None:
    """Five bytes more for two samples are not affine."""
    wider = replace(step(2), batch_size=4, sizes=(100, 25, 300))

    assert fit_law(step(2), wider) is None


@given(st.integers(0, 200), st.integers(1, 150))
def test_the_largest_batch_is_the_largest_that_fits(true: int, most: int) -> None:
    """Neither one more nor one less, and never above the most."""
    assert largest_batch(lambda size: size <= true, most=most) == min(true, most)


def test_the_largest_batch_of_a_law_stays_within_the_limit() -> None:
    """One sample more would not."""
    law = fit_law(step(2), step(3))

    assert law is not None
    assert largest_batch_of(law, 1000) == 90
    assert peak_bytes(law.at(90)) == 1000
