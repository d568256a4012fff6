"""Remarks on measurements."""

from dataclasses import replace

from strategies import MIB, sample_summary

from autotune.outcome import Measured, Measurement, Trial
from autotune.search.remarks import on_growth


def verified(growth_bytes: int | None) -> Trial:
    """Return a trial with 100 MiB to its limit."""
    seen = Measurement(peak_bytes=100 * MIB, limit_bytes=200 * MIB, growth_bytes=growth_bytes)
    return replace(sample_summary().baseline, outcome=Measured(measurement=seen))


def test_memory_that_stands_is_not_remarked_on() -> None:
    """Nor is what was not looked at."""
    assert not [*on_growth(verified(None))]


def test_memory_that_grows_is_told_with_its_end() -> None:
    """Bytes a step, and the steps until the limit."""
    (told,) = on_growth(verified(MIB // 10))

    assert "102 KiB with each optimizer step" in told
    assert "after about 1,000 steps" in told
