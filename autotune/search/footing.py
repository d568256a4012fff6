"""Phase 0: the user's own config first, measured and verified; whatever is claimed stands on it.

If it fails for another reason than memory, that is the user's error and is raised. If it does not
fit, that is its outcome, and the largest halving of its batch that fits takes its place.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import assert_never

from autotune.errors import NothingFits, StepFailed, WorkloadInvalid
from autotune.outcome import (
    Crashed,
    Invalid,
    Measured,
    OutOfMemory,
    Purpose,
    Skipped,
    TimedOut,
    Trial,
)
from autotune.search.budget import BudgetSpent
from autotune.search.fits import Fits
from autotune.search.launcher import MEMORY_CYCLES, Ask, Launcher
from autotune.search.plan import FEWEST_CYCLES, VERIFY_CYCLES
from autotune.search.task import Task
from autotune.space import Config
from autotune.units import format_bytes, format_duration

FIRST_CYCLES = 5
"""Timed cycles of the baseline's first launch, where two cycles were seen to be short."""

FIRST_STEPS = 20
"""Micro-batches that are enough for it: one cycle holds as many where it accumulates so long."""

LONG_SHARE = 1 / 40
"""Two cycles that take more of the budget are long: then the first launch times fewest cycles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footing:
    """What the search stands on.

    Args:
        baseline: The baseline's own trial, out of memory or not.
        reference: The timed trial of what is compared with; its verification where time ended.
        verified: The verification of the same config.
    """

    baseline: Trial
    reference: Trial
    verified: Trial

    @property
    def is_baseline(self) -> bool:
        """Whether the baseline itself fits."""
        return self.reference.config == self.baseline.config


def find_footing(launcher: Launcher, fits: Fits) -> Footing:
    """Return the measured and verified baseline, or the largest halving of it that fits.

    Raises:
        StepFailed: If the user's own step fails, for another reason than memory.
        WorkloadInvalid: If the workload was found wrong before its first step.
        NothingFits: If no config stays within the memory limit.
        BudgetSpent: If time or launches ran out.
    """
    failed: Trial | None = None
    own = launcher.task.baseline  # is run whatever is predicted: how it ends is its outcome
    for config in (c for c in _fallbacks(launcher) if c == own or fits.may_run(c)):
        first, timed, verified = _settle(launcher, config)
        if timed is not None and verified is not None:
            return Footing(baseline=failed or timed, reference=timed, verified=verified)
        failed = failed or first
    raise _nothing_fits(launcher)


def _settle(launcher: Launcher, config: Config) -> tuple[Trial, Trial | None, Trial | None]:
    """Return the last trial of a config, and both that it needs if memory sufficed for them."""
    memory = _own(launcher, config, purpose="memory", cycles=MEMORY_CYCLES)
    if not memory.measured:
        return memory, None, None
    verified = _own(launcher, config, purpose="verify", cycles=VERIFY_CYCLES)
    if not verified.measured:
        return verified, None, None
    is_long = memory.wall_seconds > LONG_SHARE * launcher.budget.time_seconds
    enough = math.ceil(FIRST_STEPS / config.accumulation_steps)
    cycles = min(FEWEST_CYCLES if is_long else FIRST_CYCLES, enough)
    try:
        timed = _own(launcher, config, purpose="train", cycles=cycles)
    except BudgetSpent:  # verified, but never timed: still an answer
        return verified, verified, verified
    return timed, timed if timed.measured else None, verified


def _own(launcher: Launcher, config: Config, *, purpose: Purpose, cycles: int) -> Trial:
    """Return a trial; of the user's own config only if it was measured or ran out of memory."""
    estimate = launcher.task.forecast.predict(config) if purpose == "memory" else None
    ask = Ask(
        config=config,
        purpose=purpose,
        phase="0",
        cycles=cycles,
        is_needed=True,
        predicted_peak_bytes=estimate.peak_bytes if estimate else None,
    )
    trial = launcher.run(ask)
    if config == launcher.task.baseline:
        _raise_own_failure(trial, cycles=cycles, is_spent=launcher.budget.is_done)
    return trial


def _raise_own_failure(trial: Trial, *, cycles: int, is_spent: bool) -> None:
    """Raise what the baseline failed with, unless it was measured or ran out of memory."""
    config = trial.config
    match trial.outcome:
        case Measured() | OutOfMemory() | Skipped():
            return
        case Crashed(is_workload_error=True):
            raise WorkloadInvalid(trial.outcome.reason, hint=trial.outcome.log_tail)
        case Crashed():
            raise StepFailed(
                f"the workload's own step fails with {config.describe()}: {trial.outcome.reason}",
                user_traceback=trial.outcome.log_tail,
            )
        case TimedOut() if is_spent:
            raise BudgetSpent(
                "time ran out before the baseline was verified", hint="give a larger time_budget"
            )
        case TimedOut():
            spent = format_duration(trial.wall_seconds)
            raise StepFailed(
                f"{config.describe()} did not finish a launch of {cycles} optimizer steps "
                f"within its limit of {spent}",
                hint="give a larger time_budget, or look for what it waits for",
            )
        case Invalid():
            raise StepFailed(
                f"the workload's own step gives no usable numbers: {trial.outcome.reason}"
            )
        case _:
            assert_never(trial.outcome)


def _fallbacks(launcher: Launcher) -> Iterator[Config]:
    """Yield the baseline, its halvings, and the smallest split in each other cell."""
    task = launcher.task
    yield task.baseline
    for split in _halvings(task):
        yield task.with_split(task.baseline, split)
    yield from _smallest_of_cells(launcher)


def _halvings(task: Task) -> Iterator[tuple[int, int]]:
    """Yield splits of at most half as many samples as the one before, and at last the smallest."""
    size = task.baseline.batch_size
    *splits, smallest = sorted(task.space.splits(), reverse=True)
    for split in splits:
        if split[0] * 2 <= size:
            size = split[0]
            yield split
    if smallest[0] < size:
        yield smallest


def _smallest_of_cells(launcher: Launcher) -> Iterator[Config]:
    """Yield the smallest split in each precision and kind of checkpointing, the leanest first."""
    task = launcher.task
    smallest = task.with_split(task.baseline, min(task.space.splits()))
    for amp, checkpointing in task.cells():
        yield replace(smallest, amp=amp, checkpointing=checkpointing)


def _nothing_fits(launcher: Launcher) -> NothingFits:
    """Return the error that says what the smallest configuration needs, by running it unlimited."""
    leanest = min(_peaks_without_limit(launcher), default=None)
    limit = format_bytes(launcher.task.limit_bytes)
    hint = (
        "raise the memory limit, or use a smaller model, shorter inputs, "
        "or an optimizer with less state"
    )
    if leanest is None:
        smallest = next(_smallest_of_cells(launcher)).describe()
        return NothingFits(
            f"no configuration fits in {limit}; the smallest, {smallest}, ran out of memory even "
            "without the limit",
            hint=hint,
        )
    needed = f"{format_bytes(leanest[0])} ({leanest[0]:,} bytes)"
    return NothingFits(
        f"no configuration fits in {limit}: the smallest, {leanest[1]}, needs {needed}", hint=hint
    )


def _peaks_without_limit(launcher: Launcher) -> list[tuple[int, str]]:
    """Return peak bytes and description of the smallest config in each cell that runs."""
    found = []
    for config in _smallest_of_cells(launcher):
        if launcher.budget.is_done:
            break
        peak_bytes = launcher.run(_unlimited(config)).peak_bytes
        if peak_bytes is not None:
            found.append((peak_bytes, config.describe()))
    return found


def _unlimited(config: Config) -> Ask:
    return Ask(
        config=config,
        purpose="memory",
        phase="0",
        cycles=MEMORY_CYCLES,
        is_limited=False,
        is_needed=True,
    )
