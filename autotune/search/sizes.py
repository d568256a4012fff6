"""Phase A, memory: the largest batch size that fits, in each precision.

Sizes are climbed by doubling from one that is known to fit, and halved between after the first that
does not. Small batches say nothing of the ramp (METHOD.md F.1), so nothing is taken to fit from
below; whatever is smaller than a measured size is, and whatever is larger than one that ran out, or
lies beyond a chord that has passed the limit, is skipped with that as its reason.
"""

from collections.abc import Sequence
from dataclasses import replace

from autotune.search.fits import Fits
from autotune.search.launcher import MEMORY_CYCLES, Launcher
from autotune.search.plan import Plan
from autotune.space import Config

STRIDE = 2
"""A climb at most doubles the batch: one crash or hang, of a kernel that fails from some size on,
then costs one launch."""


def cells(launcher: Launcher, reference: Config) -> tuple[Config, ...]:
    """Return the reference in each precision of the space, its own first."""
    choices = [str(amp) for amp in launcher.task.space.choices("amp")] or [reference.amp]
    choices.sort(key=lambda amp: amp != reference.amp)
    return tuple(replace(reference, amp=amp) for amp in choices)


def find_sizes(launcher: Launcher, fits: Fits, plan: Plan, *, cell: Config) -> list[Config]:
    """Return the configs of a cell that fit, by ascending batch size.

    Args:
        launcher: What runs a probe.
        fits: What is known of memory; learns.
        plan: What can be afforded.
        cell: A config of the cell; the climb starts at its batch size.
    """
    task = launcher.task
    ladder = [task.with_split(cell, split) for split in task.space.splits()]
    start = max((n for n, c in enumerate(ladder) if c.batch_size <= cell.batch_size), default=0)
    low = _first_that_fits(ladder, start, fits=fits, plan=plan)
    if low is None:
        return []
    is_own = cell.amp == task.baseline.amp
    top = _climbed(ladder, low, fits=fits, plan=plan, stride=STRIDE if is_own else 1)
    for config in ladder[top + 1 :]:
        if not fits.may_run(config):
            fits.probe(config)  # known not to fit: recorded as skipped, with the reason
    return [config for config in ladder[: top + 1] if fits.state(config) == "fits"]


def _climbed(ladder: Sequence[Config], low: int, *, fits: Fits, plan: Plan, stride: int) -> int:
    """Return the highest rung that fits, climbing from one that does.

    The first stride is one rung in another precision than the first: its border is likely to be
    that of the first one.
    """
    high = len(ladder)
    while (rung := _next_rung(ladder, low, high, stride=stride)) is not None:
        config = ladder[rung]
        if not _is_affordable(config, fits, plan):
            break
        if fits.probe(config):
            low, stride = rung, STRIDE
        else:
            high = rung
            if fits.state(config) == "doomed":
                break
    return low


def _first_that_fits(ladder: Sequence[Config], start: int, *, fits: Fits, plan: Plan) -> int | None:
    """Return the highest rung at or below `start` that fits, halving down where it does not."""
    rung = start
    while _is_affordable(ladder[rung], fits, plan):
        if fits.probe(ladder[rung]):
            return rung
        if rung == 0:
            return None
        half = ladder[rung].batch_size // STRIDE
        rung = max((n for n in range(rung) if ladder[n].batch_size <= half), default=0)
    return None


def _next_rung(ladder: Sequence[Config], low: int, high: int, *, stride: int) -> int | None:
    """Return the rung to try between one that fits and one that does not; None if they meet."""
    if high - low <= 1:
        return None
    if high < len(ladder):
        return (low + high) // 2
    most = ladder[low].batch_size * stride
    return max((n for n in range(low + 1, high) if ladder[n].batch_size <= most), default=low + 1)


def _is_affordable(config: Config, fits: Fits, plan: Plan) -> bool:
    if fits.state(config) != "unknown":
        return True
    cost = plan.cost(config, "memory", cycles=MEMORY_CYCLES)
    return plan.affords(cost, phase="A") and not plan.is_dear(
        config, "memory", cycles=MEMORY_CYCLES
    )
