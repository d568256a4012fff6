"""What a search is asked: the space, the baseline, the limit, the goal."""

from dataclasses import dataclass, field, replace
from itertools import product

from autotune.facts import DeviceFacts, WorkloadFacts
from autotune.knobs import CHECKPOINTING
from autotune.memory.foretold import Forecast
from autotune.outcome import Measurement, Purpose
from autotune.space import Config, Goal, SearchSpace

KEPT_THROUGHPUT = 0.95
"""With the goal `memory`, the share of the best throughput that the answer keeps (DESIGN 2.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a search is asked.

    Args:
        space: Which configs may be tried.
        baseline: The configuration the user has today.
        workload: What the workload is.
        device: Where it runs.
        limit_bytes: The memory limit.
        goal: What is best.
        seed: Seed of every order and of every launch's data.
        forecast: The peaks that were predicted beforehand; empty measures them all.
    """

    space: SearchSpace
    baseline: Config
    workload: WorkloadFacts
    device: DeviceFacts
    limit_bytes: int
    goal: Goal = "throughput"
    seed: int = 0
    forecast: Forecast = field(default_factory=Forecast)

    @property
    def saves_memory(self) -> bool:
        """Whether the smallest peak is best, not the most samples per second."""
        return self.goal == "memory"

    @property
    def worker_counts(self) -> tuple[int, ...]:
        """The numbers of loader workers that may be tried, ascending."""
        return tuple(int(count or 0) for count in self.space.choices("num_workers"))

    @property
    def kinds(self) -> list[str]:
        """The kinds of checkpointing that may be tried, those that recompute least first."""
        return self._words("checkpointing")

    @property
    def is_split_suspect(self) -> bool:
        """Whether another split most likely changes gradients: BatchNorm sees the batch."""
        return self.workload.has_batch_norm and self.space.global_batch is not None

    def has_choice(self, knob: str) -> bool:
        """Whether a knob may be set to more than one value."""
        return len(self.space.choices(knob)) > 1

    def only_recomputes(self, config: Config) -> bool:
        """Whether checkpointing a config, which may be left, costs time where memory is no aim."""
        is_choice = "off" in self.space.choices("checkpointing")
        return config.checkpointing != "off" and is_choice and not self.saves_memory

    def threads_of(self, config: Config) -> int:
        """Return the intra-op threads that a config runs with."""
        return config.threads or self.device.threads

    def cells(self) -> tuple[tuple[str, str], ...]:
        """Return each precision with the least and the most that is recomputed, the leanest first.

        What lies between is looked at only where its memory is needed: see `cells_between`.
        """
        ends = dict.fromkeys((self.kinds[0], self.kinds[-1]))
        found = product(self._words("amp"), ends)
        return tuple(sorted(found, key=lambda cell: (cell[1] == "off", cell[0] == "off")))

    def cells_between(self) -> tuple[tuple[str, str], ...]:
        """Return each precision with what recomputes some, but not the most; cheapest first."""
        return tuple(product(self._words("amp"), self.kinds[1:-1]))

    def cheaper(self, config: Config) -> list[Config]:
        """Return a config with each kind of checkpointing that recomputes less, the least first."""
        own = CHECKPOINTING.index(config.checkpointing)
        less = [kind for kind in self.kinds if CHECKPOINTING.index(kind) < own]
        return [replace(config, checkpointing=kind) for kind in less]

    def _words(self, knob: str) -> list[str]:
        """Return the values of a knob that is a word; the baseline's where it is not tuned."""
        values = self.space.choices(knob) or (getattr(self.baseline, knob),)
        return [str(value) for value in values]

    def with_split(self, config: Config, split: tuple[int, int]) -> Config:
        """Return `config` with another batch size and accumulation steps."""
        return replace(config, batch_size=split[0], accumulation_steps=split[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What a search is doing, for those who watch it.

    Args:
        phase: `0`, `A` … `F`, `verdict` or `verify`.
        config: What is tried.
        purpose: What the launch is for.
        outcome: How it ended; None when it begins.
        samples_per_second: What it reached; None where it was not timed, or when it begins.
        best_config: The fastest config so far, end to end; None before there is one.
        best: Its measurement.
        seconds_left: Of the budget; infinite without a limit.
        launches: Launches so far, this one included.
    """

    phase: str
    config: Config
    purpose: Purpose
    outcome: str | None = None
    samples_per_second: float | None = None
    best_config: Config | None = None
    best: Measurement | None = None
    seconds_left: float = 0.0
    launches: int = 0
