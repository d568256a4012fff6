"""Steps in fp16: the scale finds its size, and what is skipped changes nothing."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from autotune.step.make import in_precision, make_stepper
from autotune.step.scaling import ScalingStepper

CPU = torch.device("cpu")


def stepper(model: nn.Module, *, factor: float = 1.0, init_scale: float = 2.0) -> ScalingStepper:
    """A stepper in fp16 whose loss is multiplied by a factor."""

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        output: Tensor = model(batch)
        return factor * output.float().mean()

    plain = make_stepper(model, SGD(model.parameters(), lr=0.1), device=CPU, loss_fn=loss_fn)
    made = in_precision(plain, "fp16", init_scale=init_scale)
    assert isinstance(made, ScalingStepper)
    return made


def test_a_skipped_step_leaves_weights_and_schedule() -> None:
    """Gradients that overflow halve the scale; the learning rate stays with the weights."""
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    step = stepper(model, init_scale=2.0**127, factor=1e6)
    step.scheduler = ExponentialLR(step.optimizer, 0.5)
    step([torch.ones(3, 2)])

    assert torch.equal(model.weight, before)
    assert step.scaler.get_scale() == 2.0**126
    assert step.scheduler.get_last_lr() == [0.1]


def test_a_step_that_is_made_moves_both() -> None:
    """Without an overflow the weights move, and the schedule after them."""
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    step = stepper(model)
    step.scheduler = ExponentialLR(step.optimizer, 0.5)
    step([torch.ones(3, 2)])

    assert torch.allclose(before - model.weight, torch.full((1, 2), 0.1), rtol=1e-3)
    assert step.scheduler.get_last_lr() == [0.05]


def test_gradients_are_clipped_as_they_are_without_a_scale() -> None:
    """The norm is taken of the true gradients: a scale of 1024 clips nothing more."""
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    step = stepper(model, init_scale=1024.0)
    step.clip_norm = 2.0**0.5 / 2
    step([torch.ones(3, 2)])

    assert torch.allclose(before - model.weight, torch.full((1, 2), 0.05), rtol=1e-3)


@pytest.mark.parametrize("batches", [0, 1])
def test_nothing_to_step_is_no_error(batches: int) -> None:
    """A scaler would complain of a step without a gradient."""
    loss = stepper(nn.Linear(2, 1))([torch.zeros(0, 2)] * batches)

    assert loss.item() == 0
