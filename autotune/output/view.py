"""What a report shows, as rows of words: the templates below only place them."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt
from typing import TypeVar

from autotune.knobs import PRECISIONS
from autotune.outcome import Skipped, Trial
from autotune.output import words
from autotune.output.effects import EffectRow, effect_rows
from autotune.output.makeup import Makeup, makeup_of
from autotune.output.picture import draw
from autotune.output.provenance import how_measured, machine_facts
from autotune.space import Config
from autotune.summary import Summary
from autotune.units import format_bytes, format_duration
from autotune.version import __version__

_Figure = TypeVar("_Figure", int, float)

WIDE_INCHES, NARROW_INCHES = 9.0, 5.0
"""Of the picture on a desk and on a phone; its text stays readable in both."""

BADGES = {
    "tuned": "faster, confirmed",
    "keep": "keep your configuration",
    "unconfirmed": "not confirmed",
    "interrupted": "stopped early",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One figure of the answer.

    Args:
        label: What it is.
        value: The figure.
        detail: Its spread or its relation, in words.
        share: A share to draw as a bar, 0 to 1; None draws none.
    """

    label: str
    value: str
    detail: str
    share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """A trial in words; `mark` is `answer`, `baseline` or empty, `kind` its outcome's name."""

    number: int
    phase: str
    measures: str
    config: str
    kind: str
    outcome: str
    rate: str
    peak: str
    predicted: str
    launches: int
    reason: str
    mark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRow:
    """A predicted peak beside the measured one."""

    config: str
    predicted: str
    measured: str
    difference: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a rule comes from."""

    name: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule for the learning rate at another batch, and its sources."""

    text: str
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A whole report in words, in the order in which it is read."""

    name: str
    badge: str
    verdict: str
    headline: str
    notes: tuple[str, ...]
    tiles: tuple[Tile, ...]
    changes: tuple[tuple[str, str, str], ...]
    flags: str
    config: str
    new_batch: str
    rules: tuple[Rule, ...]
    precisions: tuple[str, ...]
    picture_wide: str
    picture_narrow: str
    effects: tuple[EffectRow, ...]
    makeup: Makeup | None
    peaks: tuple[PeakRow, ...]
    peaks_summary: str
    counts: str
    trials: tuple[TrialRow, ...]
    left_out: tuple[tuple[str, str], ...]
    worst_case: tuple[tuple[str, str], ...]
    how: tuple[tuple[str, str], ...]
    machine: tuple[tuple[str, str], ...]
    command: str
    version: str = __version__


def view_of(summary: Summary) -> View:
    """Return what the report of a run shows."""
    return View(
        name=words.name_of(summary),
        badge=BADGES[summary.verdict],
        verdict=summary.verdict,
        headline=words.headline(summary),
        notes=summary.notes,
        tiles=_tiles(summary),
        changes=words.changes(summary.baseline.config, summary.config),
        flags=summary.config.flags(),
        config=config_literal(summary.config),
        new_batch=_new_batch(summary),
        rules=_rules(summary) if words.has_new_batch(summary) else (),
        precisions=_precisions(summary),
        picture_wide=draw(summary, width_inches=WIDE_INCHES, name="wide"),
        picture_narrow=draw(summary, width_inches=NARROW_INCHES, name="narrow"),
        effects=effect_rows(summary),
        makeup=makeup_of(summary),
        peaks=_peaks(summary),
        peaks_summary=_peaks_summary(summary),
        counts=_counts(summary),
        trials=tuple(_trial_row(trial, summary) for trial in summary.trials),
        left_out=tuple(summary.left_out.items()),
        worst_case=tuple(summary.worst_case.items()),
        how=how_measured(summary),
        machine=machine_facts(summary),
        command=summary.command,
    )


def config_literal(config: Config) -> str:
    """Return a config as a Python dict to copy, a knob a line."""
    lines = (f'    "{knob}": {_literal(value)},' for knob, value in config.to_dict().items())
    return "\n".join(["{", *lines, "}"])


def _literal(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _tiles(summary: Summary) -> tuple[Tile, ...]:
    return (
        _speed_up_tile(summary),
        Tile(
            label="samples per second",
            value=words.rate(words.speed_of(summary)),
            detail="; ".join(filter(None, (_spread_words(summary), _before_words(summary)))),
        ),
        _memory_tile(summary),
        Tile(
            label="to find it",
            value=format_duration(summary.wall_seconds),
            detail=words.pay_back_words(summary),
        ),
    )


def _speed_up_tile(summary: Summary) -> Tile:
    estimate = summary.speedup
    is_rival = summary.verdict == "keep" and estimate is not None
    return Tile(
        label="best rival, times your speed" if is_rival else "times as fast",
        value=f"{estimate.value:.2f}×" if estimate else "–",
        detail=words.speed_words(summary),
    )


def _memory_tile(summary: Summary) -> Tile:
    peak, limit = words.peak_of(summary), format_bytes(summary.limit_bytes)
    share = None if peak is None else peak / summary.limit_bytes
    return Tile(
        label="peak memory",
        value=format_bytes(peak),
        detail=f"of {limit} ({share:.0%})" if share else f"of {limit}",
        share=share,
    )


def _spread_words(summary: Summary) -> str:
    interval = summary.measured.samples_per_second_interval if summary.measured else None
    if interval is None:
        return ""
    return f"{words.rate(interval[0])} to {words.rate(interval[1])} over launches"


def _before_words(summary: Summary) -> str:
    before = summary.baseline
    if not words.fits(before):
        return f"yours: {words.OUTCOMES[before.outcome.name]}"
    return "" if summary.verdict == "keep" else f"was {words.rate(before.samples_per_second)}"


def _new_batch(summary: Summary) -> str:
    if not words.has_new_batch(summary):
        return ""
    before = summary.baseline.config.samples_per_optimizer_step
    after = summary.config.samples_per_optimizer_step
    same = summary.best_at_baseline_batch
    ending = ""
    if same is not None and same.measured is not None:
        rate = words.rate(same.measured.samples_per_second)
        ending = f" The fastest that keeps {before}: {same.config.describe()}, {rate} samples/s."
    return (
        f"One optimizer step now averages over {after:,} samples instead of {before:,} "
        f"({words.batch_ratio(summary):.3g} times as many). Samples per second compare how fast "
        "the data is processed, not how fast the model learns: the learning rate may have to "
        f"change. Nothing of this was applied.{ending}"
    )


def _rules(summary: Summary) -> tuple[Rule, ...]:
    ratio = words.batch_ratio(summary)
    goyal = Source(name="Goyal et al. 2017", address="https://arxiv.org/abs/1706.02677")
    krizhevsky = Source(name="Krizhevsky 2014", address="https://arxiv.org/abs/1404.5997")
    malladi = Source(name="Malladi et al. 2022", address="https://arxiv.org/abs/2205.10287")
    return (
        Rule(
            text=f"Linear, usual for SGD: the learning rate times {ratio:.3g}, after a warm-up.",
            sources=(goyal,),
        ),
        Rule(
            text=f"Square root, usual for Adam and its kin: times {sqrt(ratio):.3g}.",
            sources=(krizhevsky, malladi),
        ),
    )


def _precisions(summary: Summary) -> tuple[str, ...]:
    tried = {trial.config.amp for trial in summary.trials} | {summary.config.amp}
    return tuple(name for name in PRECISIONS if name in tried)


def _foretold(summary: Summary) -> Iterator[tuple[Config, int, int]]:
    """Yield config, predicted and measured peak, where both are known."""
    for trial in summary.trials:
        if trial.peak_bytes and trial.predicted_peak_bytes is not None:
            yield trial.config, trial.predicted_peak_bytes, trial.peak_bytes


def _peaks(summary: Summary) -> tuple[PeakRow, ...]:
    return tuple(
        PeakRow(
            config=config.describe(),
            predicted=format_bytes(predicted),
            measured=format_bytes(measured),
            difference=f"{predicted / measured - 1:+z.1%}",
        )
        for config, predicted, measured in _foretold(summary)
    )


def _peaks_summary(summary: Summary) -> str:
    errors = [predicted / measured - 1 for _, predicted, measured in _foretold(summary)]
    if not errors:
        return ""
    return (
        f"{words.count(len(errors), 'prediction')}, made before the launch; they differ from the "
        f"measured peak by {min(errors):+z.1%} to {max(errors):+z.1%}."
    )


def _counts(summary: Summary) -> str:
    names = [trial.outcome.name for trial in summary.trials]
    parts = [
        f"{names.count(kind)} {word}" for kind, word in words.OUTCOMES.items() if kind in names
    ]
    return f"{words.count(len(names), 'trial')}: {', '.join(parts)}" if parts else "no trials"


def _trial_row(trial: Trial, summary: Summary) -> TrialRow:
    marks = {summary.baseline.config: "baseline", summary.config: "answer"}
    return TrialRow(
        number=trial.number,
        phase=words.PHASES.get(trial.phase, trial.phase),
        measures=words.STUDIES.get(trial.study, trial.study),
        config=trial.config.describe(),
        kind=trial.outcome.name,
        outcome=words.OUTCOMES[trial.outcome.name] + (", reused" if trial.is_reused else ""),
        rate=_if_known(words.rate, trial.samples_per_second),
        peak=_if_known(format_bytes, trial.peak_bytes),
        predicted=_if_known(format_bytes, _predicted_bytes(trial)),
        launches=len(trial.launches),
        reason=trial.outcome.reason,
        mark=marks.get(trial.config, ""),
    )


def _predicted_bytes(trial: Trial) -> int | None:
    """Return the peak that was predicted, before the launch or instead of it."""
    if trial.predicted_peak_bytes is None and isinstance(trial.outcome, Skipped):
        return trial.outcome.predicted_peak_bytes
    return trial.predicted_peak_bytes


def _if_known(say: Callable[[_Figure], str], figure: _Figure | None) -> str:
    return "" if figure is None else say(figure)
