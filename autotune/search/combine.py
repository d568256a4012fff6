"""Several launches of one config, as one measurement: the launch is the unit of evidence.

Steps of one launch are no repetitions of each other: the spread between launches is two to five
times that within one (METHOD.md C.1).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from scipy import stats

from autotune.outcome import Measured, Measurement, Outcome

_TWO_SIDED = 0.975
"""Quantile of a 95 % interval."""


def combined(outcomes: Sequence[Outcome]) -> Outcome:
    """Return how a config ended, of the ends of its launches: the first failure, else all of them.

    Raises:
        ValueError: If there is no launch.
    """
    if not outcomes:
        raise ValueError("a trial needs at least one launch, but got none")
    measured = [outcome for outcome in outcomes if isinstance(outcome, Measured)]
    failed = (outcome for outcome in outcomes if not isinstance(outcome, Measured))
    return next(failed, None) or _all_measured(measured)


def _all_measured(measured: Sequence[Measured]) -> Measured:
    reasons = dict.fromkeys(outcome.reason for outcome in measured if outcome.reason)
    return Measured(
        measurement=pooled([outcome.measurement for outcome in measured]),
        reason="; ".join(reasons),
    )


def pooled(measurements: Sequence[Measurement]) -> Measurement:
    """Return one measurement: geometric mean of the rates, largest of the peaks."""
    rate, interval = _rate(measurements)
    return replace(
        measurements[-1],
        samples_per_second=rate,
        samples_per_second_interval=interval or measurements[-1].samples_per_second_interval,
        step_seconds=_mean(measurements, "step_seconds"),
        optimizer_step_seconds=_mean(measurements, "optimizer_step_seconds"),
        data_wait_share=_mean(measurements, "data_wait_share"),
        peak_bytes=_most(measurements, "peak_bytes"),
        peak_allocated_bytes=_most(measurements, "peak_allocated_bytes"),
        peak_reserved_bytes=_most(measurements, "peak_reserved_bytes"),
        process_rss_bytes=_most(measurements, "process_rss_bytes"),
        launches=sum(item.launches for item in measurements),
    )


def _rate(
    measurements: Sequence[Measurement],
) -> tuple[float | None, tuple[float, float] | None]:
    """Return the geometric mean of the rates, and its 95 % interval; None where there is none."""
    rates = list(filter(None, (item.samples_per_second for item in measurements)))
    if len(rates) <= 1:
        return next(iter(rates), None), None
    return _mean_and_interval(list(map(math.log, rates)))


def _mean_and_interval(logs: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the geometric mean of what some logarithms are of; Student's t over launches."""
    mean = statistics.fmean(logs)
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    half = float(stats.t.ppf(_TWO_SIDED, len(logs) - 1)) * error
    return math.exp(mean), (math.exp(mean - half), math.exp(mean + half))


def _mean(measurements: Sequence[Measurement], figure: str) -> float | None:
    known = [getattr(item, figure) for item in measurements if _has(item, figure)]
    return statistics.fmean(known) if known else None


def _most(measurements: Sequence[Measurement], figure: str) -> int | None:
    known = (getattr(item, figure) for item in measurements if _has(item, figure))
    return max(known, default=None)


def _has(measurement: Measurement, figure: str) -> bool:
    return getattr(measurement, figure) is not None
