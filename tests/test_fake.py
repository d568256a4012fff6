"""Twins of models: the same shapes and ties, no data, and the user's own model left alone."""

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autotune.tracing.fake import Untraceable, copied_safely, make_mode, twin_of


class Odd(nn.Module):
    """A model that keeps tensors and modules in every place there is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.tied.bias.requires_grad = False
        self.register_buffer("counts", torch.ones(3))
        self.flat = torch.zeros(100)
        self.slice = nn.Parameter(self.flat[10:18])
        self.kept = {"flat": [self.flat]}
        self.lock = threading.Lock()  # cannot be copied
        self.seen: list[int] = []
        self.helper = functools.partial(_apply, self.first)
        self.first.register_forward_hook(lambda *_: self.seen.append(1))

    def forward(self, value: Tensor) -> Tensor:
        """Return something of all of it; what is made lazily is made here."""
        if not hasattr(self, "lazy"):
            self.lazy = torch.ones(8)
        result: Tensor = self.tied(self.helper(value)) + self.slice + self.kept["flat"][0][:8]
        return result * self.lazy


def _apply(module: nn.Module, value: Tensor) -> Tensor:
    return torch.as_tensor(module(value))


def run(twin: nn.Module, mode: Any) -> None:
    """Run forward and backward of a twin."""
    with mode:
        twin(torch.empty(4, 8)).sum().backward()


def test_a_twin_holds_no_data() -> None:
    """Each of its tensors is fake, those in plain attributes and containers too."""
    twin = twin_of(Odd(), make_mode())

    tensors = [*twin.parameters(), *twin.buffers(), twin.flat, twin.kept["flat"][0]]  # type: ignore[index]  # a dict
    assert all(isinstance(tensor, FakeTensor) for tensor in tensors)


def test_what_is_tied_stays_tied() -> None:
    """Tied weights are one parameter, and a slice shares its storage with the whole."""
    twin: Any = twin_of(Odd(), make_mode())

    assert twin.tied.weight is twin.first.weight
    assert twin.kept["flat"][0] is twin.flat
    assert twin.slice.untyped_storage() is twin.flat.untyped_storage()
    assert twin.slice.untyped_storage().nbytes() == 400


def test_what_is_frozen_stays_frozen() -> None:
    """And what is trained is trained; attributes of parameters come along."""
    model = Odd()
    model.first.weight.group = "slow"  # type: ignore[attr-defined]  # as some optimizers read

    twin: Any = twin_of(model, make_mode())

    assert not twin.tied.bias.requires_grad
    assert twin.first.weight.requires_grad
    assert twin.first.weight.group == "slow"


def test_a_step_of_a_twin_leaves_the_model_alone() -> None:
    """Hooks, partials and closures of the twin refer to the twin; lazy state is made there."""
    model, mode = Odd(), make_mode()
    before = copy.deepcopy(model.first.weight)
    twin: Any = twin_of(model, mode)

    run(twin, mode)

    assert twin.seen == [1]
    assert twin.first.weight.grad.shape == (8, 8)
    assert model.seen == []
    assert model.first.weight.grad is None
    assert not hasattr(model, "lazy")
    assert torch.equal(model.first.weight, before)


def test_a_twin_has_twins() -> None:
    """Each trace has one of its own, so that none meets what another left."""
    mode = make_mode()
    first: Any = twin_of(Odd(), mode)
    run(first, mode)

    second: Any = twin_of(first, mode)

    assert second.first.weight is not first.first.weight
    assert second.first.weight.grad is None


def test_a_model_on_the_meta_device_comes_to_the_cpu() -> None:
    """Whatever device a model is on, it is traced as on a CPU."""
    twin = twin_of(nn.Linear(4, 4, device="meta"), make_mode())

    assert twin.weight.device == torch.device("cpu")


def scripted() -> nn.Module:
    """A model compiled by TorchScript."""
    module: nn.Module = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    return module


def compiled() -> nn.Module:
    """A model compiled by torch.compile."""
    module: Any = torch.compile(nn.Linear(2, 2))
    return nn.Sequential(module)


def sparse() -> nn.Module:
    """A model that holds a sparse tensor."""
    model = nn.Linear(2, 2)
    model.register_buffer("adjacency", torch.eye(2).to_sparse())
    return model


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (scripted, "TorchScript"),
        (compiled, "torch.compile"),
        (sparse, "sparse"),
        (functools.partial(nn.LazyLinear, 2), "shape is not known"),
    ],
)
def test_what_has_no_twin_says_why(make: Callable[[], nn.Module], reason: str) -> None:
    """The text goes on from "it cannot be traced because"."""
    with pytest.raises(Untraceable, match=reason):
        twin_of(make(), make_mode())


def test_deep_copies_of_fake_tensors_are_fake() -> None:
    """PyTorch's own write where there is no memory; its method is put back afterwards."""
    original = Tensor.__deepcopy__
    with make_mode(), copied_safely():
        buffer, parameter = torch.empty(3), nn.Parameter(torch.empty(2))
        copies = copy.deepcopy({"buffer": buffer, "same": buffer, "parameter": parameter})
        real = copy.deepcopy(torch.nn.Linear(2, 2))

    assert isinstance(copies["buffer"], FakeTensor)
    assert copies["buffer"] is copies["same"]
    assert copies["buffer"] is not buffer
    assert isinstance(copies["parameter"], nn.Parameter)
    assert isinstance(real.weight, FakeTensor)
    assert Tensor.__deepcopy__ is original
