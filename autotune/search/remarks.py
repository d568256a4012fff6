"""What a reader should know of how the measurements came out."""

from collections.abc import Iterator

from autotune.facts import WorkloadFacts
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


def on_itself(facts: WorkloadFacts) -> Iterator[str]:
    """Yield, in one line, what the model does by itself, and what follows for its tuning."""
    own = facts.does_itself
    parts = [words.format(own[way]) for way, words in _ITSELF.items() if way in own]
    if parts:
        yield f"by itself the workload {'; '.join(parts)}"


_ITSELF = {
    "amp": "autocasts to {0}, so amp is not put on top of it",
    "scaler": (
        "scales its loss by a {0}, so amp is not tuned; gradients stay scaled, since nothing "
        "calls its step: better return the loss itself"
    ),
    "checkpointing": "checkpoints, so none is put on top of it",
    "compile": "is compiled by {0}: memory is measured as it runs uncompiled",
    "shared": "shares parameters ({0}), each counted and stepped once",
}
"""What a workload may do by itself → what is said of it."""
