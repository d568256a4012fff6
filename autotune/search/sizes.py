"""Phase A, memory: the largest batch size that fits, in each precision and with checkpointing.

Sizes are climbed by doubling from one that is known to fit, and halved between after the first that
does not. Small batches say nothing of the ramp (METHOD.md F.1), so nothing is taken to fit from
below; whatever is smaller than a measured size is, and whatever is larger than one that ran out, or
lies beyond a chord that has passed the limit, is skipped with that as its reason.

Recomputing takes longer than not, at the same batch: so a checkpointed cell has to be timed only
where its sizes do not fit otherwise, and at one that fits both ways, to see whether that is so.
What recomputes most decides what can fit at all; see `between` for the rest.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import filterfalse

from autotune.search.fits import Fit, Fits, cell_of
from autotune.search.launcher import MEMORY_CYCLES, Launcher
from autotune.search.plan import Plan
from autotune.search.task import Task
from autotune.space import Config

STRIDE = 2
"""A climb at most doubles the batch: one crash or hang, of a kernel that fails from some size on,
then costs one launch."""


NOT_NEEDED = "every batch size fits without checkpointing, and recomputing only takes time"
"""Why nothing of a checkpointed cell is tried."""


def cells(task: Task, reference: Config) -> tuple[Config, ...]:
    """Return the reference in each cell: those without checkpointing, and its precision, first.

    Of what recomputes, there is only what recomputes most.
    """
    found = [replace(reference, amp=amp, checkpointing=kind) for amp, kind in task.cells()]
    return tuple(sorted(found, key=lambda c: (c.checkpointing != "off", c.amp != reference.amp)))


def without_checkpointing(config: Config) -> Config:
    """Return a config without checkpointing."""
    return replace(config, checkpointing="off")


def find_sizes(launcher: Launcher, fits: Fits, plan: Plan, *, cell: Config) -> list[Config]:
    """Return the configs of a cell that fit, by ascending batch size.

    Args:
        launcher: What runs a probe.
        fits: What is known of memory; learns.
        plan: What can be afforded.
        cell: A config of the cell; the climb starts at its batch size.
    """
    task = launcher.task
    ladder = _ladder(task, cell)
    low = _first_that_fits(ladder, _place(ladder, cell), fits=fits, plan=plan)
    stride = STRIDE if _is_of_baseline(task, cell) else 1
    return _fitting(ladder, low, fits=fits, plan=plan, stride=stride)


def find_sizes_beyond(launcher: Launcher, fits: Fits, plan: Plan, *, cell: Config) -> list[Config]:
    """Return the configs of a checkpointed cell that fit where none does without checkpointing.

    Before them comes the largest that fits both ways, if there is one: it shows whether recomputing
    takes longer. Where memory does not bind there are none, and nothing is launched.

    Args:
        launcher: What runs a probe.
        fits: What is known of memory; learns.
        plan: What can be afforded.
        cell: A checkpointed config; what fits without checkpointing was looked for before.
    """
    ladder = _ladder(launcher.task, cell)
    states = [fits.state(without_checkpointing(config)) for config in ladder]
    first = _first_beyond(states)
    if first == len(ladder) and not _is_of_baseline(launcher.task, cell):
        fits.pass_over(ladder[-1], NOT_NEEDED, purpose="compute")
    if "over" not in states[first:]:
        return []
    start = first or _place(ladder, cell)
    low = _first_that_fits(ladder, start, fits=fits, plan=plan, least=first)
    found = _fitting(ladder, low, fits=fits, plan=plan, stride=STRIDE)
    return [config for config in found if config in ladder[max(first - 1, 0) :]]


def _first_beyond(states: Sequence[Fit]) -> int:
    """Return the rung above the highest that fits without checkpointing; the first if none does."""
    return max((rung + 1 for rung, state in enumerate(states) if state == "fits"), default=0)


def _is_of_baseline(task: Task, cell: Config) -> bool:
    return cell_of(cell) == cell_of(task.baseline)


def _ladder(task: Task, cell: Config) -> list[Config]:
    return [task.with_split(cell, split) for split in task.space.splits()]


def _place(ladder: Sequence[Config], cell: Config) -> int:
    """Return the rung of a cell's own batch size, or the one below it."""
    return _highest(ladder, most=cell.batch_size)


def _highest(ladder: Sequence[Config], *, most: int) -> int:
    """Return the highest rung of at most so many samples; the first where none is."""
    return max((rung for rung, c in enumerate(ladder) if c.batch_size <= most), default=0)


def _fitting(
    ladder: Sequence[Config], low: int | None, *, fits: Fits, plan: Plan, stride: int
) -> list[Config]:
    """Return all rungs that fit, by a climb from one that does; none where there is no such."""
    if low is None:
        return []
    top = _climbed(ladder, low, fits=fits, plan=plan, stride=stride)
    for config in filterfalse(fits.may_run, ladder[top + 1 :]):
        fits.probe(config)  # known not to fit: recorded as skipped, with the reason
    return list(filter(fits.may_run, ladder[: top + 1]))


def _climbed(ladder: Sequence[Config], low: int, *, fits: Fits, plan: Plan, stride: int) -> int:
    """Return the highest rung that fits, climbing from one that does.

    The first stride is one rung in another precision than the first: its border is likely to be
    that of the first one.
    """
    high = len(ladder)
    while (rung := _next_rung(ladder, low, high, stride=stride)) is not None:
        config = ladder[rung]
        if fits.is_blind(config):
            _look_below(ladder, low, fits=fits, plan=plan)
        if not is_affordable(config, fits, plan):
            break
        if fits.probe(config):
            low, stride = rung, STRIDE
        elif fits.state(config) == "doomed":
            break
        else:
            high = rung
    return low


def _look_below(ladder: Sequence[Config], low: int, *, fits: Fits, plan: Plan) -> None:
    """Measure half the size that fits: two peaks show what a larger one needs at least."""
    if low == 0:
        return
    half = ladder[_highest(ladder[:low], most=ladder[low].batch_size // 2)]
    cost = plan.cost(half, "memory", cycles=MEMORY_CYCLES)
    if plan.affords(cost, phase="A"):
        fits.weigh(half)


def _first_that_fits(
    ladder: Sequence[Config], start: int, *, fits: Fits, plan: Plan, least: int = 0
) -> int | None:
    """Return the highest rung from `start` to `least` that fits, halving down where it does not."""
    rung = start
    while is_affordable(ladder[rung], fits, plan):
        if fits.probe(ladder[rung]):
            return rung
        if rung <= least:
            return None
        rung = _highest(ladder[:rung], most=ladder[rung].batch_size // STRIDE)
    return None


def _next_rung(ladder: Sequence[Config], low: int, high: int, *, stride: int) -> int | None:
    """Return the rung to try between one that fits and one that does not; None if they meet."""
    if high - low <= 1:
        return None
    if high < len(ladder):
        return (low + high) // 2
    return max(_highest(ladder[:high], most=ladder[low].batch_size * stride), low + 1)


def is_affordable(config: Config, fits: Fits, plan: Plan) -> bool:
    """Whether it is known if a config fits, or a launch that shows it can be had."""
    if fits.state(config) != "unknown":
        return True
    cost = plan.cost(config, "memory", cycles=MEMORY_CYCLES)
    return plan.affords(cost, phase="A") and not plan.is_dear(
        config, "memory", cycles=MEMORY_CYCLES
    )
