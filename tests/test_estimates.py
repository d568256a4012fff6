"""What was not timed is estimated by what was."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.search.estimates import DIP, estimated_seconds
from autotune.space import Config

BASE = Config(batch_size=32)
HALF = Config(batch_size=16, accumulation_steps=2)
LAST = replace(BASE, channels_last=True)


def test_a_switch_acts_as_elsewhere() -> None:
    """What layout made of one size, it makes of another; in its own precision, if seen there."""
    bf16 = replace(HALF, amp="bf16")
    seconds = {BASE: 0.01, LAST: 0.008, HALF: 0.012, bf16: 0.006}

    assert estimated_seconds(seconds, replace(HALF, channels_last=True)) == pytest.approx(0.0096)
    assert estimated_seconds(seconds, replace(bf16, channels_last=True)) == pytest.approx(0.0048)
    both = seconds | {replace(bf16, channels_last=True): 0.003, replace(BASE, amp="bf16"): 0.005}
    last = replace(BASE, amp="bf16", channels_last=True)
    assert estimated_seconds(both, last) == pytest.approx(0.0025)


def test_switches_multiply() -> None:
    """Two that were turned apart act together; one that never was says nothing."""
    fused = replace(BASE, optimizer_impl="fused")
    seconds = {BASE: 0.01, LAST: 0.008, fused: 0.009}

    both = estimated_seconds(seconds, replace(LAST, optimizer_impl="fused"))

    assert both == pytest.approx(0.0072)
    assert estimated_seconds(seconds, replace(LAST, cudnn_benchmark=True)) == 0


def test_a_size_may_be_a_dip_and_recomputing_free() -> None:
    """What is unknown is taken at its best, so that nothing good is ruled out."""
    seconds = {BASE: 0.01, HALF: 0.012}

    assert estimated_seconds(seconds, replace(BASE, batch_size=24)) == pytest.approx(0.01 / DIP)
    assert estimated_seconds(seconds, replace(HALF, checkpointing="full")) == 0.012
    assert estimated_seconds(seconds, replace(BASE, amp="bf16")) == 0


@given(st.dictionaries(st.sampled_from([BASE, HALF, LAST]), st.floats(1e-6, 1.0)))
def test_what_was_measured_is_no_estimate(seconds: dict[Config, float]) -> None:
    """Whatever else is known."""
    assert all(estimated_seconds(seconds, config) == seconds[config] for config in seconds)
