"""Two traces made one law: what the same step allocates at any batch size.

The size of each allocation is affine in the batch size, `size(b) = base + slope * b`, and so is
fitted from two traces; replayed at another size they give its peak exactly, where a line through
peaks is wrong by up to 62 % (MEMORY.md A2, A3). Where two traces differ in more than sizes, or an
allocation grows in another way, there is no law, and each size has to be traced.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from autotune.memory.trace import Trace, peak_bytes

FITTED_SIZES = (2, 3)
"""Batch sizes that are traced. Never 1: broadcasting makes a special case of it."""

MOST_SAMPLES = 2**16
"""Larger batches are not looked for: grids of kernels end there (CASES.md row 52)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLaw:
    """A step at any batch size.

    Args:
        trace: At the smaller of the fitted sizes.
        slopes: Bytes that a further sample adds to each allocation.
    """

    trace: Trace
    slopes: tuple[int, ...]

    def at(self, batch_size: int) -> Trace:
        """Return the trace at a batch size."""
        more = batch_size - self.trace.batch_size
        sizes = tuple(
            size + slope * more for size, slope in zip(self.trace.sizes, self.slopes, strict=True)
        )
        return replace(self.trace, batch_size=batch_size, sizes=sizes)


def fit_law(smaller: Trace, larger: Trace) -> TraceLaw | None:
    """Return the law of two traces of one step; None where they do not follow one.

    Args:
        smaller: At a batch size.
        larger: At another.
    """
    if (smaller.events, smaller.categories) != (larger.events, larger.categories):
        return None
    samples = larger.batch_size - smaller.batch_size
    slopes = []
    for size, next_size in zip(smaller.sizes, larger.sizes, strict=True):
        slope, rest = divmod(next_size - size, samples)
        # Below zero at no sample, it grows faster than the batch does: a matrix of all pairs, say.
        if rest or slope < 0 or size < slope * smaller.batch_size:
            return None
        slopes.append(slope)
    return TraceLaw(trace=smaller, slopes=tuple(slopes))


def largest_batch(fits: Callable[[int], bool], *, most: int = MOST_SAMPLES, start: int = 1) -> int:
    """Return the largest batch size that fits, by doubling and bisection; 0 where none does.

    Args:
        fits: Whether a size fits; if one does, so do all below.
        most: The largest size that is asked for.
        start: Where to begin.

    >>> largest_batch(lambda size: size <= 21, most=100)
    21
    """
    low, high = 0, start
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def largest_batch_of(law: TraceLaw, limit_bytes: int, *, most: int = MOST_SAMPLES) -> int:
    """Return the largest batch size whose live bytes stay within a limit; 0 where none does."""
    return largest_batch(lambda size: peak_bytes(law.at(size)) <= limit_bytes, most=most)
