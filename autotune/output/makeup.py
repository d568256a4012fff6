"""What the peaks of the baseline and of the answer are made of, as rows of words."""

from dataclasses import dataclass, replace

from autotune.memory.forecast import Estimate
from autotune.outcome import Trial
from autotune.output.parts import advice_on, parts_of
from autotune.space import Config
from autotune.summary import Summary
from autotune.units import format_bytes

YOURS, TUNED = "yours", "tuned"

OWNERS_NAMED = 3
"""Modules that own most activations; the blocks of a model are much alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """A part of the peaks: its bytes in words, and as a share of the largest peak, in each."""

    name: str
    sizes: tuple[str, ...]
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Makeup:
    """What the peaks are made of.

    Args:
        columns: Whose peaks they are.
        peaks: Predicted and measured, in words, of each.
        parts: What they are made of.
        notes: In which phase they are, which modules own most of it, what would help.
    """

    columns: tuple[str, ...]
    peaks: tuple[str, ...]
    parts: tuple[PartRow, ...]
    notes: tuple[str, ...]


def makeup_of(summary: Summary) -> Makeup | None:
    """Return what the baseline's and the answer's peaks are made of; None where not predicted."""
    configs = {YOURS: summary.baseline.config, TUNED: summary.config}
    if summary.config == summary.baseline.config:
        del configs[TUNED]
    found = {name: _estimate(summary, config) for name, config in configs.items()}
    estimates = {name: estimate for name, estimate in found.items() if estimate is not None}
    if not estimates:
        return None
    return Makeup(
        columns=tuple(estimates),
        peaks=tuple(_peak_words(summary, configs[name], e) for name, e in estimates.items()),
        parts=_parts(tuple(estimates.values())),
        notes=tuple(note for name, e in estimates.items() for note in _notes(name, e)),
    )


def _estimate(summary: Summary, config: Config) -> Estimate | None:
    """Return the prediction of a config, or of the one that its small switches were added to."""
    own = summary.baseline.config
    plain = replace(config, channels_last=own.channels_last, optimizer_impl=own.optimizer_impl)
    return summary.forecast.predict(config) or summary.forecast.predict(plain)


def _parts(estimates: tuple[Estimate, ...]) -> tuple[PartRow, ...]:
    whole = max(estimate.peak_bytes for estimate in estimates)
    columns = [parts_of(estimate) for estimate in estimates]
    return tuple(
        PartRow(
            name=name,
            sizes=tuple(format_bytes(column[name]) for column in columns),
            shares=tuple(column[name] / whole for column in columns),
        )
        for name in columns[0]
        if any(column[name] for column in columns)
    )


def _peak_words(summary: Summary, config: Config, estimate: Estimate) -> str:
    predicted, measured = format_bytes(estimate.peak_bytes), _measured(summary.trials, config)
    if measured is None:
        return f"{predicted} predicted"
    return f"{predicted} predicted, {format_bytes(measured)} measured"


def _measured(trials: tuple[Trial, ...], config: Config) -> int | None:
    peaks = [t.peak_bytes for t in trials if t.config == config and t.peak_bytes]
    return max(peaks, default=None)


def _notes(name: str, estimate: Estimate) -> tuple[str, ...]:
    instant = estimate.instant
    most = list(instant.by_owner.items())[:OWNERS_NAMED]
    owners = ", ".join(f"{owner} ({format_bytes(size)})" for owner, size in most)
    where = f"{name}: the peak is in the {_PHASES[str(instant.phase)]}"
    kept = f"; of its activations {owners} keep most" if owners else ""
    return (f"{where}{kept}", *advice_on(estimate, name=name))


_PHASES = {
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimizer's step",
}
