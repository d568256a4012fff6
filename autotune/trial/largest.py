"""The largest samples of a data set, and the batch that is made of them: the worst case known."""

import heapq
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from autotune.errors import WorkloadInvalid
from autotune.space import Config
from autotune.step.batch import tensors_in
from autotune.workload import Workload

KEPT_SAMPLES = 1024
"""Indices that are kept; a larger batch repeats them."""

BATCHES_SEEN = 4
"""Batches looked at where single samples cannot be: the largest of them stands for the worst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The largest samples found.

    Args:
        indices: Largest first; empty where all that were seen are of one size, or none were.
        samples: How many were looked at.
    """

    indices: tuple[int, ...] = ()
    samples: int = 0


def find_largest(loader: object, *, seconds: float) -> Scan:
    """Look for the largest samples of a map-style data set for so many seconds.

    In index order for a third of the time, from the end for a third, then at random
    (DESIGN 8.1): sorted data has its longest at an end.
    """
    if not is_scannable(loader):
        return Scan()
    dataset = loader.dataset  # type: ignore[attr-defined]  # a DataLoader, as just asked
    sizes: dict[int, int] = {}
    for index in _indices(len(dataset), seconds):
        if index not in sizes:
            sizes[index] = sample_size(dataset[index])
    if len(set(sizes.values())) <= 1:
        return Scan(samples=len(sizes))
    largest = heapq.nlargest(KEPT_SAMPLES, sizes, key=lambda index: (sizes[index], -index))
    return Scan(indices=tuple(largest), samples=len(sizes))


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
    """Yield indices until the time is over or all were given."""
    end = time.monotonic() + seconds
    first, last = 0, length
    while first < last and (first == 0 or time.monotonic() < end - seconds * 2 / 3):
        yield first
        first += 1
    while first < last and time.monotonic() < end - seconds / 3:
        last -= 1
        yield last
    rest = list(range(first, last))
    random.Random(0).shuffle(rest)  # noqa: S311  # which samples are looked at is no secret
    for index in rest:
        if time.monotonic() >= end:
            return
        yield index


def sample_size(sample: Any) -> int:
    """Return how large a sample is, in units that only compare samples of one data set.

    >>> sample_size({"text": "four", "ids": [1, 2, 3]})
    7
    """
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if isinstance(sample, str | bytes):
        return len(sample)
    if isinstance(sample, Mapping):
        return sum(sample_size(part) for part in sample.values())
    if isinstance(sample, Sequence):
        flat = not any(isinstance(part, Sequence | Mapping | torch.Tensor) for part in sample[:1])
        return len(sample) if flat else sum(sample_size(part) for part in sample)
    size = getattr(sample, "size", 1)  # an array's number of elements, an image's sides
    if isinstance(size, tuple):
        return int(torch.Size(size).numel())
    return size if isinstance(size, int) else 1


def largest_batch(workload: Workload, config: Config, largest_samples: Sequence[int]) -> Any:
    """Return the largest batch known of this size.

    Made of the largest samples where they are known; else the largest of a few batches.
    """
    loader = workload.build_loader(config.with_workers(0))
    if largest_samples and is_scannable(loader):
        dataset = loader.dataset  # type: ignore[attr-defined]  # a DataLoader, as just asked
        count = min(config.batch_size, len(dataset))
        samples = [dataset[index] for index in islice(cycle(largest_samples), count)]
        return loader.collate_fn(samples)  # type: ignore[attr-defined]  # as above
    return max(first_batches(loader, BATCHES_SEEN), key=batch_bytes)


def first_batches(loader: Iterable[Any], count: int) -> list[Any]:
    """Return the first batches of a loader, fewer where it has no more.

    Raises:
        WorkloadInvalid: If the loader yields nothing.
    """
    batches = list(islice(loader, count))
    if not batches:
        raise WorkloadInvalid(
            "loader_fn made a loader that yields nothing",
            hint="look at the data set's length, at drop_last and at the sampler",
        )
    return batches


def batch_bytes(batch: Any) -> int:
    """Return the bytes of all tensors in a batch."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch))
