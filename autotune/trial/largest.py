"""The largest samples of a data set, and the batch that is made of them: the worst case known."""

import heapq
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from autotune.errors import WorkloadInvalid
from autotune.step.batch import tensors_in

KEPT_SAMPLES = 1024
"""Indices that are kept; a larger batch repeats them."""

MOST_RANDOM = 100_000
"""Indices drawn at random; drawing more would take longer than a scan has."""

BATCHES_SEEN = 4
"""Batches looked at where single samples cannot be: the largest of them stands for the worst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The largest samples found.

    Args:
        indices: Largest first; empty where all that were seen are of one size, or none were.
        smallest: The smallest seen; None where there is no largest.
        samples: How many were looked at.
    """

    indices: tuple[int, ...] = ()
    smallest: int | None = None
    samples: int = 0


def find_largest(loader: object, *, seconds: float) -> Scan:
    """Look for the largest samples of a map-style data set for so many seconds.

    In index order for a third of the time, from the end for a third, then at random
    (DESIGN 8.1): sorted data has its longest at an end.
    """
    if not is_scannable(loader):
        return Scan()
    dataset = loader.dataset  # type: ignore[attr-defined]  # a DataLoader, as just asked
    sizes = {index: _size_at(dataset, index) for index in _indices(len(dataset), seconds)}
    known = {index: size for index, size in sizes.items() if size is not None}
    if len(set(known.values())) <= 1:
        return Scan(samples=len(known))
    largest = heapq.nlargest(KEPT_SAMPLES, known, key=lambda index: (known[index], -index))
    smallest = min(known, key=lambda index: (known[index], index))
    return Scan(indices=tuple(largest), smallest=smallest, samples=len(known))


def _size_at(dataset: Any, index: int) -> int | None:
    """Return a sample's size; None where there is none to be had, which training would meet."""
    try:
        return sample_size(dataset[index])
    except (LookupError, OSError, RuntimeError, TypeError, ValueError):
        return None


def is_scannable(loader: object) -> bool:
    """Whether single samples can be asked for and collated: a map-style `DataLoader`."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and hasattr(loader.dataset, "__getitem__")
        and hasattr(loader.dataset, "__len__")
        and loader.batch_sampler is not None
    )


def _indices(length: int, seconds: float) -> Iterator[int]:
    """Yield indices, none twice, until the time is over or all were given."""
    end = time.monotonic() + seconds
    first, last = 0, length
    while first < last and (first == 0 or time.monotonic() < end - seconds * 2 / 3):
        yield first
        first += 1
    while first < last and time.monotonic() < end - seconds / 3:
        last -= 1
        yield last
    count = min(last - first, MOST_RANDOM)
    for index in random.Random(0).sample(range(first, last), count):  # noqa: S311  # no secret
        if time.monotonic() >= end:
            return
        yield index


def sample_size(sample: Any) -> int:
    """Return how large a sample is, in units that only compare samples of one data set.

    >>> sample_size({"text": "four", "ids": [1, 2, 3]})
    7
    """
    if sample is None or isinstance(sample, int | float):
        return 1
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if isinstance(sample, str | bytes):
        return len(sample)
    if isinstance(sample, Mapping | Sequence):
        parts = sample.values() if isinstance(sample, Mapping) else sample
        return sum(sample_size(part) for part in parts)
    size = getattr(sample, "size", None)  # an array's number of elements, an image's sides
    if isinstance(size, tuple):
        return int(torch.Size(size).numel())
    return size if isinstance(size, int) else _size_of_parts(sample)


def _size_of_parts(sample: object) -> int:
    """Return the size of what a dataclass or another plain object holds."""
    return sum(sample_size(part) for part in getattr(sample, "__dict__", {}).values()) or 1


def collate(loader: Any, indices: Sequence[int], *, count: int) -> Any:
    """Return a batch of these samples, repeated if they are fewer than `count`.

    Args:
        loader: One that `is_scannable`.
        indices: Of samples, the first are taken.
        count: Samples in the batch; no more than the data set has.
    """
    wanted = islice(cycle(indices), min(count, len(loader.dataset)))
    return loader.collate_fn([loader.dataset[index] for index in wanted])


def last_batch(loader: Any) -> Any:
    """Return a batch as short as the last one of an epoch; None where no batch is shorter.

    Of the first samples: what is looked at is their number. None, too, where the loader draws its
    batches by rules of its own.
    """
    if not is_scannable(loader) or type(loader.batch_sampler) is not BatchSampler:
        return None
    count = 0 if loader.drop_last else len(loader.sampler) % loader.batch_size
    return collate(loader, range(count), count=count) if count else None


def first_batches(loader: Iterable[Any], count: int, *, most_bytes: int | None = None) -> list[Any]:
    """Return the first batches of a loader, fewer where it has no more.

    Args:
        loader: What is read.
        count: How many.
        most_bytes: From the second on, no further one once they hold so many bytes.

    Raises:
        WorkloadInvalid: If the loader yields nothing.
    """
    batches: list[Any] = []
    held_bytes = 0
    for batch in islice(loader, count):
        batches.append(batch)
        held_bytes += batch_bytes(batch)
        if most_bytes is not None and len(batches) > 1 and held_bytes >= most_bytes:
            break
    if not batches:
        raise WorkloadInvalid(
            "loader_fn made a loader that yields nothing",
            hint="look at the data set's length, at drop_last and at the sampler",
        )
    return batches


def batch_bytes(batch: Any) -> int:
    """Return the bytes of all tensors in a batch."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch))
