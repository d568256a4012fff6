"""Everything that a run found, in plain records."""

from dataclasses import FrozenInstanceError

import pytest
from strategies import sample_summary


def test_a_summary_does_not_change() -> None:
    """What the files are written from is the same for all of them."""
    summary = sample_summary()
    with pytest.raises(FrozenInstanceError):
        summary.verdict = "keep"  # type: ignore[misc]  # which is the point
