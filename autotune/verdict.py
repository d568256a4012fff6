"""What is said at the end, and the measured ratio that it rests on."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["tuned", "keep", "unconfirmed", "interrupted"]
"""What is said at the end (DESIGN 2.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A ratio measured by interleaved pairs of launches.

    Args:
        value: How many times as fast as the baseline, end to end.
        low: Lower end of the 95 % interval.
        high: Upper end of the 95 % interval.
        pairs: Pairs of launches that it comes from.
        is_confirmed: Whether it passed the winner rule (METHOD.md D.3).
    """

    value: float
    low: float
    high: float
    pairs: int
    is_confirmed: bool

    @property
    def is_gain(self) -> bool:
        """Whether it is faster at all; the interval says how sure that is."""
        return self.value > 1

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as `config.json` holds it."""
        return asdict(self)
