"""Batches without data, of any number of samples."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from autotune.tracing.batches import Pattern
from autotune.tracing.fake import Untraceable, make_mode


class Pair(NamedTuple):
    """A batch of two parts."""

    inputs: Tensor
    targets: Tensor


@dataclass
class Graph:
    """A batch whose edges grow by three for each sample."""

    nodes: Tensor
    edges: Tensor
    sizes: list[int]
    count: int
    name: str = "graph"


class Own:
    """A batch of a class that nobody knows."""

    def __init__(self) -> None:
        self.inputs = torch.zeros(2, 3)


def graph(samples: int) -> Graph:
    """A graph of so many samples."""
    return Graph(
        nodes=torch.zeros(samples, 5),
        edges=torch.zeros(2, 3 * samples, dtype=torch.long),
        sizes=[3] * samples,
        count=samples,
    )


def grown(small: Any, large: Any, samples: int) -> Any:
    """Return a batch of so many samples after two of two and three."""
    with make_mode():
        return Pattern(batch=small, samples=2, larger=large).of(samples)


def test_all_lengths_grow_as_two_batches_tell() -> None:
    """Also those that are not the first, and numbers and lists beside the tensors."""
    batch = grown(graph(2), graph(3), 10)

    assert batch.nodes.shape == (10, 5)
    assert batch.edges.shape == (2, 30)
    assert batch.edges.dtype == torch.long
    assert (len(batch.sizes), batch.count, batch.name) == (10, 10, "graph")


@pytest.mark.parametrize(
    "make",
    [
        lambda samples: torch.zeros(samples, 7),
        lambda samples: [torch.zeros(samples, 7), torch.zeros(3)],
        lambda samples: Pair(torch.zeros(samples, 7), torch.zeros(samples)),
        lambda samples: {"inputs": torch.zeros(samples, 7), "none": None},
        lambda samples: UserDict(inputs=torch.zeros(samples, 7)),
    ],
    ids=["tensor", "list", "named tuple", "dict", "mapping"],
)
def test_batches_keep_their_nesting(make: Any) -> None:
    """A batch of 9 is of the type that the loader gives."""
    batch = grown(make(2), make(3), 9)
    first = batch if isinstance(batch, Tensor) else _first(batch)

    assert type(batch) is type(make(2)) or isinstance(batch, Tensor)
    assert first.shape == (9, 7)


def _first(batch: Any) -> Tensor:
    first: Tensor = batch["inputs"] if "inputs" in batch else batch[0]
    return first


def test_images_keep_their_order_of_memory() -> None:
    """Channels last stay last."""
    image = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    larger = torch.zeros(3, 3, 4, 4).to(memory_format=torch.channels_last)

    assert grown(image, larger, 8).is_contiguous(memory_format=torch.channels_last)


def test_a_single_batch_grows_where_it_is_as_long_as_its_samples() -> None:
    """What has another length stays; lists of a part for each sample grow."""
    batch = {"inputs": torch.zeros(4, 6), "scale": torch.zeros(6), "boxes": [torch.zeros(2)] * 4}
    with make_mode():
        large = Pattern(batch=batch, samples=4).of(7)

    assert large["inputs"].shape == (7, 6)
    assert large["scale"].shape == (6,)
    assert [box.shape for box in large["boxes"]] == [(2,)] * 7


@pytest.mark.parametrize(
    ("small", "large", "reason"),
    [
        (Own(), Own(), "class of their own, Own"),
        ([torch.zeros(2)], torch.zeros(3), "more than their length"),
        ({"a": 1}, {"a": 1, "b": 2}, "more than their length"),
        (torch.eye(2).to_sparse(), torch.eye(3).to_sparse(), "sparse"),
    ],
)
def test_what_cannot_grow_says_why(small: Any, large: Any, reason: str) -> None:
    """The text goes on from "it cannot be traced because"."""
    with pytest.raises(Untraceable, match=reason):
        grown(small, large, 5)


def test_uneven_growth_is_refused() -> None:
    """Five rows more for two samples more are no whole number for one."""
    with make_mode(), pytest.raises(Untraceable, match="evenly"):
        Pattern(batch=torch.zeros(4), samples=2, larger=torch.zeros(9), more_samples=2).of(5)
