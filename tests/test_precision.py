"""Autocast and the scaler of each precision."""

import pytest
import torch
from torch import nn

from autotune.knobs import PRECISIONS
from autotune.step.precision import AUTOCAST_DTYPES, autocast, make_scaler

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("amp", "dtype"), [("off", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_products_are_computed_in_the_precision_asked_for(amp: str, dtype: torch.dtype) -> None:
    """A linear layer's output has the precision's dtype; its weights stay fp32."""
    layer = nn.Linear(2, 2)

    with autocast(CPU, amp):
        output = layer(torch.ones(1, 2))

    assert output.dtype == dtype
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize("amp", PRECISIONS)
def test_autocast_ends_with_its_context(amp: str) -> None:
    """Nothing is left switched on, after an error either."""
    with pytest.raises(ZeroDivisionError), autocast(CPU, amp):
        raise ZeroDivisionError

    assert not torch.is_autocast_enabled("cpu")


def test_off_touches_nothing() -> None:
    """`off` leaves alone what the user switched on."""
    with torch.autocast("cpu", dtype=torch.bfloat16), autocast(CPU, "off"):
        assert torch.is_autocast_enabled("cpu")


def test_a_scaler_begins_as_it_is_told() -> None:
    """Losses are multiplied by the scale that was given."""
    scaler = make_scaler(CPU, init_scale=8.0)

    assert scaler.scale(torch.tensor(2.0)).item() == 16


def test_every_precision_but_off_has_a_dtype() -> None:
    """What the knob may be and what autocast is given agree."""
    assert {*AUTOCAST_DTYPES, "off"} == set(PRECISIONS)
