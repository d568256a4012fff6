"""The step that a config calls for."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from autotune.step.counting import CountingStepper
from autotune.step.loss import LossUnclear
from autotune.step.make import in_precision, make_stepper, with_loss
from autotune.step.scaling import ScalingCountingStepper, ScalingStepper
from autotune.step.window import Stepper

CPU = torch.device("cpu")


def mean(model: nn.Module, batch: Any) -> Tensor:
    """A user's loss."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def made(**options: Any) -> Stepper:
    """A stepper of a small model."""
    model = nn.Linear(2, 1)
    return make_stepper(model, SGD(model.parameters(), lr=0.1), device=CPU, **options)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, Stepper),
        ({"amp": "bf16"}, Stepper),
        ({"amp": "fp16"}, ScalingStepper),
        ({"loss_fn": mean}, CountingStepper),
        ({"loss_fn": mean, "amp": "fp16"}, ScalingCountingStepper),
    ],
)
def test_a_step_has_what_it_needs_and_no_more(options: dict[str, Any], kind: type[Stepper]) -> None:
    """A scaler in fp16 alone, counts where the user wrote the loss."""
    assert type(made(**options)) is kind


def test_labels_weigh_a_default_loss_and_samples_any_other() -> None:
    """What a user's loss is a mean over is not known, unless it comes with a count."""
    batch = (torch.ones(3, 2), torch.ones(3, 1))
    classes = (torch.ones(3, 2), torch.tensor([0, -100, 1]))

    assert (made().weigh(batch), made().weigh(classes)) == (3, 2)
    assert made(loss_fn=mean).weigh(classes) == 3
    assert made(loss_fn=mean, count=lambda _: 9).weigh(classes) == 9


def test_what_a_user_returns_is_checked() -> None:
    """A trial says what a loss must be."""
    with pytest.raises(LossUnclear):
        made(loss_fn=lambda *_: None)([(torch.ones(3, 2), torch.ones(3, 1))])


@pytest.mark.parametrize("options", [{}, {"loss_fn": mean}])
def test_a_precision_is_changed_and_changed_back(options: dict[str, Any]) -> None:
    """The parts stay the same, but for autocast and the scaler."""
    first = made(**options)
    scaled = in_precision(first, "fp16", init_scale=8.0)
    back = in_precision(scaled, "off")

    assert isinstance(scaled, ScalingStepper)
    assert scaled.scaler.get_scale() == 8.0
    assert (back.model, back.optimizer, back.loss_fn) == (
        first.model,
        first.optimizer,
        first.loss_fn,
    )
    assert type(back) is type(first)
    assert back.backward is Tensor.backward


def test_another_loss_keeps_the_scaler() -> None:
    """A scale that was found is not lost where each step is given its own loss."""
    first = made(amp="fp16")
    other = with_loss(first, mean)

    assert isinstance(first, ScalingStepper)
    assert isinstance(other, ScalingCountingStepper)
    assert other.scaler is first.scaler
    assert isinstance(with_loss(made(), mean), CountingStepper)
