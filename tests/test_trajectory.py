"""Tests of autotune/trial/trajectory.py: where some optimizer steps lead, beside others."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from workloads import quick_launches

from autotune.step.make import in_precision, make_stepper
from autotune.step.window import Stepper
from autotune.trial.agreement import EXACT, ROUNDED
from autotune.trial.skips import MOST_SKIPS
from autotune.trial.trajectory import Trajectory, divergence, follow

WINDOWS = [[(torch.full((4, 3), 0.1 * number), torch.arange(4))] for number in (1, 2, 3)]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """What is computed here is small."""
    with quick_launches():
        yield


def stepper_of(*, rate: float = 0.1) -> Stepper:
    """Return a stepper of layers with a buffer that moves and noise of their own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 5))
    return make_stepper(model.train(), AdamW(model.parameters(), rate), device=torch.device("cpu"))


def path(*losses: float, moved: float = 1.0, other: float = 0.0, skips: int = 0) -> Trajectory:
    """Return a trajectory of two weights."""
    weights = {"weight": torch.tensor([moved, other])}
    return Trajectory(losses=losses or (3.0, 2.0), moved=weights, skips=skips)


def test_all_is_as_before_afterwards() -> None:
    """Weights, buffers, gradients, the optimizer's state and the random numbers."""
    stepper = stepper_of()
    before = {name: item.clone() for name, item in stepper.model.state_dict().items()}
    drawn = torch.get_rng_state()

    follow(stepper, WINDOWS)

    after = stepper.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(item.grad is None for item in stepper.model.parameters())
    assert not stepper.optimizer.state
    assert torch.equal(torch.get_rng_state(), drawn)


def test_the_same_steps_lead_to_the_same_place() -> None:
    """Dropout draws the same masks each time; each step sees what the one before it made."""
    stepper = stepper_of()

    first, second = follow(stepper, WINDOWS), follow(stepper, WINDOWS)
    other = follow(stepper, WINDOWS[::-1])

    assert first.losses == second.losses
    assert all(torch.equal(first.moved[name], value) for name, value in second.moved.items())
    assert first.losses != other.losses[::-1]
    assert float(first.moved["0.weight"].abs().max()) > 0.1


def test_a_step_that_is_skipped_is_made_anew() -> None:
    """A scaler's first scale overflows here: the way is that of three steps all the same."""
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    stepper = make_stepper(
        model,
        SGD(model.parameters(), 1e-5),
        device=torch.device("cpu"),
        loss_fn=lambda model, batch: 1e3 * nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )

    plain, scaled = (follow(in_precision(stepper, amp), WINDOWS) for amp in ("off", "fp16"))

    assert 0 < scaled.skips < MOST_SKIPS
    assert divergence(plain, scaled, moved=[], tolerance=ROUNDED) == ""


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (path(), ""),
        (path(3.0, 2.0 + 1e-3), ""),
        (path(3.0, 2.1), "the loss of step 2 is 2.1 where the baseline's is 2"),
        (path(3.2, 2.0), "the loss of step 1 is 3.2 where the baseline's is 3"),
        (path(3.0, float("nan")), "loss or weights are not finite after some steps"),
        (path(moved=float("inf")), "loss or weights are not finite after some steps"),
        (path(moved=0.0), "the weights end 1 of their way apart after some steps"),
        (path(moved=2.0), "the weights end 1 of their way apart after some steps"),
        (path(moved=1.0, other=0.4), ""),
        (
            path(skips=MOST_SKIPS),
            "the scaler skipped 16 steps: gradients overflow at every scale",
        ),
        (path(skips=MOST_SKIPS - 1), ""),
    ],
)
def test_what_leaves_the_way_is_told(found: Trajectory, reason: str) -> None:
    """By its losses, by where its weights end, or by the steps that were never made."""
    assert divergence(path(), found, moved=[], tolerance=EXACT) == reason


def test_what_rounding_may_do_is_no_reason() -> None:
    """Twice what moves at random did to loss and weights."""
    found = path(3.0, 2.3, moved=0.3)
    shaken = path(3.0, 1.8, moved=1.4)

    assert divergence(path(), found, moved=[], tolerance=ROUNDED)
    assert divergence(path(), found, moved=[shaken], tolerance=ROUNDED) == ""


@pytest.mark.parametrize("reference", [path(float("inf"), 1.0), path(skips=MOST_SKIPS)])
def test_a_reference_that_ends_badly_is_compared_with_nothing(reference: Trajectory) -> None:
    """That is the user's own trouble, which other launches report."""
    assert divergence(reference, path(), moved=[], tolerance=EXACT) == ""


def test_a_rate_that_is_another_one_leads_elsewhere() -> None:
    """Real steps, twice as large: the losses of the first step alone are the same."""
    one, twice = (follow(stepper_of(rate=rate), WINDOWS) for rate in (0.1, 0.2))

    assert one.losses[0] == twice.losses[0]
    assert divergence(one, twice, moved=[], tolerance=ROUNDED)


def test_losses_are_read_before_the_step() -> None:
    """As a training loop shows them."""
    stepper = stepper_of()
    stepper.model.train(mode=False)
    expected: Tensor = stepper.loss(WINDOWS[0][0])

    assert follow(stepper, WINDOWS[:1]).losses[0] == pytest.approx(expected.item())
