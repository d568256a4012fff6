"""The loss of a batch where the user wrote none, and how much a batch weighs in a step.

Emitted: the text of this module is part of the written training loop, so it needs PyTorch and
nothing of ours.
"""

from collections.abc import Mapping
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORED_LABEL = -100
"""Labels of this value have no part in the loss: PyTorch's default of `ignore_index`."""

EXAMPLE_LOSS = "def loss_fn(model, batch):\n    return my_loss(model(batch[0]), batch[1])"

CAUSAL = ("CausalLM", "LMHeadModel", "ForConditionalGeneration")
"""In the names of models that predict each label from the ones before it, so that the first of a
sequence is not predicted; Hugging Face's name their loss so, else their class."""

SHOWN_PARTS = 4
"""Of a list, in an error: enough to recognise it."""


_LOSS_FORMS = "one number with a gradient (a mean over the batch), or (loss_sum, count)"


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
        output = model(**batch)
    else:
        output = model(batch[0] if _is_pair(batch) else batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if is_scalar_loss(output):
        return output
    if is_scalar_loss(loss):
        return loss
    if _is_pair(batch) and isinstance(output, Tensor) and isinstance(batch[1], Tensor):
        loss = _loss_between(output, batch[1])
        if loss is not None:
            return loss
    raise LossUnclear(
        f"no loss is known for a batch of {_form(batch)} and an output of {_form(output)}; "
        f"write one, for example:\n\n{EXAMPLE_LOSS}"
    )


def is_scalar_loss(output: Any) -> TypeGuard[Tensor]:
    """Whether an output is itself the loss: one number, with a gradient where there are any."""
    return isinstance(output, Tensor) and output.dim() == 0 and _has_gradient(output)


def _has_gradient(value: Tensor) -> bool:
    return value.requires_grad or not torch.is_grad_enabled()


def _is_pair(batch: Any) -> bool:
    """Whether a batch is inputs and targets, and not a list of two samples."""
    is_pair = isinstance(batch, list | tuple) and len(batch) == 2  # noqa: PLR2004  # a pair
    return is_pair and any(isinstance(part, Tensor) for part in batch)


def _loss_between(output: Tensor, targets: Tensor) -> Tensor | None:
    """Return the loss that shapes and dtypes call for; None where they call for none."""
    if targets.is_floating_point():
        is_same = _without_ones(output) == _without_ones(targets)  # (n, 1) beside (n,)
        return functional.mse_loss(output, targets.reshape(output.shape)) if is_same else None
    if targets.is_complex() or targets.dtype == torch.bool or output.shape[1:2].numel() <= 1:
        return None
    is_one_each = output.shape[:1] + output.shape[2:] == targets.shape
    if not is_one_each:
        return None
    return functional.cross_entropy(output, targets.long(), ignore_index=IGNORED_LABEL)


def _without_ones(tensor: Tensor) -> list[int]:
    return [size for size in tensor.shape if size != 1]


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__}({', '.join(map(str, value))})"
    if isinstance(value, list | tuple):
        parts = [_form(part) for part in value[:SHOWN_PARTS]]
        rest = ["…"] if len(value) > SHOWN_PARTS else []
        return f"{type(value).__name__}[{', '.join(parts + rest)}]"
    return type(value).__name__


def default_weight(model: nn.Module, batch: Any, samples: int) -> int:
    """Return what `default_loss` is a mean over: labels that count, else samples.

    A mean over labels accumulates wrongly if micro-batches are weighted by samples.
    """
    is_dict = isinstance(batch, Mapping)
    labels = batch.get("labels") if is_dict else batch[1] if _is_pair(batch) else None
    if not isinstance(labels, Tensor) or labels.dim() == 0:
        return samples
    if labels.is_floating_point():
        return labels.numel()
    if is_dict and labels.dim() > 1 and is_causal(model):
        labels = labels[..., 1:]
    return int((labels != IGNORED_LABEL).sum())


def is_causal(model: nn.Module) -> bool:
    """Whether the model, or the one that it wraps, shifts its labels by one.

    Hugging Face's causal models do; those with an encoder are given shifted labels.
    """
    while True:
        name = getattr(model, "loss_type", None) or type(model).__name__
        if any(part in name for part in CAUSAL):
            return not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        wrapped = list(model.children())
        if len(wrapped) != 1:
            return False
        (model,) = wrapped


def split_loss(loss: Any) -> tuple[Tensor, Tensor | float | None]:
    """Return a loss and its count: None for a mean, the count of `(loss_sum, count)`.

    Raises:
        LossUnclear: If it is neither one number with a gradient nor such a pair.
    """
    value, count = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)  # noqa: PLR2004
    if not isinstance(value, Tensor) or value.numel() != 1 or not _is_count(count):
        raise LossUnclear(f"a loss needs {_LOSS_FORMS}, but loss_fn gave {_form(loss)}")
    if not _has_gradient(value):
        raise LossUnclear(
            f"a loss needs {_LOSS_FORMS}, but loss_fn gave {_form(loss)} without a gradient"
        )
    if isinstance(count, Tensor):
        count = count.detach().reshape(())
    return value.reshape(()), count


def _is_count(count: Any) -> bool:
    if isinstance(count, Tensor):
        return count.numel() == 1
    return count is None or isinstance(count, Real)


def as_number(count: Tensor | float) -> float:
    """Return a count as a number; reading a tensor waits for the device."""
    return float(count.item()) if isinstance(count, Tensor) else float(count)
