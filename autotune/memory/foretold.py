"""The peaks that were predicted before a search ran anything: a table that is sent and kept.

Traces are large and stay where they were made; what a search asks is the peak of a config that it
may try, of which there are a few dozen.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from autotune.knobs import CHECKPOINTING
from autotune.memory.forecast import Cell, Estimate
from autotune.space import Config

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What was predicted for a workload.

    Args:
        peaks: Cell → batch size → the predicted peak.
        untraced: Cell → why nothing is predicted for it.
        seconds: What making it took.

    >>> Forecast().predict(Config(batch_size=8)) is None
    True
    """

    peaks: Mapping[Cell, Mapping[int, Estimate]] = field(default_factory=dict)
    untraced: Mapping[Cell, str] = field(default_factory=dict)
    seconds: float = 0.0

    def predict(self, config: Config) -> Estimate | None:
        """Return the predicted peak of a config; None where there is none."""
        return self.peaks.get(Cell.of(config), {}).get(config.batch_size)

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as JSON takes it."""
        return {
            "peaks": [
                {"cell": asdict(cell), "batch_size": size} | estimate.to_dict()
                for cell, sizes in self.peaks.items()
                for size, estimate in sizes.items()
            ],
            "untraced": [
                {"cell": asdict(cell), "reason": reason} for cell, reason in self.untraced.items()
            ],
            "seconds": self.seconds,
        }

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Self:
        """Return the forecast that `to_dict` gave."""
        peaks: dict[Cell, dict[int, Estimate]] = {}
        for row in told["peaks"]:
            sizes = peaks.setdefault(Cell(**row["cell"]), {})
            sizes[row["batch_size"]] = Estimate.from_dict(row)
        untraced = {Cell(**row["cell"]): row["reason"] for row in told["untraced"]}
        return cls(peaks=peaks, untraced=untraced, seconds=told["seconds"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be predicted.

    Args:
        cells: Cells with the batch sizes that may be tried in each, the most needed first.
        limit_bytes: The memory limit: where all of a precision fits, nothing that only recomputes
            is predicted.
        seconds: After this time no further cell is begun.
        largest_samples: Indices of the largest samples, as launches probe them.
        is_memory_the_aim: Whether recomputing is of use though everything fits.
    """

    cells: tuple[tuple[Cell, Sizes], ...]
    limit_bytes: int
    seconds: float
    largest_samples: tuple[int, ...] = ()
    is_memory_the_aim: bool = False

    def is_needed(self, cell: Cell, peaks: Mapping[Cell, Mapping[int, Estimate]]) -> bool:
        """Whether a cell is worth a prediction: one that only recomputes is where memory binds.

        Args:
            cell: The cell.
            peaks: What was predicted before it.
        """
        if cell.checkpointing == "off" or self.is_memory_the_aim:
            return True
        plain = [sizes for other, sizes in peaks.items() if _is_plain_of(other, cell)]
        if plain and all(_fits(sizes, self.limit_bytes) for sizes in plain):
            return False
        return self._adds(cell, peaks)

    def _adds(self, cell: Cell, peaks: Mapping[Cell, Mapping[int, Estimate]]) -> bool:
        """Whether a size fits where more is recomputed, and none was predicted to with less."""
        more, less, own = set[int](), set[int](), CHECKPOINTING.index(cell.checkpointing)
        alike = {other: CHECKPOINTING.index(other.checkpointing) for other in peaks}
        alike = {o: n for o, n in alike.items() if _is_like(o, cell)}
        for other, place in alike.items():
            (more if place > own else less).update(_fitting(peaks[other], self.limit_bytes))
        return bool(more - less) or own >= max(alike.values(), default=own)


def cells_of(configs: Iterable[Config]) -> tuple[tuple[Cell, Sizes], ...]:
    """Return the cells of some configs in order, each with its batch sizes, ascending.

    >>> [sizes for _, sizes in cells_of([Config(batch_size=8), Config(batch_size=4)])]
    [(4, 8)]
    """
    found: dict[Cell, set[int]] = {}
    for config in configs:
        found.setdefault(Cell.of(config), set()).add(config.batch_size)
    return tuple((cell, tuple(sorted(sizes))) for cell, sizes in found.items())


def _is_plain_of(other: Cell, cell: Cell) -> bool:
    return other.checkpointing == "off" and other.amp == cell.amp


def _is_like(other: Cell, cell: Cell) -> bool:
    """Whether two cells differ in what is recomputed at most."""
    return replace(other, checkpointing=cell.checkpointing) == cell


def _fits(sizes: Mapping[int, Estimate], limit_bytes: int) -> bool:
    return len(_fitting(sizes, limit_bytes)) == len(sizes)


def _fitting(sizes: Mapping[int, Estimate], limit_bytes: int) -> set[int]:
    return {size for size, estimate in sizes.items() if estimate.high_bytes <= limit_bytes}
