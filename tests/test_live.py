"""Live objects on their way to a launch: sent, or tuned here."""

import os
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autotune.errors import WorkloadInvalid
from autotune.live import open_live
from autotune.outcome import Measured, Request
from autotune.space import Config
from autotune.trial.inprocess import InProcess
from autotune.trial.isolate import Isolated
from autotune.workload import Workload, live_workload


def workload(**functions: Any) -> Workload:
    """A tiny model and its data, in a closure."""
    data = TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,)))
    return live_workload(
        nn.Linear(4, 3), lambda batch_size: DataLoader(data, batch_size=batch_size), **functions
    )


def unsendable() -> Workload:
    """One whose loss holds a lock, which no pickle can send."""
    lock = threading.Lock()

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        with lock:
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return workload(loss_fn=loss_fn)


@pytest.mark.slow
def test_live_objects_are_sent() -> None:
    """Closures and lambdas run in a process of their own, and the model here stays as it is."""
    own = workload()
    request = Request(purpose="train", config=Config(batch_size=8), cycles=2)
    with open_live(own, device="cpu", isolate=None) as (runner, notes):
        outcome = runner(request).outcome

    assert isinstance(runner, Isolated)
    assert isinstance(outcome, Measured)
    assert notes == ()
    assert own.live_model is not None
    assert all(item.grad is None for item in own.live_model.parameters())


def test_what_cannot_be_sent_is_tuned_here() -> None:
    """A note says so; weights and environment are as before."""
    before, own = dict(os.environ), unsendable()
    assert own.live_model is not None
    weights = [item.clone() for item in own.live_model.parameters()]
    request = Request(purpose="train", config=Config(batch_size=8), cycles=2)
    with open_live(own, device="cpu", isolate=None) as (runner, notes):
        outcome = runner(request).outcome

    assert isinstance(runner, InProcess)
    assert isinstance(outcome, Measured)
    assert "cannot be sent" in notes[0]
    assert dict(os.environ) == before
    assert all(map(torch.equal, weights, own.live_model.parameters()))


def test_what_must_be_sent_and_cannot_is_an_error() -> None:
    """With `isolate=True` nothing runs here."""
    with (
        pytest.raises(WorkloadInvalid, match="cannot be sent"),
        open_live(unsendable(), device="cpu", isolate=True),
    ):
        pass


def test_nothing_is_sent_where_the_user_says_so() -> None:
    """With `isolate=False` a note says what that costs."""
    with open_live(workload(), device="cpu", isolate=False) as (runner, notes):
        assert isinstance(runner, InProcess)

    assert "a crash would have ended it" in notes[0]
