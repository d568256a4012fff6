"""What a search would try, and about what it would cost: told before anything is launched."""

import math
from collections.abc import Iterator

from autotune.knobs import Value, knob_value
from autotune.search.bounds import FIRST_LOOK, LAST_LOOK
from autotune.search.proposals import SWITCHES
from autotune.search.task import Task
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
    "channels_last": "channels last",
    "optimizer_impl": "optimizer",
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
    limit = format_bytes(task.limit_bytes)
    yield f"baseline: {task.baseline.describe()}, within {limit} on {task.device.name}"
    yield f"batch size x accumulation steps: {_splits(task)}"
    yield from _tuned(task)
    for knob, reason in task.space.left_out.items():
        yield f"not tuned: {knob} ({reason})"
    yield (
        "in turn: what fits, what is fast, what the loader gives, a race of the best few, "
        f"then {FIRST_LOOK} to {LAST_LOOK} pairs of launches against the baseline"
    )
    yield _cost(task, time_seconds=time_seconds, trials=trials)


def _splits(task: Task) -> str:
    """Return the splits in words, the middle of many left out."""
    shown = _shortened([f"{size} x {steps}" for size, steps in task.space.splits()])
    kept = task.space.global_batch
    told = "the global batch is free" if kept is None else f"the global batch of {kept} is kept"
    return f"{', '.join(shown)} ({told})"


def _shortened(words: list[str]) -> list[str]:
    if len(words) <= MOST_SPLITS:
        return words
    half = MOST_SPLITS // 2
    return [*words[:half], "…", *words[-half:]]


def _tuned(task: Task) -> Iterator[str]:
    """Yield the knobs that there is a choice of, each with its values."""
    for knob in filter(task.has_choice, _NAMES):
        words = ", ".join(_word(knob, value) for value in task.space.choices(knob))
        yield f"{_NAMES[knob]}: {words}{_only(task, knob)}"


def _word(knob: str, value: Value) -> str:
    return "fp32" if (knob, value) == ("amp", "off") else knob_value(value)


def _only(task: Task, knob: str) -> str:
    is_partial = knob == "checkpointing" and not task.saves_memory
    return " (only where a batch does not fit without)" if is_partial else ""


def _cost(task: Task, *, time_seconds: float | None, trials: int | None) -> str:
    most = math.inf if trials is None else trials
    launches = min(expected_launches(task), most)
    limits = " and ".join(_limits(time_seconds=time_seconds, trials=trials))
    return f"about {launches} launches, fewer where time is short: {limits or 'no limit was set'}"


def _limits(*, time_seconds: float | None, trials: int | None) -> Iterator[str]:
    if trials is not None:
        yield f"at most {trials}"
    if time_seconds is not None:
        yield f"at most {format_duration(time_seconds)}"


def expected_launches(task: Task) -> int:
    """Return about how many launches a search makes that time does not limit."""
    sizes = [size for size, _ in task.space.splits()]
    cells = _timed_cells(task)
    timing = math.ceil(SWEPT_SHARE * len(sizes))
    turned = [len(task.space.choices(knob)) - 1 for knob in SWITCHES if task.has_choice(knob)]
    switches = task.has_choice("threads") + sum(turned)
    loading = min(len(task.worker_counts), MOST_LOOKS)
    if max(len(sizes), cells, loading) == 1 and not switches:
        return FOOTING_LAUNCHES + timing  # nothing to choose from
    checks = cells if cells * len(sizes) > 1 else 0
    climbing = _rungs(task.baseline.batch_size, max(sizes))
    found = cells * (climbing + timing) + switches + loading + checks
    return FOOTING_LAUNCHES + found + RACE_LAUNCHES + REFINING_LAUNCHES + CONFIRMING_LAUNCHES


def _timed_cells(task: Task) -> int:
    """Return how many cells are timed: those that only recompute are not."""
    plain = [kind for _, kind in task.cells() if kind == "off"]
    return len(task.cells()) if task.saves_memory or not plain else len(plain)


def _rungs(start: int, most: int) -> int:
    """Return how many sizes a climb by doubling looks at."""
    return math.ceil(math.log2(most / min(start, most))) + 1
