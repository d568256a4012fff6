"""What a predicted peak is made of and what makes it smaller, in words."""

from collections.abc import Iterator

from autotune.memory.forecast import Estimate
from autotune.memory.trace import Category, Phase

LARGE_SHARE = 0.4
"""Of a peak; a part as large as this is worth a word of advice."""

SHOWN_SHARE = 0.02
"""Parts below this share of a peak are not shown."""

OUTSIDE = "allocator and context"
"""What a device holds beside the bytes of tensors."""

PARTS = {
    Category.PARAMETERS: "parameters",
    Category.GRADIENTS: "gradients",
    Category.OPTIMIZER_STATE: "optimizer state",
    Category.ACTIVATIONS: "activations",
    Category.TEMPORARIES: "temporaries",
    Category.INPUTS: "inputs",
}

REMEDIES = {
    Category.PARAMETERS: "a smaller model, or one whose parameters are frozen or shared out",
    Category.GRADIENTS: "freeze a part of the model",
    Category.OPTIMIZER_STATE: "an optimizer with less state, such as SGD or Adafactor",
    Category.ACTIVATIONS: "checkpointing, of larger blocks if need be, or shorter samples",
    Category.TEMPORARIES: "shorter samples, or smaller outputs, which most of it is made of",
    Category.INPUTS: "shorter samples",
}


def parts_of(estimate: Estimate) -> dict[str, int]:
    """Return the parts of a peak in words → bytes; they add up to it.

    The bytes of tensors come by category, in the order in which they last; then what the device
    holds beside them.
    """
    by_category = estimate.instant.by_category
    parts = {name: by_category.get(category, 0) for category, name in PARTS.items()}
    return parts | {OUTSIDE: estimate.peak_bytes - estimate.instant.peak_bytes}


def parts_words(estimate: Estimate) -> str:
    """Return the parts worth showing with their shares of the tensors, the largest first."""
    instant = estimate.instant
    shares = {
        name: instant.by_category.get(category, 0) / max(instant.peak_bytes, 1)
        for category, name in PARTS.items()
    }
    shown = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {share:.0%}" for name, share in shown if share >= SHOWN_SHARE)


def largest_part(estimate: Estimate, *, name: str) -> str:
    """Return what is largest of a peak, and what makes it smaller.

    Args:
        estimate: The peak.
        name: Whose it is.
    """
    parts = estimate.instant.by_category
    largest = max(parts, key=lambda category: parts[category])
    share = parts[largest] / max(estimate.instant.peak_bytes, 1)
    return f"{share:.0%} of what {name} needs goes to {PARTS[largest]}: {REMEDIES[largest]}"


def advice_on(estimate: Estimate, *, name: str) -> Iterator[str]:
    """Yield what holds a peak up, and what would help, one sentence each.

    Args:
        estimate: The peak.
        name: Whose it is.
    """
    instant = estimate.instant
    state = instant.by_category.get(Category.OPTIMIZER_STATE, 0) / max(instant.peak_bytes, 1)
    if instant.phase is Phase.OPTIMIZER:
        yield (
            f"the peak of {name} is the optimizer's step, whatever the batch size: "
            "fused=True spares its temporaries"
        )
    if state >= LARGE_SHARE or instant.phase is not Phase.OPTIMIZER:
        yield largest_part(estimate, name=name)
