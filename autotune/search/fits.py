"""Which configs fit: what launches showed, what the law proves, and one launch where neither does.

A config that crashed or hung rules out larger batches of its cell; in the baseline's own cell, of
all cells, since then it is the size that kills.
"""

import math
from dataclasses import replace
from typing import Literal

from autotune.memory.law import MemoryLaw, Prediction, Split
from autotune.outcome import Crashed, Invalid, Measured, OutOfMemory, Purpose, TimedOut, Trial
from autotune.search.foresight import Foresight
from autotune.search.launcher import MEMORY_CYCLES, Ask, Launcher
from autotune.space import Config
from autotune.units import format_bytes

Cell = tuple[str, str, bool, bool, str]
"""Precision, checkpointing, whether cuDNN searches, whether channels are last, and how the
optimizer steps: configs of one cell differ in memory by size alone."""

Fit = Literal["fits", "over", "doomed", "unknown"]

ROUNDING_BYTES = 32 * 2**20
"""Reserved bytes grow in segments of 2 and 20 MiB, so that they are convex only so far."""

KIN_MARGIN = 1.03
"""So far over the limit a size has to be with plain kernels before it is left out with others."""


def cell_of(config: Config) -> Cell:
    """Return the cell of a config."""
    return (
        config.amp,
        config.checkpointing,
        config.cudnn_benchmark,
        config.channels_last,
        config.optimizer_impl,
    )


def split_of(config: Config) -> Split:
    """Return how a config splits its optimizer step."""
    return Split(batch_size=config.batch_size, is_accumulated=config.accumulation_steps > 1)


class Fits:
    """What is known of the memory that configs need; learns from every trial.

    Args:
        launcher: What runs a probe.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._task = launcher.task
        self._laws: dict[Cell, MemoryLaw] = {}
        self._foresight = Foresight(launcher.task)
        self._deadly: dict[Cell, int] = {}
        self._alive: dict[Cell, int] = {}
        self._skipped: set[Config] = set()
        self._broken: set[Config] = set()
        launcher.listeners.append(self.learn)

    def law(self, config: Config) -> MemoryLaw:
        """Return the law of a config's cell."""
        is_cuda = self._task.device.kind == "cuda"
        empty = MemoryLaw(
            gradient_bytes=self._task.workload.parameter_bytes,
            rounding_bytes=ROUNDING_BYTES if is_cuda else 0,
        )
        return self._laws.get(cell_of(config), empty)

    def learn(self, purpose: Purpose, trial: Trial) -> None:
        """Take note of how a trial ended."""
        if purpose in {"loader", "check"}:
            return
        config, cell = trial.config, cell_of(trial.config)
        match trial.outcome:
            case Measured(measurement=seen):
                self._alive[cell] = max(config.batch_size, self._alive.get(cell, 0))
                if purpose in {"memory", "verify"} and seen.peak_bytes is not None:
                    self._laws[cell] = self.law(config).with_peak(split_of(config), seen.peak_bytes)
                    self._foresight.learn(config, seen.peak_bytes)
            case OutOfMemory():
                self._foresight.learn_excess(config)
                self._skipped.add(config)  # it has a trial of its own
                limit = self._task.limit_bytes
                self._laws[cell] = self.law(config).with_excess(split_of(config), limit)
            case Crashed() | TimedOut():
                self._broken.add(config)
                self._skipped.add(config)
                if purpose in {"memory", "compute"} or not config.num_workers:
                    self._deadly[cell] = min(config.batch_size, self._deadly.get(cell, 2**62))
            case Invalid():
                self._broken.add(config)
            case _:  # Skipped: nothing was learnt
                return

    def predict(self, config: Config) -> Prediction:
        """Return the peak: measured, else as traces foretell it, else a bound of it."""
        bound = self.law(config).predict(split_of(config))
        foretold = self._foresight.peak_bytes(config)
        if bound.kind == "measured" or foretold is None:
            return bound
        return Prediction(kind="foretold", peak_bytes=foretold)

    def peak_of(self, config: Config) -> float:
        """Return the predicted peak in bytes; infinite where nothing is known of it."""
        peak_bytes = self.predict(config).peak_bytes
        return math.inf if peak_bytes is None else peak_bytes

    def state(self, config: Config) -> Fit:
        """Return what is known of a config, without a launch."""
        law, split, limit_bytes = self.law(config), split_of(config), self._task.limit_bytes
        if self._is_doomed(config):
            return "doomed"
        if law.must_be_over(limit_bytes, split) or self._is_over_in_kin(config):
            return "over"
        if law.surely_fits(limit_bytes, split):
            return "fits"
        if self._foresight.is_over(config):
            return "over"
        return "fits" if self._foresight.fits(config) and self._has_run(config) else "unknown"

    def _has_run(self, config: Config) -> bool:
        """Whether a batch as large has run in any cell: kernels may fail from some size on."""
        return config.batch_size <= max(self._alive.values(), default=0)

    def _is_over_in_kin(self, config: Config) -> bool:
        """Whether a config is surely over with its layout, kernels and optimizer left as they are.

        These change what a step needs by a little; cuDNN's search only adds to it.
        """
        plain = replace(
            config, cudnn_benchmark=False, channels_last=False, optimizer_impl="default"
        )
        own = self.law(plain).lower_bytes(split_of(plain))
        return plain != config and own > KIN_MARGIN * self._task.limit_bytes

    def _is_doomed(self, config: Config) -> bool:
        return config in self._broken or config.batch_size >= self._deadly_from(config)

    def is_blind(self, config: Config) -> bool:
        """Whether a config may not fit, and only one smaller size of its cell was measured.

        One peak says nothing of the slope: in proportion to the batch a larger one may be over. A
        prediction does.
        """
        if self._foresight.fits(config):
            return False
        seen = [peak for peak in self.law(config).peaks if peak.is_bounded]
        if len(seen) != 1 or self.state(config) != "unknown":
            return False
        (peak,) = seen
        return peak.high_bytes * config.batch_size / peak.size > self._task.limit_bytes

    def reason_against(self, config: Config) -> str:
        """Return why a config may not run; empty where it may."""
        return "" if self.may_run(config) else self._reason(config)

    def may_run(self, config: Config) -> bool:
        """Whether a config is neither proved too large nor known to die."""
        return self.state(config) in {"fits", "unknown"}

    def probe(self, config: Config, *, phase: str = "A") -> bool:
        """Return whether a config fits, by a launch where that is not known.

        Raises:
            BudgetSpent: If nothing more may be launched.
        """
        state = self.state(config)
        if state == "unknown":
            trial = self._launcher.run(self._ask(config, "memory", phase))
            return isinstance(trial.outcome, Measured)
        if state != "fits":
            self.pass_over(config, self._reason(config), phase=phase)
        return state == "fits"

    def pass_over(
        self, config: Config, reason: str, *, purpose: Purpose = "memory", phase: str = "A"
    ) -> None:
        """Record, once for each config, that it is not tried, and why."""
        if config not in self._skipped:
            self._skipped.add(config)
            self._launcher.skip(self._ask(config, purpose, phase), reason)

    def weigh(self, config: Config, *, phase: str = "A") -> None:
        """Measure a config's own peak, where only a bound of it is known.

        Raises:
            BudgetSpent: If nothing more may be launched.
        """
        if self.may_run(config) and self.predict(config).kind != "measured":
            self._launcher.run(self._ask(config, "memory", phase))

    def _ask(self, config: Config, purpose: Purpose, phase: str) -> Ask:
        return Ask(
            config=config,
            purpose=purpose,
            phase=phase,
            cycles=MEMORY_CYCLES,
            predicted_peak_bytes=self.foretold(config),
        )

    def foretold(self, config: Config) -> int | None:
        """Return the peak predicted for a config that was not measured.

        A bound is none, but where it rules the config out.
        """
        predicted = self.predict(config)
        is_said = predicted.kind == "foretold" or not self.may_run(config)
        return predicted.peak_bytes if is_said else None

    def _reason(self, config: Config) -> str:
        if self.state(config) == "doomed":
            return f"a launch died at batch {self._deadly_from(config)}, and this is no smaller"
        predicted, limit = self.predict(config), format_bytes(self._task.limit_bytes)
        needs = "is predicted to need" if predicted.kind == "foretold" else "needs at least"
        return f"{needs} {format_bytes(predicted.peak_bytes)} of {limit}"

    def _deadly_from(self, config: Config) -> float:
        """Return the batch size from which on launches die; infinite where none is known."""
        baseline = self._task.baseline
        own = replace(config, amp=baseline.amp, checkpointing=baseline.checkpointing)
        return min(self._deadly_in(cell_of(each)) for each in (config, own))

    def _deadly_in(self, cell: Cell) -> float:
        size = self._deadly.get(cell, math.inf)
        return size if size > self._alive.get(cell, 0) else math.inf
