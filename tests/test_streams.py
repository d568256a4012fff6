"""Streams: whether loader workers divide them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from autotune.trial.streams import repeats_by_worker
from autotune.workload import live_workload

pytestmark = pytest.mark.slow  # each starts loader workers


class Stream(IterableDataset[Tensor]):
    """A row of numbers, divided among workers or not."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        if self.kind == "fails" and worker:
            raise OSError("no such shard")
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        if self.kind == "repeated":
            first, step = 0, 1
        return (torch.full((3,), float(number)) for number in range(first, 40, step))


@pytest.mark.parametrize(
    ("kind", "expected"), [("repeated", True), ("divided", False), ("fails", False)]
)
def test_a_stream_that_each_worker_yields_whole_is_seen(kind: str, expected: bool) -> None:
    """By the first batches of two workers; workers that fail are seen to elsewhere."""

    def loader_fn(batch_size: int = 4, num_workers: int = 0) -> Any:
        return DataLoader(Stream(kind), batch_size, num_workers=num_workers)

    workload = live_workload(nn.Linear(3, 1), loader_fn)

    assert repeats_by_worker(workload, loader_fn()) is expected


def test_a_data_set_with_an_index_is_divided() -> None:
    """Its sampler deals the indices out, so that equal samples mean nothing."""

    def loader_fn(batch_size: int = 4, num_workers: int = 0) -> Any:
        return DataLoader(TensorDataset(torch.ones(40, 3)), batch_size, num_workers=num_workers)

    assert not repeats_by_worker(live_workload(nn.Linear(3, 1), loader_fn), loader_fn())
