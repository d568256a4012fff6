"""What the peaks of a run are made of, as a report shows it."""

from dataclasses import replace

import pytest
from simulations import MIB, estimate
from strategies import ANSWER, BASELINE, sample_summary

from autotune.memory.forecast import Cell, Estimate
from autotune.memory.foretold import Forecast
from autotune.memory.trace import Category, Instant, Phase
from autotune.output.makeup import makeup_of
from autotune.output.parts import OUTSIDE, parts_of
from autotune.output.report import render_reports
from autotune.space import Config
from autotune.summary import Summary


def peak(phase: Phase = Phase.BACKWARD, *, outside: int = 0, **parts: int) -> Estimate:
    """A predicted peak of these parts, in MiB, and of what is outside of tensors."""
    by_category = {Category(name): count * MIB for name, count in parts.items()}
    tensors = sum(by_category.values())
    instant = Instant(
        peak_bytes=tensors, phase=phase, by_category=by_category, by_owner={"layer.0": MIB}
    )
    return replace(estimate(tensors), peak_bytes=tensors + outside * MIB, instant=instant)


def summary_with(answer: Estimate | None, baseline: Estimate | None = None) -> Summary:
    """The sample run, with these predictions for its two configs."""
    pairs = ((ANSWER, answer), (BASELINE, baseline))
    peaks = {Cell.of(c): {c.batch_size: each} for c, each in pairs if each is not None}
    return replace(sample_summary(), forecast=Forecast(peaks=peaks, seconds=2.0))


def test_without_predictions_there_is_nothing_to_show() -> None:
    """Not even a heading."""
    html, text = render_reports(sample_summary())

    assert makeup_of(sample_summary()) is None
    assert "What the peak is made of" not in html + text


def test_both_peaks_are_shown_beside_what_was_measured() -> None:
    """Parts that neither has are left out; shares are of the larger peak."""
    found = makeup_of(
        summary_with(peak(activations=300, parameters=100), peak(activations=700, parameters=100))
    )

    assert found is not None
    assert found.columns == ("yours", "tuned")
    assert found.peaks[1] == "400.0 MiB predicted, 412.7 MiB measured"
    assert [(p.name, p.sizes, p.shares) for p in found.parts] == [
        ("parameters", ("100.0 MiB", "100.0 MiB"), (0.125, 0.125)),
        ("activations", ("700.0 MiB", "300.0 MiB"), (0.875, 0.375)),
    ]


def test_an_answer_that_is_the_baseline_is_shown_once() -> None:
    """There is nothing to put beside it."""
    kept = replace(summary_with(None, peak(activations=1)), config=BASELINE)
    found = makeup_of(kept)

    assert found is not None
    assert found.columns == ("yours",)


@pytest.mark.parametrize("change", [{"channels_last": True}, {"optimizer_impl": "fused"}])
def test_small_switches_are_shown_without_them(change: dict[str, str | bool]) -> None:
    """They were not traced, and change little."""
    switched = Config.from_dict(ANSWER.to_dict() | change)
    found = makeup_of(replace(summary_with(peak(activations=2)), config=switched))

    assert found is not None
    assert found.columns == ("tuned",)


def test_phase_owners_and_a_remedy_are_named() -> None:
    """An optimizer-bound peak is named as such."""
    found = makeup_of(
        summary_with(peak(Phase.OPTIMIZER, temporaries=4, parameters=1), peak(activations=5))
    )

    assert found is not None
    first, helps, second, bound = found.notes
    assert first == (
        "yours: the peak is in the backward pass; of its activations layer.0 (1.0 MiB) keep most"
    )
    assert helps.startswith("100% of what yours needs goes to activations: checkpointing")
    assert "in the optimizer's step" in second
    assert bound.startswith("the peak of tuned is the optimizer's step, whatever the batch size")


def test_parts_add_up_to_the_peak() -> None:
    """On a GPU with what the allocator and CUDA hold beside the tensors."""
    parts = parts_of(peak(outside=7, activations=3, gradients=2))

    assert sum(parts.values()) == 12 * MIB
    assert parts[OUTSIDE] == 7 * MIB


def test_the_report_shows_it() -> None:
    """Bars and figures in HTML, a table in Markdown; and how it was predicted."""
    html, text = render_reports(summary_with(peak(activations=300, parameters=100)))

    assert "width: 75.0%" in html
    assert "| activations | 300.0 MiB |" in text
    assert "1 peak predicted in 2.0 s by tracing the step" in text


def test_what_was_not_predicted_says_why() -> None:
    """The reason once, though each cell has it; and what stands in for it."""
    untraced = {Cell(): "the step reads a value", Cell(amp="bf16"): "the step reads a value"}
    _, text = render_reports(replace(sample_summary(), forecast=Forecast(untraced=untraced)))

    assert "not predicted, since the step cannot be traced: the step reads a value; two" in text
