"""What a reader should know of how the measurements came out."""

from collections.abc import Iterator

from autotune.outcome import Trial
from autotune.search.confirm import UNSTABLE_SPREAD, Confirmation, detectable_gain
from autotune.units import format_bytes


def on_spread(found: Confirmation) -> Iterator[str]:
    """Yield what the spread of the pairs means for what could be seen."""
    if found.spread is None or found.estimate is None:
        return
    if found.spread > UNSTABLE_SPREAD:
        yield (
            f"unstable: pairs of launches differ by {found.spread:.1%}; other work on this "
            "machine, or samples of very unequal size"
        )
    if found.ending == "lost":
        least = detectable_gain(found.spread, found.estimate.pairs)
        yield f"gains under {least:.1%} cannot be seen in so many launches here"


def on_growth(verified: Trial) -> Iterator[str]:
    """Yield that memory grows from step to step, and after how many steps that ends a training."""
    seen = verified.measured
    if seen is None or not seen.growth_bytes:
        return
    grown = f"memory grows by {format_bytes(seen.growth_bytes)} with each optimizer step"
    if seen.limit_bytes and seen.peak_bytes:
        steps = (seen.limit_bytes - seen.peak_bytes) // seen.growth_bytes
        grown += f", so that the limit is met after about {steps:,} steps"
    yield f"{grown}; does the loss or the model keep tensors of earlier steps?"
