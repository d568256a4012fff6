"""One optimizer step over a window of micro-batches, whatever their sizes.

Emitted: the text of this module is part of the written training loop, so it needs PyTorch and
nothing of ours. What is measured is what is written; a class that is built on another is written
as one, with what it overrides left out.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(slots=True, kw_only=True)
class Stepper:
    """Makes optimizer steps, each of a window of micro-batches.

    Args:
        model: Trained in place.
        optimizer: Stepped once a window.
        device: Where the batches go.
        autocast: Held while a loss is computed: `torch.autocast(…)` for half precision.
        loss_fn: `loss_fn(model, batch)`, a mean over the batch.
        weigh: How much a batch counts: the number of what its loss is a mean over.
        count: Samples in a batch.
        move: Returns a batch with its tensors on a device.
        backward: Adds the gradients of a loss.
        clip_norm: Gradients are clipped to this norm once a step; None does not clip.
        scheduler: Stepped after the optimizer; None leaves the learning rate.
    """

    model: nn.Module
    optimizer: Optimizer
    device: torch.device
    autocast: AbstractContextManager[object]
    loss_fn: Callable[[nn.Module, Any], Any]
    weigh: Callable[[Any], int]
    count: Callable[[Any], int]
    move: Callable[[Any, torch.device], Any]
    backward: Callable[[Tensor], object] = Tensor.backward
    clip_norm: float | None = None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None

    def __call__(self, window: Sequence[Any]) -> Tensor:
        """Make one optimizer step of the window; return its mean loss, on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.accumulate(window)
        if self.clip_norm is not None:
            stepped = [item for group in self.optimizer.param_groups for item in group["params"]]
            nn.utils.clip_grad_norm_(stepped, self.clip_norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss

    def accumulate(self, window: Sequence[Any]) -> Tensor:
        """Add the gradients of the window's loss: a batch weighs what its own is a mean over."""
        weights = [self.weigh(batch) for batch in window]
        total = torch.zeros((), device=self.device)
        for batch, weight in zip(window, weights, strict=True):
            if weight:  # a mean over no label is not a number
                loss = self.loss(batch) * (weight / sum(weights))
                self.backward(loss)
                total += loss.detach()
        return total

    def loss(self, batch: Any) -> Any:
        """Return the loss of a batch, computed in the precision of the run."""
        with self.autocast:
            return self.loss_fn(self.model, self.move(batch, self.device))

    @torch.inference_mode()
    def evaluate(self, loader: Iterable[Any]) -> float:
        """Return the mean loss over a loader, every batch weighing what its loss is a mean over."""
        self.model.eval()
        total = counted = 0.0
        for batch in loader:
            if weight := self.weigh(batch):
                total, counted = total + float(self.loss(batch)) * weight, counted + weight
        return total / max(counted, 1.0)


def windows(batches: Iterable[Any], accumulation_steps: int) -> Iterator[list[Any]]:
    """Yield batches in windows of one optimizer step; the last may be shorter."""
    stream = iter(batches)
    while window := list(islice(stream, accumulation_steps)):
        yield window
