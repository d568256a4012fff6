"""What a larger effective batch would give: one line, where the batch is kept and time is left.

It is never applied: a larger effective batch trains otherwise. So it is only looked at once the
answer is known, without a loader, and within the memory limit.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from autotune.outcome import Measured
from autotune.search.launcher import MEMORY_CYCLES, Ask
from autotune.search.phases import Explorer
from autotune.search.plan import FEWEST_CYCLES
from autotune.space import Config

FACTORS = (2, 4)
"""So many times the global batch are looked at."""

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
    own = explorer.speeds.of(answer)
    gains = {} if kept is None or math.isinf(own) else _gains(explorer, answer, seconds=own)
    if kept is None or not gains:
        return None
    enough = max(gains.values()) / WORTH
    factor = min(factor for factor, gain in gains.items() if gain >= enough)
    return (
        f"a global batch of {kept * factor} would give about {gains[factor]:.2f} times the "
        "samples/s (not tried end to end; it changes the effective batch)"
    )


def _gains(explorer: Explorer, answer: Config, *, seconds: float) -> dict[int, float]:
    """Return factor → how many times as fast it would be than the answer, which takes `seconds`."""
    now = explorer.loading.predicted(seconds, answer.num_workers)
    found: dict[int, float] = {}
    for factor in FACTORS:
        tried = (_seconds(explorer, config) for config in _larger(answer, factor))
        known = next((one for one in tried if one is not None), None)
        if known is not None:
            found[factor] = now / explorer.loading.predicted(known, answer.num_workers)
    return found


def _larger(answer: Config, factor: int) -> Iterator[Config]:
    """Yield larger steps: of a larger batch, where that may be better; or of more batches."""
    if answer.accumulation_steps == 1:
        yield replace(answer, batch_size=answer.batch_size * factor)
    yield replace(answer, accumulation_steps=answer.accumulation_steps * factor)


def _seconds(explorer: Explorer, config: Config) -> float | None:
    """Return seconds per sample by cheap launches; None where they cannot be had."""
    launcher, plan = explorer.launcher, explorer.plan
    length = launcher.task.workload.dataset_length
    core = explorer.speeds.core(config)
    cost = plan.cost(core, "memory", cycles=MEMORY_CYCLES)
    cost += plan.cost(core, "compute", cycles=FEWEST_CYCLES)
    spent = sum(trial.wall_seconds for trial in launcher.trials)
    samples = config.samples_per_optimizer_step * launcher.task.space.world_size
    has_samples = length is None or samples <= length
    has_launches = launcher.budget.remaining_launches > 1  # one for memory, one for time
    is_cheap = cost <= min(SPARE_SHARE * spent, LEFT_SHARE * launcher.budget.remaining_seconds)
    if not (has_samples and has_launches and is_cheap and explorer.fits.probe(core, phase="F")):
        return None
    ask = Ask(config=core, purpose="compute", phase="F", cycles=FEWEST_CYCLES)
    outcome = launcher.run(ask).outcome
    rate = outcome.measurement.samples_per_second if isinstance(outcome, Measured) else None
    return 1 / rate if rate else None
