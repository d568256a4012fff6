"""Tests of autotune/trial/inprocess.py: a launch in the caller's process leaves no trace there."""

import multiprocessing
import os
import random
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset
from workloads import quick_launches

from autotune.errors import DeviceMissing, WorkloadInvalid
from autotune.outcome import Purpose, Request
from autotune.space import Config
from autotune.trial.inprocess import InProcess
from autotune.workload import Workload, live_workload

BASELINE = Config(batch_size=4)
TRAIN = Request(purpose="train", config=BASELINE, cycles=2)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """What is computed here is small."""
    with quick_launches():
        yield


class Convolved(nn.Module):
    """Values through a convolution, as an image of two channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, values: Tensor) -> Tensor:
        """Return as many values."""
        changed: Tensor = self.layer(values[:, :, None, None].expand(-1, -1, 3, 3))
        return changed.mean((2, 3))


class Caller:
    """Somebody in the middle of a training of their own."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2), Convolved()
        )
        self.model[0].requires_grad_(requires_grad=False)
        self.model[3].register_forward_hook(lambda *_: None)
        self.optimizer = AdamW([item for item in self.model.parameters() if item.requires_grad])
        self.generator = torch.Generator().manual_seed(5)
        self.data = TensorDataset(torch.randn(24, 4), torch.randint(0, 2, (24,)))
        self.model(torch.randn(6, 4)).sum().backward()
        self.optimizer.step()
        self.model[1].eval()

    def loader_fn(self, batch_size: int, num_workers: int = 0) -> "DataLoader[Any]":
        """Return a loader that draws from the caller's own generator."""
        return DataLoader(
            self.data, batch_size, shuffle=True, generator=self.generator, num_workers=num_workers
        )

    def optimizer_fn(self, _parameters: object) -> AdamW:
        """Return the caller's own optimizer."""
        return self.optimizer

    def workload(self, **more: Any) -> Workload:
        """Return the workload of all that is the caller's own."""
        own = {"optimizer_fn": self.optimizer_fn, "eval_loader_fn": self.loader_fn}
        return live_workload(self.model, self.loader_fn, **own | more)

    def state(self) -> list[Any]:
        """Return all that has to be as before, in a form that can be compared."""
        return [
            [bits(value) for value in self.model.state_dict().values()],
            [(id(item), item.grad is None or bits(item.grad)) for item in self.model.parameters()],
            [item.requires_grad for item in self.model.parameters()],
            [(module.training, len(module._forward_hooks)) for module in self.model.modules()],
            [type(module) for module in self.model.modules()],
            sorted(self.model[2].__dict__, key=str),
            [
                {name: bits(value) for name, value in each.items()}
                for each in self.optimizer.state.values()
            ],
            [(g["lr"], g["foreach"], g["fused"]) for g in self.optimizer.param_groups],
            [item.stride() for item in self.model.state_dict().values()],
            bits(self.generator.get_state()),
            *surroundings(),
        ]


def bits(value: Tensor) -> bytes:
    """Return the bits of a tensor."""
    return value.detach().numpy().tobytes()


def surroundings() -> list[Any]:
    """Return what belongs to the process."""
    return [
        random.getstate(),
        str(np.random.get_state()),  # noqa: NPY002  # the global one
        bits(torch.get_rng_state()),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        dict(os.environ),
        resource.getrlimit(resource.RLIMIT_DATA),
        multiprocessing.active_children(),
        multiprocessing.get_start_method(allow_none=True),
    ]


def unruly(model: nn.Module, batch: Any) -> Tensor:
    """Return a loss, and change everything on the way."""
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002  # the global one
    os.environ["UNRULY"] = "yes"
    torch.set_default_dtype(torch.float64)
    torch.backends.cudnn.benchmark = True
    torch.use_deterministic_algorithms(mode=True)
    model.train()
    model.register_forward_hook(lambda *_: None)
    for parameter in model.parameters():
        parameter.requires_grad = True
    next(module for module in model.modules() if isinstance(module, nn.Dropout)).p = 0.9
    result: Tensor = model(batch[0].float()).square().mean()
    return result


def failing(model: nn.Module, batch: Any) -> Tensor:
    """Do the same, then raise."""
    unruly(model, batch)
    torch.set_grad_enabled(mode=False)
    raise RuntimeError("boom")


REQUESTS: list[tuple[Request, str]] = [
    (TRAIN, "measured"),
    (replace(TRAIN, config=BASELINE.with_workers(1)), "measured"),
    (replace(TRAIN, config=replace(BASELINE, amp="bf16", threads=1)), "measured"),
    (replace(TRAIN, config=replace(BASELINE, optimizer_impl="foreach")), "measured"),
    (replace(TRAIN, config=replace(BASELINE, optimizer_impl="fused")), "measured"),
    (replace(TRAIN, config=replace(BASELINE, channels_last=True)), "measured"),
    (replace(TRAIN, purpose="compute"), "measured"),
    (replace(TRAIN, purpose="loader"), "measured"),
    (replace(TRAIN, purpose="memory"), "measured"),
    (replace(TRAIN, purpose="memory", limit_bytes=500), "out_of_memory"),
    (replace(TRAIN, purpose="verify"), "measured"),
    (
        replace(TRAIN, purpose="check", config=replace(BASELINE, amp="bf16"), baseline=BASELINE),
        "measured",
    ),
]


@pytest.mark.parametrize(("request_", "name"), REQUESTS)
def test_everything_is_put_back(request_: Request, name: str) -> None:
    """Bit for bit, whatever the launch was for and however it ended."""
    caller = Caller()
    before = caller.state()

    with InProcess(caller.workload(), device="cpu") as runner:
        outcome = runner(request_).outcome

    assert outcome.name == name, outcome
    assert caller.state() == before


@pytest.mark.parametrize(("loss_fn", "name"), [(unruly, "measured"), (failing, "crashed")])
@pytest.mark.parametrize("purpose", ["train", "memory"])
def test_what_user_code_changes_is_put_back(
    loss_fn: Callable[[nn.Module, Any], Tensor], name: str, purpose: Purpose
) -> None:
    """Also if it raises half-way."""
    caller = Caller()
    before = caller.state()

    with InProcess(caller.workload(loss_fn=loss_fn), device="cpu") as runner:
        outcome = runner(replace(TRAIN, purpose=purpose)).outcome

    assert outcome.name == name, outcome
    assert caller.state() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_an_interrupt_leaves_no_trace_either(error: BaseException) -> None:
    """It passes through, and everything is as before."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        unruly(model, batch)
        raise error

    caller = Caller()
    before = caller.state()

    with (
        InProcess(caller.workload(loss_fn=loss_fn), device="cpu") as runner,
        pytest.raises(type(error)),
    ):
        runner(TRAIN)

    assert caller.state() == before


def test_a_survey_leaves_no_trace() -> None:
    """Though it reads batches and looks at samples."""
    caller = Caller()
    before = caller.state()

    with InProcess(caller.workload(), device="cpu") as runner:
        survey = runner.survey(scan_seconds=0.1)

    assert survey.workload.dataset_length == 24
    assert caller.state() == before


def test_what_a_survey_meets_is_the_workloads_fault() -> None:
    """Under its own name, as in a process of its own."""

    def model_fn() -> nn.Module:
        raise ValueError("no such weights")

    workload = live_workload(model_fn, lambda batch_size: [torch.zeros(batch_size, 4)])

    with InProcess(workload, device="cpu") as runner, pytest.raises(WorkloadInvalid) as caught:
        runner.survey(scan_seconds=0.1)

    assert "ValueError: no such weights" in str(caught.value)
    assert "model_fn" in caught.value.hint


def test_a_device_that_is_not_there_is_said_at_once() -> None:
    """Before anything is run."""
    with pytest.raises(DeviceMissing):
        InProcess(Caller().workload(), device="cuda:99")
