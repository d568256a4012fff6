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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Literal, Self

Kind = Literal["measured", "foretold", "at_most", "at_least", "unknown"]
"""How a predicted peak was got, and so what it may be used for; `foretold` is by traces."""


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

    @property
    def size(self) -> int:
        """The batch size."""
        return self.split.batch_size

    @property
    def is_bounded(self) -> bool:
        """Whether an upper bound is known: whether it ran."""
        return self.high_bytes < math.inf

    @property
    def floor(self) -> tuple[int, float]:
        """Batch size and lower bound: a point below the curve."""
        return self.size, self.low_bytes

    @property
    def roof(self) -> tuple[int, float]:
        """Batch size and upper bound: a point above the curve."""
        return self.size, self.high_bytes


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
        seen = self._measured_bytes(split)
        most = peak_bytes if seen is None else max(peak_bytes, seen)
        return self._with(Peak(split=split, low_bytes=most, high_bytes=most))

    def with_excess(self, split: Split, limit_bytes: int) -> Self:
        """Return the law with a split more that ran out of memory at a limit."""
        return self._with(Peak(split=split, low_bytes=limit_bytes + 1, high_bytes=math.inf))

    def _with(self, new: Peak) -> Self:
        others = tuple(peak for peak in self.peaks if peak.split != new.split)
        peaks = sorted((*others, new), key=lambda p: (p.size, p.split.is_accumulated))
        return replace(self, peaks=tuple(peaks))

    def predict(self, split: Split) -> Prediction:
        """Return the predicted peak: measured, else an upper bound, else a lower bound."""
        seen = self._measured_bytes(split)
        if seen is not None:
            return Prediction(kind="measured", peak_bytes=seen)
        upper, lower = self.upper_bytes(split), self.lower_bytes(split)
        if upper < math.inf:
            return Prediction(kind="at_most", peak_bytes=math.ceil(upper))
        if lower > 0:
            return Prediction(kind="at_least", peak_bytes=math.floor(lower))
        return Prediction(kind="unknown", peak_bytes=None)

    def _measured_bytes(self, split: Split) -> int | None:
        """Return the measured peak of a split; None where it did not run."""
        own = (int(p.high_bytes) for p in self.peaks if p.split == split and p.is_bounded)
        return next(own, None)

    def upper_bytes(self, split: Split) -> float:
        """Return the least upper bound that the peaks allow; infinite where there is none."""
        points = self._seen_from(split)
        above = [p.high_bytes for p in points if p.size >= split.batch_size]
        return min([*above, *_between(points, split.batch_size)], default=math.inf)

    def lower_bytes(self, split: Split) -> float:
        """Return the greatest lower bound that the peaks allow; 0 where there is none."""
        points = self._seen_from(split)
        below = [p.low_bytes for p in points if p.size <= split.batch_size]
        return max([0.0, *below, *_beyond(points, split.batch_size)])

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
        ran_with_more = peak.split.is_accumulated - split.is_accumulated  # 1, 0 or -1
        rounding = self.rounding_bytes * (peak.split != split)
        down = rounding + self.gradient_bytes * max(ran_with_more, 0)
        up = rounding + self.gradient_bytes * max(-ran_with_more, 0)
        return replace(
            peak, low_bytes=max(peak.low_bytes - down, 0), high_bytes=peak.high_bytes + up
        )


def _between(points: Sequence[Peak], size: int) -> Iterator[float]:
    """Yield what chords of a smaller and a larger size say of `size` at most."""
    for low, high in _chords(points):
        if low.size < size < high.size and high.is_bounded:
            yield _line(size, low.roof, high.roof)


def _beyond(points: Sequence[Peak], size: int) -> Iterator[float]:
    """Yield what chords of two smaller sizes say of `size` at least."""
    for low, high in _chords(points):
        if high.size < size:
            yield _line(size, low.roof, high.floor)


def _chords(points: Sequence[Peak]) -> Iterator[tuple[Peak, Peak]]:
    """Yield all pairs of a size that ran and a larger one."""
    pairs = permutations(points, 2)
    return ((low, high) for low, high in pairs if low.is_bounded and low.size < high.size)


def _line(size: int, first: tuple[int, float], second: tuple[int, float]) -> float:
    """Return the value at `size` of the line through two points."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return first[1] + slope * (size - first[0])
