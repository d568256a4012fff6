"""Streams: whether loader workers divide an iterable data set, or each reads all of it."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from autotune.boundary import Boundary
from autotune.space import Config
from autotune.step.batch import tensors_in
from autotune.workload import Workload, accepted_settings

WORKERS = 2
"""Two are enough to see whether the second repeats the first."""

PATIENCE_SECONDS = 10
"""Workers that take longer for a batch are not waited for."""


def repeats_by_worker(workload: Workload, loader: Iterable[Any]) -> bool:
    """Whether each worker yields the whole stream, so that several of them repeat it.

    Seen by the first batches of two workers, which are the same then; a stream that is shuffled
    anew in each worker is not seen through. False where workers cannot be had, or end in an error.

    Args:
        workload: Whose `loader_fn` makes a loader with workers.
        loader: One without, which tells whether there is a stream at all.
    """
    if not isinstance(getattr(loader, "dataset", None), IterableDataset):
        return False
    if "num_workers" not in accepted_settings(workload.loader_fn):
        return False
    size = getattr(loader, "batch_size", None) or 1
    return _begins_twice(workload.build_loader(Config(batch_size=size).with_workers(WORKERS)))


def _begins_twice(loader: Iterable[Any]) -> bool:
    """Whether the first two batches of two workers are the same."""
    if not isinstance(loader, DataLoader) or loader.num_workers != WORKERS:
        return False
    loader.timeout = PATIENCE_SECONDS
    batches: list[list[torch.Tensor]] = []
    with Boundary():  # a launch of its own will say what is wrong with workers
        batches += [list(tensors_in(batch)) for batch in islice(loader, WORKERS)]
    return len(batches) == WORKERS and bool(batches[0]) and _are_equal(*batches)


def _are_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))
