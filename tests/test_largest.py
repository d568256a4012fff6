"""Tests of autotune/trial/largest.py: the largest samples, and the batch that is made of them."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from autotune.errors import WorkloadInvalid
from autotune.trial.largest import (
    KEPT_SAMPLES,
    Scan,
    batch_bytes,
    collate,
    find_largest,
    first_batches,
    is_scannable,
    sample_size,
)

Clock = Callable[[float], None]


class Lengths(Dataset[Tensor]):
    """Samples of these lengths; a look at one takes its time on the clock."""

    def __init__(self, lengths: Sequence[int], *, look: Callable[[], None] = lambda: None) -> None:
        self.lengths, self.look = lengths, look
        self.seen: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        self.look()
        self.seen.append(index)
        return torch.zeros(self.lengths[index])


class Stream(IterableDataset[Tensor]):
    """Samples in a row, of which none can be asked for."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from (torch.zeros(length) for length in (1, 5, 2, 3))


class Endless(Sequence[int]):
    """Lengths of a thousand million samples."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: Any) -> Any:
        return index % 7


def padded(samples: list[Tensor]) -> Tensor:
    """Return samples as one tensor, as long as the longest."""
    return pad_sequence(samples, batch_first=True)


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that stands still unless it is told to go on."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def go_on(seconds: float) -> None:
        now[0] += seconds

    return go_on


def scan(lengths: Sequence[int], *, pass_time: Clock, seconds: float) -> tuple[Scan, list[int]]:
    """Scan for so many seconds, of which each sample takes one; return which were looked at."""
    samples = Lengths(lengths, look=lambda: pass_time(1.0))
    return find_largest(DataLoader(samples), seconds=seconds), samples.seen


@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=60))
def test_a_small_data_set_is_looked_at_whole(lengths: list[int]) -> None:
    """Every sample once, the largest first, the smallest known too; nothing if all are alike."""
    samples = Lengths(lengths)

    found = find_largest(DataLoader(samples), seconds=1e6)

    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    assert sorted(samples.seen) == list(range(len(lengths)))
    assert found.samples == len(lengths)
    assert list(found.indices) == (order if len(set(lengths)) > 1 else [])
    assert found.smallest == (lengths.index(min(lengths)) if len(set(lengths)) > 1 else None)


@pytest.mark.parametrize("at", [0, 10, 500, 990, 999])
def test_a_longest_sample_near_an_end_is_found(pass_time: Clock, at: int) -> None:
    """Sorted data has it there: a third of the time goes to each end, and a third in between."""
    lengths = [5] * 1000
    lengths[at] = 99

    found, seen = scan(lengths, pass_time=pass_time, seconds=60.0)

    assert len(seen) == 60
    assert seen[:20] == list(range(20))
    assert seen[20:40] == list(range(999, 979, -1))
    assert len(set(seen)) == 60
    assert (found.indices[:1] == (at,)) == (at != 500 or 500 in seen)


def test_a_scan_is_bounded_in_time(pass_time: Clock) -> None:
    """Whatever the size of the data set; at least one sample is looked at."""
    many, seen = scan(Endless(), pass_time=pass_time, seconds=30.0)
    none, only = scan(range(20), pass_time=pass_time, seconds=0.0)

    assert many.samples == len(seen) == 30
    assert none.samples == len(only) == 1


def test_what_takes_longer_than_a_share_ends_it(pass_time: Clock) -> None:
    """The next share then has no time left: here each sample takes half of all."""
    samples = Lengths(range(50), look=lambda: pass_time(5.0))

    find_largest(DataLoader(samples), seconds=10.0)

    assert samples.seen == [0, 49]


def test_only_so_many_are_kept() -> None:
    """A larger batch repeats them."""
    found = find_largest(DataLoader(Lengths(range(KEPT_SAMPLES + 10))), seconds=1e6)

    assert len(found.indices) == KEPT_SAMPLES
    assert found.indices[0] == KEPT_SAMPLES + 9


def test_a_sample_that_cannot_be_had_is_passed_over() -> None:
    """Training that meets it will say so itself, or its sampler leaves it out."""

    class Holes(Lengths):
        def __getitem__(self, index: int) -> Tensor:
            if index % 3 == 0:
                raise [OSError, KeyError, ValueError][index % 2]("no such sample")
            return super().__getitem__(index)

    found = find_largest(DataLoader(Holes(range(10))), seconds=1e6)

    assert found == Scan(indices=(8, 7, 5, 4, 2, 1), smallest=1, samples=6)


class Pair(NamedTuple):
    """A sample with names."""

    label: int
    tokens: list[int]


@dataclasses.dataclass
class Molecule:
    """A sample with attributes."""

    atoms: Tensor
    name: str


@pytest.mark.parametrize(
    ("sample", "size"),
    [
        (torch.zeros(3, 4), 12),
        ("four", 4),
        (b"five!", 5),
        ([1, 2, 3], 3),
        (7, 1),
        (None, 1),
        ((1, "a longer text"), 14),
        (("a longer text", 1), 14),
        ({"text": "four", "ids": [1, 2]}, 6),
        (Pair(label=1, tokens=[1, 2, 3]), 4),
        ([[1, 2], [3]], 3),
        (np.zeros((2, 5)), 10),
        ((np.zeros((2, 5)), 1), 11),
        (Image.new("L", (4, 3)), 12),
        (Molecule(atoms=torch.zeros(6), name="x"), 7),
        (object(), 1),
    ],
)
def test_a_sample_is_as_large_as_its_parts(sample: object, size: int) -> None:
    """Of whatever nesting and kind; the units only compare samples of one data set."""
    assert sample_size(sample) == size


@pytest.mark.parametrize(
    ("loader", "answer"),
    [
        (DataLoader(Lengths([1, 2])), True),
        (DataLoader(Lengths([1, 2]), batch_sampler=[[0], [1]]), True),
        (DataLoader(Lengths([1, 2]), batch_size=None), False),
        (DataLoader(Stream()), False),
        ([torch.zeros(1)], False),
    ],
)
def test_only_a_map_style_loader_that_collates_is_scanned(loader: object, answer: bool) -> None:
    """Of others no batch can be made of chosen samples."""
    assert is_scannable(loader) == answer
    assert answer or find_largest(loader, seconds=1e6) == Scan()


def test_a_batch_of_the_largest_is_collated_as_usual() -> None:
    """By the loader's own function, whatever its sampler would have chosen."""
    loader = DataLoader(Lengths([3, 9, 1, 7]), batch_sampler=[[0], [2]], collate_fn=padded)
    found = find_largest(loader, seconds=1e6)

    batch = collate(loader, found.indices, count=2)

    assert batch.shape == (2, 9)


@pytest.mark.parametrize(("count", "samples"), [(3, 3), (4, 4), (50, 4)])
def test_fewer_largest_samples_are_repeated(count: int, samples: int) -> None:
    """But no batch is larger than the data set."""
    loader = DataLoader(Lengths([3, 9, 1, 7]), collate_fn=padded)

    batch = collate(loader, [1, 3], count=count)

    assert batch.shape == (samples, 9)


def test_the_first_batches_are_read() -> None:
    """Fewer where there are no more."""
    loader = DataLoader(Lengths([2] * 7), batch_size=3)

    assert [len(batch) for batch in first_batches(loader, 2)] == [3, 3]
    assert [len(batch) for batch in first_batches(loader, 9)] == [3, 3, 1]


def test_batches_are_read_until_they_hold_enough() -> None:
    """Two at least: of one alone it can't be told whether an epoch has more."""
    loader = DataLoader(Lengths([2] * 40), batch_size=2)

    assert len(first_batches(loader, 20, most_bytes=50)) == 4
    assert len(first_batches(loader, 20, most_bytes=1)) == 2


@pytest.mark.parametrize("loader", [[], DataLoader(Lengths([1] * 3), batch_size=4, drop_last=True)])
def test_a_loader_that_yields_nothing_is_invalid(loader: Any) -> None:
    """The hint says where to look."""
    with pytest.raises(WorkloadInvalid, match="yields nothing") as caught:
        first_batches(loader, 1)

    assert "drop_last" in caught.value.hint


def test_a_batch_has_the_bytes_of_its_tensors() -> None:
    """Of any nesting and type."""
    batch = {"ids": torch.zeros(2, 3, dtype=torch.long), "more": [torch.zeros(5), "text"]}

    assert batch_bytes(batch) == 2 * 3 * 8 + 5 * 4
