"""Tests of autotune/trial/skips.py: steps that a gradient scaler skips, counted and bounded."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from workloads import quick_launches

from autotune.step.make import in_precision, make_stepper
from autotune.step.window import Stepper
from autotune.trial.skips import (
    MOST_SKIPS,
    never_made,
    scale_of,
    seldom_made,
    step_until_made,
)

WINDOW = [torch.ones(4, 2)]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """What is computed here is small."""
    with quick_launches():
        yield


def stepper_of(factor: float, *, amp: str = "fp16") -> Stepper:
    """Return a stepper whose gradients overflow unless the scale is small enough."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        value: Tensor = model(batch).float().mean()
        return value * factor

    optimizer = SGD(model.parameters(), 1e-9)
    stepper = make_stepper(model, optimizer, device=torch.device("cpu"), loss_fn=loss_fn)
    return in_precision(stepper, amp)


@pytest.mark.parametrize(("factor", "skips"), [(1.0, 0), (1e4, 14), (1e9, MOST_SKIPS)])
def test_a_step_is_made_anew_until_its_gradients_are_finite(factor: float, skips: int) -> None:
    """Those of fp16 end at 65,504: the scale is halved until they are below, or not at all."""
    stepper = stepper_of(factor)
    _, skipped = step_until_made(stepper, WINDOW)

    assert skipped == pytest.approx(skips, abs=1)
    assert bool(never_made(skipped)) == (factor > 1e6)


def test_a_step_without_a_scaler_is_made_once() -> None:
    """There is no scale that could fall."""
    stepper = stepper_of(1e9, amp="bf16")

    assert scale_of(stepper) == 1
    assert step_until_made(stepper, WINDOW)[1] == 0


@pytest.mark.parametrize(
    ("before", "after", "steps", "reason"),
    [
        (2.0**16, 2.0**16, 4, ""),
        (2.0**16, 2.0**15, 4, ""),
        (2.0**16, 2.0**14, 4, "the scaler skipped 2 of 4 steps: gradients overflow"),
        (2.0**16, 2.0**17, 2500, ""),
        (1.0, 1.0, 0, ""),
    ],
)
def test_few_skips_are_usual_and_many_are_not(
    before: float, after: float, steps: int, reason: str
) -> None:
    """One of four comes of a scale that still falls, and a scale may grow, too."""
    assert seldom_made(before, after, steps=steps) == reason
