"""A workload's memory, foreseen from traces of its step: user code runs, its step does not.

A `model_fn` is called where tensors have no data, so that a model of any size costs nothing; where
it cannot be, since it reads values, the model is made for real.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.memory.forecast import Cell, CellForecast, Estimate, NotTraced
from autotune.memory.replay import FITTED_SIZES, MOST_SAMPLES, fit_law, largest_batch
from autotune.memory.trace import Trace
from autotune.space import DEFAULT_BATCH_SIZE, Config
from autotune.step.apply import blocks_of
from autotune.step.batch import count_samples
from autotune.step.checkpointing import kinds_of
from autotune.tracing.batches import Pattern
from autotune.tracing.fake import make_mode
from autotune.tracing.subject import Subject
from autotune.trial.fingerprint import dataset_length
from autotune.trial.largest import (
    BATCHES_SEEN,
    batch_bytes,
    collate,
    find_largest,
    first_batches,
    is_scannable,
)
from autotune.trial.launch import reading
from autotune.trial.seeds import seed_everything
from autotune.trial.survey import describe_batch
from autotune.workload import Workload

SCAN_SECONDS = 2.0
"""How long to look for the largest samples: as long as a few traces take."""

CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """A workload that was read, ready to be traced.

    Args:
        subject: Its step.
        device_kind: `"cpu"` or `"cuda"`: where it is to train.
        kinds: Kinds of checkpointing that make a difference, cheapest first.
        most_samples: No batch is larger: the data set has no more.
    """

    subject: Subject
    device_kind: str
    kinds: tuple[str, ...]
    most_samples: int = MOST_SAMPLES

    def describe_batch(self) -> str:
        """Return one line that says what a batch of two samples looks like, or the one seen."""
        return describe_batch(self.subject.pattern.batch)

    def forecast(self, cell: Cell) -> CellForecast | NotTraced:
        """Return what two traces tell of a cell, or why there are none."""
        size, next_size = FITTED_SIZES
        pair = self.subject.trace(cell, size)
        if isinstance(pair, NotTraced):
            return pair
        larger = self.subject.trace_like(pair, cell, next_size)
        if isinstance(larger, NotTraced):
            return larger
        forecast = CellForecast(device_kind=self.device_kind, law=fit_law(pair, larger))
        return forecast.with_trace(pair).with_trace(larger)

    def with_largest(
        self, forecast: CellForecast, cell: Cell, limit_bytes: int
    ) -> tuple[int, CellForecast]:
        """Return the largest batch that is sure to fit, traced at that very size; 0 if none is.

        The law proposes, the trace decides; without a law each size is traced.
        """
        known = self.known(forecast, cell)
        most = self.most_samples
        start = 1 if forecast.law is None else forecast.largest(limit_bytes, most=most)
        if forecast.law is not None and start and known.fits(start, limit_bytes):
            return start, known.forecast
        most = most if forecast.law is None else max(start - 1, 1)
        found = largest_batch(lambda size: known.fits(size, limit_bytes), most=most)
        return found, known.forecast

    def known(self, forecast: CellForecast, cell: Cell) -> "Known":
        """Return a forecast that makes traces of further sizes where it is asked for them."""
        return Known(self.subject, cell, forecast)


class Known:
    """A forecast that grows by a trace for each size that it is asked for."""

    def __init__(self, subject: Subject, cell: Cell, forecast: CellForecast) -> None:
        self._subject = subject
        self._cell = cell
        self.forecast = forecast

    def fits(self, batch_size: int, limit_bytes: int) -> bool:
        """Whether a size fits, as its own trace tells; one that cannot be traced does not."""
        return self._has_trace(batch_size) and self.forecast.fits(batch_size, limit_bytes)

    def predict(self, batch_size: int) -> Estimate | None:
        """Return the peak at a size, by the law where there is one; None if it has no trace."""
        if self.forecast.law is None and not self._has_trace(batch_size):
            return None
        return self.forecast.predict(batch_size)

    def _has_trace(self, batch_size: int) -> bool:
        """Whether there is a trace at a size, made now if it can be."""
        if batch_size not in self.forecast.traces:
            pair = self.forecast.traces[FITTED_SIZES[0]]
            trace = self._subject.trace_like(pair, self._cell, batch_size)
            if not isinstance(trace, Trace):
                return False
            self.forecast = self.forecast.with_trace(trace)
        return True


def foresee(
    workload: Workload, *, device_kind: str, largest_samples: Sequence[int] = ()
) -> Foreseen:
    """Read a workload: model, loader and largest batch; to be called in a process of one's own.

    Args:
        workload: What is to be trained.
        device_kind: `"cpu"` or `"cuda"`; the device need not be there.
        largest_samples: Indices of the largest samples; empty looks for them.

    Raises:
        WorkloadInvalid: If model, loader or blocks are not what they need to be.
    """
    seed_everything(0)
    mode = make_mode()
    with reading():
        model = _model_of(workload, mode)
        full = Config(batch_size=1, checkpointing="full")
        blocks = blocks_of(model, full, named=workload.checkpoint_blocks)
        loader = _loader_of(workload)
        pattern = _pattern_of(workload, loader, largest_samples)
    length = dataset_length(loader)
    subject = Subject(
        workload=workload,
        model=model,
        pattern=pattern,
        is_foreach=device_kind == CUDA,
        mode=mode,
    )
    return Foreseen(
        subject=subject,
        device_kind=device_kind,
        kinds=kinds_of(model, blocks),
        most_samples=min(MOST_SAMPLES, length or MOST_SAMPLES),
    )


def _model_of(workload: Workload, mode: FakeTensorMode) -> nn.Module:
    """Return the user's model: a live one as it is, else one made without data if that works."""
    if workload.live_model is None:
        with suppress(*_MAY_NEED_DATA), mode:
            return workload.make_model()
    return workload.make_model()


_MAY_NEED_DATA = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What constructors raise where tensors have no data; those that fail with it too raise again."""


def _loader_of(workload: Workload) -> Any:
    size = workload.stated_batch_size() or DEFAULT_BATCH_SIZE
    return workload.build_loader(Config(batch_size=size))


def _pattern_of(workload: Workload, loader: Any, largest: Sequence[int]) -> Pattern:
    """Return what batches look like: of the largest sample found, else of the largest of a few."""
    count = workload.batch_size_fn or count_samples
    size, next_size = FITTED_SIZES
    if is_scannable(loader) and len(loader.dataset) >= next_size:
        index = (*(largest or find_largest(loader, seconds=SCAN_SECONDS).indices), 0)[0]
        batch, larger = (collate(loader, [index], count=samples) for samples in FITTED_SIZES)
        if (count(batch), count(larger)) == FITTED_SIZES:
            return Pattern(batch=batch, samples=size, larger=larger, more_samples=next_size - size)
    seen = max(first_batches(loader, BATCHES_SEEN), key=batch_bytes)
    return Pattern(batch=seen, samples=count(seen))
