"""Batches of any nesting: moved to a device, counted, and cut into micro-batches.

Emitted: the text of this module is part of the written training loop, so it needs PyTorch and
nothing of ours.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor


class BatchUnclear(ValueError):
    """The number of samples in a batch cannot be told from its form."""


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor in it on the device, its nesting kept.

    Objects with a `to` method of their own are asked; what holds no tensor is passed on. Copies
    from pinned memory do not block.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to") and not isinstance(batch, type):
        return batch.to(device)
    return map_parts(batch, lambda part: to_device(part, device))


def map_parts(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return the batch with each of its direct parts changed; a leaf comes back as it is."""
    if isinstance(batch, Mapping):
        changed = {key: change(part) for key, part in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return changed
        whole = copy.copy(batch)
        whole.update(changed)
        return whole
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(change(part) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(change(part) for part in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        parts = {item.name: getattr(batch, item.name) for item in dataclasses.fields(batch)}
        twin = copy.copy(batch)
        for name, part in parts.items():
            object.__setattr__(twin, name, change(part))  # a frozen one too
        return twin
    return batch


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor in the batch, depth first, in the order of its parts."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from tensors_in(part)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        for part in batch:
            yield from tensors_in(part)
    elif hasattr(batch, "__dict__") and not isinstance(batch, type):
        for part in vars(batch).values():
            yield from tensors_in(part)


def count_samples(batch: Any) -> int:
    """Return the number of samples in the batch: the leading dimension of its first tensor.

    Raises:
        BatchUnclear: If the batch holds no tensor with a dimension.
    """
    for tensor in tensors_in(batch):
        if tensor.dim() > 0:
            return tensor.shape[0]
    raise BatchUnclear(
        f"a batch needs a tensor whose first dimension counts the samples, but this "
        f"{type(batch).__name__} has none; pass batch_size_fn(batch)"
    )
