"""Several launches as one measurement."""

import math

import pytest

from autotune.outcome import Crashed, Measured, Measurement, OutOfMemory
from autotune.search.combine import combined, pooled


def of_rate(rate: float, *, peak: int | None = None) -> Measurement:
    """A measurement of one launch."""
    return Measurement(samples_per_second=rate, peak_bytes=peak)


def test_rates_are_averaged_over_launches() -> None:
    """Geometric mean, largest peak, and an interval by Student's t (t = 12.71 for two)."""
    seen = pooled([of_rate(100, peak=5), of_rate(121, peak=7)])

    assert seen.samples_per_second == pytest.approx(110)
    assert (seen.peak_bytes, seen.launches) == (7, 2)
    assert seen.samples_per_second_interval is not None
    low, high = seen.samples_per_second_interval
    half = 12.7062 * math.log(121 / 100) / 2
    assert (low, high) == pytest.approx((110 * math.exp(-half), 110 * math.exp(half)), rel=1e-4)


def test_one_launch_has_no_interval() -> None:
    """The spread of a single launch is unknown."""
    seen = pooled([of_rate(100)])

    assert (seen.samples_per_second, seen.samples_per_second_interval) == (100, None)


def test_the_first_failure_is_the_end_of_a_trial() -> None:
    """A config that failed once failed, whatever its other launches gave."""
    good = Measured(measurement=of_rate(100))
    bad = OutOfMemory(reason="1 GiB")

    assert combined([good, bad, Crashed(reason="SIGSEGV")]) == bad


def test_reasons_are_told_once() -> None:
    """Launches that say the same say it once."""
    good = Measured(measurement=of_rate(100), reason="slow to settle")

    assert combined([good, good]).reason == "slow to settle"
    with pytest.raises(ValueError, match="at least one launch"):
        combined([])
