"""Batches that have shapes and no data, of any number of samples, made after real ones.

Two batches of one sample each repeated, of two and of three samples, tell how each part grows with
the number of samples. Where only one batch can be had, parts as long as it has samples grow.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from autotune.step.batch import map_parts, tensors_in
from autotune.tracing.fake import CPU, Untraceable
from autotune.units import is_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """What a batch of any number of samples looks like.

    Args:
        batch: A real one.
        samples: Their number in it.
        larger: A real one of more samples; None where there is none.
        more_samples: By how many it has more.
    """

    batch: Any
    samples: int
    larger: Any = None
    more_samples: int = 1

    def of(self, samples: int) -> Any:
        """Return a batch of so many samples; to be called in the mode of its fake tensors.

        Raises:
            Untraceable: If the parts of a batch grow in no regular way.
        """
        growth = _Growth(samples=self.samples, more=samples - self.samples, apart=self.more_samples)
        return (
            growth.of(self.batch, self.larger)
            if self.larger is not None
            else growth.alone(self.batch)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Growth:
    """Growth of a batch.

    Args:
        samples: Of the batch that is grown.
        more: Samples that it gets more.
        apart: Samples that the larger of two batches has more.
    """

    samples: int
    more: int
    apart: int

    def of(self, part: Any, larger: Any) -> Any:
        """Return a part of a batch, grown as a larger batch tells."""
        if type(part) is not type(larger):
            raise Untraceable("batches of two sizes differ in more than their length")
        if isinstance(part, Tensor):
            pairs = zip(part.shape, larger.shape, strict=True) if part.dim() == larger.dim() else ()
            return _like(part, [self._length(*pair) for pair in pairs])
        if isinstance(part, list) and len(part) != len(larger):
            length = self._length(len(part), len(larger))
            return [self.of(item, item) for item in _repeated(part, length)]
        if is_whole(part):
            return self._length(part, larger)
        return self._parts(part, larger)

    def _parts(self, part: Any, larger: Any) -> Any:
        """Return a part whose own parts are grown; a leaf comes back as it is."""
        others = iter(_direct_parts(larger))
        if len(_direct_parts(part)) != len(_direct_parts(larger)):
            raise Untraceable("batches of two sizes differ in more than their length")
        return _mapped(part, lambda item: self.of(item, next(others)))

    def _length(self, length: int, larger: int) -> int:
        slope, rest = divmod(larger - length, self.apart)
        if rest:
            raise Untraceable("the shapes of its batches do not grow evenly with their samples")
        return length + slope * self.more

    def alone(self, part: Any) -> Any:
        """Return a part of a batch, grown where it is as long as the batch has samples."""
        grown = self.samples + self.more
        if isinstance(part, Tensor):
            is_grown = part.dim() > 0 and part.shape[0] == self.samples
            return _like(part, [grown, *part.shape[1:]] if is_grown else part.shape)
        if isinstance(part, list) and len(part) == self.samples and self.samples > 1:
            return [self._same(item) for item in _repeated(part, grown)]
        return _mapped(part, self.alone)

    def _same(self, part: Any) -> Any:
        return _like(part, part.shape) if isinstance(part, Tensor) else _mapped(part, self._same)


def _repeated(items: list[Any], length: int) -> list[Any]:
    return [items[min(place, len(items) - 1)] for place in range(length)]


def _mapped(part: Any, change: Callable[[Any], Any]) -> Any:
    """Return a part with its own parts changed.

    Raises:
        Untraceable: If it holds tensors in a way of its own.
    """
    is_opened = isinstance(part, Mapping | list | tuple) or is_dataclass(part)
    if not is_opened and any(True for _ in tensors_in(part)):
        raise Untraceable(f"its batches are objects of a class of their own, {type(part).__name__}")
    return map_parts(part, change)


def _direct_parts(part: Any) -> list[Any]:
    if isinstance(part, Mapping):
        return list(part.values())
    if isinstance(part, list | tuple):
        return list(part)
    if is_dataclass(part) and not isinstance(part, type):
        return [getattr(part, item.name) for item in fields(part)]
    return []


def _like(tensor: Tensor, shape: Any) -> Tensor:
    """Return a fake tensor of another shape, in the same order of memory."""
    if tensor.layout is not torch.strided:
        raise Untraceable("its batches hold sparse tensors")
    order = torch.contiguous_format
    for other in (torch.channels_last, torch.channels_last_3d):
        is_image = tensor.dim() == len(_DIMENSIONS[other])
        if is_image and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=other):
            order = other
    return torch.empty(tuple(shape), dtype=tensor.dtype, device=CPU, memory_format=order)


_DIMENSIONS = {torch.channels_last: "NCHW", torch.channels_last_3d: "NCDHW"}
