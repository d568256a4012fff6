"""What would fit in memories of given sizes, as a record, as JSON, and in words."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autotune.memory.forecast import CUDA_MARGIN, HIDDEN_MARGIN, Cell, Estimate
from autotune.output.parts import advice_on, largest_part, parts_words
from autotune.units import format_bytes

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCell:
    """What would fit of one cell.

    Args:
        cell: Precision and checkpointing.
        batch_size: The largest that is sure to fit; 0 where none is.
        estimate: Its peak, or that of a single sample where none fits; None where not known.
        reason: Why nothing is known; empty where something is.
        is_whole_data: Whether it is the whole data set, and more would fit.
    """

    cell: Cell
    batch_size: int = 0
    estimate: Estimate | None = None
    reason: str = ""
    is_whole_data: bool = False

    @property
    def name(self) -> str:
        """The cell in words: `"bf16, checkpointed"`."""
        return self.cell.config().describe().removeprefix("batch 1, ")

    def to_dict(self) -> dict[str, Any]:
        """Return the cell as JSON takes it."""
        return {
            "amp": self.cell.amp,
            "checkpointing": self.cell.checkpointing,
            "batch_size": self.batch_size or None,
            "reason": self.reason or None,
            "predicted": None if self.estimate is None else self.estimate.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSize:
    """What would fit in one memory.

    Args:
        limit_bytes: Its size.
        cells: What would fit of each cell.
    """

    limit_bytes: int
    cells: tuple[PlannedCell, ...]

    @property
    def best(self) -> PlannedCell | None:
        """The cell of the largest batch; None where nothing fits."""
        fitting = [each for each in self.cells if each.batch_size]
        return max(fitting, key=lambda each: each.batch_size, default=None)

    def advice(self) -> tuple[str, ...]:
        """Return what to change to fit more, one sentence each."""
        return tuple(_advice(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What would fit where: predicted, nothing was run.

    Args:
        device_kind: `"cpu"` or `"cuda"`.
        sizes: One memory each.
        batch: One line that describes the batches.
    """

    device_kind: str
    sizes: tuple[PlannedSize, ...]
    batch: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON takes it."""
        return {
            "schema_version": SCHEMA_VERSION,
            "device": self.device_kind,
            "batch": self.batch,
            "is_approximate": self.device_kind != "cpu",
            "sizes": [
                {
                    "limit_bytes": size.limit_bytes,
                    "cells": [each.to_dict() for each in size.cells],
                    "advice": list(size.advice()),
                }
                for size in self.sizes
            ],
        }

    def words(self) -> str:
        """Return the plan as a terminal shows it."""
        return "\n".join(_lines(self))

    def __str__(self) -> str:
        return self.words()


def _lines(plan: Plan) -> Iterator[str]:
    yield f"What would fit, on {_DEVICES[plan.device_kind]}; predicted, no step was run."
    if plan.batch:
        yield f"Batches, of the largest samples found: {plan.batch}"
    names = [each.name for size in plan.sizes for each in size.cells]
    width = max(map(len, names), default=0)
    for size in plan.sizes:
        yield ""
        yield format_bytes(size.limit_bytes)
        for each in size.cells:
            yield f"  {each.name:<{width}}  {_cell_words(each)}"
        for sentence in size.advice():
            yield f"  → {sentence}"
    yield ""
    yield from _margin_words(plan)


_DEVICES = {
    "cpu": "a CPU (a limit on live tensors)",
    "cuda": "a GPU (a limit on all it holds; approximate)",
}


def _cell_words(each: PlannedCell) -> str:
    if each.estimate is None:
        return f"not known: {each.reason}"
    needs = f"{format_bytes(each.estimate.peak_bytes)} + {each.estimate.margin:.0%}"
    peak = f"{needs:<16}  peak in {each.estimate.instant.phase}: {parts_words(each.estimate)}"
    if not each.batch_size:
        return f"does not fit     1 sample needs {peak}"
    whole = ", all data" if each.is_whole_data else ""
    return f"{f'batch {each.batch_size:,}{whole}':<15}  {peak}"


def _advice(size: PlannedSize) -> Iterator[str]:
    best, known = size.best, [each for each in size.cells if each.estimate is not None]
    if not known:
        return
    if best is None:
        yield from _largest_part(min(known, key=_need))
        return
    plain = known[0]
    if not plain.batch_size:
        yield f"{best.name} fits, {plain.name} does not"
    elif best.batch_size > plain.batch_size:
        times = best.batch_size / plain.batch_size
        yield f"{best.name} takes {times:.1f} times the batch of {plain.name}"
    if best.estimate is not None and not best.is_whole_data:
        yield from advice_on(best.estimate, name=best.name)


def _largest_part(each: PlannedCell) -> Iterator[str]:
    """Yield what is largest of a peak, and what makes it smaller."""
    if each.estimate is not None:
        yield largest_part(each.estimate, name=each.name)


def _need(each: PlannedCell) -> int:
    return each.estimate.high_bytes if each.estimate else 0


def _margin_words(plan: Plan) -> Iterator[str]:
    margins = {each.estimate.margin for size in plan.sizes for each in size.cells if each.estimate}
    yield "A batch fits if its peak and a margin do: what a prediction may be short of the truth."
    if plan.device_kind == "cuda":
        yield (
            f"Traced as on a CPU, with the allocator simulated: hence {CUDA_MARGIN:.0%}, and half "
            "a GiB for CUDA itself."
        )
    if HIDDEN_MARGIN in margins:
        yield f"Recurrent layers have a workspace that cannot be seen: hence {HIDDEN_MARGIN:.0%}."
