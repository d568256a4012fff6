"""What the peaks that were measured say of the sizes that were not: bounds, never guesses.

Live bytes at each moment of a step are affine in the batch size, so the peak, their maximum, is
convex in it (MEMORY.md A2). Hence a chord between two measured sizes is an upper bound between
them, and a lower bound beyond them: a law of measured peaks can prove that a size does not fit, but
never that a larger one than those measured does. Small batches may be flat, where the optimizer's
step is the peak, and say nothing of the ramp (METHOD.md F.1).

Accumulation keeps gradients alive in a forward pass, so two splits that differ in whether they
accumulate differ by up to the bytes of the gradients beside the batch size.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Self

Kind = Literal["measured", "at_most", "at_least", "unknown"]
"""How a predicted peak was got, and so what it may be used for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Batch size, and whether gradients are accumulated over more than one of them."""

    batch_size: int
    is_accumulated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """A peak that was measured, or a limit that was passed.

    Args:
        split: What ran.
        low_bytes: The peak is at least this.
        high_bytes: The peak is at most this; infinite where memory ran out.
    """

    split: Split
    low_bytes: float
    high_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A predicted peak in bytes, and how it was got; no bytes where nothing is known."""

    kind: Kind
    peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLaw:
    """The measured law of one cell: configs that differ in nothing but how they are split.

    Args:
        peaks: What was seen.
        gradient_bytes: Most bytes that gradients hold.
        rounding_bytes: How far a measured peak may be from the convex curve: 0 where tensor bytes
            are counted, some segments where an allocator's reserved bytes are.

    >>> law = MemoryLaw().with_peak(Split(batch_size=2), 200).with_peak(Split(batch_size=4), 400)
    >>> law.predict(Split(batch_size=3))
    Prediction(kind='at_most', peak_bytes=300)
    >>> law.must_be_over(500, Split(batch_size=6))
    True
    """

    peaks: tuple[Peak, ...] = ()
    gradient_bytes: int = 0
    rounding_bytes: int = 0

    def with_peak(self, split: Split, peak_bytes: int) -> Self:
        """Return the law with a measured peak more; the largest of a split counts."""
        known = [peak for peak in self.peaks if peak.split == split]
        most = max([peak_bytes, *(int(p.high_bytes) for p in known if p.high_bytes < math.inf)])
        return self._with(Peak(split=split, low_bytes=most, high_bytes=most))

    def with_excess(self, split: Split, limit_bytes: int) -> Self:
        """Return the law with a split more that ran out of memory at a limit."""
        return self._with(Peak(split=split, low_bytes=limit_bytes + 1, high_bytes=math.inf))

    def _with(self, new: Peak) -> Self:
        others = tuple(peak for peak in self.peaks if peak.split != new.split)
        peaks = sorted((*others, new), key=lambda p: (p.split.batch_size, p.split.is_accumulated))
        return replace(self, peaks=tuple(peaks))

    def predict(self, split: Split) -> Prediction:
        """Return the predicted peak: measured, else an upper bound, else a lower bound."""
        own = [peak for peak in self.peaks if peak.split == split]
        if own and own[0].high_bytes < math.inf:
            return Prediction(kind="measured", peak_bytes=int(own[0].high_bytes))
        upper = self.upper_bytes(split)
        if upper < math.inf:
            return Prediction(kind="at_most", peak_bytes=math.ceil(upper))
        lower = self.lower_bytes(split)
        return Prediction(
            kind="at_least" if lower > 0 else "unknown",
            peak_bytes=math.floor(lower) if lower > 0 else None,
        )

    def upper_bytes(self, split: Split) -> float:
        """Return the least upper bound that the peaks allow; infinite where there is none."""
        points = self._seen_from(split)
        above = [p.high_bytes for p in points if p.split.batch_size >= split.batch_size]
        below = [p for p in points if p.split.batch_size < split.batch_size]
        chords = [
            _line(split.batch_size, (low.split.batch_size, low.high_bytes), _corner(high))
            for low in below
            for high in points
            if high.split.batch_size > split.batch_size and high.high_bytes < math.inf
        ]
        return min([*above, *chords], default=math.inf)

    def lower_bytes(self, split: Split) -> float:
        """Return the greatest lower bound that the peaks allow; 0 where there is none."""
        points = self._seen_from(split)
        at_least = [p.low_bytes for p in points if p.split.batch_size <= split.batch_size]
        return max([0.0, *at_least, *_extrapolated(points, split.batch_size)])

    def must_be_over(self, limit_bytes: float, split: Split) -> bool:
        """Whether the peaks prove that a split does not fit."""
        return self.lower_bytes(split) > limit_bytes

    def surely_fits(self, limit_bytes: float, split: Split) -> bool:
        """Whether the peaks prove that a split fits."""
        return self.upper_bytes(split) <= limit_bytes

    def _seen_from(self, split: Split) -> list[Peak]:
        """Return the peaks as bounds for splits that accumulate as this one does."""
        return [self._converted(peak, split) for peak in self.peaks]

    def _converted(self, peak: Peak, split: Split) -> Peak:
        down = up = self.rounding_bytes * (peak.split != split)
        if peak.split.is_accumulated and not split.is_accumulated:
            down += self.gradient_bytes
        if split.is_accumulated and not peak.split.is_accumulated:
            up += self.gradient_bytes
        return replace(
            peak, low_bytes=max(peak.low_bytes - down, 0), high_bytes=peak.high_bytes + up
        )


def _corner(peak: Peak) -> tuple[int, float]:
    return peak.split.batch_size, peak.high_bytes


def _extrapolated(points: Iterable[Peak], size: int) -> list[float]:
    """Return what chords of two smaller sizes say of `size` at least."""
    smaller = [p for p in points if p.split.batch_size < size]
    return [
        _line(size, (low.split.batch_size, low.high_bytes), (high.split.batch_size, high.low_bytes))
        for low in smaller
        for high in smaller
        if low.split.batch_size < high.split.batch_size and low.high_bytes < math.inf
    ]


def _line(size: int, first: tuple[int, float], second: tuple[int, float]) -> float:
    """Return the value at `size` of the line through two points."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return first[1] + slope * (size - first[0])
