"""Losses as trials compute them: the written loop's own, with what comes and goes checked.

A batch whose form leaves no doubt needs no `loss_fn`; any other is refused by name. What was
checked is handed on as it is, so that a trial computes the very tensors that the loop will.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache, wraps
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from autotune.step import forms

EXAMPLE_LOSS = "def loss_fn(model, batch):\n    return my_loss(model(batch[0]), batch[1])"

CAUSAL = ("CausalLM", "LMHeadModel", "ForConditionalGeneration")
"""In the names of models that predict each label from the ones before it, so that the first of a
sequence is not predicted; Hugging Face's name their loss so, else a class of theirs."""

SHOWN_PARTS = 4
"""Of a list, in an error: enough to recognise it."""

LossFn = Callable[[nn.Module, Any], Any]
"""`loss_fn(model, batch)`: a mean over the batch, or `(loss_sum, count)`."""

LOSSES: Mapping[str, Callable[[forms.Model, Any], Any]] = {
    "named": forms.named_loss,
    "dict": forms.dict_loss,
    "items": forms.items_loss,
    "shifted_items": forms.shifted_items_loss,
    "pair": forms.pair_loss,
    "whole": forms.whole_loss,
    "classes": forms.class_loss,
    "values": forms.value_loss,
}
"""The form of a batch → its loss."""

WEIGHTS: Mapping[str, Callable[[Any], int]] = {
    "labels": forms.count_labels,
    "shifted_labels": forms.count_shifted_labels,
    "label_values": forms.count_label_values,
    "classes": forms.count_classes,
    "values": forms.count_values,
}
"""What a loss is a mean over, where these are not samples → their number in a batch."""

_LOSS_FORMS = "one number with a gradient (a mean over the batch), or (loss_sum, count)"


class LossUnclear(TypeError):
    """What a loss is cannot be told from the batch and the output, or it is no loss."""


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of the batch, where its form leaves no doubt what that is.

    Raises:
        LossUnclear: If the output has another form; it shows a `loss_fn` to write.
    """
    form = form_of(model, batch)

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = model(*args, **kwargs)
        if not _is_clear(form, batch, output):
            raise LossUnclear(
                f"no loss is known for a batch of {_form(batch)} and an output of {_form(output)}; "
                f"write one, for example:\n\n{EXAMPLE_LOSS}"
            )
        return output

    loss: Tensor = LOSSES[form](watched, batch)
    return loss


def form_of(model: nn.Module, batch: Any) -> str:
    """Return the form of a batch, a key of `LOSSES`.

    A dict is passed as `model(**batch)` and the output's `loss` is used; models of Hugging Face
    have it by name. Those that divide the sum over their labels by a number that they are given
    get the number of this very batch (`items`): weighted by it, a window's losses come out as if
    each had been given the number of the window, which is what Hugging Face's Trainer does.

    A pair is inputs and targets: cross entropy for integer targets (`classes`), mean squared error
    for floating ones (`values`). Of other pairs, of anything else, and where the output is or has
    a loss, it is the model that computes it.
    """
    if isinstance(batch, Mapping):
        items = _ITEMS.get(weight_of(model, batch)) if _takes_items(model, batch) else None
        return items or ("named" if _names_its_loss(model) else "dict")
    if not _is_pair(batch):
        return "whole"
    targets = batch[1]
    if not isinstance(targets, Tensor) or targets.is_complex() or targets.dtype == torch.bool:
        return "pair"
    return "values" if targets.is_floating_point() else "classes"


def weight_of(model: nn.Module, batch: Any) -> str:
    """Return what the default loss of a batch is a mean over: a key of `WEIGHTS`, or `samples`.

    A mean over labels accumulates wrongly if micro-batches are weighted by samples.
    """
    is_dict = isinstance(batch, Mapping)
    labels = batch.get("labels") if is_dict else batch[1] if _is_pair(batch) else None
    if not isinstance(labels, Tensor) or labels.dim() == 0:
        return "samples"
    if not is_dict:
        return "values" if labels.is_floating_point() else "classes"
    if labels.is_floating_point():
        return "label_values"
    return "shifted_labels" if labels.dim() > 1 and is_causal(model) else "labels"


def default_weight(model: nn.Module, batch: Any, samples: int) -> int:
    """Return the number of what the default loss of a batch is a mean over.

    Args:
        model: Which may shift its labels.
        batch: Of any form.
        samples: Their number, for a batch whose loss is a mean over samples.
    """
    count = WEIGHTS.get(weight_of(model, batch))
    return count(batch) if count else samples


def is_causal(model: nn.Module) -> bool:
    """Whether the model, or the one that it wraps, shifts its labels by one.

    Hugging Face's causal models do; those with an encoder are given shifted labels.
    """
    while True:
        kinds = " ".join(kind.__name__ for kind in type(model).__mro__)
        names = getattr(model, "loss_type", None) or kinds
        if any(part in names for part in CAUSAL):
            return not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        wrapped = list(model.children())
        if len(wrapped) != 1:
            return False
        (model,) = wrapped


def checked(loss_fn: LossFn) -> LossFn:
    """Return a user's `loss_fn` that raises `LossUnclear` if what it returns is no loss."""

    @wraps(loss_fn)
    def wrapped(model: nn.Module, batch: Any) -> Any:
        loss = loss_fn(model, batch)
        require_loss(loss)
        return loss

    return wrapped


def require_loss(loss: Any) -> None:
    """Refuse what is neither one number with a gradient nor `(loss_sum, count)`.

    Raises:
        LossUnclear: If it is something else.
    """
    value, count = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, 0)  # noqa: PLR2004
    if not isinstance(value, Tensor) or value.numel() != 1 or not _is_count(count):
        raise LossUnclear(f"a loss needs {_LOSS_FORMS}, but loss_fn gave {_form(loss)}")
    if not _has_gradient(value):
        raise LossUnclear(
            f"a loss needs {_LOSS_FORMS}, but loss_fn gave {_form(loss)} without a gradient"
        )


_ITEMS_ARGUMENT = "num_items_in_batch"
"""By which models of Hugging Face are told how many labels count."""

_ITEMS = {"labels": "items", "shifted_labels": "shifted_items"}
"""What a loss is a mean over → the form of a batch whose model is told the number of these."""


def _takes_items(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether a model is to be told how many labels count, by an argument that is not there yet."""
    kind: Any = type(getattr(model, "_orig_mod", model))  # a compiled one holds its own
    is_said = getattr(model, "accepts_loss_kwargs", False) is True  # as Hugging Face's may
    return (is_said or _is_asked(kind.forward)) and _ITEMS_ARGUMENT not in batch


@cache
def _is_asked(forward: Callable[..., Any]) -> bool:
    """Whether the forward of a class names the argument."""
    try:
        return _ITEMS_ARGUMENT in inspect.signature(forward).parameters
    except (TypeError, ValueError):  # some have none that can be read
        return False


def _names_its_loss(model: nn.Module) -> bool:
    """Whether a model's output has its loss as an attribute, as all of Hugging Face's do."""
    is_theirs = any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)
    return is_theirs and getattr(getattr(model, "config", None), "return_dict", False) is True


def _is_pair(batch: Any) -> bool:
    """Whether a batch is inputs and targets, and not a list of two samples."""
    is_pair = isinstance(batch, list | tuple) and len(batch) == 2  # noqa: PLR2004  # a pair
    return is_pair and any(isinstance(part, Tensor) for part in batch)


def _is_clear(form: str, batch: Any, output: Any) -> bool:
    """Whether an output is or has a loss, or is one that the targets of its batch call for."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return _has_gradient(loss)
    if form not in {"classes", "values"} or not isinstance(output, Tensor):
        return False
    targets: Tensor = batch[1]
    if form == "values":
        return _without_ones(output) == _without_ones(targets)  # (n, 1) beside (n,)
    is_scores = output.shape[1:2].numel() > 1
    return is_scores and output.shape[:1] + output.shape[2:] == targets.shape


def _has_gradient(value: Tensor) -> bool:
    return value.requires_grad or not torch.is_grad_enabled()


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


def _is_count(count: Any) -> bool:
    return count.numel() == 1 if isinstance(count, Tensor) else isinstance(count, Real)
