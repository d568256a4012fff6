"""What was predicted of a config's memory, corrected by what was measured of its cell.

The first measured peak of a cell tells how far its prediction is off, and the rest of the cell is
corrected by that ratio; before, the margins are those of the prediction (MEMORY.md C). A cell whose
ratio is far from one is not understood, and is measured as if nothing had been predicted.
"""

from collections.abc import Iterator
from dataclasses import replace

from autotune.memory.forecast import HIDDEN_MARGIN, Cell, Estimate
from autotune.memory.foretold import Question, cells_of
from autotune.search.task import Task
from autotune.space import Config

LEARNED_MARGIN = 0.02
"""Left of a margin once a cell was measured: rounding, and operators' scratch (MEMORY.md C)."""

MOST_OFF = 1.25
"""A cell that was measured so many times above or below its prediction is not understood."""

CUDA_EXCESS = 0.10
"""So far above a limit a prediction for CUDA has to be before a config is left out for it: unproven
there. On a CPU a prediction is the tracker's own figure (MEMORY.md C)."""


LARGER_FACTORS = (2, 4)
"""So many times a global batch that is kept are looked at, to say what they would give."""


class Foresight:
    """Predicted peaks that learn from measured ones.

    Args:
        task: What is asked, with what was predicted.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._seen: dict[Cell, tuple[int, float]] = {}
        self._wrong: set[Cell] = set()
        self._first_ratio = 1.0

    def learn(self, config: Config, peak_bytes: int) -> None:
        """Take note of a measured peak; that of the largest batch counts for its cell."""
        estimate, cell = self._task.forecast.predict(config), Cell.of(config)
        if estimate is None:
            return
        ratio = peak_bytes / estimate.peak_bytes
        if not 1 / MOST_OFF <= ratio <= _most_off(estimate):
            self._wrong.add(cell)
        if not self._seen:
            self._first_ratio = ratio
        size, _ = self._seen.get(cell, (0, ratio))
        if config.batch_size >= size:
            self._seen[cell] = (config.batch_size, ratio)

    def learn_excess(self, config: Config) -> None:
        """Take note of a config that ran out of memory: where it was said to fit, no more is."""
        if self.fits(config):
            self._wrong.add(Cell.of(config))

    def peak_bytes(self, config: Config) -> int | None:
        """Return the predicted peak, corrected; None where there is none to rely on."""
        estimate, cell = self._task.forecast.predict(config), Cell.of(config)
        if estimate is None or cell in self._wrong:
            return None
        _, ratio = self._seen.get(cell, (0, self._first_ratio))
        return round(estimate.peak_bytes * ratio)

    def fits(self, config: Config) -> bool:
        """Whether a config is predicted to fit, margin included."""
        peak, estimate = self.peak_bytes(config), self._task.forecast.predict(config)
        if peak is None or estimate is None:
            return False
        margin = LEARNED_MARGIN if Cell.of(config) in self._seen else estimate.margin
        return peak * (1 + margin) <= self._task.limit_bytes

    def is_over(self, config: Config) -> bool:
        """Whether a config is predicted not to fit; what a trace cannot see only adds to it."""
        peak = self.peak_bytes(config)
        excess = CUDA_EXCESS if self._task.device.kind == "cuda" else 0.0
        return peak is not None and peak > (1 + excess) * self._task.limit_bytes


def question_of(task: Task, *, seconds: float) -> Question:
    """Return what is to be predicted for a search: each config's peak but for its small switches.

    Args:
        task: What the search is asked.
        seconds: After this time no further cell is begun.
    """
    return Question(
        cells=cells_of(_plain_configs(task)),
        limit_bytes=task.limit_bytes,
        seconds=seconds,
        largest_samples=task.workload.largest_samples,
        is_memory_the_aim=task.saves_memory,
    )


def _plain_configs(task: Task) -> Iterator[Config]:
    """Yield the baseline, its cell, the other precisions, what recomputes most, and what less."""
    yield task.baseline
    own = (task.baseline.checkpointing, task.baseline.amp)
    cells = sorted(
        task.cells(), key=lambda c: (c[1] != own[0], c[1] != "off", c[0] != own[1], c[0], c[1])
    )
    for amp, checkpointing in (*cells, *task.cells_between()):
        for split in (*task.space.splits(), *_larger_splits(task)):
            config = task.with_split(task.baseline, split)
            yield replace(config, amp=amp, checkpointing=checkpointing)


def _larger_splits(task: Task) -> Iterator[tuple[int, int]]:
    """Yield the batches beyond a global batch that is kept, which are looked at in the end."""
    if task.space.global_batch is not None:
        whole = [size for size, steps in task.space.splits() if steps == 1]
        yield from ((size * factor, 1) for size in whole for factor in LARGER_FACTORS)


def _most_off(estimate: Estimate) -> float:
    """Return how far above its prediction a peak may be: what is hidden may be a part of it."""
    return max(MOST_OFF, 1 + HIDDEN_MARGIN) if estimate.margin >= HIDDEN_MARGIN else MOST_OFF
