"""Loaders rebuilt from a user's own: the same data, other settings."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from autotune.errors import WorkloadInvalid
from autotune.rebuild import FromDataset, Rebuilt

DATA = TensorDataset(torch.arange(23).float())


class Stream(IterableDataset[torch.Tensor]):
    """Twenty numbers, without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(20).float())


class Pairs(Sampler[list[int]]):
    """A batch sampler of the user's own, whose size can be set."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(SequentialSampler(range(12)), self.batch_size, drop_last=True))


class Nameless(Pairs):
    """One whose size cannot be set from outside."""

    def __init__(self) -> None:
        super().__init__(3)
        del self.batch_size


def sizes(factory: Rebuilt | FromDataset, batch_size: int) -> list[int]:
    """Samples of each batch of a rebuilt loader."""
    return [
        len(batch[0]) if isinstance(batch, list) else len(batch) for batch in factory(batch_size)
    ]


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(DATA, batch_size=4), [10, 10, 3]),
        (DataLoader(DATA, batch_size=4, drop_last=True), [10, 10]),
        (DataLoader(DATA, batch_size=4, sampler=SequentialSampler(range(15))), [10, 5]),
        (DataLoader(DATA, batch_sampler=Pairs(4)), [10]),
        (DataLoader(Stream(), batch_size=4), [10, 10]),
    ],
    ids=["plain", "drop-last", "sampler", "batch-sampler", "iterable"],
)
def test_batches_have_the_size_that_is_asked_for(
    loader: "DataLoader[torch.Tensor]", expected: list[int]
) -> None:
    """Data set, sampler and `drop_last` stay as they are."""
    assert sizes(Rebuilt(loader), 10) == expected


def test_what_else_a_loader_has_is_kept() -> None:
    """`collate_fn`, `timeout`, generator, `worker_init_fn` and context are the user's."""
    loader = DataLoader(
        DATA,
        batch_size=4,
        collate_fn=len,
        num_workers=1,
        timeout=3,
        worker_init_fn=print,
        generator=torch.Generator(),
        multiprocessing_context="fork",
        sampler=WeightedRandomSampler([1.0] * 23, 23),
    )
    built = Rebuilt(loader)(8, num_workers=2, prefetch_factor=4, persistent_workers=True)

    assert isinstance(built, DataLoader)
    for name in ("dataset", "sampler", "collate_fn", "timeout", "generator", "worker_init_fn"):
        assert getattr(built, name) is getattr(loader, name)
    assert (built.num_workers, built.prefetch_factor, built.persistent_workers) == (2, 4, True)
    assert built.multiprocessing_context.get_start_method() == "fork"


def test_what_the_user_has_today_is_told() -> None:
    """The settings of the loader that was handed in are the baseline's."""
    loader = DataLoader(DATA, batch_size=4, num_workers=2, prefetch_factor=3)

    assert Rebuilt(loader).stated_settings == {
        "batch_size": 4,
        "num_workers": 2,
        "prefetch_factor": 3,
        "pin_memory": False,
        "persistent_workers": False,
    }


@pytest.mark.parametrize(
    "loader",
    [DataLoader(DATA, batch_sampler=Nameless()), DataLoader(DATA, batch_size=None)],
    ids=["batch-sampler", "no-batching"],
)
def test_a_batch_size_that_cannot_be_set_is_said(loader: "DataLoader[torch.Tensor]") -> None:
    """The hint shows the function to write instead."""
    with pytest.raises(WorkloadInvalid, match="batch size that can be set") as caught:
        Rebuilt(loader)

    assert "def loader_fn(batch_size" in caught.value.hint


def test_a_data_set_is_shuffled() -> None:
    """Of a map-style data set every sample comes once, in another order."""
    torch.manual_seed(0)
    seen = torch.cat([batch[0] for batch in FromDataset(DATA)(5)])

    assert sorted(seen.tolist()) == list(range(23))
    assert seen.tolist() != list(range(23))


def test_a_stream_comes_as_it_is() -> None:
    """An iterable data set has no order that could be changed."""
    assert sizes(FromDataset(Stream()), 8) == [8, 8, 4]
