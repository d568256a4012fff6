"""Batches of any nesting: moved whole, counted right, their types kept."""

import copy
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import MaskedLMOutput

from autotune.step import forms, plain
from autotune.step.batch import (
    BatchUnclear,
    count_samples,
    images_to_device,
    map_parts,
    nesting_of,
    tensors_in,
    to_device,
)

META = torch.device("meta")
"""A device that every machine has, and that no tensor is on by itself."""

ROWS = 3

Pair = namedtuple("Pair", ["inputs", "targets"])  # noqa: PYI024  # as users write them


@dataclass
class Open:
    """A batch that may be written to."""

    inputs: Tensor
    name: str = "open"


@dataclass(frozen=True)
class Closed:
    """A batch that may not be written to."""

    inputs: Tensor
    name: str = "closed"


@dataclass(frozen=True, slots=True)
class Slotted:
    """A batch without a `__dict__`."""

    inputs: Tensor
    name: str = "slotted"


class Boxes(list[Any]):
    """A list with an attribute of its own."""

    size = 7


class Graph:
    """An object that moves itself: in place, as those of torch_geometric do."""

    def __init__(self) -> None:
        self.nodes = rows()

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Graph":
        """Move, and return itself."""
        self.nodes = self.nodes.to(device, non_blocking=non_blocking)
        return self


class Plain(Graph):
    """An object whose `to` takes a device alone, and forgets to return itself."""

    def to(self, device: torch.device) -> None:  # type: ignore[override]
        """Move."""
        self.nodes = self.nodes.to(device)


def rows(count: int = ROWS) -> Tensor:
    """A tensor of so many samples."""
    return torch.arange(count * 2.0).reshape(count, 2)


def packed() -> Any:
    """Three sequences of 4, 2 and 1 steps: seven rows of data."""
    return pack_sequence([torch.ones(4, 2), torch.ones(2, 2), torch.ones(1, 2)])


def default_dict() -> defaultdict[str, Any]:
    """A dict that makes what it lacks."""
    return defaultdict(list, inputs=rows())


FORMS: dict[str, Callable[[], Any]] = {
    "tensor": rows,
    "dict": lambda: {"inputs": rows(), "name": "a", "nothing": None, "empty": {}},
    "ordered dict": lambda: OrderedDict(inputs=rows()),
    "default dict": default_dict,
    "user dict": lambda: UserDict(inputs=rows()),
    "batch encoding": lambda: BatchEncoding({"input_ids": rows().long()}),
    "model output": lambda: MaskedLMOutput(logits=rows()),
    "list": lambda: [rows(), ["a", "b", "c"], 3, None],
    "list of its own": lambda: Boxes([rows()]),
    "tuple": lambda: (rows(), rows()),
    "result of torch.max": lambda: torch.max(rows(), dim=1),
    "named tuple": lambda: Pair(rows(), rows()),
    "dataclass": lambda: Open(rows()),
    "frozen dataclass": lambda: Closed(rows()),
    "slotted dataclass": lambda: Slotted(rows()),
    "object": Graph,
    "object, returns nothing": Plain,
    "packed sequence": packed,
    "packed beside targets": lambda: (packed(), rows()),
    "scalar first": lambda: {"temperature": torch.tensor(0.5), "inputs": rows()},
    "nested": lambda: {"views": [Pair(rows(), (Closed(rows()), Graph()))], "targets": rows()},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_tensor_is_moved_and_no_type_changes(form: str) -> None:
    """Batches of every form arrive whole: the same types, and as many tensors, on the device."""
    batch = FORMS[form]()

    moved = to_device(batch, META)

    left = [tensor for tensor in tensors_in(moved) if tensor.device != META]
    assert shape_of(moved) == shape_of(batch)
    assert len(left) == ("packed" in form)  # its lengths belong on the host


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("device", [META, torch.device("cpu")])
def test_images_arrive_as_all_else_does(form: str, device: torch.device) -> None:
    """With their channels last: nothing but the layout of what has four dimensions changes."""
    images = torch.rand(ROWS, 2, 4, 4)
    batch = {"images": images, "all else": FORMS[form](), "more": [Pair(images, images)]}

    moved = images_to_device(batch, device)

    assert shape_of(moved) == shape_of(batch)
    found = [tensor for tensor in tensors_in(moved) if tensor.dim() == 4]
    assert [tensor.is_contiguous(memory_format=torch.channels_last) for tensor in found] == [
        True
    ] * 3
    assert images.is_contiguous()
    left = [tensor for tensor in tensors_in(moved) if tensor.device != device]
    assert len(left) == ("packed" in form and device == META)


@pytest.mark.parametrize("form", FORMS)
def test_the_batch_in_hand_stays_where_it_is(form: str) -> None:
    """Moving makes a new batch: one that is stepped on again is moved again."""
    batch = FORMS[form]()

    to_device(batch, META)

    assert all(tensor.device.type == "cpu" for tensor in tensors_in(batch))


@pytest.mark.parametrize("form", FORMS)
def test_samples_are_counted_in_every_form(form: str) -> None:
    """Every form of a batch of three says three, a packed sequence of seven steps too."""
    assert count_samples(FORMS[form]()) == ROWS


def test_a_mapping_that_cannot_be_written_to_arrives_as_a_dict() -> None:
    """A read-only mapping is moved as well; it can only come back as a dict."""
    moved = to_device(MappingProxyType({"inputs": rows()}), META)

    assert moved["inputs"].device == META


def test_a_list_of_its_own_keeps_its_attributes() -> None:
    """What a list carries beside its items travels along."""
    batch = Boxes([rows()])
    batch.size = 9

    assert to_device(batch, META).size == 9


def test_what_moves_in_place_and_fails_tells_why() -> None:
    """An error inside a user's own `to` is theirs, and is shown."""

    class Broken:
        def to(self, device: torch.device) -> None:
            raise TypeError(f"no {device} for me")

    with pytest.raises(TypeError, match="no meta for me"):
        to_device(Broken(), META)


@pytest.mark.parametrize("batch", [None, "text", 3, {}, [], torch.device("cpu"), Open, Graph])
def test_what_holds_no_tensor_is_passed_on(batch: object) -> None:
    """Names, numbers, nothing and classes pass through, and hold no tensors."""
    assert to_device(batch, META) == batch
    assert list(tensors_in(batch)) == []


@pytest.mark.parametrize(
    ("batch", "kind"),
    [(None, "NoneType"), ({}, "dict"), ([torch.tensor(3)], "list"), ({"ids": [1, 2]}, "dict")],
)
def test_a_batch_that_cannot_be_counted_is_named(batch: object, kind: str) -> None:
    """Where no tensor has a dimension, the error names the batch and the way out."""
    with pytest.raises(BatchUnclear, match=rf"this {kind} has none; pass batch_size_fn\(batch\)"):
        count_samples(batch)


def test_an_object_that_cannot_be_moved_is_counted_still() -> None:
    """A plain object's tensors are seen: a loss_fn may well move them itself."""
    assert count_samples(SimpleNamespace(inputs=rows(), name="a")) == ROWS


def test_objects_that_refer_to_each_other_are_walked_once() -> None:
    """A circle of references has an end."""
    batch = SimpleNamespace(inputs=rows())
    batch.owner = SimpleNamespace(batch=batch)

    assert len(list(tensors_in(batch))) == 1


def test_tensors_come_in_the_order_of_the_parts() -> None:
    """The first tensor is the first that a reader of the batch meets."""
    tensors = [torch.tensor([float(place)]) for place in range(4)]
    batch = {"a": [tensors[0], (tensors[1],)], "b": Closed(tensors[2]), "c": tensors[3]}

    assert [float(tensor) for tensor in tensors_in(batch)] == [0, 1, 2, 3]


leaves = st.one_of(
    st.integers(1, 3).map(rows), st.none(), st.text(max_size=3), st.just(torch.tensor(1.0))
)
batches = st.recursive(
    leaves,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.lists(parts, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), parts, max_size=3),
        st.dictionaries(st.text(max_size=2), parts, max_size=3).map(UserDict),
        st.builds(Pair, parts, parts),
        st.builds(Closed, parts),
        st.builds(Slotted, parts),
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(batches)
def test_a_round_trip_changes_nothing(batch: object) -> None:
    """Whatever the nesting, changing no part gives the same batch, with the same tensors."""

    def same(part: Any) -> Any:
        return map_parts(part, same)

    twin = same(batch)

    assert shape_of(twin) == shape_of(batch)
    assert [id(one) for one in tensors_in(twin)] == [id(one) for one in tensors_in(batch)]


@settings(deadline=None)
@given(batches)
def test_moving_is_seen_in_every_nesting(batch: object) -> None:
    """Whatever the nesting, every tensor is moved and nothing else is different."""
    before = copy.deepcopy(shape_of(batch))

    moved = to_device(batch, META)

    assert shape_of(moved) == before
    assert all(tensor.device == META for tensor in tensors_in(moved))


FEW_LINES: dict[str, tuple[Callable[..., Any], Callable[..., int]]] = {
    "tensor": (forms.move_tensor, len),
    "dict": (forms.move_dict, forms.count_dict),
    "parts": (forms.move_parts, forms.count_parts),
    "nested": (plain.to_device, plain.count_samples),
}
"""A batch's nesting → what the written loop moves and counts it by."""

NESTINGS = {
    "tensor": "tensor",
    "dict": "nested",
    "batch encoding": "other",
    "list": "nested",
    "tuple": "parts",
    "named tuple": "other",
    "dataclass": "other",
    "slotted dataclass": "other",
    "object": "other",
    "packed beside targets": "other",
    "scalar first": "nested",
    "nested": "other",
}


@pytest.mark.parametrize("form", NESTINGS)
def test_a_nesting_says_how_little_code_will_do(form: str) -> None:
    """Batches of plain parts need few lines; what has a type of its own needs them all."""
    assert nesting_of(FORMS[form](), is_kept=True) == NESTINGS[form]


def test_a_mapping_of_tensors_is_a_dict_where_its_type_does_not_matter() -> None:
    """Hugging Face's batches are unpacked into arguments, whatever type holds these."""
    batch = BatchEncoding({"input_ids": rows().long()})

    assert nesting_of(batch, is_kept=False) == "dict"
    assert nesting_of(dict(batch), is_kept=True) == "dict"


@pytest.mark.parametrize("batch", [{}, [], None, torch.tensor(3), [torch.tensor(3)], {"a": 1}])
def test_what_cannot_be_counted_is_no_plain_batch(batch: object) -> None:
    """Without a tensor that tells the number of samples, no short code is written."""
    assert nesting_of(batch, is_kept=True) == "other"


parts = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=6,
)
counted = st.one_of(
    st.integers(1, 3).map(rows),
    parts.map(lambda part: (rows(), part)),
    parts.map(lambda part: {"inputs": rows(), "other": part}),
)


@settings(deadline=None)
@given(counted)
def test_few_lines_give_what_many_give(batch: object) -> None:
    """Where few lines are written, they move and count as the general ones of trials do."""
    move, count = FEW_LINES[nesting_of(batch, is_kept=True)]

    moved = move(batch, META)

    assert shape_of(moved) == shape_of(batch)
    assert all(tensor.device == META for tensor in tensors_in(moved))
    assert count(batch) == count_samples(batch)


def shape_of(batch: Any) -> Any:
    """Describe a batch: its types, its keys, and the shapes of its tensors."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape)
    return type(batch), [(name, shape_of(part)) for name, part in parts_of(batch)]


def parts_of(batch: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of a batch by their names."""
    if isinstance(batch, dict | UserDict):
        yield from batch.items()
    elif isinstance(batch, list | tuple):
        yield from enumerate(batch)
    elif isinstance(batch, Open | Closed | Slotted):
        yield from (("inputs", batch.inputs), ("name", batch.name))
    elif isinstance(batch, Graph):
        yield "nodes", batch.nodes
    elif isinstance(batch, str | int):
        yield "itself", None
