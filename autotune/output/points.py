"""Every config that was measured as a point: how fast, at which peak, and what is best of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autotune.outcome import Measured, Trial
from autotune.output.words import rate
from autotune.space import Config
from autotune.summary import Summary
from autotune.units import format_bytes

Role = Literal["answer", "baseline", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A config with a throughput and a peak.

    Args:
        config: What ran.
        samples_per_second: End to end where that was measured, else on batches in hand.
        peak_bytes: The peak of the same batch, accumulation and precision.
        is_end_to_end: Whether the loader was part of the measurement.
        role: What it is in the answer.
    """

    config: Config
    samples_per_second: float
    peak_bytes: int
    is_end_to_end: bool
    role: Role = "other"

    @property
    def is_named(self) -> bool:
        """Whether it is the answer or the baseline."""
        return self.role != "other"

    @property
    def title(self) -> str:
        """What hovering shows."""
        ending = "end to end" if self.is_end_to_end else "on batches in hand"
        name = f"{self.role}: " if self.is_named else ""
        return (
            f"{name}{self.config.describe()}\n{rate(self.samples_per_second)} samples/s {ending}, "
            f"peak {format_bytes(self.peak_bytes)}"
        )


def points_of(summary: Summary) -> tuple[Point, ...]:
    """Return a point for each config whose throughput and peak are known; the answer last."""
    found = {point.config: point for point in _of_trials(summary.trials)}
    roles: tuple[Role, ...] = ("baseline", "answer")
    for role in roles:
        point = _of_role(summary, role) or found.get(_config_of(summary, role))
        if point is not None:
            found.pop(point.config, None)
            found[point.config] = replace(point, role=role)
    return tuple(found.values())


def frontier(points: Iterable[Point]) -> tuple[Point, ...]:
    """Return the points that no other beats in both figures, by ascending peak."""
    best: list[Point] = []
    for point in sorted(points, key=lambda item: (item.peak_bytes, -item.samples_per_second)):
        if not best or point.samples_per_second > best[-1].samples_per_second:
            best.append(point)
    return tuple(best)


def ruled_out(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Return the trials that a prediction places beyond what ran: no throughput is known."""
    return tuple(
        trial
        for trial in trials
        if trial.predicted_peak_bytes and not isinstance(trial.outcome, Measured)
    )


def _of_trials(trials: Sequence[Trial]) -> Iterator[Point]:
    """Yield a point for each trial that was timed, those end to end last."""
    peaks = _peaks(trials)
    for trial in sorted(filter(_is_timed, trials), key=_is_end_to_end):
        speed, peak = trial.samples_per_second, peaks.get(_memory_knobs(trial.config))
        if speed is not None and peak is not None:
            yield Point(
                config=trial.config,
                samples_per_second=speed,
                peak_bytes=peak,
                is_end_to_end=_is_end_to_end(trial),
            )


def _peaks(trials: Iterable[Trial]) -> dict[tuple[int, int, str], int]:
    peaks: dict[tuple[int, int, str], int] = {}
    for trial in trials:
        if trial.peak_bytes:
            key = _memory_knobs(trial.config)
            peaks[key] = max(peaks.get(key, 0), trial.peak_bytes)
    return peaks


def _memory_knobs(config: Config) -> tuple[int, int, str]:
    return config.batch_size, config.accumulation_steps, config.amp


def _is_timed(trial: Trial) -> bool:
    return trial.study in {"compute", "e2e"}


def _is_end_to_end(trial: Trial) -> bool:
    return trial.study == "e2e"


def _config_of(summary: Summary, role: Role) -> Config:
    return summary.config if role == "answer" else summary.baseline.config


def _of_role(summary: Summary, role: Role) -> Point | None:
    measured = summary.measured if role == "answer" else summary.baseline.measured
    if measured is None or measured.samples_per_second is None or measured.peak_bytes is None:
        return None
    return Point(
        config=_config_of(summary, role),
        samples_per_second=measured.samples_per_second,
        peak_bytes=measured.peak_bytes,
        is_end_to_end=True,
    )
