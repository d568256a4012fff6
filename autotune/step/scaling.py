"""Optimizer steps in fp16, whose gradients would vanish unless the loss is scaled.

Emitted: the text of this module is part of the written training loop, so it needs PyTorch and
nothing of ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from autotune.step.counting import CountingStepper
from autotune.step.window import Stepper


@dataclass(slots=True, kw_only=True)
class ScalingStepper(Stepper):
    """Makes optimizer steps, each of a window of micro-batches, in fp16.

    Args:
        scaler: Scales what `backward` is given, and skips steps whose gradients overflow.
    """

    scaler: GradScaler

    def __call__(self, window: Sequence[Any]) -> Tensor:
        """Make one optimizer step of the window; return its mean loss, on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.accumulate(window)
        stepped = [item for group in self.optimizer.param_groups for item in group["params"]]
        if all(parameter.grad is None for parameter in stepped):
            return loss  # no label counted, which a scaler does not expect
        if self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(stepped, self.clip_norm)
        scale = self.scaler.get_scale() if self.scheduler else 0.0
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scheduler is not None and self.scaler.get_scale() >= scale:  # it was not skipped
            self.scheduler.step()
        return loss


@dataclass(slots=True, kw_only=True)
class ScalingCountingStepper(ScalingStepper, CountingStepper):
    """Makes optimizer steps, each of a window of micro-batches, in fp16."""
