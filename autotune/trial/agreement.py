"""How far two sets of gradients may be apart, and whether they are further.

Autocast rounds, and rounding moves the gradients of one model by a thousandth and those of
another by their own size. So what is allowed is measured on the model itself: on a few sets of
gradients for which each number on the way was moved at random by as much as rounding moves it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, isfinite

SENSITIVITY = 2.0
"""Times the largest effect of moves that rounding may have: it is one draw more, if from the same
distribution."""

RELATIVE = 0.05
"""Of its own norm, by which a gradient may differ under autocast all the same. Where samples are
much alike, their roundings are too, and do not cancel as moves do: seen up to 0.07, of which
moves explained a third (24 layers with tanh)."""

FLOOR = 0.002
"""Of the model's root-mean-square gradient: what is smaller is rounding noise."""

# With these figures the largest error was 0.84 times what is allowed on 14 kinds of networks of
# torchvision, BERT, GPT-2, an LSTM and 24 layers with tanh (batches of 2 to 512 samples, bf16),
# and none of 810 small networks of fully connected layers was distrusted. A gradient of 1.5 times
# its size was found wherever it was not below the floor of such a network, save once.

SPLIT_RELATIVE = 1e-3
SPLIT_FLOOR = 1e-4
"""As above, between a whole and a split batch in fp32: sums of 2¹⁰ to 2²⁰ terms in another
order differ by about 1e-6 to 1e-4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Loss and gradients of one window, in host memory."""

    loss: float
    by_name: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far gradients may be apart.

    Args:
        relative: Share of a gradient's own norm.
        floor: Share of the model's root-mean-square gradient.
    """

    relative: float
    floor: float


ROUNDED = Tolerance(relative=RELATIVE, floor=FLOOR)
EXACT = Tolerance(relative=SPLIT_RELATIVE, floor=SPLIT_FLOOR)


def difference(
    reference: Gradients, found: Gradients, *, moved: Sequence[Gradients], tolerance: Tolerance
) -> str:
    """Return in words how the gradients differ by more than is allowed; empty if they do not.

    Args:
        reference: Those that are right; nothing can be compared with what is not finite.
        found: Those that are looked at.
        moved: Those with moves as rounding makes them, which say how much rounding may do.
        tolerance: What is allowed beside that.
    """
    if not is_finite(reference):
        return ""
    if not is_finite(found):
        return "loss or gradients are not finite"
    moved = [one for one in moved if is_finite(one)]
    rounding = max((abs(one.loss - reference.loss) for one in moved), default=0.0)
    off = tolerance.relative * abs(reference.loss) + SENSITIVITY * rounding
    if abs(found.loss - reference.loss) > max(off, tolerance.floor):
        return f"the loss is {found.loss:.6g} where the baseline's is {reference.loss:.6g}"
    excesses = _excesses(reference, found, moved, tolerance)
    worst, name, share = max(excesses, default=(0.0, "", 0.0))
    if worst <= 1:
        return ""
    return f"the gradient of {name} is off by {share:.2g} of its size, {worst:.1f} × the allowed"


def _excesses(
    reference: Gradients, found: Gradients, moved: Sequence[Gradients], tolerance: Tolerance
) -> Iterator[tuple[float, str, float]]:
    """Yield each gradient's error over what is allowed, its name, and its error over its norm."""
    norms = {name: float(expected.norm()) for name, expected in reference.by_name.items()}
    numbers = sum(expected.numel() for expected in reference.by_name.values())
    typical = math.hypot(*norms.values()) / numbers**0.5
    for name, norm in norms.items():
        rounding = max((_distance(one, reference, name) for one in moved), default=0.0)
        noise = tolerance.floor * typical * reference.by_name[name].numel() ** 0.5
        allowed = SENSITIVITY * rounding + tolerance.relative * norm + noise
        error = _distance(found, reference, name)
        yield error / allowed if allowed else float(error > 0) * 2, name, error / (norm or 1.0)


def _distance(one: Gradients, other: Gradients, name: str) -> float:
    return float((one.by_name[name] - other.by_name[name]).norm())


def is_finite(found: Gradients) -> bool:
    """Whether the loss and every gradient is a number."""
    return math.isfinite(found.loss) and all(
        bool(isfinite(gradient).all()) for gradient in found.by_name.values()
    )
