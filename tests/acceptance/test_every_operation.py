"""Memory runs out at every single operation of a step, and nothing is the worse for it."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

import autotune
from autotune.device.cpu import CpuDevice
from autotune.device.oom import Failure, classify, forget
from autotune.device.tracker import StorageTracker
from autotune.knobs import CHECKPOINTING
from autotune.step.restore import borrowed

MOST_OPERATIONS = 800
"""Of a step; a campaign raises at each of them."""


class OutOfMemoryAt(TorchDispatchMode):
    """Raises the allocator's own error at the n-th operation; counts them all.

    Args:
        number: Which operation fails; None fails at none.
    """

    def __init__(self, number: int | None = None) -> None:
        TorchDispatchMode.__init__(self)
        self.number = number
        self.seen = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, or fail at it."""
        self.seen += 1
        if self.seen - 1 == self.number:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate at {func}")
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """A block to repeat: normalised, residual, with dropout."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = norm, nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return inputs and their change."""
        changed: Tensor = inputs + self.dropout(torch.relu(self.linear(self.norm(inputs))))
        return changed


class Attending(nn.Module):
    """Two layers of a transformer, and the mean of what they say."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(2)
        )
        self.last = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the scores of each class."""
        tokens = inputs.reshape(4, 2, 8)
        for layer in self.layers:
            tokens = layer(tokens)
        scores: Tensor = self.last(tokens).reshape(8, 3)
        return scores


def normalised(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Two blocks with a normalisation, and a last layer."""
    blocks = nn.Sequential(Block(norm(8)), Block(norm(8)))
    return nn.Sequential(blocks, nn.Linear(8, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layer-norm": lambda: normalised(nn.LayerNorm),
    "batch-norm": lambda: normalised(nn.BatchNorm1d),
    "attention": Attending,
}


def make(name: str) -> tuple[nn.Module, AdamW, list[Tensor]]:
    """A model, its optimizer with state from a first step, and a batch."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = AdamW(model.parameters(), foreach=name == "attention")
    batch = [torch.randn(8, 8), torch.arange(8) % 3]
    return model, optimizer, batch


@contextmanager
def counted(model: nn.Module) -> Iterator[StorageTracker]:
    """Count live bytes from here on."""
    held = [*model.parameters(), *model.buffers()]
    with StorageTracker(held) as tracker:
        yield tracker


def outcome_of(step: Callable[[], Tensor], number: int | None) -> tuple[Failure | None, int]:
    """Make a step that fails at an operation; return what it was taken for, and its operations."""
    failure: Exception | None = None
    with OutOfMemoryAt(number) as mode:
        try:
            step()
        except torch.OutOfMemoryError as error:
            failure = error
    kind = None if failure is None else classify(failure, under_limit=True)
    if failure is not None:
        forget(failure)
    CpuDevice().release()
    return kind, mode.seen


@pytest.fixture(autouse=True)
def _few_objects() -> Iterator[None]:
    """Let a collection walk what the test makes, not all that was imported before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "amp", "checkpointing"),
    [*product(MODELS, ("off",), ("off", "full")), *product(MODELS, ("bf16",), CHECKPOINTING)],
    ids=lambda value: value,
)
def test_every_operation_may_run_out_of_memory(name: str, amp: str, checkpointing: str) -> None:
    """Recognised each time; the next step is exact, and memory is back to the byte."""
    model, optimizer, batch = make(name)
    config = {"batch_size": 8, "amp": amp, "checkpointing": checkpointing}
    with counted(model) as tracker, autotune.apply(config, model, optimizer=optimizer) as step:
        step([batch])
        optimizer.zero_grad(set_to_none=True)

        def exact() -> tuple[float, list[Tensor]]:
            with borrowed(model, optimizer):
                loss = float(step([batch]))
                return loss, [item.detach().clone() for item in model.parameters()]

        with borrowed(model, optimizer):
            _, operations = outcome_of(lambda: step([batch]), None)
        expected = exact()
        live_bytes = tracker.live_bytes
        for number in range(operations):
            with borrowed(model, optimizer):
                kind, _ = outcome_of(lambda: step([batch]), number)
            optimizer.zero_grad(set_to_none=True)

            assert kind is Failure.MEMORY, number
            assert tracker.live_bytes == live_bytes, number
        loss, weights = exact()

    assert 50 < operations <= MOST_OPERATIONS
    assert loss == expected[0]
    assert all(map(torch.equal, weights, expected[1]))
