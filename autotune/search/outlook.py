"""What a search would try, and about what it would cost: told before anything is launched."""

import math
from collections.abc import Iterator

from autotune.search.bounds import FIRST_LOOK, LAST_LOOK
from autotune.search.task import Task
from autotune.space import SWITCHES, Value
from autotune.units import format_bytes, format_duration

FOOTING_LAUNCHES = 3
"""Memory, verification and time of the baseline."""

SWEPT_SHARE = 0.6
"""Of the sizes of a cell, those that are timed: every second one, and neighbours of the best."""

RACE_LAUNCHES = 15
"""Of a race: five configs, three rounds."""

REFINING_LAUNCHES = 18
"""Of two challenges to the leader by two configs each, three rounds."""

CONFIRMING_LAUNCHES = 1 + 2 * FIRST_LOOK
"""Verification of the pick, and the fewest pairs of a verdict."""

MOST_LOOKS = 3
"""At the loader: none, one, and as many workers as should feed the device."""

MOST_SPLITS = 12
"""More splits than this are not listed one by one."""

_NAMES = {
    "amp": "precision",
    "checkpointing": "checkpointing",
    "num_workers": "loader workers",
    "prefetch_factor": "batches ahead of each worker",
    "threads": "threads",
    "pin_memory": "pinned memory",
    "cudnn_benchmark": "cudnn.benchmark",
    "persistent_workers": "persistent workers",
}


def plan_of(
    task: Task, *, time_seconds: float | None = None, trials: int | None = None
) -> tuple[str, ...]:
    """Return what would be tried and about how much it would cost, one line for each thing.

    Args:
        task: What is asked.
        time_seconds: How long the search may take; None for as long as it needs.
        trials: How many launches it may make; None for any number.
    """
    return tuple(_lines(task, time_seconds=time_seconds, trials=trials))


def _lines(task: Task, *, time_seconds: float | None, trials: int | None) -> Iterator[str]:
    space = task.space
    limit = format_bytes(task.limit_bytes)
    yield f"baseline: {task.baseline.describe()}, within {limit} on {task.device.name}"
    yield f"batch size x accumulation steps: {_splits(task)}"
    for knob, name in _NAMES.items():
        choices = space.choices(knob)
        if len(choices) > 1:
            yield f"{name}: {', '.join(_word(knob, value) for value in choices)}{_only(task, knob)}"
    for knob, reason in space.left_out.items():
        yield f"not tuned: {knob} ({reason})"
    yield (
        "in turn: what fits, what is fast, what the loader gives, a race of the best few, "
        f"then {FIRST_LOOK} to {LAST_LOOK} pairs of launches against the baseline"
    )
    yield _cost(task, time_seconds=time_seconds, trials=trials)


def _splits(task: Task) -> str:
    """Return the splits in words, the middle of many left out."""
    shown = [f"{size} x {steps}" for size, steps in task.space.splits()]
    if len(shown) > MOST_SPLITS:
        half = MOST_SPLITS // 2
        shown = [*shown[:half], "…", *shown[-half:]]
    kept = task.space.global_batch
    told = "the global batch is free" if kept is None else f"the global batch of {kept} is kept"
    return f"{', '.join(shown)} ({told})"


def _word(knob: str, value: Value) -> str:
    if knob == "amp":
        return "fp32" if value == "off" else str(value)
    if knob in SWITCHES:
        return "on" if value else "off"
    return "default" if value is None else str(value)


def _only(task: Task, knob: str) -> str:
    is_partial = knob == "checkpointing" and task.goal == "throughput"
    return " (only where a batch does not fit without)" if is_partial else ""


def _cost(task: Task, *, time_seconds: float | None, trials: int | None) -> str:
    launches = expected_launches(task)
    if trials is not None:
        launches = min(launches, trials)
    most = [] if trials is None else [f"at most {trials}"]
    if time_seconds is not None:
        most.append(f"at most {format_duration(time_seconds)}")
    limits = " and ".join(most) or "no limit was set"
    return f"about {launches} launches, fewer where time is short: {limits}"


def expected_launches(task: Task) -> int:
    """Return about how many launches a search makes that time does not limit."""
    space = task.space
    sizes = [size for size, _ in space.splits()]
    cells = [cell for cell in task.cells() if cell[1] == "off"]
    if not cells or task.goal == "memory":
        cells = [*task.cells()]
    doublings = math.ceil(math.log2(max(sizes) / min(task.baseline.batch_size, max(sizes))))
    climbing = doublings + 1
    timing = math.ceil(SWEPT_SHARE * len(sizes))
    switches = sum(len(space.choices(knob)) > 1 for knob in ("threads", "cudnn_benchmark"))
    loading = min(len(space.choices("num_workers")), MOST_LOOKS)
    if max(len(sizes), len(cells), loading) == 1 and not switches:
        return FOOTING_LAUNCHES + timing  # nothing to choose from
    checks = len(cells) if len(cells) * len(sizes) > 1 else 0
    found = len(cells) * (climbing + timing) + switches + loading + checks
    return FOOTING_LAUNCHES + found + RACE_LAUNCHES + REFINING_LAUNCHES + CONFIRMING_LAUNCHES
