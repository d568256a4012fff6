"""Batches of any nesting: moved to a device, and counted.

Emitted where a batch is more than dicts, lists and tuples of tensors: the text of this module is
then part of the written training loop, so it needs PyTorch and nothing of ours.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from autotune.step.kernels import put


class BatchUnclear(ValueError):
    """The number of samples in a batch cannot be told from its form."""


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor in it on the device, its nesting kept.

    Objects with a `to` method of their own are asked; what holds no tensor is passed on. The
    batch itself stays as it is. Copies from pinned memory do not block.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        return _ask_to_move(copy.copy(batch), device)  # many a `to` changes its own object
    return map_parts(batch, lambda part: to_device(part, device))


def _ask_to_move(batch: Any, device: torch.device) -> Any:
    try:
        moved = batch.to(device, non_blocking=True)
    except TypeError:  # a `to` that takes a device and no more
        moved = batch.to(device)
    return batch if moved is None else moved


def images_to_device(batch: Any, device: torch.device) -> Any:
    """Return the same, with the tensors of four dimensions that are seen in it channels last."""
    return _laid_out(to_device(batch, device))


def _laid_out(batch: Any) -> Any:
    return put(batch, batch.device) if isinstance(batch, Tensor) else map_parts(batch, _laid_out)


def nesting_of(batch: Any, *, is_kept: bool) -> str:
    """Return what a batch is made of: how few lines of code move and count it.

    Args:
        batch: Of any nesting.
        is_kept: Whether its own type has to be kept, and not only what is in it.

    Returns:
        `"dict"` of tensors, `"parts"` in a list or a tuple, a `"tensor"`, `"nested"` of these and
        of what is not moved, or something `"other"`.
    """
    is_dict = type(batch) is dict if is_kept else isinstance(batch, Mapping)
    if isinstance(batch, Tensor) and batch.dim():
        return "tensor"
    if is_dict and _are_tensors([*batch.values()]):
        return "dict"
    if type(batch) in {list, tuple} and _are_tensors(batch):
        return "parts"
    return "nested" if _is_plain(batch) and _is_counted(batch) else "other"


def _is_counted(batch: Any) -> bool:
    """Whether a tensor tells the number of samples."""
    return any(part.dim() for part in tensors_in(batch))


def _are_tensors(parts: Sequence[Any]) -> bool:
    """Whether all are tensors, and the first tells the number of samples."""
    is_counted = bool(parts) and isinstance(parts[0], Tensor) and parts[0].dim() > 0
    return is_counted and all(isinstance(part, Tensor) for part in parts)


def _is_plain(batch: Any) -> bool:
    """Whether a batch is dicts, lists and tuples of tensors, and of what need not be moved."""
    if type(batch) is dict:
        return all(map(_is_plain, batch.values()))
    if type(batch) in {list, tuple}:
        return all(map(_is_plain, batch))
    holds_parts = isinstance(batch, Mapping | list | tuple) or hasattr(batch, "__dict__")
    return isinstance(batch, Tensor) or not (holds_parts or dataclasses.is_dataclass(batch))


def map_parts(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return the batch with each of its direct parts changed; a leaf comes back as it is."""
    if isinstance(batch, Mapping):
        return _with_items(batch, {key: change(part) for key, part in batch.items()})
    if isinstance(batch, list):
        whole = copy.copy(batch)
        whole[:] = [change(part) for part in batch]
        return whole
    if isinstance(batch, tuple):
        parts = [change(part) for part in batch]
        make = getattr(type(batch), "_make", type(batch))  # `_make` is how named tuples are made
        return make(parts)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        twin = copy.copy(batch)
        for item in dataclasses.fields(batch):
            changed = change(getattr(batch, item.name))
            object.__setattr__(twin, item.name, changed)  # a frozen one too
        return twin
    return batch


def _with_items(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return items
    whole = copy.copy(batch)
    for key, part in items.items():  # some refuse `update`
        whole[key] = part
    return whole


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor in the batch, depth first, in the order of its parts."""
    for leaf in _leaves(batch):
        if isinstance(leaf, PackedSequence):
            yield from (part for part in leaf if part is not None)
        else:
            yield leaf


def _leaves(batch: Any, within: tuple[int, ...] = ()) -> Iterator[Tensor | PackedSequence]:
    if isinstance(batch, Tensor | PackedSequence):
        yield batch
    elif id(batch) not in within:  # objects may refer to each other in a circle
        path = (*within, id(batch))
        for part in _parts(batch):
            yield from _leaves(part, path)


def _parts(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, list | tuple):
        return batch
    if isinstance(batch, type):
        return ()
    if dataclasses.is_dataclass(batch):
        return [getattr(batch, item.name) for item in dataclasses.fields(batch)]
    return getattr(batch, "__dict__", {}).values()


def count_samples(batch: Any) -> int:
    """Return the number of samples in the batch: the leading dimension of its first tensor.

    A packed sequence knows how many sequences it holds.

    Raises:
        BatchUnclear: If the batch holds no tensor with a dimension.
    """
    for leaf in _leaves(batch):
        if isinstance(leaf, PackedSequence):
            return int(leaf.batch_sizes[0])
        if leaf.dim() > 0:
            return leaf.shape[0]
    raise BatchUnclear(
        f"a batch needs a tensor whose first dimension counts the samples, but this "
        f"{type(batch).__name__} has none; pass batch_size_fn(batch)"
    )
