"""The inside of a launch's own process: an order in, an answer out."""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.device.base import find_device
from autotune.errors import AutotuneError
from autotune.trial.foretell import foretell
from autotune.trial.launch import attempt, reading
from autotune.trial.order import INSIDE_LAUNCH, Order, Source, read_order, write_answer
from autotune.trial.packing import unpack
from autotune.trial.survey import surveys
from autotune.workload import Workload, load_script


def answer_order(order_path: Path, answer_path: Path) -> None:
    """Carry out an order and write the answer: a report, facts, or a deliberate error."""
    os.environ[INSIDE_LAUNCH] = "1"
    order = read_order(order_path)
    if order.start_method is not None:
        multiprocessing.set_start_method(order.start_method, force=True)
    try:
        for answer in _answers(order):
            write_answer(answer_path, answer)
    except AutotuneError as error:
        kind = type(error).__name__
        failed = {"error": {"type": kind, "message": str(error), "hint": error.hint}}
        write_answer(answer_path, failed)


def _answers(order: Order) -> Iterator[dict[str, Any]]:
    """Yield an answer, or some of which each tells more: the last that was given holds."""
    device = find_device(order.device)
    with reading():
        workload = load_source(order.source)
        if order.question is not None:
            told = foretell(workload, order.question, device_kind=device.kind)
            yield {"forecast": told.to_dict()}
        elif order.request is None:
            for found in surveys(workload, device, scan_seconds=order.scan_seconds):
                yield {"survey": found.to_dict()}
    if order.request is not None:
        device.guard(order.request.limit_bytes)
        yield {"report": attempt(workload, device, order.request).to_dict()}


def load_source(source: Source) -> Workload:
    """Return the workload of a script or of packed live objects."""
    if source.script is not None:
        sys.argv[:] = [source.script]
        return load_script(source.script)
    return unpack(Path(source.live_path or ""))
