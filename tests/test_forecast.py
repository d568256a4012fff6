"""Forecasts: what is asked of traces before anything is run."""

import json

import pytest
from traces import trace_of

from autotune.memory.allocator import MIB
from autotune.memory.forecast import (
    CONTEXT_BYTES,
    CPU_MARGIN,
    CUDA_MARGIN,
    HIDDEN_MARGIN,
    Cell,
    CellForecast,
    Estimate,
)
from autotune.memory.replay import fit_law
from autotune.memory.trace import Trace
from autotune.space import Config


def step(batch_size: int, *, hidden: tuple[str, ...] = ()) -> Trace:
    """A parameter of 100 MiB, and 10 MiB of activations for each sample."""
    sizes = (100 * MIB, 10 * MIB * batch_size)
    return trace_of(sizes, (0, 1, ~1), batch_size=batch_size, hidden=hidden)


def forecast(kind: str = "cpu", *, hidden: tuple[str, ...] = ()) -> CellForecast:
    """What two traces of that step tell."""
    law = fit_law(step(2, hidden=hidden), step(3, hidden=hidden))
    return CellForecast(device_kind=kind, law=law)


def test_a_cell_is_a_config_without_its_size() -> None:
    """Accumulation counts as far as gradients are there in forward."""
    config = Config(batch_size=4, accumulation_steps=3, amp="bf16", checkpointing="full")

    assert Cell.of(config) == Cell(amp="bf16", checkpointing="full", is_accumulated=True)


def test_a_prediction_has_a_margin() -> None:
    """A limit of the peak with its margin is sure to do."""
    estimate = forecast().predict(10)

    assert estimate is not None
    assert estimate.peak_bytes == 200 * MIB
    assert estimate.high_bytes == int(200 * MIB * (1 + CPU_MARGIN))
    assert not estimate.is_traced


def test_hidden_workspaces_widen_the_margin() -> None:
    """An LSTM may need 30 % more than a trace sees."""
    estimate = forecast(hidden=("aten.mkldnn_rnn_layer.default",)).predict(10)

    assert estimate is not None
    assert estimate.margin == HIDDEN_MARGIN


def test_a_trace_is_believed_before_the_law() -> None:
    """It was made at that very size."""
    odd = trace_of((100 * MIB, 300 * MIB), (0, 1, ~1), batch_size=10)

    estimate = forecast().with_trace(odd).predict(10)

    assert estimate is not None
    assert estimate.is_traced
    assert estimate.peak_bytes == 400 * MIB


@pytest.mark.parametrize(("kind", "margin"), [("cpu", CPU_MARGIN), ("cuda", CUDA_MARGIN)])
def test_the_largest_batch_fits_with_its_margin(kind: str, margin: float) -> None:
    """One sample more would need more than the limit."""
    found, limit = forecast(kind), 2048 * MIB

    largest = found.largest(limit)
    estimate = found.predict(largest)

    assert estimate is not None
    assert estimate.margin == margin
    assert found.fits(largest, limit)
    assert not found.fits(largest + 1, limit)
    assert estimate.peak_bytes <= limit / (1 + margin)


def test_a_gpu_also_holds_its_context_and_whole_segments() -> None:
    """100 MiB and 20 of activations are two segments, and CUDA's own half a GiB."""
    estimate = forecast("cuda").predict(2)

    assert estimate is not None
    assert estimate.peak_bytes == 120 * MIB + CONTEXT_BYTES


def test_without_law_and_trace_nothing_is_known() -> None:
    """A size that was not traced is neither predicted nor said to fit."""
    unknown = CellForecast(device_kind="cpu", law=None)

    assert unknown.predict(4) is None
    assert not unknown.fits(4, 2**60)


def test_an_estimate_is_json() -> None:
    """With what is alive at the peak, by category and by module."""
    estimate = forecast().predict(4)
    assert estimate is not None

    assert Estimate.from_dict(json.loads(json.dumps(estimate.to_dict()))) == estimate
