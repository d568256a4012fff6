"""Simulated and recorded trials as runners, to test a search without a device or without waiting.

`Simulated` is a landscape of plain functions on a clock that is moved by hand; `Replayed` plays
what an earlier run recorded. Both are runners: a search cannot tell them from the real one.
"""

import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from autotune.errors import AutotuneError
from autotune.outcome import (
    STUDY_OF_PURPOSE,
    Invalid,
    Launch,
    Measured,
    Measurement,
    Outcome,
    OutOfMemory,
    Purpose,
    Report,
    Request,
    TimedOut,
    Trial,
)
from autotune.space import Config

WARM_UP_CYCLES = 2
"""Optimizer steps that a simulated launch takes before it measures time."""

WATCHED = 2
"""Micro-batches of a cycle that a simulated launch for the peak, or for gradients, runs."""

_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
"""When the simulated clock stood at 0."""

_TIMED: tuple[Purpose, ...] = ("compute", "loader", "train")

Failure = Callable[[Config, Purpose], Outcome | None]
"""Returns how a launch fails, or None where it does not; a `TimedOut` hangs until its limit."""


class SimulatedClock:
    """A clock that stands still until it is moved.

    >>> clock = SimulatedClock()
    >>> clock.advance(1.5)
    >>> clock()
    1.5
    """

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """Return the seconds it was moved by so far."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move it by some seconds."""
        self._now += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Landscape:
    """What is true of a simulated workload, as functions of a config.

    Args:
        compute_seconds: Seconds per sample of the device, without a loader.
        peak_bytes: Peak that is held against the limit.
        loader_seconds: Seconds per sample of the loader, with its workers.
        failure: How a launch fails for another reason than memory.
        is_right: Whether gradients agree with the baseline's, the second argument.
        start_seconds: Seconds of a launch before its first step.
        launch_sd: Spread of the log rate between launches.
        data_sd: Spread of the log rate that the data's order makes: shared by launches of one seed.
        has_overlap: Whether loading and computing overlap where there are workers.
    """

    compute_seconds: Callable[[Config], float]
    peak_bytes: Callable[[Config], float]
    loader_seconds: Callable[[Config], float] = lambda _: 0.0
    failure: Failure = lambda _config, _purpose: None
    is_right: Callable[[Config, Config], bool] = lambda _config, _baseline: True
    start_seconds: float = 0.4
    launch_sd: float = 0.01
    data_sd: float = 0.0
    has_overlap: bool = True

    def sample_seconds(self, config: Config) -> float:
        """Return the true seconds per sample, end to end."""
        compute, load = self.compute_seconds(config), self.loader_seconds(config)
        if config.num_workers and self.has_overlap:
            return max(compute, load)
        return compute + load

    def best(self, configs: Iterable[Config], *, limit_bytes: float) -> Config:
        """Return the truly fastest of some configs among those within the limit."""
        fitting = [config for config in configs if self.peak_bytes(config) <= limit_bytes]
        return min(fitting, key=self.sample_seconds)


class Simulated:
    """A runner on a landscape.

    Args:
        landscape: What is true.
        clock: The clock that launches take their time from.
        seed: Seed of the noise.
    """

    def __init__(self, landscape: Landscape, *, clock: SimulatedClock, seed: int = 0) -> None:
        self.landscape = landscape
        self.clock = clock
        self.requests: list[Request] = []
        self._seed = seed

    def __call__(self, request: Request) -> Report:
        """Return what a launch on the landscape gives, and move the clock by what it takes."""
        self.requests.append(request)
        cycle = self._cycle_seconds(request)
        outcome = self._failure(request)
        if outcome is None:
            warm_up = WARM_UP_CYCLES if request.purpose in _TIMED else 0
            wall = self.landscape.start_seconds + (request.cycles + warm_up) * cycle
            if wall <= request.time_limit_seconds:
                self.clock.advance(wall)
                return self._measured(request, cycle)
            outcome = TimedOut(reason=f"no end within {request.time_limit_seconds:.0f} s")
        hangs = isinstance(outcome, TimedOut)
        spent = request.time_limit_seconds if hangs else self.landscape.start_seconds + cycle
        self.clock.advance(min(spent, request.time_limit_seconds))
        return Report(outcome=outcome)

    def _cycle_seconds(self, request: Request) -> float:
        config = request.config
        per_sample = {
            "compute": self.landscape.compute_seconds,
            "memory": self.landscape.compute_seconds,
            "check": self.landscape.compute_seconds,
            "loader": self.landscape.loader_seconds,
        }.get(request.purpose, self.landscape.sample_seconds)
        told = (self._seed, request.seed, request.purpose, *_set_in(config))
        noise = random.Random(repr(told)).gauss(0, self.landscape.launch_sd)  # noqa: S311  # as above
        data = random.Random(request.seed).gauss(0, self.landscape.data_sd)  # noqa: S311  # as above
        few = WATCHED if request.purpose in {"memory", "check"} else config.accumulation_steps
        samples = config.batch_size * min(config.accumulation_steps, few)
        return per_sample(config) * samples * math.exp(noise + data)

    def _failure(self, request: Request) -> Outcome | None:
        failed = self.landscape.failure(request.config, request.purpose)
        if failed is not None or request.purpose == "loader":
            return failed
        peak = self.landscape.peak_bytes(request.config)
        if request.limit_bytes is not None and peak > request.limit_bytes:
            return OutOfMemory(reason=f"{peak:.0f} bytes > {request.limit_bytes}")
        baseline = request.baseline or request.config
        if request.purpose == "check" and not self.landscape.is_right(request.config, baseline):
            return Invalid(reason="gradients disagree with the baseline's")
        return None

    def _measured(self, request: Request, cycle: float) -> Report:
        samples = request.config.samples_per_optimizer_step
        is_timed = request.purpose in _TIMED
        measurement = Measurement(
            samples_per_second=samples / max(cycle, 1e-9) if is_timed else None,
            step_seconds=cycle / request.config.accumulation_steps if is_timed else None,
            optimizer_step_seconds=cycle if is_timed else None,
            peak_bytes=int(self.landscape.peak_bytes(request.config)),
            limit_bytes=request.limit_bytes,
            samples_per_optimizer_step=samples,
        )
        launch = Launch(
            started_at=(_EPOCH + timedelta(seconds=self.clock())).isoformat(),
            seed=request.seed,
            step_seconds=(cycle,) * request.cycles if is_timed else (),
            peak_bytes=measurement.peak_bytes,
        )
        return Report(outcome=Measured(measurement=measurement), launch=launch)


def _set_in(config: Config) -> tuple[object, ...]:
    """Return what is not at its default in a config, so that a further knob changes no noise."""
    usual = Config(batch_size=config.batch_size).to_dict()
    items = config.to_dict().items()
    return config.batch_size, *(item for item in items if item[1] != usual[item[0]])


class NotRecorded(AutotuneError):
    """A launch was asked for that the recording does not hold."""


class Replayed:
    """A runner that plays recorded trials: each launch of a config in order, then from the first.

    Args:
        trials: The trials, or the path of a `trials.jsonl`.
    """

    def __init__(self, trials: Iterable[Trial] | str | Path) -> None:
        if isinstance(trials, str | Path):
            trials = _read(Path(trials))
        self._reports: defaultdict[tuple[str, Config], list[Report]] = defaultdict(list)
        self._played: defaultdict[tuple[str, Config], int] = defaultdict(int)
        for trial in trials:
            self._reports[trial.study, trial.config].extend(_reports_of(trial))

    def __call__(self, request: Request) -> Report:
        """Return the next recorded launch of a config in the study of a purpose.

        Raises:
            NotRecorded: If there is none.
        """
        key = (STUDY_OF_PURPOSE[request.purpose], request.config)
        if not self._reports[key]:
            raise NotRecorded(
                f"no {request.purpose} launch of {request.config.describe()!r} is recorded",
                hint="record the run again, or ask for what it holds",
            )
        number = self._played[key] % len(self._reports[key])
        self._played[key] += 1
        return self._reports[key][number]


def _read(path: Path) -> list[Trial]:
    """Return the trials of a file; a last line without its end is a write that was cut off."""
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    return [Trial.from_dict(json.loads(line)) for line in whole.splitlines()]


def _reports_of(trial: Trial) -> list[Report]:
    """Return one report for each launch of a trial, with the rate of its own steps."""
    measured = trial.measured
    if measured is None or not trial.launches:
        return [Report(outcome=trial.outcome)]
    return [
        Report(outcome=Measured(measurement=_of_launch(measured, launch)), launch=launch)
        for launch in trial.launches
    ]


def _of_launch(measured: Measurement, launch: Launch) -> Measurement:
    samples = measured.samples_per_optimizer_step
    if not launch.step_seconds or samples is None:
        return replace(measured, launches=1)
    rate = samples * len(launch.step_seconds) / sum(launch.step_seconds)
    return replace(measured, samples_per_second=rate, samples_per_second_interval=None, launches=1)
