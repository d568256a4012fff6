"""Layout and optimizer as a config says, and both put back."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.sparse_adam import SparseAdam
from workloads import quick_launches

from autotune.errors import WorkloadInvalid
from autotune.step.kernels import put
from autotune.step.variants import (
    are_channels_last,
    channels_last,
    is_fused,
    other_ways,
    stepping,
)

LAST = torch.channels_last
CPU = torch.device("cpu")
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": AdamW,
    "adam, amsgrad": lambda parameters: Adam(parameters, amsgrad=True),
    "sgd, momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda parameters: Adagrad(parameters, lr=0.1),
}
"""Optimizers with a fused kernel on a CPU."""


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """What is computed here is small."""
    with quick_launches():
        yield


def cnn() -> nn.Module:
    """Return the same small convolutions every time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.Tanh(), nn.Conv2d(6, 5, 4), nn.Flatten()
    )


def images(count: int = 4) -> Tensor:
    """Return the same images every time."""
    return torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, optimizer: Optimizer, *, steps: int = 3, is_last: bool = False) -> None:
    """Make some steps on images."""
    batch = images().contiguous(memory_format=LAST if is_last else torch.contiguous_format)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(batch), torch.arange(4)).backward()
        optimizer.step()


def layouts(model: nn.Module, optimizer: Optimizer) -> list[tuple[int, ...]]:
    """Return how weights, gradients and state of the weights' shape lie in memory."""
    weights = [item for item in model.parameters() if item.dim() == 4]
    kept = [value for item in weights for value in optimizer.state[item].values()]
    gradients = [item.grad for item in weights if item.grad is not None]
    tensors = [*weights, *gradients, *(value for value in kept if value.dim() == 4)]
    return [item.stride() for item in tensors]


def test_weights_lie_otherwise_inside_and_as_before_afterwards() -> None:
    """So do gradients and state that were made meanwhile; what was trained stays trained."""
    model, twin = cnn(), cnn()
    optimizer, other = AdamW(model.parameters()), AdamW(twin.parameters())
    held = [*model.parameters()]
    train(twin, other)

    with channels_last(model, is_on=True, optimizer=optimizer):
        train(model, optimizer, is_last=True)
        inside = layouts(model, optimizer)
        values = [item.detach().clone() for item in model.parameters()]

    assert len(inside) == 2 * 4
    assert inside != layouts(twin, other) == layouts(model, optimizer)
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
    assert all(map(torch.equal, values, model.parameters()))


def test_buffers_and_an_error_are_no_exception() -> None:
    """A buffer of four dimensions stays the same object; whoever raises leaves all as it was."""
    model = cnn()
    buffer = torch.rand(1, 3, 6, 6)
    model.register_buffer("scale", buffer)

    def fail() -> None:
        raise KeyError(buffer.is_contiguous(memory_format=LAST))

    with pytest.raises(KeyError, match="True"), channels_last(model, is_on=True):
        fail()

    assert model.get_buffer("scale") is buffer
    assert all(item.is_contiguous() for item in (*model.parameters(), buffer))


def test_off_leaves_what_the_user_chose() -> None:
    """A model that has its channels last keeps them, and so do views of other memory."""
    chosen = cnn().to(memory_format=LAST)
    whole = torch.rand(2, 6, 3, 3, 3)
    views = nn.ParameterList(nn.Parameter(part) for part in whole.unbind())

    with channels_last(chosen, is_on=False), channels_last(views, is_on=True):
        assert are_channels_last(chosen)
        assert all(view.is_contiguous() for view in views.parameters())
    with channels_last(chosen, is_on=True):
        pass

    assert are_channels_last(chosen)
    assert not are_channels_last(cnn())
    assert not are_channels_last(nn.Linear(3, 3))


def test_gradients_agree_in_both_layouts() -> None:
    """To the tolerance of fp32: sums are the same in another order."""
    plain, last = cnn().double(), cnn()
    functional.cross_entropy(plain(images().double()), torch.arange(4)).backward()

    with channels_last(last, is_on=True):
        functional.cross_entropy(last(put(images(), CPU)), torch.arange(4)).backward()

    for ours, exact in zip(last.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert exact.grad is not None
        torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "is_last"), [((2, 3, 4, 4), True), ((2, 3, 4), False), ((), False)]
)
def test_images_alone_are_put_otherwise(shape: tuple[int, ...], *, is_last: bool) -> None:
    """The values are the same, and what is no image is not touched."""
    tensor = torch.rand(shape)

    found = put(tensor, CPU)

    assert torch.equal(found, tensor)
    assert (found is tensor) != is_last
    assert not is_last or found.is_contiguous(memory_format=LAST)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["foreach", "fused"])
@pytest.mark.parametrize("is_last", [False, True])
def test_every_way_makes_the_same_steps(name: str, way: str, *, is_last: bool) -> None:
    """To the tolerance of fp32, from state that other steps left, and on to steps as before."""
    model, twin = cnn(), cnn()
    optimizer, other = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](twin.parameters())
    train(twin, other, steps=6)

    train(model, optimizer, steps=2)
    with channels_last(model, is_on=is_last, optimizer=optimizer), stepping(optimizer, way):
        train(model, optimizer, steps=2, is_last=is_last)
    train(model, optimizer, steps=2)

    for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_flags_are_seen_by_a_step_and_put_back(way: str) -> None:
    """Those of each group, whatever the user chose; also where a scaler looks."""
    model = cnn()
    parameters = [*model.parameters()]
    groups: list[dict[str, Any]] = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    optimizer = AdamW(groups, fused=way == "foreach", foreach=None if way == "foreach" else True)
    before = [(group["foreach"], group["fused"]) for group in optimizer.param_groups]
    seen: list[tuple[bool, bool]] = []
    optimizer.register_step_pre_hook(
        lambda stepped, *_: seen.extend((g["foreach"], g["fused"]) for g in stepped.param_groups)
    )

    with stepping(optimizer, way):
        train(model, optimizer, steps=1)
        is_scaled_inside = getattr(optimizer, "_step_supports_amp_scaling", False)

    assert seen == [(way == "foreach", way == "fused")] * 2
    assert is_scaled_inside == (way == "fused")
    assert [(group["foreach"], group["fused"]) for group in optimizer.param_groups] == before
    assert getattr(optimizer, "_step_supports_amp_scaling", False) == (way == "foreach")


def test_the_default_is_what_the_user_made() -> None:
    """It is left alone, flags and all."""
    optimizer = AdamW(cnn().parameters(), fused=True)

    with stepping(optimizer, "default"):
        assert is_fused(optimizer)

    assert is_fused(optimizer)


def test_an_optimizer_without_the_flag_is_refused() -> None:
    """By the name of its class."""
    context = stepping(RMSprop(cnn().parameters()), "fused")

    with pytest.raises(WorkloadInvalid, match="RMSprop takes no such flag"), context:
        pass


@pytest.mark.parametrize(
    ("make", "kind", "expected"),
    [
        (AdamW, "cpu", ("foreach", "fused")),
        (AdamW, "cuda", ("fused",)),
        (lambda p: AdamW(p, foreach=False), "cuda", ("foreach", "fused")),
        (lambda p: AdamW(p, fused=True), "cuda", ("foreach",)),
        (lambda p: AdamW(p, foreach=True), "cpu", ("fused",)),
        (lambda p: AdamW(p, differentiable=True), "cpu", ()),
        (lambda p: AdamW(p, lr=torch.tensor(0.1), capturable=False), "cpu", ("fused",)),
        (NAdam, "cpu", ("foreach",)),
        (lambda p: Adagrad(p, lr=0.1), "cpu", ("foreach", "fused")),
        (lambda p: Adagrad(p, lr=0.1), "cuda", ()),
        (torch.optim.LBFGS, "cpu", ()),
        (SparseAdam, "cpu", ()),
    ],
)
def test_ways_that_an_optimizer_can_be_told(
    make: Callable[[Any], Optimizer], kind: str, expected: tuple[str, ...]
) -> None:
    """Those that it has a flag and a kernel for, but for the one that it takes by itself."""
    model = nn.Linear(2, 2)

    assert other_ways(model, make([*model.parameters()]), device_kind=kind) == expected


def test_what_has_no_kernel_is_not_offered() -> None:
    """Complex parameters are not fused, and sparse gradients are left to the optimizer."""
    waves = nn.Linear(2, 2, dtype=torch.complex64)
    words = nn.Embedding(9, 2, sparse=True)

    assert other_ways(waves, Adam(waves.parameters()), device_kind="cpu") == ("foreach",)
    assert other_ways(words, SGD(words.parameters(), lr=0.1), device_kind="cpu") == ()
