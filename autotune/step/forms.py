"""The losses that need no `loss_fn`, one for each form of batch, and what each is a mean over.

Emitted: the text of this module is part of the written training loop, so it needs PyTorch and
nothing of ours. Trials run these very functions, and check what comes and goes: see `loss`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autotune.step.kernels import put

Model = Callable[..., Any]
"""A module, or what can be called as one."""


def named_loss(model: Model, batch: Any) -> Any:
    """Return the loss that a model of Hugging Face computes of its arguments, a dict."""
    return model(**batch).loss


def dict_loss(model: Model, batch: Any) -> Any:
    """Return the loss that the model computes of its arguments, a dict."""
    output = model(**batch)
    return output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)


def items_loss(model: Model, batch: Any) -> Any:
    """Return the loss that the model computes of its arguments, a dict, if told what counts."""
    output = model(**batch, num_items_in_batch=batch["labels"].ne(-100).sum())
    return output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)


def shifted_items_loss(model: Model, batch: Any) -> Any:
    """Return the same of a model that does not predict the first label of a sequence."""
    output = model(**batch, num_items_in_batch=batch["labels"][..., 1:].ne(-100).sum())
    return output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)


def pair_loss(model: Model, batch: Any) -> Any:
    """Return the loss that the model computes of the first part of a pair."""
    output = model(batch[0])
    return output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)


def whole_loss(model: Model, batch: Any) -> Any:
    """Return the loss that the model computes of the batch."""
    output = model(batch)
    return output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)


def class_loss(model: Model, batch: Any) -> Any:
    """Return the cross entropy of inputs and classes, or the loss that the model computes."""
    output = model(batch[0])
    if isinstance(output, Tensor) and output.dim():
        return nn.functional.cross_entropy(output, batch[1].long(), ignore_index=-100)
    return output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)


def value_loss(model: Model, batch: Any) -> Any:
    """Return the mean squared error of inputs and values, or the loss that the model computes."""
    output = model(batch[0])
    if isinstance(output, Tensor) and output.dim():
        return nn.functional.mse_loss(output, batch[1].reshape(output.shape))
    return output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)


def count_labels(batch: Any) -> int:
    """Return the number of labels that count: what the model's loss is a mean over."""
    return int(batch["labels"].ne(-100).sum())


def count_shifted_labels(batch: Any) -> int:
    """Return the number of labels that count; the first of a sequence is not predicted."""
    return int(batch["labels"][..., 1:].ne(-100).sum())


def count_label_values(batch: Any) -> int:
    """Return the number of floating labels: what the model's loss is a mean over."""
    return int(batch["labels"].numel())


def count_classes(batch: Any) -> int:
    """Return the number of targets that count: what cross entropy is a mean over."""
    return int(batch[1].ne(-100).sum())


def count_values(batch: Any) -> int:
    """Return the number of targets: what the squared error is a mean over."""
    return int(batch[1].numel())


def move_dict(batch: Any, device: torch.device) -> Any:
    """Return a dict of tensors on the device."""
    return {k: v.to(device, non_blocking=True) for k, v in batch.items()}


def move_parts(batch: Any, device: torch.device) -> Any:
    """Return a list or a tuple of tensors on the device."""
    return type(batch)(v.to(device, non_blocking=True) for v in batch)


def move_tensor(batch: Any, device: torch.device) -> Any:
    """Return a tensor on the device."""
    return batch.to(device, non_blocking=True)


def move_dict_of_images(batch: Any, device: torch.device) -> Any:
    """Return a dict of tensors on the device, images with their channels last."""
    return {k: put(v, device) for k, v in batch.items()}


def move_parts_of_images(batch: Any, device: torch.device) -> Any:
    """Return a list or a tuple of tensors on the device, images with their channels last."""
    return type(batch)(put(v, device) for v in batch)


def count_dict(batch: Any) -> int:
    """Return the number of samples in a dict of tensors."""
    return len(next(iter(batch.values())))


def count_parts(batch: Any) -> int:
    """Return the number of samples in a list or a tuple of tensors."""
    return len(batch[0])
