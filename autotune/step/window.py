"""One optimizer step over a window of micro-batches, whatever their sizes.

Emitted: the text of this module is part of the written training loop, so it needs PyTorch and
nothing of ours. What is measured is what is written.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from autotune.step.batch import count_samples, to_device
from autotune.step.loss import as_number, default_loss, default_weight, split_loss
from autotune.step.precision import autocast

LossFn = Callable[[nn.Module, Any], Any]
"""`loss_fn(model, batch)`: a mean over the batch, or `(loss_sum, count)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepper:
    """What every optimizer step of a run has in common.

    Args:
        model: Trained in place.
        optimizer: Stepped once a window.
        scaler: Idle unless the precision is fp16.
        device: Where the batches go.
        amp: `off`, `bf16` or `fp16`.
        loss_fn: The user's; None takes `default_loss`.
        count: Samples in a batch.
        clip_norm: Gradients are clipped to this norm once a step; None does not clip.
    """

    model: nn.Module
    optimizer: Optimizer
    scaler: GradScaler
    device: torch.device
    amp: str = "off"
    loss_fn: LossFn | None = None
    count: Callable[[Any], int] = count_samples
    clip_norm: float | None = None

    def __call__(self, window: Sequence[Any]) -> Tensor:
        """Make one optimizer step of the window; return its mean loss, on the device.

        A window without a label that counts has no gradient, and makes no step.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.accumulate(window)
        trained = [parameter for parameter in self._trained() if parameter.grad is not None]
        if not trained:
            return loss
        if self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(trained, self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def accumulate(self, window: Sequence[Any]) -> Tensor:
        """Add the gradients of the window's mean loss; return that loss.

        Each micro-batch counts by what its loss is a mean over, so that the sum is the gradient
        of one large batch. Where the count is known only after the forward pass, as in
        `(loss_sum, count)`, backward runs on the sum over the first count, which keeps fp16 in
        range, and the gradients are put right at the end.
        """
        weights = [self._weight(batch) for batch in window]
        total_weight = sum(weights)
        loss = torch.zeros((), device=self.device)
        unit, counts = 0.0, []
        for batch, weight in zip(window, weights, strict=True):
            if weight == 0:  # a mean over no label is not a number
                continue
            value, count = self._forward(batch)
            if count is None:
                part = value * (weight / total_weight)
            else:
                unit = unit or as_number(count)
                if unit == 0:  # nothing has counted yet
                    continue
                counts.append(count)
                part = value / unit
            self.scaler.scale(part).backward()
            loss += part.detach()
        if len(counts) > 1:
            factor = torch.as_tensor(unit / sum(counts), device=self.device)  # nothing waits
            scale_gradients([*self.model.parameters(), *self._trained()], factor)
            loss *= factor
        return loss

    def _weight(self, batch: Any) -> int:
        samples = self.count(batch)
        return samples if self.loss_fn else default_weight(self.model, batch, samples)

    def _forward(self, batch: Any) -> tuple[Tensor, Tensor | float | None]:
        with autocast(self.device, self.amp):
            loss = (self.loss_fn or default_loss)(self.model, to_device(batch, self.device))
        return split_loss(loss)

    def _trained(self) -> list[nn.Parameter]:
        """Return what the optimizer steps: it may hold parameters beside the model's."""
        return [item for group in self.optimizer.param_groups for item in group["params"]]


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply all gradients by a factor, in place, each once."""
    once = dict.fromkeys(parameters)
    gradients = [parameter.grad for parameter in once if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor)  # what clip_grad_norm_ uses as well


def windows(loader: Iterable[Any], accumulation_steps: int) -> Iterator[list[Any]]:
    """Yield the loader's batches in windows of one optimizer step; the last may be shorter."""
    window: list[Any] = []
    for batch in loader:
        window.append(batch)
        if len(window) == accumulation_steps:
            yield window
            window = []
    if window:
        yield window
