"""The answer of a run in words: one phrasing for the terminal, the reports and the written loop."""

from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from autotune.knobs import knob_names, knob_value
from autotune.outcome import Trial
from autotune.space import Config
from autotune.summary import Summary
from autotune.units import format_bytes, format_duration
from autotune.verdict import Estimate

PHASES = {
    "0": "baseline",
    "A": "batch, precision",
    "B": "switches",
    "C": "combinations",
    "D": "loader",
    "E": "race",
    "F": "refinement",
    "verdict": "verdict",
    "verify": "verification",
}
"""The phases of METHOD.md D.1 in words."""

STUDIES = {
    "memory": "peak memory",
    "compute": "steps alone",
    "loader": "loader alone",
    "e2e": "end to end",
    "checks": "gradients",
}
"""What the trials of each study measure."""

OUTCOMES = {
    "measured": "measured",
    "out_of_memory": "out of memory",
    "skipped": "skipped",
    "timed_out": "timed out",
    "crashed": "crashed",
    "invalid": "invalid",
}

_WHOLE_FROM, _TENTHS_FROM = 100.0, 10.0
"""From here on further digits say less than the noise between launches does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayBack:
    """When the time that tuning took is won back.

    Args:
        samples: Samples of training at the tuned speed.
        seconds: What these take.
        epochs: The same in passes over the data set; None where it has no length.
    """

    samples: float
    seconds: float
    epochs: float | None


def name_of(summary: Summary) -> str:
    """Return what the run is called: its script's name."""
    return Path(summary.script).stem if summary.script else "your model"


def headline(summary: Summary) -> str:
    """Return the answer in one sentence."""
    use = f"Use {summary.config.describe()}"
    match summary.verdict:
        case "tuned":
            return f"{use}: {_gain(summary)}."
        case "keep":
            return f"Keep what you have, {summary.config.describe()}: {_why_keep(summary)}."
        case "unconfirmed":
            return (
                f"{use} with caution: {_gain(summary)}, but the budget ended before that "
                "could be confirmed."
            )
        case "interrupted":
            best = "the best configuration that was verified until then is"
            return f"Stopped early: {best} {summary.config.describe()}."
        case _:
            assert_never(summary.verdict)


def speed_words(summary: Summary) -> str:
    """Return the speed-up with its interval and the number of pairs, or why there is none."""
    estimate = summary.speedup
    if estimate is None:
        return "not measured in pairs" if fits(summary.baseline) else "the baseline does not fit"
    return (
        f"95 % interval {estimate.low:.2f} to {estimate.high:.2f}, "
        f"{count(estimate.pairs, 'pair')} of launches, end to end"
    )


def rate_words(summary: Summary) -> str:
    """Return samples per second, before and after."""
    after, before = rate(speed_of(summary)), summary.baseline.samples_per_second
    if before is None or summary.verdict == "keep":
        return f"{after} samples/s"
    return f"{after} samples/s, was {rate(before)}"


def memory_words(summary: Summary) -> str:
    """Return the peak out of the limit."""
    peak = peak_of(summary)
    whole = f"{format_bytes(peak)} of {format_bytes(summary.limit_bytes)}"
    return whole if peak is None else f"{whole} ({peak / summary.limit_bytes:.0%})"


def cost_words(summary: Summary) -> str:
    """Return what the search took."""
    launches = sum(len(trial.launches) for trial in summary.trials)
    return (
        f"{format_duration(summary.wall_seconds)}, {count(len(summary.trials), 'trial')}, "
        f"{count(launches, 'launch', 'launches')}"
    )


def pay_back_words(summary: Summary) -> str:
    """Return when the search has paid for itself, or that it does not."""
    pay_back = pay_back_of(summary)
    if pay_back is None:
        return "nothing to win back: the speed stays as it is"
    epochs = "" if pay_back.epochs is None else f", {pay_back.epochs:.3g} epochs"
    return (
        f"pays back after {pay_back.samples:,.0f} samples "
        f"({format_duration(pay_back.seconds)} of training{epochs})"
    )


def pay_back_of(summary: Summary) -> PayBack | None:
    """Return when the search pays back; None where no gain was measured.

    At `v` times the baseline's speed, training wins `1 - 1/v` of the time the baseline would
    take; in the seconds `t` at the tuned speed that is `t * (v - 1)`, set equal to the cost.
    """
    gain, speed = _applied_gain(summary), speed_of(summary)
    if gain is None or not speed:
        return None
    seconds = summary.wall_seconds / (gain.value - 1)
    samples = seconds * speed
    length = summary.workload.dataset_length
    return PayBack(samples=samples, seconds=seconds, epochs=samples / length if length else None)


def speed_of(summary: Summary) -> float | None:
    """Return the answer's samples per second; None where they were not measured."""
    return summary.measured.samples_per_second if summary.measured else None


def peak_of(summary: Summary) -> int | None:
    """Return the answer's peak in bytes; None where it was not measured."""
    return summary.measured.peak_bytes if summary.measured else None


def has_new_batch(summary: Summary) -> bool:
    """Whether an optimizer step now has another number of samples than the baseline's."""
    return summary.is_global_batch_free and batch_ratio(summary) != 1


def batch_ratio(summary: Summary) -> float:
    """Return the effective batch over the baseline's."""
    before = summary.baseline.config.samples_per_optimizer_step
    return summary.config.samples_per_optimizer_step / before


def changes(before: Config, after: Config) -> tuple[tuple[str, str, str], ...]:
    """Return knob, value before and value after, for every knob that differs."""
    old, new = before.to_dict(), after.to_dict()
    return tuple(
        (knob, knob_value(old[knob]), knob_value(new[knob]))
        for knob in knob_names()
        if old[knob] != new[knob]
    )


def fits(trial: Trial) -> bool:
    """Whether a trial ran to its end."""
    return trial.measured is not None


def rate(samples_per_second: float | None) -> str:
    """Return a rate with as many digits as mean something.

    >>> rate(68.4321), rate(1234.5), rate(None)
    ('68.4', '1,234', 'unknown')
    """
    if samples_per_second is None:
        return "unknown"
    if samples_per_second >= _WHOLE_FROM:
        return f"{samples_per_second:,.0f}"
    if samples_per_second >= _TENTHS_FROM:
        return f"{samples_per_second:.1f}"
    return f"{samples_per_second:.3g}"


def count(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun.

    >>> count(1, "pair"), count(3, "launch", "launches")
    ('1 pair', '3 launches')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _gain(summary: Summary) -> str:
    estimate = summary.speedup
    if summary.goal == "memory":
        return f"peak memory {memory_words(summary)}{_share_of_baseline(summary)}"
    if not fits(summary.baseline) and summary.reference == summary.baseline.config:
        return "it fits, which your baseline does not"
    if estimate is None:
        return "the fastest that was measured"
    times = f"{estimate.value:.2f} times as fast as"
    if summary.reference == summary.baseline.config:
        return f"{times} what you have"
    return f"{times} {summary.reference.describe()}, the most of your baseline that fits"


def _share_of_baseline(summary: Summary) -> str:
    before, after = summary.baseline.peak_bytes, peak_of(summary)
    if not before or after is None:
        return ""
    return f", {after / before:.0%} of what you have"


def _why_keep(summary: Summary) -> str:
    estimate = summary.speedup
    if estimate is None:
        return "nothing that was tried is better by more than the noise"
    rival = f"the best rival measured {estimate.value:.2f} times its speed"
    return f"{rival}, which is not beyond the noise" if estimate.is_gain else rival


def _applied_gain(summary: Summary) -> Estimate | None:
    """Return the speed-up that the answer brings; None where it brings none."""
    estimate = summary.speedup
    if summary.verdict == "keep" or estimate is None or not estimate.is_gain:
        return None
    return estimate
