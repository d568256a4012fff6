"""Phases B and C: what else changes the step, at the best size; then the other cells, set so too.

What suits one cell may suit another more: a cell that was behind may lead once both are set so, and
then at another size (METHOD.md B.4, second hold-out).
"""

from collections.abc import Sequence
from dataclasses import replace

from autotune.search.speeds import Speeds
from autotune.search.task import Task
from autotune.space import Config

REACH = 1.5
"""A cell is looked at again whose best size takes at most so many times as long as the best of all
(METHOD.md D.1, row C)."""


def turn_switches(speeds: Speeds, task: Task) -> Config | None:
    """Time threads and cuDNN's search at the best size; return the best of all, if there is one.

    Raises:
        BudgetSpent: If nothing more may be launched.
    """
    ranked = speeds.ranked()
    if not ranked:
        return None
    best = _with_best_threads(speeds, task, ranked[0])
    for is_on in task.space.choices("cudnn_benchmark"):  # as it is, that is known already
        speeds.measure(replace(best, cudnn_benchmark=bool(is_on)), phase="B")
    return speeds.ranked()[0]


def walk_rivals(
    speeds: Speeds, ladders: Sequence[Sequence[Config]], *, best: Config, reference: Config
) -> None:
    """Time the best sizes of all cells within reach as the best is set, and their neighbours.

    Args:
        speeds: What was timed; learns.
        ladders: The sizes of each cell, set as the reference is.
        best: The fastest so far.
        reference: How everything was set so far.

    Raises:
        BudgetSpent: If nothing more may be launched.
    """
    if best == _set_as(reference, best):
        return
    for leader in _leaders_within_reach(speeds, ladders):
        speeds.measure(_set_as(best, leader), phase="C")
    turned = [[_set_as(best, config) for config in ladder] for ladder in ladders]
    speeds.close_in(turned, phase="C")


def _leaders_within_reach(speeds: Speeds, ladders: Sequence[Sequence[Config]]) -> list[Config]:
    """Return the fastest size of each cell that is worth another look, the fastest first."""
    leaders = sorted((min(ladder, key=speeds.of) for ladder in ladders if ladder), key=speeds.of)
    within = REACH * min(map(speeds.of, leaders), default=0.0)
    return [leader for leader in leaders if speeds.of(leader) <= within]


def _set_as(model: Config, config: Config) -> Config:
    """Return a config with the threads and cuDNN's search of another."""
    return replace(config, threads=model.threads, cudnn_benchmark=model.cudnn_benchmark)


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
