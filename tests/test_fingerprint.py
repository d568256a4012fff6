"""Tests of autotune/trial/fingerprint.py: what makes a workload the same, and what does not."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from autotune.facts import UNKNOWN
from autotune.trial.fingerprint import dataset_length, fingerprint
from autotune.workload import Workload, live_workload


def loader_fn(batch_size: int, *, samples: int = 20) -> "DataLoader[Any]":
    """Return a loader of a few samples."""
    return DataLoader(TensorDataset(torch.zeros(samples, 4), torch.zeros(samples)), batch_size)


def mean(model: nn.Module, batch: Any) -> Tensor:
    """Return a loss."""
    result: Tensor = model(batch[0]).mean()
    return result


def total(model: nn.Module, batch: Any) -> Tensor:
    """Return another loss."""
    result: Tensor = model(batch[0]).sum()
    return result


class Net(nn.Module):
    """A model with a setting that is in no tensor."""

    def __init__(self, *, slope: float = 0.1, act: Callable[[], object] = object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.slope, self.act = nn.Linear(4, 2), slope, act

    def extra_repr(self) -> str:
        """Return its settings, the text of a function with its address among them."""
        return f"slope={self.slope}, act={self.act}"


def print_of(
    model: nn.Module | None = None, *, batch: Any = None, loader: Any = None, loss_fn: Any = mean
) -> dict[str, Any]:
    """Return the fingerprint of a workload of which all but what is given is always the same."""
    model = model or Net()
    loader = loader_fn(4) if loader is None else loader
    batch = next(iter(loader)) if batch is None else batch
    return fingerprint(live_workload(model, loader_fn, loss_fn=loss_fn), model, batch, loader)


def changed(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Return the parts in which two fingerprints differ."""
    return {name for name in one if one[name] != other[name]}


def moved() -> nn.Module:
    """Return the same model with other weights."""
    model = Net()
    nn.init.ones_(model.layer.weight)
    return model


@pytest.mark.parametrize(
    "other",
    [
        print_of,
        lambda: print_of(moved()),
        lambda: print_of(loader=loader_fn(8)),
        lambda: print_of(batch=[torch.ones(9, 4), torch.ones(9)]),
    ],
    ids=["again", "weights", "batch size", "values"],
)
def test_what_may_change_is_not_in_it(other: Callable[[], dict[str, Any]]) -> None:
    """Weights, values, and how many samples a batch has."""
    assert changed(print_of(), other()) == set()


def test_addresses_are_not_in_it() -> None:
    """The text of a function holds one, which is another in each process."""
    one, other = ([lambda: None][0] for _ in range(2))

    assert repr(one) != repr(other)
    assert changed(print_of(Net(act=one)), print_of(Net(act=other))) == set()


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        (lambda: print_of(Net().double()), {"tensors"}),
        (lambda: print_of(Net().requires_grad_(requires_grad=False)), {"tensors"}),
        (lambda: print_of(Net(slope=0.2)), {"modules"}),
        (lambda: print_of(loader=loader_fn(4, samples=21)), {"dataset"}),
        (lambda: print_of(loader=[[torch.zeros(4, 4), torch.zeros(4)]]), {"dataset"}),
        (lambda: print_of(loss_fn=total), {"source"}),
        (lambda: print_of(batch=[torch.ones(9, 5), torch.ones(9)]), {"batch"}),
        (lambda: print_of(batch=[torch.ones(9, 4), torch.ones(9).long()]), {"batch"}),
        (lambda: print_of(batch={"x": torch.ones(9, 4), "y": torch.ones(9)}), {"batch"}),
        (lambda: print_of(batch=(torch.ones(9, 4), [torch.ones(9)])), {"batch"}),
    ],
)
def test_what_makes_it_another_is_in_it(
    other: Callable[[], dict[str, Any]], parts: set[str]
) -> None:
    """Each part tells what changed."""
    assert changed(print_of(), other()) == parts


def test_keys_of_a_batch_count() -> None:
    """A model is called with them."""
    one, other = ({name: torch.ones(2, 4)} for name in ("inputs", "input_ids"))

    assert changed(print_of(batch=one), print_of(batch=other)) == {"batch"}


def test_a_source_that_cannot_be_had_is_unknown() -> None:
    """So that nothing is reused across processes, which is said."""
    code: dict[str, Any] = {}
    exec("def loss_fn(model, batch): return model(batch[0]).mean()", code)  # noqa: S102  # no file

    assert print_of(loss_fn=code["loss_fn"])["source"] == UNKNOWN


@pytest.mark.parametrize(
    ("name", "is_same"), [("other.py", True), ("beside.py", False), ("script.py", False)]
)
def test_a_script_is_its_text_and_what_it_imports(
    tmp_path: Path, name: str, *, is_same: bool
) -> None:
    """From its own folder; what else lies there does not matter."""
    (tmp_path / "beside.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text("import beside\nloader_fn = print\nmodel_fn = print")
    workload = Workload(model_fn=nn.Module, loader_fn=loader_fn, script=str(script))
    batch, model, loader = torch.zeros(1), nn.Linear(1, 1), loader_fn(4)
    before = fingerprint(workload, model, batch, loader)

    with (tmp_path / name).open("a") as file:
        file.write("\n# changed")

    assert (changed(before, fingerprint(workload, model, batch, loader)) == set()) == is_same


class Stream(IterableDataset[int]):
    """A data set without a length."""

    def __iter__(self) -> Iterator[int]:
        yield 1


class Shy(TensorDataset):
    """A data set that does not know its length yet."""

    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("loader", "length"),
    [
        (loader_fn(4), 20),
        (DataLoader(Stream()), None),
        (DataLoader(Shy(torch.zeros(3)), batch_sampler=[[0]]), None),
        ([1, 2, 3], None),
    ],
)
def test_a_data_set_has_a_length_or_none(loader: object, length: int | None) -> None:
    """It is that of the data set, not of the loader."""
    assert dataset_length(loader) == length
