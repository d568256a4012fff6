"""The answer in words: every verdict reads naturally, and the pay-back is right."""

from dataclasses import replace

import pytest
from hypothesis import given
from strategies import ANSWER, BASELINE, configs, sample_summary, summaries

from autotune.outcome import Measurement, OutOfMemory
from autotune.output import words
from autotune.space import Config
from autotune.summary import Summary
from autotune.verdict import Estimate

SAMPLE = sample_summary()
OUT_OF_MEMORY = replace(SAMPLE.baseline, outcome=OutOfMemory(reason="needs 2 GiB"))


def rival(value: float) -> Estimate:
    """Return the ratio of a rival that did not win."""
    return Estimate(value=value, low=value - 0.03, high=value + 0.03, pairs=10, is_confirmed=False)


@pytest.mark.parametrize(
    ("summary", "start"),
    [
        (SAMPLE, "Use batch 16 x 2, bf16, 1 worker: 1.93 times as fast as what you have."),
        (
            replace(SAMPLE, verdict="keep", config=BASELINE, speedup=rival(1.01)),
            "Keep what you have, batch 32, fp32: the best rival measured 1.01 times its speed, whi",
        ),
        (
            replace(SAMPLE, verdict="keep", config=BASELINE, speedup=rival(0.8)),
            "Keep what you have, batch 32, fp32: the best rival measured 0.80 times its speed.",
        ),
        (
            replace(SAMPLE, verdict="keep", config=BASELINE, speedup=None),
            "Keep what you have, batch 32, fp32: nothing that was tried is better",
        ),
        (
            replace(SAMPLE, verdict="unconfirmed", speedup=None),
            "Use batch 16 x 2, bf16, 1 worker with caution: the fastest that was measured, but",
        ),
        (
            replace(SAMPLE, verdict="interrupted"),
            "Stopped early: the best configuration that was verified until then is batch 16 x",
        ),
        (
            replace(SAMPLE, baseline=OUT_OF_MEMORY, reference=Config(batch_size=8)),
            "Use batch 16 x 2, bf16, 1 worker: 1.93 times as fast as batch 8, fp32, the most of",
        ),
        (
            replace(SAMPLE, baseline=OUT_OF_MEMORY, speedup=None),
            "Use batch 16 x 2, bf16, 1 worker: it fits, which your baseline does not.",
        ),
        (
            replace(SAMPLE, goal="memory"),
            "Use batch 16 x 2, bf16, 1 worker: peak memory 412.7 MiB of 768.0 MiB (54%), 68% of",
        ),
    ],
)
def test_headline_reads_naturally(summary: Summary, start: str) -> None:
    """Each way in which a run ends has a sentence of its own."""
    assert words.headline(summary).startswith(start)


def test_pay_back_is_the_cost_over_the_gain() -> None:
    """100 s of search at twice the speed are won back in 100 s: 50 samples/s make 5,000 samples."""
    measured = Measurement(samples_per_second=50.0)
    estimate = replace(rival(2.0), is_confirmed=True)
    summary = replace(SAMPLE, measured=measured, speedup=estimate, wall_seconds=100.0)

    pay_back = words.pay_back_of(summary)

    assert pay_back == words.PayBack(samples=5000.0, seconds=100.0, epochs=5000 / 2600)


@given(summaries())
def test_pay_back_is_never_promised_without_a_gain(summary: Summary) -> None:
    """Where the speed stays as it is, or is unknown, nothing pays back."""
    pay_back = words.pay_back_of(summary)

    if pay_back is not None:
        assert summary.verdict != "keep"
        assert summary.speedup is not None
        assert summary.speedup.value > 1
        assert pay_back.seconds > 0


@given(configs(), configs())
def test_changes_name_every_knob_that_differs(before: Config, after: Config) -> None:
    """What is not named among the changes is the same in both."""
    named = {knob for knob, _, _ in words.changes(before, after)}

    old, new = before.to_dict(), after.to_dict()
    assert named == {knob for knob in old if old[knob] != new[knob]}


def test_changes_say_on_off_and_default() -> None:
    """Knobs are shown as a reader says them."""
    assert ("persistent_workers", "off", "on") in words.changes(BASELINE, ANSWER)
    assert ("prefetch_factor", "default", "2") in words.changes(BASELINE, ANSWER)


def test_batch_has_changed_only_where_it_was_free() -> None:
    """A kept global batch is never told as a change."""
    bigger = replace(SAMPLE, config=Config(batch_size=128))

    assert not words.has_new_batch(bigger)
    assert words.has_new_batch(replace(bigger, is_global_batch_free=True))
    assert words.batch_ratio(bigger) == 4


def test_run_is_called_by_its_script() -> None:
    """A run of live objects has no name of its own."""
    assert words.name_of(SAMPLE) == "bert"
    assert words.name_of(replace(SAMPLE, script=None)) == "your model"


def test_unknown_figures_are_said_to_be_unknown() -> None:
    """Without a measurement no figure is made up."""
    unknown = replace(SAMPLE, measured=None)

    assert words.memory_words(unknown) == "unknown of 768.0 MiB"
    assert words.rate_words(unknown) == "unknown samples/s, was 68.4"
    assert words.pay_back_of(unknown) is None
