"""Searches on simulated landscapes, for the tests of the search."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from autotune.baseline import resolve_baseline
from autotune.candidates import build_space
from autotune.facts import LOADER_SETTINGS, DeviceFacts, WorkloadFacts
from autotune.memory.forecast import CPU_MARGIN, Cell, Estimate
from autotune.memory.foretold import Forecast
from autotune.memory.trace import Category, Instant, Phase
from autotune.outcome import Outcome, Purpose, Trial
from autotune.search.budget import Budget
from autotune.search.foresight import question_of
from autotune.search.launcher import Launcher
from autotune.search.search import Decision, Search
from autotune.search.studies import Studies
from autotune.search.task import Event, Task
from autotune.space import Config, Goal, SearchSpace
from autotune.testing import Landscape, Simulated, SimulatedClock

MIB = 2**20

BLOCKS = ("layers.0", "layers.1", "layers.2", "layers.3")
"""What a workload has that repeats."""


def workload(**changes: Any) -> WorkloadFacts:
    """A workload of 2,600 samples whose loader accepts every setting."""
    plain = WorkloadFacts(
        dataset_length=2600,
        loader_settings=LOADER_SETTINGS,
        stated_batch_size=32,
        parameter_bytes=MIB,
        trainable_parameters=2**18,
        has_convolutions=False,
        has_batch_norm=False,
        varies_in_shape=False,
        drops_last=True,
        loss="loss_fn",
        has_evaluation=False,
        batch="16 floats",
    )
    return replace(plain, **changes)


def device(**changes: Any) -> DeviceFacts:
    """A CPU of two cores with native bf16."""
    plain = DeviceFacts(
        kind="cpu",
        name="a CPU",
        native_precisions=("off", "bf16"),
        total_bytes=2**34,
        free_bytes=2**33,
        usable_cores=2,
        threads=2,
    )
    return replace(plain, **changes)


def cuda(**changes: Any) -> DeviceFacts:
    """A CUDA device beside eight cores."""
    lower = ("off", "bf16", "fp16")
    plain = device(kind="cuda", name="a GPU", native_precisions=lower, usable_cores=8, threads=8)
    return replace(plain, **changes)


def affine(config: Config, *, bf16: float = 0.5) -> float:
    """Seconds per sample: 0.5 s for 32 in fp32; more by a third on one of two threads."""
    precision = 1.0 if config.amp == "off" else bf16
    threads = 1.3 if config.threads == 1 else 1.0
    return 0.0147 * (1 + 2 / config.batch_size) * precision * threads


def ramp(config: Config) -> float:
    """Peak bytes: 300 MiB and 8 MiB a sample."""
    return (300 + 8 * config.batch_size) * MIB


def recomputing(config: Config, *, share: float = 0.3) -> float:
    """Peak bytes: 300 MiB, and 15 MiB a sample of which checkpointing leaves a share."""
    kept = share if config.checkpointing == "full" else 1.0
    return (300 + 15 * kept * config.batch_size) * MIB


def landscape(**changes: Any) -> Landscape:
    """The landscape of a small BERT on two cores: 0.5 s a step, a launch ready in 0.4 s."""
    plain = Landscape(
        compute_seconds=affine,
        peak_bytes=ramp,
        loader_seconds=lambda config: 0.001 / max(config.num_workers, 1),
    )
    return replace(plain, **changes)


def estimate(peak_bytes: int, *, margin: float = CPU_MARGIN) -> Estimate:
    """A prediction of a peak that is all activations, in backward."""
    return Estimate(
        peak_bytes=peak_bytes,
        margin=margin,
        instant=Instant(
            peak_bytes=peak_bytes,
            phase=Phase.BACKWARD,
            by_category={Category.ACTIVATIONS: peak_bytes},
            by_owner={"layer.0": peak_bytes},
        ),
        is_traced=False,
    )


def forecast_of(
    task: Task, peak: Callable[[Config], float], *, margin: float = CPU_MARGIN
) -> Forecast:
    """What traces that see this peak would predict of a task's configs."""
    peaks: dict[Cell, dict[int, Estimate]] = {}
    for cell, batch_sizes in question_of(task, seconds=1.0).cells:
        configs = [cell.config(size) for size in batch_sizes]
        peaks[cell] = {
            config.batch_size: estimate(int(peak(config)), margin=margin) for config in configs
        }
    return Forecast(peaks=peaks)


def _recomputed(config: Config) -> float:
    return affine(config) * (1.2 if config.checkpointing == "full" else 1.0)


LANDSCAPES = {
    "plain": landscape(),
    "recomputing": landscape(compute_seconds=_recomputed, peak_bytes=recomputing),
    "loading": landscape(loader_seconds=lambda config: 0.03 / max(config.num_workers, 1)),
    "tiled": landscape(
        compute_seconds=lambda c: _recomputed(c) * stepped(c.batch_size, wide=16) / 2,
        peak_bytes=recomputing,
    ),
}
"""Some landscapes, by what is special about them."""


IMAGES = workload(
    has_convolutions=True, has_image_batches=True, optimizer_impls=("foreach", "fused")
)
"""A workload that may have its channels last, and whose optimizer may step in three ways."""


def switched(
    config: Config, *, last: float = 1.0, foreach: float = 1.0, fused: float = 1.0
) -> float:
    """Seconds per sample: as `affine`, times what channels last and the optimizer make of it."""
    ways = {"default": 1.0, "foreach": foreach, "fused": fused}
    return affine(config) * (last if config.channels_last else 1.0) * ways[config.optimizer_impl]


def fails_from(
    size: int, outcome: Outcome, *, purposes: Sequence[Purpose] = ("memory", "compute", "train")
) -> Callable[[Config, Purpose], Outcome | None]:
    """Return a failure of every batch from some size on."""
    return lambda config, purpose: (
        outcome if config.batch_size >= size and purpose in purposes else None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is searched, and with what."""

    landscape: Landscape
    workload: WorkloadFacts
    device: DeviceFacts
    limit_bytes: int = 1024 * MIB
    global_batch: Any = None
    baseline: Mapping[str, Any] | None = None
    space: Mapping[str, Any] | None = None
    goal: Goal = "throughput"
    time_seconds: float | None = 180.0
    trials: int | None = None
    seed: int = 0
    forecast: Forecast = field(default_factory=Forecast)

    def task(self) -> Task:
        """Return the task, resolved as a run would."""
        baseline, kept = resolve_baseline(
            self.workload, self.device, given=self.baseline, global_batch=self.global_batch
        )
        space = build_space(
            self.workload, self.device, baseline=baseline, global_batch=kept, space=self.space
        )
        return Task(
            space=space,
            baseline=baseline,
            workload=self.workload,
            device=self.device,
            limit_bytes=self.limit_bytes,
            goal=self.goal,
            seed=self.seed,
            forecast=self.forecast,
        )


class Simulation:
    """A search of a setting, with all that it leaves."""

    def __init__(self, *, has_studies: bool = True, **setting: Any) -> None:
        defaults = {"landscape": landscape(), "workload": workload(), "device": device()}
        self.setting = Setting(**{**defaults, **setting})
        self.task = self.setting.task()
        self.clock = SimulatedClock()
        self.runner = Simulated(self.setting.landscape, clock=self.clock, seed=self.setting.seed)
        self.budget = Budget(
            time_seconds=self.setting.time_seconds, trials=self.setting.trials, clock=self.clock
        )
        self.trials: list[Trial] = []
        self.events: list[Event] = []
        self.studies = Studies(
            None,
            "simulated",
            space=self.task.space,
            baseline=self.task.baseline,
            limit_bytes=self.task.limit_bytes,
            seed=self.task.seed,
        )
        self.search = Search(
            self.task,
            self.runner,
            budget=self.budget,
            record=self.trials.append,
            watch=self.events.append,
            studies=self.studies if has_studies else None,
        )

    def run(self) -> Decision:
        """Run the search to its end."""
        return self.search.run()

    def launcher(self) -> Launcher:
        """Return a launcher of its own, for the parts of a search."""
        return Launcher(
            self.runner,
            self.task,
            budget=self.budget,
            record=self.trials.append,
            watch=self.events.append,
            studies=None,
        )

    def best_seconds(self) -> float:
        """Return the true seconds per sample of the fastest config within the limit."""
        land = self.setting.landscape
        fastest = land.best(
            configs_of(self.task.space, self.task.baseline), limit_bytes=self.task.limit_bytes
        )
        return land.sample_seconds(fastest)

    def regret(self, config: Config) -> float:
        """Return how much slower a config truly is than the fastest, as a share."""
        return self.setting.landscape.sample_seconds(config) / self.best_seconds() - 1

    def ended(self, name: str, *, phases: str = "") -> list[Trial]:
        """Return the trials that ended in one way, of some phases or all."""
        return [
            trial
            for trial in self.trials
            if trial.outcome.name == name and (not phases or trial.phase in phases)
        ]


def configs_of(space: SearchSpace, base: Config) -> Iterator[Config]:
    """Yield every split, precision, checkpointing, number of workers and of threads of a space."""
    knobs = ("amp", "checkpointing", "threads")
    for size, steps in space.splits():
        split = replace(base, batch_size=size, accumulation_steps=steps).to_dict()
        for values in product(*(space.choices(knob) for knob in knobs)):
            config = Config.from_dict({**split, **dict(zip(knobs, values, strict=True))})
            for workers in space.choices("num_workers"):
                yield space.with_workers(config, int(workers or 0))


def stepped(size: int, *, wide: int) -> float:
    """Return the share of work in tiles of `wide` samples that is padding, and 1."""
    return math.ceil(size / wide) * wide / size
