"""Optimizer steps of a user's own `loss_fn`, which may return `(loss_sum, count)`.

Emitted: the text of this module is part of the written training loop, so it needs PyTorch and
nothing of ours.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from autotune.step.window import Stepper


@dataclass(slots=True, kw_only=True)
class CountingStepper(Stepper):
    """Makes optimizer steps, each of a window of micro-batches."""

    def accumulate(self, window: Sequence[Any]) -> Tensor:
        """Add the gradients of the window's loss: a mean weighs its samples, a sum its count."""
        weights, counts = [*map(self.weigh, window)], list[Tensor]()  # no mean is over nothing
        total = torch.zeros((), device=self.device)
        for batch, weight in compress(zip(window, weights, strict=True), weights):
            loss = self.loss(batch)
            if isinstance(loss, tuple):
                count = torch.as_tensor(loss[1], device=self.device).detach().squeeze()
                if not counts and count == 0:  # nothing has counted yet
                    continue
                counts.append(count)
                loss = loss[0] / counts[0]  # so fp16 stays in range; put right below
            else:
                loss = loss * (weight / sum(weights))
            self.backward(loss)
            total += loss.detach().squeeze()
        if len(counts) > 1:
            stepped = [item for group in self.optimizer.param_groups for item in group["params"]]
            every = dict.fromkeys([*self.model.parameters(), *stepped])  # each once
            factor = counts[0] / sum(counts)
            torch._foreach_mul_([item.grad for item in every if item.grad is not None], factor)
            total *= factor
        return total

    @torch.inference_mode()
    def evaluate(self, loader: Iterable[Any]) -> float:
        """Return the mean loss over a loader, every batch weighing what its loss is a mean over."""
        self.model.eval()
        total = counted = 0.0
        for batch in loader:
            if weight := self.weigh(batch):
                loss = self.loss(batch)
                loss_sum, count = loss if isinstance(loss, tuple) else (loss * weight, weight)
                total, counted = total + float(loss_sum), counted + float(count)
        return total / max(counted, 1.0)
