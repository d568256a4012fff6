"""Everything a run found, in plain records: what the files and the report are written from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.facts import DeviceFacts, WorkloadFacts
from autotune.knobs import Value
from autotune.memory.foretold import Forecast
from autotune.outcome import Measurement, Trial
from autotune.space import Config
from autotune.verdict import Estimate, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a knob is worth around the answer: measured with it put back to the reference's value.

    Args:
        knobs: The knob, or those that belong together.
        value: The reference's value of the first of them.
        estimate: How many times as fast the answer is as with it put back; None where that was not
            measured.
        reason: Why it was not; empty where it was.
    """

    knobs: tuple[str, ...]
    value: Value
    estimate: Estimate | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run found.

    Args:
        verdict: `tuned`, `keep`, `unconfirmed` or `interrupted`.
        config: The answer; with `keep` it is the baseline's config.
        measured: The answer's figures, of its latest launches.
        baseline: The baseline's trial; its launches in the verdict where there were any.
        best_at_baseline_batch: The fastest trial with the baseline's effective batch, where the
            answer has another; None otherwise.
        reference: What the speed-up is against: the baseline, or the largest halving of it that
            fits where the baseline does not.
        speedup: The ratio measured in the verdict; None without one.
        global_batch: Samples of an optimizer step, over all ranks.
        is_global_batch_free: Whether the tuner was allowed to change it.
        limit_bytes: The memory limit of the run.
        goal: `throughput` or `memory`.
        trials: All trials, in order.
        workload: What the workload is.
        device: What the device is.
        machine: Host, cores, memory, system: what a reader needs to judge the figures.
        versions: Package → version.
        left_out: Knob → why it was not tuned.
        notes: Sentences a reader must not miss, in order of weight.
        command: The command line or call that made the run.
        script: Path of the workload's script as the user gave it; None for live objects.
        seed: Seed of the run.
        time_budget_seconds: The budget.
        wall_seconds: What the run took.
        worst_case: Worst case → whether and how it was probed, in words.
        effects: What each knob is worth around the answer.
        forecast: The peaks that traces predicted before anything was run.
    """

    verdict: Verdict
    config: Config
    measured: Measurement | None
    baseline: Trial
    best_at_baseline_batch: Trial | None = None
    reference: Config
    speedup: Estimate | None = None
    global_batch: int
    is_global_batch_free: bool = False
    limit_bytes: int
    goal: str = "throughput"
    trials: tuple[Trial, ...] = ()
    workload: WorkloadFacts
    device: DeviceFacts
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    command: str = ""
    script: str | None = None
    seed: int = 0
    time_budget_seconds: float = 600.0
    wall_seconds: float = 0.0
    worst_case: Mapping[str, str] = field(default_factory=dict)
    effects: tuple[Effect, ...] = ()
    forecast: Forecast = field(default_factory=Forecast)
