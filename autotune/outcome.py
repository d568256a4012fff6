"""How a trial ended and what was measured: frozen records, to and from JSON.

The way through this module: a `Request` asks a `Runner` for one launch of a config; the `Report`
that comes back holds an `Outcome`, one of six, and what the launch saw; a `Trial` is one config
measured for one purpose, with all its launches.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, Self

from autotune.space import Config

SCHEMA_VERSION = 1
"""Of `trials.jsonl` and `config.json`; a change of meaning raises it, a reader refuses others."""

Purpose = Literal["memory", "compute", "loader", "train", "check", "verify"]
"""What a launch is for.

`memory`: two cycles on the largest batch, untimed, for the peak · `compute`: steps on batches in
hand, without a loader · `loader`: the loader drained, without a step · `train`: steps end to end ·
`check`: gradients against the baseline's, on the same samples · `verify`: whole cycles on the
largest batch, and evaluation, within the limit.
"""

STUDY_OF_PURPOSE: Mapping[Purpose, str] = {
    "memory": "memory",
    "compute": "compute",
    "loader": "loader",
    "train": "e2e",
    "check": "checks",
    "verify": "memory",
}
"""Which Optuna study holds the trials of a purpose: one objective each (METHOD.md D.4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What was measured of a config; what is unknown is None.

    Args:
        samples_per_second: Real samples, over all ranks.
        samples_per_second_interval: 95 % interval over launches, low then high.
        step_seconds: Seconds of one micro-batch, its share of the optimizer's step included.
        optimizer_step_seconds: Seconds of one whole accumulation cycle.
        data_wait_share: Share of the time that the step waited for the loader, 0 to 1.
        peak_bytes: What is held against the limit: on a CPU live tensor bytes, on CUDA reserved.
        peak_allocated_bytes: Most bytes that tensors held.
        peak_reserved_bytes: Most bytes that the caching allocator held; None on a CPU.
        process_rss_bytes: Most resident bytes of the training process.
        limit_bytes: The limit that was enforced.
        growth_bytes: By which live tensors grow from step to step; None where none was seen.
        samples_per_optimizer_step: Batch size × accumulation steps × ranks.
        launches: How many launches the figures come from.
    """

    samples_per_second: float | None = None
    samples_per_second_interval: tuple[float, float] | None = None
    step_seconds: float | None = None
    optimizer_step_seconds: float | None = None
    data_wait_share: float | None = None
    peak_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    process_rss_bytes: int | None = None
    limit_bytes: int | None = None
    growth_bytes: int | None = None
    samples_per_optimizer_step: int | None = None
    launches: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Return the measurement as JSON takes it; growth is there only where memory grows."""
        interval = self.samples_per_second_interval
        known = [f.name for f in fields(self) if f.name != "growth_bytes" or self.growth_bytes]
        plain = {name: getattr(self, name) for name in known}
        return plain | {"samples_per_second_interval": list(interval) if interval else None}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Return the measurement that `to_dict` wrote."""
        interval = document["samples_per_second_interval"]
        return cls(
            **{**document, "samples_per_second_interval": tuple(interval) if interval else None}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The launch ran to its end."""

    measurement: Measurement
    reason: str = ""
    name: ClassVar[str] = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Memory ran out, or the limit was passed; `reason` names bytes and operator if known."""

    reason: str
    name: ClassVar[str] = "out_of_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Not run, because a prediction ruled it out."""

    reason: str
    predicted_peak_bytes: int | None = None
    name: ClassVar[str] = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """Ended by us when its time limit passed."""

    reason: str
    name: ClassVar[str] = "timed_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    """Ended by a signal or an exception that is no memory failure.

    Args:
        reason: The signal or the exception, in one line.
        log_tail: The last lines of what the launch printed; the user's traceback where it raised.
        is_workload_error: Whether the workload was found wrong before its first step.
    """

    reason: str
    log_tail: str = ""
    is_workload_error: bool = False
    name: ClassVar[str] = "crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Invalid:
    """Ran, but its numbers must not be used: not finite, gradients off, another batch size."""

    reason: str
    name: ClassVar[str] = "invalid"


Outcome = Measured | OutOfMemory | Skipped | TimedOut | Crashed | Invalid
"""The six ways in which a trial ends; matched exhaustively."""

_OUTCOMES: Mapping[str, type[Outcome]] = {
    kind.name: kind for kind in (Measured, OutOfMemory, Skipped, TimedOut, Crashed, Invalid)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One run of a config, in numbers.

    Args:
        started_at: UTC, ISO 8601.
        seed: Seed of the data's order; rivals of a comparison share it.
        step_seconds: Seconds of each optimizer step, its wait for data included.
        peak_bytes: The peak that is held against the limit; None where it was not watched.
        load: The machine's load average over one minute when it ended.
    """

    started_at: str
    seed: int
    step_seconds: tuple[float, ...] = ()
    peak_bytes: int | None = None
    load: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the launch as JSON takes it."""
        return asdict(self) | {"step_seconds": list(self.step_seconds)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Return the launch that `to_dict` wrote."""
        return cls(**{**document, "step_seconds": tuple(document["step_seconds"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One launch that is asked for.

    Args:
        purpose: What it is for.
        config: What to run.
        baseline: What `check` compares with; None elsewhere.
        seed: Seed of the data's order and of the model's randomness.
        cycles: Optimizer steps to time, warm-up not counted.
        limit_bytes: Memory limit; None enforces none.
        time_limit_seconds: After this the launch is ended.
        largest_samples: Indices of the largest samples, largest first; empty where unknown.
        skip_windows: Windows pulled from the loader and not computed on before timing starts;
            rivals of a comparison share it, so that they see the same samples. A launch with
            workers pulls at least `workers + 1` batches.
    """

    purpose: Purpose
    config: Config
    baseline: Config | None = None
    seed: int = 0
    cycles: int = 5
    limit_bytes: int | None = None
    time_limit_seconds: float = 60.0
    largest_samples: tuple[int, ...] = ()
    skip_windows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a launch gave: how it ended, and its numbers where it got so far.

    Args:
        outcome: How it ended.
        launch: Its numbers.
        reused_seconds: What it took when it was run, where it is recalled from an earlier run.
    """

    outcome: Outcome
    launch: Launch | None = None
    reused_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON takes it."""
        return {
            "outcome": outcome_to_dict(self.outcome),
            "launch": self.launch.to_dict() if self.launch else None,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Return the report that `to_dict` wrote."""
        launch = document["launch"]
        return cls(
            outcome=outcome_from_dict(document["outcome"]),
            launch=Launch.from_dict(launch) if launch else None,
        )


Runner = Callable[[Request], Report]
"""Whatever can run a config: in this process, in its own, recorded, or simulated."""


def outcome_to_dict(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON takes it, with its kind under `name`."""
    plain: dict[str, Any] = {item.name: getattr(outcome, item.name) for item in fields(outcome)}
    if isinstance(outcome, Measured):
        plain["measurement"] = outcome.measurement.to_dict()
    return plain | {"name": outcome.name}


def outcome_from_dict(document: Mapping[str, Any]) -> Outcome:
    """Return the outcome that `outcome_to_dict` wrote."""
    plain = {key: value for key, value in document.items() if key != "name"}
    if "measurement" in plain:
        plain["measurement"] = Measurement.from_dict(plain["measurement"])
    return _OUTCOMES[document["name"]](**plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One config, tried for one purpose.

    Args:
        number: Its place in the run, from 0.
        study: The Optuna study that holds it.
        phase: `0`, `A` … `F`, `verdict` or `verify`.
        config: What was tried.
        outcome: How it ended.
        predicted_peak_bytes: What the memory law said beforehand; None where it said nothing.
        launches: Its launches, in order.
        started_at: UTC, ISO 8601.
        wall_seconds: From the first request to the last answer.
        is_reused: Whether it was taken from an earlier run.
    """

    number: int
    study: str
    phase: str
    config: Config
    outcome: Outcome
    predicted_peak_bytes: int | None = None
    launches: tuple[Launch, ...] = ()
    started_at: str = ""
    wall_seconds: float = 0.0
    is_reused: bool = False

    @property
    def measured(self) -> Measurement | None:
        """Its measurement; None where it did not run to its end."""
        return self.outcome.measurement if isinstance(self.outcome, Measured) else None

    @property
    def samples_per_second(self) -> float | None:
        """What it reached; None where that was not measured."""
        return self.measured.samples_per_second if self.measured else None

    @property
    def peak_bytes(self) -> int | None:
        """Its peak; None where that was not measured."""
        return self.measured.peak_bytes if self.measured else None

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as one line of `trials.jsonl` (DESIGN 2.5)."""
        measured = self.measured
        return {
            "schema_version": SCHEMA_VERSION,
            "number": self.number,
            "study": self.study,
            "phase": self.phase,
            "config": self.config.to_dict(),
            "outcome": self.outcome.name,
            "reason": self.outcome.reason,
            "measured": measured.to_dict() if measured else None,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "launches": [launch.to_dict() for launch in self.launches],
            "started_at": self.started_at,
            "wall_seconds": self.wall_seconds,
            "is_reused": self.is_reused,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Return the trial of one line of `trials.jsonl`.

        Raises:
            ValueError: If the line has another schema version than this reader knows.
        """
        if document["schema_version"] != SCHEMA_VERSION:
            raise ValueError(
                f"a trial needs schema version {SCHEMA_VERSION}, "
                f"but has {document['schema_version']!r}"
            )
        plain = {item.name: document[item.name] for item in fields(cls)}
        plain["config"] = Config.from_dict(document["config"])
        plain["outcome"] = _outcome_of_line(document)
        plain["launches"] = tuple(Launch.from_dict(item) for item in document["launches"])
        return cls(**plain)


def _outcome_of_line(document: Mapping[str, Any]) -> Outcome:
    kind = _OUTCOMES[document["outcome"]]
    if kind is Measured:
        measurement = Measurement.from_dict(document["measured"])
        return Measured(measurement=measurement, reason=document["reason"])
    if kind is Skipped:
        predicted = document["predicted_peak_bytes"]
        return Skipped(reason=document["reason"], predicted_peak_bytes=predicted)
    return kind(reason=document["reason"])  # type: ignore[call-arg]  # Measured left above
