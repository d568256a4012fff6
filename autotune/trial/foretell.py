"""The peaks of all configs that a search may try, predicted in a launch before the first step."""

import time
from collections.abc import Callable, Iterator

from autotune.memory.forecast import Cell, CellForecast, Estimate
from autotune.memory.foretold import Forecast, Question, Sizes
from autotune.trial.foresee import Foreseen, foresee
from autotune.workload import Workload


def foretell(
    workload: Workload,
    question: Question,
    *,
    device_kind: str,
    clock: Callable[[], float] = time.monotonic,
) -> Forecast:
    """Return the peaks that are asked for; no step is run.

    Args:
        workload: What is to be trained.
        question: What is to be predicted, and for how long.
        device_kind: `"cpu"` or `"cuda"`.
        clock: Seconds that never go back.

    Raises:
        WorkloadInvalid: If model, loader or blocks are not what they need to be.
    """
    began = clock()
    foreseen = foresee(workload, device_kind=device_kind, largest_samples=question.largest_samples)
    peaks: dict[Cell, dict[int, Estimate]] = {}
    untraced: dict[Cell, str] = {}
    for cell, sizes in question.cells:
        if clock() - began > question.seconds:
            break
        if not question.is_needed(cell, peaks):
            continue
        forecast = foreseen.forecast(cell)
        if isinstance(forecast, CellForecast):
            peaks[cell] = dict(_peaks(foreseen, forecast, cell, sizes))
        else:
            untraced[cell] = forecast.reason
    return Forecast(peaks=peaks, untraced=untraced, seconds=clock() - began)


def _peaks(
    foreseen: Foreseen, forecast: CellForecast, cell: Cell, sizes: Sizes
) -> Iterator[tuple[int, Estimate]]:
    """Yield the sizes of a cell whose peak is known, or can be traced, with it."""
    known = foreseen.known(forecast, cell)
    for size in sizes:
        estimate = known.predict(size)
        if estimate is not None:
            yield size, estimate
