"""Batches of tensors, dicts, lists and tuples: moved to a device, and counted.

Emitted: the text of this module is part of the written training loop, so it needs PyTorch and
nothing of ours. For batches of other nestings there is `batch`, which gives the same for these.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from autotune.step.kernels import put


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on the device; copies from pinned memory do not block."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(part, device) for key, part in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(part, device) for part in batch)
    return batch


def images_to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on the device, those of four dimensions channels last."""
    if isinstance(batch, Tensor):
        return put(batch, device)
    if isinstance(batch, Mapping):
        return {key: images_to_device(part, device) for key, part in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(images_to_device(part, device) for part in batch)
    return batch


def count_samples(batch: Any) -> int:
    """Return the number of samples in the batch: the leading dimension of its first tensor."""
    return next(tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim())


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in the batch, in the order of its parts."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(part)
