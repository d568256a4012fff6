"""A block's forward that runs again in backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotune.step.recompute import Buffers, recomputed, recomputed_once


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


@pytest.mark.parametrize("recompute", [recomputed, recomputed_once])
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


def test_the_second_run_finds_the_buffers_of_the_first() -> None:
    """The gradient is the one without recomputation, and the buffer has moved once."""
    plain, block = Counting(), Counting()
    block.load_state_dict(plain.state_dict())
    vars(block)["forward"] = recomputed_once(block)
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
