"""What would fit where, said before anything is run: `plan` and `--plan`."""

import gc
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autotune.errors import NothingFits, OptionInvalid, WorkloadInvalid
from autotune.memory.forecast import Cell, CellForecast
from autotune.output.planned import Plan, PlannedCell, PlannedSize
from autotune.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader, Dataset

    from autotune.trial.foresee import Foreseen
    from autotune.workload import Workload

PLANNED_PRECISIONS = ("off", "bf16")
"""fp16 needs as much as bf16 does."""

LONG_SECONDS = 20.0
"""A plan that has taken so long begins no further kind of checkpointing between none and all."""

Sizes = str | float | Sequence[str | float]
"""One memory size or some, each as `units.parse_bytes` takes it."""


def plan(
    model: "nn.Module | Callable[[], nn.Module]",
    loader_fn: "Callable[..., Iterable[Any]] | DataLoader[Any] | Dataset[Any]",
    *,
    memory: Sizes,
    loss_fn: "Callable[[nn.Module, Any], Any] | None" = None,
    optimizer_fn: "Callable[[Any], Optimizer] | None" = None,
    batch_size_fn: Callable[[Any], int] | None = None,
    checkpoint_blocks: Sequence[str] | None = None,
    device: str | None = None,
) -> Plan:
    """Say which batches would fit in memories of some sizes; no step is run, nothing is trained.

    The step is traced on tensors that have shapes and no data, once for each precision and
    kind of checkpointing. A function that makes the model is called where tensors have no data, if
    that works; a model that is handed in stays as it is, and none of its data is copied.

    Args:
        model: The model, or a function that makes it.
        loader_fn: As `fit` takes it; some batches are read.
        memory: Sizes: bytes, `"24GiB"`, or `"80%"` of what is free on the device.
        loss_fn: As `fit` takes it.
        optimizer_fn: As `fit` takes it.
        batch_size_fn: Samples in a batch; the leading dimension by default.
        checkpoint_blocks: As `fit` takes it.
        device: `"cpu"`, or `"cuda"`, which need not be there; by default the best there is.

    Returns:
        For each size and cell the largest batch that is sure to fit, and what its peak is made of.

    Raises:
        OptionInvalid: If a size or a device means nothing.
        WorkloadInvalid: If model or loader are not what they need to be, or cannot be traced.
        NothingFits: If nothing fits in any of the sizes.
    """
    from autotune.workload import live_workload  # noqa: PLC0415  # torch, where it is needed

    workload = live_workload(
        model,
        loader_fn,
        loss_fn=loss_fn,
        optimizer_fn=optimizer_fn,
        batch_size_fn=batch_size_fn,
        checkpoint_blocks=checkpoint_blocks,
    )
    return plan_workload(workload, memory=memory, device=device)


def plan_script(script: str, *, memory: Sizes, device: str | None) -> Plan:
    """Return the plan of a script's workload; the script is imported in this process.

    Raises:
        As `plan`.
    """
    from autotune.workload import load_script  # noqa: PLC0415  # torch, where it is needed

    workload = load_script(script)
    return plan_workload(workload, memory=memory, device=device or workload.options.get("device"))


def plan_workload(workload: "Workload", *, memory: Sizes, device: str | None) -> Plan:
    """Return the plan of a workload; this process is as before afterwards.

    Raises:
        As `plan`.
    """
    from autotune.step.restore import borrowed  # noqa: PLC0415  # torch, where it is needed
    from autotune.trial.foresee import foresee  # noqa: PLC0415  # as above

    kind, limits = _asked(memory, device)
    with borrowed(None), _little_to_collect():
        foreseen = foresee(workload, device_kind=kind)
        made = Plan(
            device_kind=kind, sizes=_sizes(foreseen, limits), batch=foreseen.describe_batch()
        )
    _require_known(made)
    _require_fit(made)
    return made


@contextmanager
def _little_to_collect() -> Iterator[None]:
    """Leave what is loaded out of garbage collection meanwhile: a tenth of the time of a plan."""
    if gc.get_freeze_count():  # the caller's own doing
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _asked(memory: Sizes, device: str | None) -> tuple[str, list[int]]:
    """Return the kind of device and the sizes in bytes, ascending.

    Raises:
        OptionInvalid: If one of them means nothing.
        DeviceMissing: If a share is asked of a device that is not there.
    """
    from autotune.device.base import find_device  # noqa: PLC0415  # torch, where it is needed

    name = device or "auto"
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise OptionInvalid(f"device needs auto, cpu or cuda, but got {name!r}")
    texts = [memory] if isinstance(memory, str | float | int) else list(memory)
    if not texts:
        raise OptionInvalid("plan needs at least one memory size", hint='memory=["16GiB", "80GiB"]')
    has_share = any(str(text).strip().endswith("%") for text in texts)
    free = find_device(name).facts().free_bytes if has_share else None
    kind = find_device(name).kind if name == "auto" else name.partition(":")[0]
    return kind, sorted({parse_bytes(text, free_bytes=free) for text in texts})


def _sizes(foreseen: "Foreseen", limits: Sequence[int]) -> tuple[PlannedSize, ...]:
    order = ("off", *foreseen.kinds)
    rows = sorted(_rows(foreseen, limits), key=lambda row: order.index(row[0].cell.checkpointing))
    columns = zip(*rows, strict=True)
    return tuple(
        PlannedSize(limit_bytes=limit, cells=tuple(cells))
        for limit, cells in zip(limits, columns, strict=True)
    )


def _rows(foreseen: "Foreseen", limits: Sequence[int]) -> Iterator[list[PlannedCell]]:
    """Yield the cells, each with what would fit; of what lies between, those there is time for."""
    began = time.monotonic()
    ends = dict.fromkeys(("off", *foreseen.kinds[-1:]))
    between = [kind for kind in foreseen.kinds if kind not in ends]
    for checkpointing in (*ends, *between):
        for amp in PLANNED_PRECISIONS:
            if checkpointing not in ends and time.monotonic() - began > LONG_SECONDS:
                return
            cell = Cell(amp=amp, checkpointing=checkpointing)
            yield list(_planned(foreseen, cell, limits))


def _planned(foreseen: "Foreseen", cell: Cell, limits: Sequence[int]) -> Iterator[PlannedCell]:
    """Yield what would fit of a cell, for each limit."""
    forecast = foreseen.forecast(cell)
    for limit in limits:
        if not isinstance(forecast, CellForecast):
            yield PlannedCell(cell=cell, reason=forecast.reason)
            continue
        batch_size, forecast = foreseen.with_largest(forecast, cell, limit)
        estimate = forecast.predict(batch_size or 1)
        yield PlannedCell(
            cell=cell,
            batch_size=batch_size,
            estimate=estimate,
            reason="" if estimate else "a single sample cannot be traced",
            is_whole_data=batch_size == foreseen.most_samples,
        )


def _require_known(made: Plan) -> None:
    cells = made.sizes[0].cells
    if all(each.estimate is None for each in cells):
        raise WorkloadInvalid(
            f"its memory cannot be predicted, since it cannot be traced: {cells[0].reason}",
            hint="without --plan it is measured instead",
        )


def _require_fit(made: Plan) -> None:
    largest = made.sizes[-1]
    if largest.best is None:
        needs = [each.estimate for each in largest.cells if each.estimate is not None]
        least = min(each.high_bytes for each in needs)
        raise NothingFits(
            f"nothing fits in {format_bytes(largest.limit_bytes)}: a single sample needs "
            f"{format_bytes(least)} at least, margin included",
            hint="\n".join(largest.advice()),
        )
