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
    for outcome in outcomes:
        if not isinstance(outcome, Measured):
            return outcome
    measured = [outcome for outcome in outcomes if isinstance(outcome, Measured)]
    reasons = dict.fromkeys(outcome.reason for outcome in measured if outcome.reason)
    return Measured(
        measurement=pooled([outcome.measurement for outcome in measured]),
        reason="; ".join(reasons),
    )


def pooled(measurements: Sequence[Measurement]) -> Measurement:
    """Return one measurement: geometric mean of the rates, largest of the peaks."""
    rates = [item.samples_per_second for item in measurements if item.samples_per_second]
    rate, interval = _rate(rates)

    def most(figure: str) -> int | None:
        return _most([getattr(item, figure) for item in measurements])

    def mean(figure: str) -> float | None:
        return _mean([getattr(item, figure) for item in measurements])

    return replace(
        measurements[-1],
        samples_per_second=rate,
        samples_per_second_interval=interval or measurements[-1].samples_per_second_interval,
        step_seconds=mean("step_seconds"),
        optimizer_step_seconds=mean("optimizer_step_seconds"),
        data_wait_share=mean("data_wait_share"),
        peak_bytes=most("peak_bytes"),
        peak_allocated_bytes=most("peak_allocated_bytes"),
        peak_reserved_bytes=most("peak_reserved_bytes"),
        process_rss_bytes=most("process_rss_bytes"),
        launches=sum(item.launches for item in measurements),
    )


def _rate(rates: Sequence[float]) -> tuple[float | None, tuple[float, float] | None]:
    """Return the geometric mean, and its 95 % interval by Student's t over launches."""
    if not rates:
        return None, None
    logs = [math.log(rate) for rate in rates]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return rates[0], None
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    half = float(stats.t.ppf(_TWO_SIDED, len(logs) - 1)) * error
    return math.exp(mean), (math.exp(mean - half), math.exp(mean + half))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _most(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
