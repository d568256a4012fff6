"""Tests of autotune/device/peak.py: the record of a peak."""

from dataclasses import FrozenInstanceError

import pytest

from autotune.device.peak import Peak


def test_peak_is_a_record_that_holds_still() -> None:
    """A peak that was measured does not change, and equals another with the same figures."""
    peak = Peak(allocated_bytes=3, reserved_bytes=None, source="tracker", operator="aten.mm")

    with pytest.raises(FrozenInstanceError):
        peak.allocated_bytes = 4  # type: ignore[misc]
    assert peak == Peak(
        allocated_bytes=3, reserved_bytes=None, source="tracker", operator="aten.mm"
    )
