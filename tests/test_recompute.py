"""A block's forward that runs again in backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.step.recompute import (
    Both,
    Buffers,
    keeps,
    recomputed,
    recomputed_once,
    selective,
    selective_matmul,
    selective_matmul_once,
    selective_once,
)

aten = torch.ops.aten
ONCE = [recomputed_once, selective_once, selective_matmul_once]


class Counting(nn.Module):
    """A block that counts its forwards, and keeps a running value."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("running", torch.zeros(2), persistent=False)
        self.register_buffer("absent", None)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Add to the running value, and multiply by it."""
        self.calls += 1
        self.running.add_(inputs.detach().mean(0))
        output: Tensor = self.linear(inputs) * self.running
        return output


class Seeing(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.operators: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator."""
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute", [recomputed, selective, selective_matmul, *ONCE])
def test_a_forward_runs_again_in_backward(
    recompute: Callable[[nn.Module], Callable[..., Any]],
) -> None:
    """Once for the loss, once for the gradient; without a gradient only once."""
    block = Counting()
    vars(block)["forward"] = recompute(block)
    block(torch.ones(3, 2, requires_grad=True)).sum().backward()
    with torch.inference_mode():
        block(torch.ones(3, 2))

    assert block.calls == 3


@pytest.mark.parametrize("recompute", ONCE)
def test_the_second_run_finds_the_buffers_of_the_first(
    recompute: Callable[[nn.Module], Callable[..., Any]],
) -> None:
    """The gradient is the one without recomputation, and the buffer has moved once."""
    plain, block = Counting(), Counting()
    block.load_state_dict(plain.state_dict())
    vars(block)["forward"] = recompute(block)
    for each in (plain, block):
        for _ in range(2):
            each(torch.ones(3, 2)).square().sum().backward()

    assert torch.equal(plain.running, block.running)
    assert plain.linear.weight.grad is not None
    assert block.linear.weight.grad is not None
    assert torch.equal(plain.linear.weight.grad, block.linear.weight.grad)


def test_buffers_are_exchanged_for_the_length_of_a_with() -> None:
    """Modules have the others inside, and their very own again afterwards."""
    block = Counting()
    own, other = block.running, torch.ones(2)
    with Buffers({block: {"running": other, "absent": None}}):
        inside = block.running

    assert inside is other
    assert block.running is own


@pytest.mark.parametrize(
    ("operator", "given", "is_kept"),
    [
        (aten.mm.default, (), True),
        (aten.addmm.default, (), True),
        (aten.convolution.default, (True,), True),
        (aten.addmm_.default, (), False),
        (aten.lgamma.default, (), False),
        (aten.native_dropout.default, (0.1, True), False),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (), True),
        (aten._scaled_dot_product_flash_attention.default, (0.0, True), True),
        (aten._scaled_dot_product_efficient_attention.default, (None, True, 0.1), False),
        (aten._scaled_dot_product_cudnn_attention.default, (None, True, 0.1), False),
        (aten._flash_attention_forward.default, (None, 4, 4, 0.0), True),
    ],
    ids=str,
)
def test_matmuls_and_attention_are_kept(
    operator: Any, given: tuple[Any, ...], *, is_kept: bool
) -> None:
    """By name; with dropout attention runs again, or what draws after it would draw otherwise."""
    words = ("mm.", "convolution.", "attention")

    assert keeps(words, None, operator, *given) == is_kept


@pytest.mark.parametrize(
    ("recompute", "runs"), [(recomputed, 2), (selective, 1), (selective_once, 1)]
)
def test_what_is_kept_does_not_run_again(
    recompute: Callable[[nn.Module], Callable[..., Any]], runs: int
) -> None:
    """Twice the linear layer where all is recomputed, once where its product is kept."""
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    vars(block)["forward"] = recompute(block)
    with Seeing() as seen:
        block(torch.ones(3, 4)).sum().backward()

    assert seen.operators.count(aten.addmm.default) == runs
    assert seen.operators.count(aten.tanh.default) == 2


def test_contexts_are_entered_together() -> None:
    """In order, left in reverse, and again as often as asked."""
    block, other = Counting(), Counting()
    own, new = block.running, torch.ones(2)
    both = Both((Buffers({block: {"running": new}}), Buffers({other: {"running": new}})))
    inside = []
    for _ in range(2):
        with both:
            inside += [block.running, other.running]

    assert all(each is new for each in inside)
    assert len(inside) == 4
    assert block.running is own
