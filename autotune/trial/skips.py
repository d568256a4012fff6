"""Steps that a gradient scaler skips, since their gradients overflow: counted and bounded.

A scaler begins with a scale that is often too large and halves it at each overflow, so that the
first steps of a run may well be skipped. One that goes on skipping trains nothing.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from autotune.step.scaling import ScalingStepper
from autotune.step.window import Stepper

MOST_SKIPS = 16
"""Steps that a scaler may skip: it halves its scale each time, and so comes from 2¹⁶ to 1, below
which it is not the scale that is at fault."""

SKIPPED_SHARE = 0.25
"""Of the timed steps that a scaler may skip: without the optimizer they take less time, and train
nothing; one of four may come of a scale that still falls."""


def step_until_made(
    stepper: Stepper, window: Sequence[Any], *, most_skips: int = MOST_SKIPS
) -> tuple[Tensor, int]:
    """Make a step, anew where a scaler skips it; return its loss and how often it was skipped."""
    scale, loss = scale_of(stepper), stepper(window)
    skips = 0
    while skips < most_skips and scale_of(stepper) < scale:
        scale, loss, skips = scale_of(stepper), stepper(window), skips + 1
    return loss, skips


def scale_of(stepper: Stepper) -> float:
    """Return what a stepper's scaler multiplies losses by now; 1 where it has none."""
    return stepper.scaler.get_scale() if isinstance(stepper, ScalingStepper) else 1.0


def never_made(skips: int) -> str:
    """Return in words that a scaler skipped a step until nothing was left; empty if it did not."""
    is_stuck = skips >= MOST_SKIPS
    return (
        f"the scaler skipped {skips} steps: gradients overflow at every scale" if is_stuck else ""
    )


def seldom_made(before: float, after: float, *, steps: int) -> str:
    """Return in words that a scaler skipped too many of some steps; empty if it did not.

    Args:
        before: Its scale before them.
        after: Its scale after them; it grows but once in 2,000 steps.
        steps: How many were made.
    """
    skips = round(math.log2(before / after))
    is_often = skips > SKIPPED_SHARE * steps
    return f"the scaler skipped {skips} of {steps} steps: gradients overflow" if is_often else ""
