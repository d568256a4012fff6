"""Phases B and C: what else changes the step, at the best size; then the other cells, set so too.

What suits one cell may suit another more: a cell that was behind may lead once both are set so, and
then at another size (METHOD.md B.4, second hold-out). And what did not pay in one precision may in
another, as channels that lie last do.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from autotune.search.proposals import SWITCHES, set_as
from autotune.search.speeds import Speeds
from autotune.search.task import Task
from autotune.space import Config

_BY_PRECISION = "channels_last"
"""The switch that may pay in one precision alone (METHOD.md B.4, first hold-out)."""

REACH = 1.25
"""A cell is looked at again whose best size takes at most so many times as long as the best of all:
no switch is known to suit one cell by more than another."""

NEAR = 1.05
"""Sizes this close to the best are timed as the best is set: single launches tell no less apart."""


def turn_switches(speeds: Speeds, task: Task) -> Config | None:
    """Time threads and each switch at the best size; return the best of all, if there is one.

    A switch that is not clearly faster stays as it is by default: see `Speeds.plainest`.

    Raises:
        BudgetSpent: If nothing more may be launched.
    """
    ranked = speeds.ranked()
    if not ranked:
        return None
    best = _with_best_threads(speeds, task, ranked[0])
    for knob in SWITCHES:
        best = speeds.plainest([best, *_turned(speeds, task, best, knob)])
    return best


def _turned(speeds: Speeds, task: Task, config: Config, knob: str) -> list[Config]:
    """Return a config with each value of a knob, of those that could be timed."""
    values = task.space.choices(knob)
    turned = [Config.from_dict(config.to_dict() | {knob: value}) for value in values]
    return [each for each in turned if each == config or _is_timed(speeds, config, each)]


def _is_timed(speeds: Speeds, base: Config, other: Config) -> bool:
    return speeds.compare(base, other) is not None


def walk_rivals(
    speeds: Speeds,
    ladders: Sequence[Sequence[Config]],
    *,
    task: Task,
    best: Config,
    reference: Config,
) -> None:
    """Time the best sizes of all cells within reach as the best is set, and their neighbours.

    Args:
        speeds: What was timed; learns.
        ladders: The sizes of each cell, set as the reference is.
        task: What is asked.
        best: The fastest so far.
        reference: How everything was set so far.

    Raises:
        BudgetSpent: If nothing more may be launched.
    """
    leaders = _leaders_within_reach(speeds, ladders)
    if task.has_choice(_BY_PRECISION):
        others = [set_as(best, leader) for leader in leaders if leader.amp != best.amp]
        turned = chain.from_iterable(_turned(speeds, task, c, _BY_PRECISION) for c in others)
        best = min([best, *turned], key=speeds.of)
    if best == set_as(reference, best):
        return
    for leader in leaders:
        speeds.measure(set_as(best, leader), phase="C")
    as_best = [[set_as(best, config) for config in ladder] for ladder in ladders]
    speeds.close_in(as_best, reach=NEAR, phase="C")


def _leaders_within_reach(speeds: Speeds, ladders: Sequence[Sequence[Config]]) -> list[Config]:
    """Return the fastest size of each cell that is worth another look, the fastest first."""
    leaders = sorted((min(ladder, key=speeds.of) for ladder in ladders if ladder), key=speeds.of)
    within = REACH * min(map(speeds.of, leaders), default=0.0)
    return [leader for leader in leaders if speeds.of(leader) <= within]


def _with_best_threads(speeds: Speeds, task: Task, best: Config) -> Config:
    """Return a size with the fastest number of threads, from the default down while it pays."""
    for other in _other_threads(task, best):
        seconds = speeds.measure(other, phase="B")
        if seconds is None or seconds > speeds.of(best):
            break
        best = other
    return best


def _other_threads(task: Task, config: Config) -> list[Config]:
    """Return a config with each other number of threads, the nearest to the default first."""
    counts = [n for n in task.space.choices("threads") if n is None or isinstance(n, int)]
    others = [replace(config, threads=n) for n in counts if n != config.threads]
    return sorted(others, key=lambda other: abs(task.threads_of(other) - task.device.threads))
