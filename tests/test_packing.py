"""Tests of autotune/trial/packing.py: live objects as bytes, read where nothing of ours is."""

import importlib.util
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autotune.errors import WorkloadInvalid
from autotune.space import Config
from autotune.step.batch import count_samples
from autotune.trial.packing import pack, unpack
from autotune.workload import Workload, live_workload

MODULE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZE = 4

class Made(nn.Linear):
    def forward(self, value):
        return super().forward(value) * SIZE

class Samples(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.ones(SIZE), index

def loader_fn(batch_size):
    return DataLoader(Samples(), batch_size)
"""


def loader_fn(batch_size: int) -> "DataLoader[Any]":
    """Return a loader of a few samples."""
    return DataLoader(TensorDataset(torch.ones(6, 4), torch.zeros(6)), batch_size)


def there_and_back(workload: Workload, folder: Path) -> Workload:
    """Return a workload that was packed and unpacked."""
    path = folder / "workload"
    path.write_bytes(pack(workload))
    return unpack(path)


def used(workload: Workload) -> tuple[str, tuple[int, ...]]:
    """Return the module of a workload's model, and the shape of its output for a batch."""
    model = workload.build_model(torch.device("cpu"))
    batch = next(iter(workload.build_loader(Config(batch_size=2))))
    return type(model).__module__, tuple(model(batch[0]).shape)


@pytest.fixture(params=["a_script", "a_script.with_a_dot"])
def module(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ModuleType]:
    """A module made from a file, as a script is: no fresh process finds it by its name."""
    path = tmp_path / "file.py"
    path.write_text(MODULE)
    spec = importlib.util.spec_from_file_location(request.param, path)
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules[request.param] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    yield made
    sys.modules.pop(request.param, None)


def test_weights_buffers_and_settings_arrive(tmp_path: Path) -> None:
    """Bit for bit, with modes and what requires no gradient."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    next(model.parameters()).requires_grad = False

    arrived = there_and_back(live_workload(model, loader_fn), tmp_path).live_model

    assert arrived is not None
    assert all(
        torch.equal(value, model.state_dict()[name]) for name, value in arrived.state_dict().items()
    )
    assert not arrived.training
    assert [item.requires_grad for item in arrived.parameters()] == [False, True, True, True]


def test_what_is_shared_stays_shared(tmp_path: Path) -> None:
    """Tied weights are one tensor afterwards, and travel once."""
    layers = [nn.Linear(300, 300, bias=False) for _ in range(2)]
    layers[1].weight = layers[0].weight
    workload = live_workload(nn.Sequential(*layers), loader_fn)

    arrived = there_and_back(workload, tmp_path).live_model

    assert arrived is not None
    assert len(list(arrived.parameters())) == 1
    assert len(pack(workload)) < 1.5 * 300 * 300 * 4


def test_lambdas_and_closures_arrive(tmp_path: Path) -> None:
    """With the values that they hold."""
    factor = torch.tensor(3.0)
    model = live_workload(
        lambda: nn.Linear(4, 1),
        lambda batch_size: [torch.ones(batch_size, 4) * factor],
        loss_fn=lambda model, batch: model(batch).mean(),
    )

    arrived = there_and_back(model, tmp_path)

    assert arrived.loss_fn is not None
    assert next(iter(arrived.loader_fn(batch_size=2))).tolist() == [[3.0] * 4] * 2


def test_what_cannot_be_imported_travels_by_value(module: ModuleType, tmp_path: Path) -> None:
    """Classes of the model, functions, and what they use of their module."""
    path = tmp_path / "packed"
    path.write_bytes(pack(live_workload(module.Made(4, 2), module.loader_fn)))
    del sys.modules[module.__name__]

    arrived = unpack(path)

    assert used(arrived) == (module.__name__, (2, 2))
    assert cloudpickle.list_registry_pickle_by_value() == set()


@pytest.mark.parametrize("is_named", [True, False], ids=["module", "data set"])
def test_what_a_closure_uses_travels_too(
    module: ModuleType, tmp_path: Path, *, is_named: bool
) -> None:
    """A data set, or a module whose parts are looked up later; wherever it is found."""
    samples = module.Samples()
    path = tmp_path / "packed"
    loader_fn: Callable[..., Any] = lambda batch_size: DataLoader(samples, batch_size)  # noqa: E731
    if is_named:
        loader_fn = lambda batch_size: DataLoader(module.Samples(), batch_size)  # noqa: E731
    path.write_bytes(pack(live_workload(nn.Linear(4, 2), loader_fn)))
    del sys.modules[module.__name__]

    arrived = unpack(path)

    assert used(arrived) == ("torch.nn.modules.linear", (2, 2))


def test_what_can_be_imported_travels_by_name(tmp_path: Path) -> None:
    """Libraries, and modules on the path: a fresh process has the same path."""
    workload = live_workload(nn.Linear(4, 2), loader_fn, batch_size_fn=count_samples)

    arrived = there_and_back(workload, tmp_path)

    assert arrived.batch_size_fn is count_samples
    assert type(arrived.live_model) is nn.Linear


class Refuses:
    """Cannot be pickled, and says so in its own way."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> str:
        raise self.error


@pytest.mark.parametrize(
    "make",
    [
        threading.Lock,
        lambda: (number for number in range(3)),
        lambda: Refuses(NotImplementedError("not me")),
        lambda: Refuses(ValueError("closed")),
        lambda: Refuses(OSError("no handle")),
        lambda: Refuses(pickle.PicklingError("not so")),
    ],
)
def test_what_cannot_be_sent_is_said(make: Callable[[], Any]) -> None:
    """With what to do instead; nothing stays registered."""
    held = make()

    with pytest.raises(WorkloadInvalid, match="cannot be sent to another process") as caught:
        pack(live_workload(nn.Linear(4, 2), lambda batch_size: [held] * batch_size))

    assert "isolate=False" in caught.value.hint
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_only_a_workload_is_unpacked(tmp_path: Path) -> None:
    """Anything else is a mistake of ours."""
    torch.save({"not": "a workload"}, tmp_path / "other")

    with pytest.raises(TypeError, match="need to be a Workload, but are dict"):
        unpack(tmp_path / "other")


MAIN = """
import sys, tempfile, pathlib
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from autotune.outcome import Request
from autotune.space import Config
from autotune.trial.isolate import ALWAYS_LOADED, Isolated
from autotune.trial.order import Source
from autotune.trial.packing import pack
from autotune.workload import live_workload

print("imported", flush=True)
scale = 2.0

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, value):
        return self.layer(value) * scale

def loader_fn(batch_size, num_workers=0):
    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    collate = lambda samples: torch.utils.data.default_collate(samples)
    return DataLoader(data, batch_size, num_workers=num_workers, collate_fn=collate)

with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "packed")
    path.write_bytes(pack(live_workload(Model(), loader_fn)))
    preload = {name: [] for name in ALWAYS_LOADED}
    with Isolated(Source(live_path=str(path)), device="cpu", preload=preload) as runner:
        config = Config(batch_size=8).with_workers(1)
        report = runner(Request(purpose="train", config=config, cycles=2))
        print(report.outcome.name, getattr(report.outcome, "log_tail", ""))
"""
"""A script without a guard of `__main__`, with classes, functions and a lambda of its own."""


@pytest.mark.parametrize("how", ["file", "-c", "stdin"])
@pytest.mark.slow
def test_whoever_calls_is_not_run_again(tmp_path: Path, how: str) -> None:
    """A script, `python -c` or a notebook, which has no file: none needs a guard of `__main__`."""
    (tmp_path / "caller.py").write_text(MAIN)
    arguments = {"file": [str(tmp_path / "caller.py")], "-c": ["-c", MAIN], "stdin": ["-"]}[how]

    run = subprocess.run(
        [sys.executable, *arguments], input=MAIN, capture_output=True, text=True, check=False
    )

    assert run.stdout.split() == ["imported", "measured"], run.stderr
