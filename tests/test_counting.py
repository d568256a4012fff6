"""Losses that come with their counts: sums are put right when all counts are known."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from autotune.step.counting import CountingStepper
from autotune.step.make import make_stepper

Parts = list[tuple[float, float]]


class Weight(nn.Module):
    """A model of one number, whose gradient is the mean of what it is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))


def stepper(model: Weight, loss_fn: Any) -> CountingStepper:
    """A stepper with a user's loss."""
    optimizer = SGD(model.parameters(), lr=1.0)
    made = make_stepper(model, optimizer, device=torch.device("cpu"), loss_fn=loss_fn)
    assert isinstance(made, CountingStepper)
    return made


def summed(model: Weight, batch: Tensor) -> tuple[Tensor, Tensor]:
    """A sum of the first column, and the sum of the second as its count."""
    return (model.value * batch[:, 0]).sum(), batch[:, 1].sum()


@pytest.mark.parametrize(
    ("parts", "mean"),
    [
        ([[(6, 2)]], 3.0),
        ([[(6, 2)], [(9, 1)]], 5.0),
        ([[(0, 0)], [(6, 2)], [(9, 1)]], 5.0),
        ([[(6, 2)], [(0, 0)], [(9, 1), (1, 1)]], 4.0),
        ([[(0.5, 0.25)], [(1, 0.25)]], 3.0),
    ],
    ids=["one", "two", "nothing first", "nothing between", "fractions"],
)
def test_a_step_is_by_the_sum_over_the_count(parts: list[Parts], mean: float) -> None:
    """However the counts are spread, the gradient is that of the whole sum over all of them."""
    model = Weight()

    stepper(model, summed)([torch.tensor(part, dtype=torch.float32) for part in parts])

    assert model.value.item() == pytest.approx(-mean)


def test_means_count_by_their_samples() -> None:
    """A loss without a count is a mean: two samples weigh twice as much as one."""
    model = Weight()
    step = stepper(model, lambda model, batch: (model.value * batch).mean())

    step([torch.tensor([3.0, 3.0]), torch.tensor([9.0])])

    assert model.value.item() == pytest.approx(-5.0)


def test_evaluation_sums_sums_and_weighs_means() -> None:
    """Sums are averaged over their counts, means over their samples."""
    model = Weight()
    batches = [torch.tensor([[6.0, 2.0]]), torch.tensor([[9.0, 1.0], [1.0, 1.0]])]
    nn.init.ones_(model.value)

    assert stepper(model, summed).evaluate(batches) == pytest.approx(16 / 4)
    means = stepper(model, lambda model, batch: (model.value * batch[:, 0]).mean())
    assert means.evaluate(batches) == pytest.approx(16 / 3)
