"""What a report shows, before any template places it."""

from dataclasses import replace

from strategies import ANSWER, BASELINE, sample_summary

from autotune.outcome import OutOfMemory
from autotune.output.view import view_of

SAMPLE = sample_summary()


def test_predictions_stand_beside_what_was_measured() -> None:
    """Each prediction that was measured is compared, and the span of errors is told."""
    view = view_of(SAMPLE)

    assert view.peaks[0].predicted == "129.8 MiB"
    assert view.peaks[0].measured == "126.0 MiB"
    assert view.peaks[0].difference == "+3.0%"
    assert view.peaks_summary.endswith("by +1.8% to +3.0%.")


def test_baseline_that_ran_out_of_memory_is_told() -> None:
    """Without a measured baseline the report says why there is no ratio."""
    baseline = replace(SAMPLE.baseline, outcome=OutOfMemory(reason="needs 2 GiB"))
    summary = replace(SAMPLE, baseline=baseline, speedup=None)

    tiles = view_of(summary).tiles

    assert (tiles[0].value, tiles[0].detail) == ("–", "the baseline does not fit")
    assert tiles[1].detail.endswith("yours: out of memory")


def test_keep_shows_the_rival() -> None:
    """With nothing better, the ratio shown is named as the best rival's."""
    summary = replace(SAMPLE, verdict="keep", config=BASELINE)

    view = view_of(summary)

    assert view.tiles[0].label == "best rival, times your speed"
    assert view.changes == ()


def test_answer_and_baseline_are_marked_in_the_table() -> None:
    """A reader finds both among all the trials."""
    marks = {row.config: row.mark for row in view_of(SAMPLE).trials}

    assert marks[ANSWER.describe()] == "answer"
    assert marks[BASELINE.describe()] == "baseline"
    assert marks["batch 64, fp32"] == ""
