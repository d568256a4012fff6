"""The restoration contract: after `fit` the caller's process is as before (DESIGN 4)."""

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autotune
from acceptance.product import python, wait_for
from autotune.errors import AutotuneError

pytestmark = pytest.mark.slow

FLAGS = {
    "backends": (
        "cudnn.enabled",
        "cudnn.benchmark",
        "cudnn.deterministic",
        "cudnn.allow_tf32",
        "cuda.matmul.allow_tf32",
        "cuda.matmul.allow_fp16_reduced_precision_reduction",
        "cuda.matmul.allow_bf16_reduced_precision_reduction",
        "mkldnn.enabled",
        "mkldnn.deterministic",
    ),
    "calls": (
        "get_default_dtype",
        "get_default_device",
        "get_float32_matmul_precision",
        "get_num_threads",
        "get_num_interop_threads",
        "is_grad_enabled",
        "is_inference_mode_enabled",
        "is_anomaly_enabled",
        "are_deterministic_algorithms_enabled",
        "is_autocast_cache_enabled",
        "initial_seed",
    ),
}
"""Switches of the process, below `torch.backends` and `torch`."""

LARGE = 64
"""Samples in a batch from which the model misbehaves, where it does."""


class Model(nn.Module):
    """Has one of everything that training may change."""

    def __init__(self, folder: Path, end: str) -> None:
        super().__init__()
        self.folder = folder
        self.end = end
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3))
        self.head = nn.Linear(16, 2)
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)
        self.register_buffer("offset", torch.randn(16), persistent=False)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the class scores; a large batch ends as the test wants it."""
        self.calls += 1
        if len(inputs) >= LARGE:
            self._misbehave()
        hidden: Tensor = self.trunk(inputs) + self.frozen + self.offset
        return torch.as_tensor(self.head(hidden))

    def _misbehave(self) -> None:
        (self.folder / "large").touch()
        if self.end == "crash":
            raise ArithmeticError("a large batch")
        if self.end == "death":
            os.abort()
        while self.end in {"time_out", "interrupt"}:
            threading.Event().wait(0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a person has in hand when they call `fit`."""

    model: Model
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    generator: torch.Generator
    loader_fn: Callable[..., DataLoader[Any]]


@pytest.fixture
def process() -> Iterator[None]:
    """Unusual settings of this process, so that a default in their place is seen."""
    with warnings.catch_warnings():
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        torch.backends.cudnn.deterministic = True
        torch.set_float32_matmul_precision("high")
        os.environ["AUTOTUNE_TEST_SETTING"] = "kept"
        yield
        del os.environ["AUTOTUNE_TEST_SETTING"]
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.deterministic = False
        torch.set_num_threads(threads)


@pytest.fixture
def make_job(tmp_path: Path, process: None) -> Callable[[str], Job]:
    """Make a job in the middle of its training; a large batch ends as one says."""
    del process

    def make(end: str) -> Job:
        torch.manual_seed(3)
        model = Model(tmp_path, end)
        optimizer = torch.optim.AdamW(
            (each for each in model.parameters() if each.requires_grad), lr=0.01
        )
        inputs = torch.randn(256, 8)
        data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
        nn.functional.cross_entropy(model(inputs[:32]), data.tensors[1][:32]).backward()
        optimizer.step()  # state of the optimizer, running statistics, gradients
        model.trunk.eval()
        model.head.register_forward_hook(lambda *_: None)
        model.head.weight.register_hook(lambda gradient: gradient)
        generator = torch.Generator().manual_seed(11)
        random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002, S311

        def loader_fn(batch_size: int = 32, num_workers: int = 0) -> DataLoader[Any]:
            return DataLoader(
                data, batch_size, shuffle=True, num_workers=num_workers, generator=generator
            )

        return Job(
            model=model,
            optimizer=optimizer,
            scaler=torch.amp.GradScaler("cpu", init_scale=8.0),
            generator=generator,
            loader_fn=loader_fn,
        )

    return make


ENDS: Mapping[str, Mapping[str, Any]] = {
    "success": {"trials": 9},
    "out_of_memory": {"memory": 2000},
    "crash": {"trials": 9, "global_batch": "free"},
    "time_out": {"trials": 8, "global_batch": "free", "time_budget": "30s"},
    "interrupt": {"trials": 30, "global_batch": "free"},
}
"""How a run ends → arguments of `fit` that lead there."""


@pytest.mark.parametrize("end", ENDS)
def test_launches_elsewhere_leave_no_trace(make_job: Callable[[str], Job], end: str) -> None:
    """The parent of isolated launches is bit for bit as before, however they end."""
    job = make_job("death" if end == "crash" else end)
    before = snapshot(job)

    outcomes = fit(job, end, isolate=True)

    assert differences(before, snapshot(job)) == []
    assert ENDED_WITH[end] & outcomes


@pytest.mark.parametrize("end", [end for end in ENDS if end != "time_out"])
def test_launches_here_leave_no_trace(make_job: Callable[[str], Job], end: str) -> None:
    """Where the caller's own process trains, everything it borrowed is put back."""
    job = make_job(end)
    before = snapshot(job)

    outcomes = fit(job, end, isolate=False)

    assert differences(before, snapshot(job)) == []
    assert ENDED_WITH[end] & outcomes


def test_time_running_out_here_leaves_no_trace(make_job: Callable[[str], Job]) -> None:
    """A hang in the caller's own process cannot be ended; its budget can, and nothing is lost."""
    job = make_job("success")
    before = snapshot(job)

    with contextlib.suppress(AutotuneError):
        autotune.fit(job.model, job.loader_fn, isolate=False, time_budget=0.5, progress=False)

    assert differences(before, snapshot(job)) == []


def test_the_callers_own_optimizer_is_given_back(make_job: Callable[[str], Job]) -> None:
    """One who hands out the very optimizer of their training finds its state as it was."""
    job = make_job("success")
    before = snapshot(job)

    autotune.fit(
        job.model,
        job.loader_fn,
        optimizer_fn=lambda _: job.optimizer,
        isolate=False,
        trials=6,
        progress=False,
    )

    assert differences(before, snapshot(job)) == []


FRESH = """
import random
import numpy, torch, autotune
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
def told():
    arrays = (numpy.random.get_state()[1], torch.get_rng_state())
    return random.getstate(), [each.tolist() for each in arrays]

model = torch.nn.Linear(4, 2)
before = told()
autotune.fit(model, lambda batch_size=8: DataLoader(data, batch_size), isolate=False, trials=5)
print(told() == before)
"""


def test_what_is_loaded_on_the_way_draws_no_random_number(tmp_path: Path) -> None:
    """Some libraries draw when they are imported, which the first call in a process does."""
    ended = python("-", cwd=tmp_path, source=FRESH)

    assert ended.code == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "True"


def test_the_comparison_sees_what_changes(make_job: Callable[[str], Job]) -> None:
    """Each kind of state is really compared: a change of one is told by its name."""
    job = make_job("success")
    before = snapshot(job)
    changes: dict[str, Callable[[], object]] = {
        "parameter head.bias": lambda: _add_one(job.model.head.bias),
        "buffer trunk.1.running_mean": lambda: _add_one(job.model.trunk[1].running_mean),
        "gradient head.weight": lambda: _add_one(job.model.head.weight.grad),
        "modes": job.model.trunk.train,
        "requires_grad": job.model.frozen.requires_grad_,
        "hooks": lambda: job.model.trunk.register_forward_hook(lambda *_: None),
        "optimizer": job.optimizer.step,
        "random numbers": lambda: torch.rand(1),
        "generator": lambda: torch.rand(1, generator=job.generator),
        "environment": lambda: os.environ.update(AUTOTUNE_TEST_SETTING="lost"),
        "switches": lambda: torch.set_num_threads(2),
    }
    for change in changes.values():
        change()

    assert set(changes) <= set(differences(before, snapshot(job)))


ENDED_WITH = {
    "success": {"measured"},
    "out_of_memory": {"NothingFits"},
    "crash": {"crashed", "out_of_memory"},  # an abort may be either
    "time_out": {"timed_out"},
    "interrupt": {"interrupted"},
}
"""How a run ends → what shows that it did."""


def _add_one(value: object) -> None:
    assert isinstance(value, Tensor)
    with torch.no_grad():
        value.add_(1)


def fit(job: Job, end: str, *, isolate: bool) -> set[str]:
    """Run `fit` to its end; return the outcomes of its trials, its error's or verdict's name."""
    with _interrupted(job) if end == "interrupt" else contextlib.nullcontext():
        try:
            result = autotune.fit(
                job.model, job.loader_fn, isolate=isolate, progress=False, **ENDS[end]
            )
        except AutotuneError as error:
            return {type(error).__name__}
    return {trial.outcome.name for trial in result.trials} | {result.verdict}


@contextlib.contextmanager
def _interrupted(job: Job) -> Iterator[None]:
    """Send Ctrl-C as soon as a large batch hangs."""

    def interrupt() -> None:
        wait_for(job.model.folder / "large")
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def snapshot(job: Job) -> dict[str, Any]:
    """Return everything that the contract lists, bit for bit: name → what can be compared."""
    gc.collect()
    model = job.model
    named = dict(model.named_parameters())
    state = {f"parameter {name}": _bits(value) for name, value in named.items()}
    state |= {f"buffer {name}": _bits(value) for name, value in model.named_buffers()}
    state |= {f"gradient {name}": _bits(value.grad) for name, value in named.items()}
    state |= {
        "same tensors": [(id(value), value.data_ptr()) for value in named.values()],
        "requires_grad": {name: value.requires_grad for name, value in named.items()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": _hooks(model),
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "calls": model.calls,
        "optimizer": _bits(job.optimizer.state_dict()),
        "scaler": _bits(job.scaler.state_dict()),
        "generator": _bits(job.generator.get_state()),
    }
    return state | _process()


def _process() -> dict[str, Any]:
    torch_flags = {name: _read(torch.backends, name) for name in FLAGS["backends"]} | {
        name: getattr(torch, name)() for name in FLAGS["calls"]
    }
    me = psutil.Process()
    return {
        "random numbers": [
            random.getstate(),
            _bits(np.random.get_state()),  # noqa: NPY002  # the global one
            _bits(torch.get_rng_state()),
        ],
        "switches": {name: str(value) for name, value in torch_flags.items()},
        "autocast": [torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))],
        "environment": dict(os.environ),
        "processes": sorted(child.pid for child in me.children(recursive=True)),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "shared memory": sorted(path.name for path in Path("/dev/shm").glob("*")),  # noqa: S108
        "signals": [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)],
        "working folder": Path.cwd(),
        "sys.path": list(sys.path),
    }


def _read(holder: object, path: str) -> object:
    for name in path.split("."):
        holder = getattr(holder, name)
    return holder() if callable(holder) else holder


def _hooks(model: nn.Module) -> dict[str, Any]:
    names = [name for name in vars(model) if name.endswith("hooks")]
    hooks: dict[str, Any] = {
        f"{where} {name}": list(getattr(module, name).items())
        for where, module in model.named_modules()
        for name in names
    }
    return hooks | {
        where: list((value._backward_hooks or {}).items())
        for where, value in model.named_parameters()
    }


def _bits(value: Any) -> Any:
    """Return a value with each tensor and array in it as its type, shape and bytes."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: _bits(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_bits(part) for part in value]
    return value


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names of what is not the same."""
    return sorted(
        name for name in {*before, *after} if before.get(name, ...) != after.get(name, ...)
    )
