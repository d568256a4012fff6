"""The loss of a batch where the user wrote none, and how much a batch weighs in a step.

Emitted: the text of this module is part of the written training loop, so it needs PyTorch and
nothing of ours.
"""

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORED_LABEL = -100
"""Labels of this value have no part in the loss: PyTorch's default of `ignore_index`."""

EXAMPLE_LOSS = "def loss_fn(model, batch):\n    return my_loss(model(batch[0]), batch[1])"


class LossUnclear(TypeError):
    """What a loss is cannot be told from the batch and the output, or it is no loss."""


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of the batch, where its form leaves no doubt what that is.

    A dict is passed as `model(**batch)` and the output's `loss` is used. A pair is inputs and
    targets: cross entropy for integer targets, mean squared error for floating ones. An output
    that is itself a scalar with a gradient is the loss.

    Raises:
        LossUnclear: If the batch or the output has another form; it shows a `loss_fn` to write.
    """
    if isinstance(batch, Mapping):
        return _loss_of(model(**batch), batch)
    if isinstance(batch, list | tuple) and len(batch) == 2:  # noqa: PLR2004  # a pair
        inputs, targets = batch
        output = model(inputs)
        if is_scalar_loss(output):
            return output
        if isinstance(output, Tensor) and isinstance(targets, Tensor):
            return _loss_between(output, targets)
        return _loss_of(output, batch)
    return _loss_of(model(batch), batch)


def is_scalar_loss(output: Any) -> TypeGuard[Tensor]:
    """Whether an output is itself the loss: one number with a gradient."""
    return isinstance(output, Tensor) and output.dim() == 0 and output.requires_grad


def _loss_between(output: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return functional.mse_loss(output, targets.reshape(output.shape))
    return functional.cross_entropy(output, targets, ignore_index=IGNORED_LABEL)


def _loss_of(output: Any, batch: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if is_scalar_loss(output):
        return output
    if is_scalar_loss(loss):
        return loss
    raise LossUnclear(
        f"no loss is known for a batch of {_form(batch)} and an output of {_form(output)}; "
        f"write one, for example:\n\n{EXAMPLE_LOSS}"
    )


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor{tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__}({', '.join(map(str, value))})"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[{', '.join(_form(part) for part in value)}]"
    return type(value).__name__


def default_weight(model: nn.Module, batch: Any, samples: int) -> int:
    """Return what `default_loss` is a mean over: labels that count, else samples.

    A mean over labels accumulates wrongly if micro-batches are weighted by samples: a causal
    model predicts each label from the ones before, so the first of a sequence is not predicted.
    """
    labels = None
    if isinstance(batch, Mapping):
        labels = batch.get("labels")
    elif isinstance(batch, list | tuple) and len(batch) == 2:  # noqa: PLR2004  # a pair
        labels = batch[1]
    if not isinstance(labels, Tensor) or labels.dim() == 0:
        return samples
    if labels.is_floating_point():
        return labels.numel()
    if is_causal(model) and labels.dim() > 1:
        labels = labels[..., 1:]
    return int((labels != IGNORED_LABEL).sum())


def is_causal(model: nn.Module) -> bool:
    """Whether the model shifts its labels by one, as Hugging Face's causal models do."""
    inner = getattr(model, "module", getattr(model, "_orig_mod", model))
    name = getattr(inner, "loss_type", None) or type(inner).__name__
    return "CausalLM" in name or "LMHead" in name


def split_loss(loss: Any) -> tuple[Tensor, Tensor | float | None]:
    """Return a loss and its count: None for a mean, the count of `(loss_sum, count)`.

    Raises:
        LossUnclear: If it is neither a scalar with a gradient nor such a pair.
    """
    value, count = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)  # noqa: PLR2004
    if not isinstance(value, Tensor) or value.dim() != 0 or not value.requires_grad:
        seen = _form(loss) if not isinstance(value, Tensor) else f"{_form(value)}"
        detached = isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad
        raise LossUnclear(
            f"a loss needs one number with a gradient, or (loss_sum, count), but loss_fn gave "
            f"{seen}{' without a gradient' if detached else ''}"
        )
    if count is not None and not isinstance(count, Tensor):
        count = float(count)
    return value, count


def as_number(count: Tensor | float) -> float:
    """Return a count as a number; reading a tensor waits for the device."""
    return float(count.item()) if isinstance(count, torch.Tensor) else float(count)
