"""Phase A, between: how little need be recomputed of sizes that do not fit with nothing recomputed.

What recomputes most decides what can fit at all; this looks at those of its sizes that might be the
fastest of all if they recomputed less.
"""

from collections.abc import Sequence
from dataclasses import replace

from autotune.search.costs import RECOMPUTING
from autotune.search.fits import Fits
from autotune.search.launcher import Launcher
from autotune.search.plan import Plan
from autotune.search.sizes import is_affordable, without_checkpointing
from autotune.search.speeds import Speeds
from autotune.space import Config


def find_sizes_between(
    launcher: Launcher, fits: Fits, plan: Plan, *, speeds: Speeds, beyond: Sequence[Config]
) -> list[Config]:
    """Return sizes that fit with less recomputed than the most, each with the least that does.

    What does not fit with one kind of checkpointing is tried with the next. Those that one fits
    are found by halving: a kind costs a launch or two, and none where its peaks are predicted.

    Args:
        launcher: What runs a probe.
        fits: What is known of memory; learns.
        plan: What can be afforded.
        speeds: What was timed.
        beyond: Configs that recompute most, by ascending batch size.

    Raises:
        BudgetSpent: If nothing more may be launched.
    """
    found: list[Config] = []
    kinds = launcher.task.kinds[1:-1]
    if kinds:  # the largest tells most of the others
        speeds.measure(beyond[-1])
    within = RECOMPUTING * speeds.best_seconds
    left = [c for c in beyond if _is_needed(c, fits) and speeds.estimate(c) <= within]
    for kind in kinds:
        ladder = [replace(config, checkpointing=kind) for config in left]
        most = _most_that_fit(ladder, fits=fits, plan=plan)
        found, left = [*found, *ladder[:most]], left[most:]
    return found


def _is_needed(config: Config, fits: Fits) -> bool:
    """Whether it is not known that nothing need be recomputed."""
    return fits.state(without_checkpointing(config)) != "fits"


def _most_that_fit(ladder: Sequence[Config], *, fits: Fits, plan: Plan) -> int:
    """Return how many of some configs fit, the smallest first."""
    low, high = 0, len(ladder)
    while low < high:
        middle = (low + high - 1) // 2  # of two the smaller: it is likelier to fit
        if is_affordable(ladder[middle], fits, plan) and fits.probe(ladder[middle]):
            low = middle + 1
        else:
            high = middle
    return low
