"""Tests of autotune/trial/guard.py: which configs compute what the baseline computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from autotune.outcome import Invalid, Measured, Outcome
from autotune.space import Config
from autotune.step.precision import make_scaler
from autotune.step.window import Stepper
from autotune.trial import guard
from autotune.trial.guard import (
    FLOOR,
    RELATIVE,
    ROUNDED,
    Gradients,
    check,
    cut,
    difference,
    gradients,
    is_finite,
)

WHOLE = Config(batch_size=16)
SPLIT = Config(batch_size=8, accumulation_steps=2)
BF16 = Config(batch_size=16, amp="bf16")
CPU = torch.device("cpu")


def stepper_of(model: nn.Module, *, loss_fn: Callable[..., Any] | None = None, amp: str = "off") -> Stepper:
    """Return a stepper of a model in training."""
    return Stepper(
        model=model.train(),
        optimizer=SGD(model.parameters()),
        scaler=make_scaler(CPU, amp),
        device=CPU,
        amp=amp,
        loss_fn=loss_fn,
    )


def rows(*, samples: int = 8, width: int = 12, classes: int = 5) -> list[Any]:
    """Return a window of two batches of inputs and classes."""
    torch.manual_seed(1)
    return [(torch.randn(samples, width), torch.randint(0, classes, (samples,))) for _ in range(2)]


def images() -> list[Any]:
    """Return a window of two batches of images and classes."""
    torch.manual_seed(1)
    return [(torch.randn(8, 3, 16, 16), torch.randint(0, 5, (8,))) for _ in range(2)]


def words() -> list[Any]:
    """Return a window of two batches of tokens and what follows each."""
    torch.manual_seed(1)
    return [(torch.randint(0, 50, (8, 9)), torch.randint(0, 50, (8, 9))) for _ in range(2)]


def mlp() -> nn.Module:
    """Return a model that treats each sample apart."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))


def cnn(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Return convolutions with a normalisation between."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2), norm(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)),
    )


class Recurrent(nn.Module):
    """An LSTM that predicts a token from those before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores, the classes in the second dimension as cross entropy wants them."""
        scores: Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return scores.transpose(1, 2)


class Attention(nn.Module):
    """A transformer of two blocks that predicts a class for each token."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 16)
        block = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores, the classes in the second dimension as cross entropy wants them."""
        scores: Tensor = self.head(self.blocks(self.embed(tokens)))
        return scores.transpose(1, 2)


HEALTHY = {
    "mlp": (mlp, rows),
    "cnn": (lambda: cnn(lambda width: nn.GroupNorm(4, width)), images),
    "batch norm": (lambda: cnn(nn.BatchNorm2d), images),
    "lstm": (Recurrent, words),
    "transformer": (Attention, words),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_rounding_is_trusted(name: str) -> None:
    """Whatever bf16 does to the gradients of a healthy model is within the tolerance."""
    make, window = HEALTHY[name]

    outcome = check(stepper_of(make()), window(), config=BF16, baseline=WHOLE)

    assert outcome == Measured(measurement=outcome.measurement), outcome
