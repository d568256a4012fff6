"""Tests of autotune/trial/shaking.py: numbers move as rounding to a lower precision moves them."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from workloads import quick_launches

from autotune.trial.shaking import Shake

CPU = torch.device("cpu")
SPACING = torch.finfo(torch.bfloat16).eps


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """What is computed here is small."""
    with quick_launches():
        yield


def shake(seed: int = 0) -> Shake:
    """Return what moves numbers as rounding to bf16 does."""
    return Shake(torch.bfloat16, device=CPU, seed=seed)


@given(
    value=st.floats(-(2.0**99), 2.0**99, allow_subnormal=False, width=32), seed=st.integers(0, 99)
)
def test_a_number_moves_by_half_a_spacing_at_most(value: float, seed: int) -> None:
    """As rounding to the nearest could move it; zero does not move."""
    numbers = torch.full((50,), value)

    moved = shake(seed)(numbers)

    assert bool(((moved - numbers).abs() <= abs(value) * SPACING / 2 * 1.001).all())
    assert abs(value) < 2.0**-100 or not torch.equal(moved, numbers)
    assert value != 0 or torch.equal(moved, numbers)


def test_moves_are_as_large_as_rounding() -> None:
    """On average over many numbers, within a few per cent."""
    numbers = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) + 1

    moved = (shake()(numbers) - numbers).square().mean().sqrt()
    rounded = (numbers.bfloat16().float() - numbers).square().mean().sqrt()

    assert 1.0 < moved / rounded < 1.6  # a spacing is relative to the lower end of a binade


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(5),
        torch.tensor([True, False]),
        torch.full((3,), torch.finfo(torch.float32).min),
        torch.tensor([float("-inf"), 0.0]),
        torch.ones(2, device="meta"),
        torch.eye(3).to_sparse(),
        "text",
        None,
    ],
)
def test_what_is_no_number_does_not_move(value: object) -> None:
    """Nor what lies elsewhere; the largest numbers, as in masks, stay finite."""
    moved = shake()(value)

    if isinstance(value, Tensor) and not (value.is_meta or value.is_sparse):
        assert torch.equal(moved.isfinite(), value.isfinite())
        assert torch.allclose(moved, value, rtol=SPACING)
    else:
        assert moved is value


def test_a_nesting_is_kept() -> None:
    """Tensors in it move, the rest is as it was."""
    batch = {"inputs": [torch.ones(3), "name"], "count": 3}

    moved = shake()(batch)

    assert moved["inputs"][1] == "name"
    assert moved["count"] == 3
    assert not torch.equal(moved["inputs"][0], torch.ones(3))


def test_parameters_are_put_back() -> None:
    """Bit for bit, an exception or not."""
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()

    during = []

    def fail() -> None:
        with shake().parameters(model):
            during.append(model.weight.detach().clone())
            raise KeyError

    with pytest.raises(KeyError):
        fail()

    assert not torch.equal(during[0], before)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    "compute",
    [
        lambda value: value @ value,
        lambda value: value.relu(),
        lambda value: nn.functional.layer_norm(value, (4,)),
        lambda value: nn.functional.scaled_dot_product_attention(value, value, value),
    ],
)
def test_every_operator_is_moved(compute: Callable[[Tensor], Tensor]) -> None:
    """In forward and in backward; the same seed makes the same moves."""
    value = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def run(seed: int | None) -> tuple[Tensor, Tensor]:
        with shake(seed) if seed is not None else torch.enable_grad():
            result = compute(value)
            (gradient,) = torch.autograd.grad(result, value, torch.ones_like(result))
        return result.detach(), gradient

    plain, moved, again, other = run(None), run(1), run(1), run(2)

    for index in range(2):
        assert torch.equal(moved[index], again[index])
        assert not torch.equal(moved[index], plain[index])
        assert not torch.equal(moved[index], other[index])
        assert torch.allclose(moved[index], plain[index], rtol=0.1, atol=0.1)


def test_what_an_operator_keeps_does_not_move() -> None:
    """Only what it gives: the first in forward, all gradients in backward."""
    value, weight = torch.randn(2, 4), torch.ones(4)
    forward = torch.ops.aten.native_layer_norm.default
    backward = torch.ops.aten.native_layer_norm_backward.default
    kept = forward(value, [4], weight, weight, 1e-5)
    arguments = (value, value, [4], *kept[1:], weight, weight, [True] * 3)

    with shake():
        moved = forward(value, [4], weight, weight, 1e-5)
        gradients = backward(*arguments)

    assert [torch.equal(*pair) for pair in zip(kept, moved, strict=True)] == [False, True, True]
    assert not any(map(torch.equal, backward(*arguments), gradients))


def test_views_and_writes_in_place_stay_what_they_are() -> None:
    """Whoever writes through a view writes to the same memory."""
    value = torch.zeros(4)

    with shake():
        value.view(2, 2)[0].add_(1.0)

    assert torch.equal(value, torch.tensor([1.0, 1.0, 0.0, 0.0]))
