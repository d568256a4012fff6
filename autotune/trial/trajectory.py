"""A few optimizer steps of a config beside the baseline's, from one state on the same samples.

Gradients that agree where training starts leave open what a scaler, an optimizer or the buffers
make of them; here the losses of some steps are compared, and where the weights have come to.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autotune.step.restore import borrowed
from autotune.step.window import Stepper
from autotune.trial.agreement import SENSITIVITY, Tolerance
from autotune.trial.seeds import seed_everything
from autotune.trial.skips import MOST_SKIPS, never_made, step_until_made

STEPS = 3
"""Optimizer steps: the second meets the optimizer's state, the third what both have made."""

MOST_SAMPLES = 4
"""Of a step: gradients were compared on more, and so these steps cost less than that did."""

STRAYED = 0.5
"""Share of the way that the weights go by which they may end elsewhere before it is looked at what
rounding does: Adam goes as far for the smallest gradient as for the largest, so that the sign of
a gradient that is near zero counts in full. Seen were 0.003 to 0.31 in bf16 on networks without
BatchNorm and 1.2 on a ResNet-18, whose rounding explains as much; weights that go nowhere are 1
apart, those that go twice as far too, and those that go the other way 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Some optimizer steps that were made.

    Args:
        losses: Of each step, before it.
        moved: Parameter → how it has moved over all steps, in host memory.
        skips: How often a scaler skipped a step, which was made anew.
    """

    losses: tuple[float, ...]
    moved: Mapping[str, Tensor]
    skips: int = 0

    @property
    def is_finite(self) -> bool:
        """Whether every loss and every weight is a number."""
        are_finite = (bool(part.isfinite().all()) for part in self.moved.values())
        return all(map(math.isfinite, self.losses)) and all(are_finite)


def follow(
    stepper: Stepper,
    windows: Sequence[Sequence[Any]],
    *,
    around: AbstractContextManager[object] | None = None,
) -> Trajectory:
    """Make an optimizer step of each window; model and optimizer are as before afterwards.

    Args:
        stepper: What makes the steps, from the same random numbers each time.
        windows: The micro-batches of each step.
        around: Held while a step is made.
    """
    losses, skips = list[float](), 0
    with borrowed(stepper.model, stepper.optimizer):
        before = _weights(stepper.model)
        for number, window in enumerate(windows):
            seed_everything(number)  # what is compared draws the same
            with around or nullcontext():
                loss, skipped = step_until_made(stepper, window, most_skips=MOST_SKIPS - skips)
            skips += skipped
            losses.append(float(loss))
        after = _weights(stepper.model)
    stepper.optimizer.zero_grad(set_to_none=True)
    moved = {name: after[name] - value for name, value in before.items()}
    return Trajectory(losses=tuple(losses), moved=moved, skips=skips)


def divergence(
    reference: Trajectory, found: Trajectory, *, moved: Sequence[Trajectory], tolerance: Tolerance
) -> str:
    """Return in words how a trajectory leaves the reference; empty if it does not.

    Args:
        reference: The one that is right; nothing can be compared with what is not finite.
        found: The one that is looked at.
        moved: Those with moves as rounding makes them, which say how much rounding may do.
        tolerance: What a loss may be off beside that.
    """
    if never_made(reference.skips) or not reference.is_finite:
        return ""
    if skipping := never_made(found.skips):
        return skipping
    if not found.is_finite:
        return "loss or weights are not finite after some steps"
    moved = [one for one in moved if one.is_finite]
    return next(_parted(reference, found, moved, tolerance), "") or _strayed(
        reference, found, moved
    )


def _parted(
    reference: Trajectory, found: Trajectory, moved: Sequence[Trajectory], tolerance: Tolerance
) -> Iterator[str]:
    """Yield for each step whose loss is off in words by how much."""
    for number, (right, loss) in enumerate(zip(reference.losses, found.losses, strict=True)):
        rounding = max((abs(one.losses[number] - right) for one in moved), default=0.0)
        off = tolerance.relative * abs(right) + SENSITIVITY * rounding
        if abs(loss - right) > max(off, tolerance.floor):
            yield f"the loss of step {number + 1} is {loss:.6g} where the baseline's is {right:.6g}"


def _strayed(reference: Trajectory, found: Trajectory, moved: Sequence[Trajectory]) -> str:
    way = math.hypot(*(float(part.norm()) for part in reference.moved.values()))
    rounding = max((_distance(one, reference) for one in moved), default=0.0)
    apart = _distance(found, reference)
    if apart <= max(STRAYED * way, SENSITIVITY * rounding):
        return ""
    return f"the weights end {apart / (way or 1.0):.2g} of their way apart after some steps"


def _distance(one: Trajectory, other: Trajectory) -> float:
    parts = (one.moved[name] - value for name, value in other.moved.items())
    return math.hypot(*(float(part.norm()) for part in parts))


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return what is trained, in host memory."""
    return {
        name: parameter.detach().to("cpu", torch.float32, copy=True)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
