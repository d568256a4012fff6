"""How many bytes a config will need, from traces of its step: asked before anything is run.

A cell is what changes a step beside its batch size. All here is plain data, so that it can be
asked where torch is not loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from autotune.memory.replay import MOST_SAMPLES, TraceLaw, largest_batch
from autotune.memory.simulation import completes, smallest_limit_bytes
from autotune.memory.trace import Category, Instant, Phase, Trace, peak_bytes, peak_of
from autotune.space import Config

CPU_MARGIN = 0.05
"""Added to a peak on a CPU: the prediction is the tracker's own figure to within 0.5 %, and
operators' scratch of up to 2.1 % is not seen by either (MEMORY.md B1)."""

CUDA_MARGIN = 0.20
"""Added to a peak on CUDA: traced as on a CPU, whose activations in forward were 6 % below to 14 %
above those of CUDA (MEMORY.md A1); and the simulation of the allocator is unproven."""

HIDDEN_MARGIN = 0.30
"""Added where recurrent operators have a workspace that no trace sees, or one that was worked out
for one kind of machine: it was up to 20 % of the real peak of an LSTM, which is 24 % of what is
seen (MEMORY.md B1); of a small one it is most."""

CONTEXT_BYTES = 2**29
"""Of a GPU, for what is outside the allocator: CUDA's context, kernels and library handles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What changes a step beside its batch size.

    Args:
        amp: Precision of autocast.
        checkpointing: What is recomputed for backward.
        is_accumulated: Whether gradients of an earlier micro-batch are there in forward.
        channels_last: Whether the channels of images lie last in memory.
        optimizer_impl: How the optimizer steps.
    """

    amp: str = "off"
    checkpointing: str = "off"
    is_accumulated: bool = False
    channels_last: bool = False
    optimizer_impl: str = "default"

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the cell of a config."""
        return cls(
            amp=config.amp,
            checkpointing=config.checkpointing,
            is_accumulated=config.accumulation_steps > 1,
            channels_last=config.channels_last,
            optimizer_impl=config.optimizer_impl,
        )

    def config(self, batch_size: int = 1) -> Config:
        """Return a config of this cell."""
        return Config(
            batch_size=batch_size,
            accumulation_steps=1 + self.is_accumulated,
            amp=self.amp,
            checkpointing=self.checkpointing,
            channels_last=self.channels_last,
            optimizer_impl=self.optimizer_impl,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NotTraced:
    """No trace could be made.

    Args:
        reason: Why, as the end of "it cannot be traced because".
        detail: The traceback, where there is one.
    """

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted peak.

    Args:
        peak_bytes: As the limit of the device counts it.
        margin: Share of the peak that the truth may be above it.
        instant: What is alive at the peak; its bytes are those of tensors.
        is_traced: Whether it was traced at this very size, and not replayed by a law.
    """

    peak_bytes: int
    margin: float
    instant: Instant
    is_traced: bool

    @property
    def high_bytes(self) -> int:
        """The peak with its margin: a limit that is sure to do."""
        return int(self.peak_bytes * (1 + self.margin))

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as JSON takes it."""
        instant = self.instant
        return {
            "peak_bytes": self.peak_bytes,
            "margin": self.margin,
            "tensor_bytes": instant.peak_bytes,
            "phase": str(instant.phase),
            "by_category": {str(kind): count for kind, count in instant.by_category.items()},
            "largest_activations": dict(instant.by_owner),
            "is_traced": self.is_traced,
        }

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Self:
        """Return the estimate that `to_dict` gave."""
        instant = Instant(
            peak_bytes=told["tensor_bytes"],
            phase=Phase(told["phase"]),
            by_category={Category(kind): count for kind, count in told["by_category"].items()},
            by_owner=dict(told["largest_activations"]),
        )
        return cls(
            peak_bytes=told["peak_bytes"],
            margin=told["margin"],
            instant=instant,
            is_traced=told["is_traced"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CellForecast:
    """What is known of one cell.

    Args:
        device_kind: `"cpu"` or `"cuda"`: whose limit is asked for.
        law: The step at any size; None where it follows none.
        traces: Batch size → a trace made at it, which is believed before the law.
    """

    device_kind: str
    law: TraceLaw | None
    traces: Mapping[int, Trace] = field(default_factory=dict)

    def with_trace(self, trace: Trace) -> Self:
        """Return the forecast with what was traced at a size."""
        return replace(self, traces={**self.traces, trace.batch_size: trace})

    def at(self, batch_size: int) -> Trace | None:
        """Return the step at a size, traced or replayed; None where neither is to be had."""
        if batch_size in self.traces:
            return self.traces[batch_size]
        return None if self.law is None else self.law.at(batch_size)

    def predict(self, batch_size: int) -> Estimate | None:
        """Return the peak at a size; None where it would have to be traced first."""
        trace = self.at(batch_size)
        if trace is None:
            return None
        return Estimate(
            peak_bytes=self._needed_bytes(trace),
            margin=self._margin(trace),
            instant=peak_of(trace),
            is_traced=batch_size in self.traces,
        )

    def fits(self, batch_size: int, limit_bytes: int) -> bool:
        """Whether a size is sure to fit, margin included; False where nothing is known of it."""
        trace = self.at(batch_size)
        if trace is None:
            return False
        room = int(limit_bytes / (1 + self._margin(trace)))
        if self.device_kind == "cpu":
            return peak_bytes(trace) <= room
        return completes(trace, room - CONTEXT_BYTES)

    def largest(self, limit_bytes: int, *, most: int = MOST_SAMPLES) -> int:
        """Return the largest size that is sure to fit; 0 where none does."""
        return largest_batch(lambda size: self.fits(size, limit_bytes), most=most)

    def _needed_bytes(self, trace: Trace) -> int:
        """Return what a device's limit must be for a trace to complete."""
        if self.device_kind == "cpu":
            return peak_bytes(trace)
        return smallest_limit_bytes(trace) + CONTEXT_BYTES

    def _margin(self, trace: Trace) -> float:
        if trace.hidden:
            return HIDDEN_MARGIN
        return CPU_MARGIN if self.device_kind == "cpu" else CUDA_MARGIN
