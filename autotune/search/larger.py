"""What a larger effective batch would give: one line, where the batch is kept and time is left.

It is never applied: a larger effective batch trains otherwise. So it is only looked at once the
answer is known, without a loader, and within the memory limit.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from autotune.search.foresight import LARGER_FACTORS
from autotune.search.launcher import MEMORY_CYCLES, Ask
from autotune.search.phases import Explorer
from autotune.search.plan import FEWEST_CYCLES
from autotune.search.task import Task
from autotune.space import Config

SPARE_SHARE = 0.05
"""Of the time that the search took, what the launches at one of them may take: it is but a line."""

LEFT_SHARE = 0.5
"""As above, of the time that is left when all is decided."""

WORTH = 1.01
"""A still larger batch is named where it is this much faster: launches differ by as much."""


def larger_batch_note(explorer: Explorer, answer: Config) -> str | None:
    """Return the line that tells what a larger effective batch would give, by some launches.

    Args:
        explorer: What has found the answer.
        answer: The config that is recommended.

    Returns:
        The line; None where the batch is free, nothing larger can be had, or no time is to spare.

    Raises:
        BudgetSpent: If nothing more may be launched.
    """
    kept = explorer.launcher.task.space.global_batch
    if kept is None or math.isinf(explorer.speeds.of(answer)):
        return None
    gains = {factor: _gain(explorer, answer, factor=factor) for factor in LARGER_FACTORS}
    enough = max(gains.values()) / WORTH
    factor = min(factor for factor in gains if gains[factor] >= enough)
    if not gains[factor]:
        return None
    return (
        f"a global batch of {kept * factor} would give about {gains[factor]:.2f} times the "
        "samples/s (not tried end to end; it changes the effective batch)"
    )


def _gain(explorer: Explorer, answer: Config, *, factor: int) -> float:
    """Return how many times as fast a step that much larger would be; 0 where that is unknown."""
    tried = (_seconds(explorer, config) for config in _larger(answer, factor))
    seconds = next(filter(None, tried), math.inf)
    return explorer.known.predicted(answer) / explorer.loading.predicted(
        seconds, answer.num_workers
    )


def _larger(answer: Config, factor: int) -> Iterator[Config]:
    """Yield larger steps: of a larger batch, where that may be better; or of more batches."""
    if answer.accumulation_steps == 1:
        yield replace(answer, batch_size=answer.batch_size * factor)
    yield replace(answer, accumulation_steps=answer.accumulation_steps * factor)


def _seconds(explorer: Explorer, config: Config) -> float | None:
    """Return seconds per sample by cheap launches; None where they cannot be had."""
    core = explorer.speeds.core(config)
    may_look = _has_samples(explorer.launcher.task, core) and _is_cheap(explorer, core)
    if not may_look or not explorer.fits.probe(core, phase="F"):
        return None
    ask = Ask(config=core, purpose="compute", phase="F", cycles=FEWEST_CYCLES)
    rate = explorer.launcher.run(ask).samples_per_second
    return 1 / rate if rate else None


def _has_samples(task: Task, config: Config) -> bool:
    """Whether the data set has samples for a step, as far as is known."""
    length = task.workload.dataset_length
    return length is None or config.samples_per_optimizer_step * task.space.world_size <= length


def _is_cheap(explorer: Explorer, core: Config) -> bool:
    """Whether a launch for memory and one for time take little of what was, and of what is left."""
    plan, budget = explorer.plan, explorer.launcher.budget
    cost = plan.cost(core, "memory", cycles=MEMORY_CYCLES)
    cost += plan.cost(core, "compute", cycles=FEWEST_CYCLES)
    spent = explorer.launcher.spent_seconds
    has_time = cost <= min(SPARE_SHARE * spent, LEFT_SHARE * budget.remaining_seconds)
    return has_time and budget.remaining_launches > 1
