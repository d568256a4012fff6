"""Landscapes in which one assumption of the search each is false; for `search.py --landscapes`.

The search fits affine laws of memory, takes time to be smooth in the size but for dips, loaders to
be apart from steps, a machine to stay as it is, and more workers to be no worse. Each family here
breaks one of these, and is otherwise plain: a network that computes `alpha + beta * batch` seconds
a micro-batch, on a device whose noise, start-up and memory are simulated.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

Setting = Mapping[str, Any]
"""Knob → value, or an array of values: one for each of many settings."""

MOST_MEDIAN, MOST_P95, MOST_OOMS = 0.01, 0.05, 0.05
"""What `search.py` asks on each: median and 95 % quantile of the regrets, and launches that run out
of memory per search."""

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 192)
WORKERS = (0, 1, 2, 3, 4, 6, 8)
STEPS_OF_A_GRID = 25
"""A setting of the full grid is taken to be timed by so many micro-batches."""


@dataclass(kw_only=True)
class Family:
    """A landscape, as `search.py` takes it; times in seconds, memory in GiB.

    Not frozen: for null twins `search.py` sets its default to its best.

    Args:
        name: Its name.
        alpha: What a micro-batch takes beside its samples.
        beta: What a sample takes in fp32.
        lower: What bf16 makes of that.
        recompute: What checkpointing makes of a step.
        kept: Share of the activations that checkpointing keeps.
        activations: Memory of a sample, in fp32.
        static: Memory of everything else.
        limit: The memory limit.
        sample: What the loader takes for a sample, on one core.
        time: What the assumption makes of a micro-batch: a factor, by setting.
        memory: What it makes of the peak: GiB instead of the plain ones.
        loading: What it makes of the loader: a factor, by setting.
        machine: What the machine makes of any time: a factor, by the clock.
        stalls: Share of the micro-batches that take five times as long.
        cpu_share: 1 where the device is the CPU itself.
    """

    name: str
    alpha: float = 4e-3
    beta: float = 1.5e-3
    lower: float = 0.5
    recompute: float = 1.3
    kept: float = 0.3
    activations: float = 0.08
    static: float = 1.5
    limit: float = 24.0
    sample: float = 1.2e-3
    time: Callable[[Setting], Any] = lambda _: 1.0
    memory: Callable[[Setting, Any], Any] = lambda _, plain: plain
    loading: Callable[[Setting], Any] = lambda _: 1.0
    machine: Callable[[float], float] = lambda _: 1.0
    stalls: float = 0.01
    cpu_share: float = 0.0
    G: int = 192
    cores: int = 8
    conv: float = 0.0
    len_cv: float = 0.0
    host_limit: float = 64.0
    bytes_sample: float = 0.0
    default: dict[str, int] = field(
        default_factory=lambda: {
            "batch": 8,
            "amp": 0,
            "ckpt": 0,
            "fused": 0,
            "workers": 1,
            "prefetch": 2,
            "pin": 0,
        }
    )

    @cached_property
    def space(self) -> dict[str, list[int]]:
        """The values of each knob."""
        return {
            "batch": list(BATCHES),
            "amp": [0, 1],
            "ckpt": [0, 1],
            "fused": [0, 1],
            "workers": list(WORKERS),
            "prefetch": [2, 4, 8],
            "pin": [0] if self.cpu_share else [0, 1],
        }

    def compute(self, values: Setting) -> Any:
        """Return what the device takes for a micro-batch, its share of the optimizer in it."""
        batch = np.asarray(values["batch"], float)
        lower = np.where(np.asarray(values["amp"]) == 1, self.lower, 1.0)
        again = np.where(np.asarray(values["ckpt"]) == 1, self.recompute, 1.0)
        plain = (self.alpha + self.beta * lower * batch) * again
        optimizer = 5e-3 * np.where(np.asarray(values["fused"]) == 1, 0.6, 1.0) * batch / self.G
        return plain * self.time(values) + optimizer

    def load(self, values: Setting) -> Any:
        """Return what the loader takes for a batch, by itself."""
        workers = np.asarray(values["workers"], float)
        alone = np.asarray(values["batch"], float) * self.sample
        return alone / np.minimum(np.maximum(workers, 1.0), self.cores) * self.loading(values)

    def step(self, values: Setting) -> Any:
        """Return what a micro-batch takes end to end."""
        copied = np.where(np.asarray(values["pin"]) == 1, 1.0, 1.0 if self.cpu_share else 1.04)
        computing, loading = self.compute(values) * copied, self.load(values)
        together = np.maximum(computing, loading)
        return np.where(np.asarray(values["workers"]) == 0, computing + loading, together)

    def mem(self, values: Setting) -> Any:
        """Return the peak."""
        lower = np.where(np.asarray(values["amp"]) == 1, 0.6, 1.0)
        kept = np.where(np.asarray(values["ckpt"]) == 1, self.kept, 1.0)
        ramp = self.activations * lower * kept * np.asarray(values["batch"], float)
        return self.memory(values, self.static + ramp)

    def feasible(self, values: Setting) -> Any:
        """Whether settings fit."""
        return self.mem(values) <= self.limit

    def sec_per_sample(self, values: Setting) -> Any:
        """Return the truth."""
        return self.step(values) / np.asarray(values["batch"])

    def optimum(self) -> tuple[None, float, int, float]:
        """Return the best time, the number of settings, and what timing all of them takes."""
        mesh = np.meshgrid(*self.space.values(), indexing="ij")
        grid = {knob: each.ravel() for knob, each in zip(self.space, mesh, strict=True)}
        times = np.where(self.feasible(grid), self.sec_per_sample(grid), np.inf)
        cost = np.sum(1.5 + STEPS_OF_A_GRID * self.step(grid))
        return None, float(times.min()), len(times), float(cost)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a launch gives."""

    step_times: np.ndarray
    batch: int
    oom: bool
    peak_mem: float
    cost: float

    @property
    def sec_per_sample(self) -> float:
        """Seconds per sample; infinite where memory ran out."""
        return math.inf if self.oom else float(np.mean(self.step_times)) / self.batch


class TuningRun:
    """One seeded run on a family: its clock, its noise, what it met.

    Args:
        landscape: The family.
        seed: Of the noise.
    """

    def __init__(self, landscape: Family, seed: int = 0) -> None:
        self.ls = landscape
        self.clock = 0.0
        self.ooms = self.runs = 0
        self._noise = np.random.default_rng([23, seed])

    def run_compute(self, values: Setting, *, worst: bool = False, **timing: Any) -> Result:
        """Return a launch without its loader; `worst` is for landscapes whose lengths vary."""
        del worst
        return self._run(values, float(self.ls.compute(values)), start=1.5, **timing)

    def run_e2e(self, values: Setting, *, prewarm: bool = False, **timing: Any) -> Result:
        """Return a launch end to end; with `prewarm` a queue is filled before."""
        start = 1.5 + 0.1 * values["workers"] + prewarm * 5 * float(self.ls.compute(values))
        return self._run(values, float(self.ls.step(values)), start=start, **timing)

    def run_loader(self, values: Setting, **timing: Any) -> Result:
        """Return a launch of the loader alone."""
        start = 0.3 + 0.1 * values["workers"]
        return self._run(values, float(self.ls.load(values)), start=start, needs=False, **timing)

    def _run(
        self,
        values: Setting,
        seconds: float,
        *,
        start: float,
        warm: int = 3,
        steps: int = 10,
        needs: bool = True,
        data_seed: int | None = None,
    ) -> Result:
        del data_seed  # no lengths, so nothing that the data's order could change
        began, peak = self.clock, float(self.ls.mem(values))
        self.runs += 1
        self.clock += start
        if needs and peak > self.ls.limit:
            self.ooms += 1
            return self._ended(np.array([]), values, began, is_over=True)
        effect = math.exp(self._noise.normal(0, 0.008))
        times = np.array([self._step(seconds * effect) for _ in range(warm + steps)])
        return self._ended(times[warm:], values, began, is_over=False)

    def _step(self, seconds: float) -> float:
        stalled = 5.0 if self._noise.random() < self.ls.stalls else 1.0
        noise = math.exp(self._noise.normal(0, 0.02))
        taken = seconds * noise * stalled * self.ls.machine(self.clock)
        self.clock += taken
        return taken

    def _ended(self, times: np.ndarray, values: Setting, began: float, *, is_over: bool) -> Result:
        return Result(
            step_times=times,
            batch=values["batch"],
            oom=is_over,
            peak_mem=float(self.ls.mem(values)),
            cost=self.clock - began,
        )


def _workspaces(values: Setting, plain: Any) -> Any:
    """From 32 samples on a kernel takes a workspace, and what is taken is rounded up."""
    batch = np.asarray(values["batch"])
    return np.ceil((plain + np.where(batch >= 32, 3.0, 0.0)) * 2) / 2


def _flat(_values: Setting, plain: Any) -> Any:
    """Small batches have the peak of the optimizer's step."""
    return np.maximum(plain, 6.0)


def _waves(values: Setting) -> Any:
    """Work is done in waves of 32 samples; a batch of 24 has a kernel of its own."""
    batch = np.asarray(values["batch"], float)
    waves = 0.5 + 0.5 * np.ceil(batch / 32) * 32 / batch
    return np.where(batch == 24, 0.6, np.minimum(waves, 4.0))


def _competing(values: Setting) -> Any:
    """Each worker takes a core of the eight from the step."""
    return 8 / np.maximum(8 - np.asarray(values["workers"], float), 1.0)


def _thrashing(values: Setting) -> Any:
    """From the fourth worker on storage seeks: each further one costs all of them a fifth more."""
    beyond = np.maximum(np.asarray(values["workers"], float) - 4, 0.0)
    return (
        (1 + 0.2 * beyond)
        * np.maximum(np.asarray(values["workers"], float), 1.0)
        / np.minimum(np.maximum(np.asarray(values["workers"], float), 1.0), 4.0)
    )


def _throttled(clock: float) -> float:
    """The machine is slower by up to 8 % and faster again, over five minutes."""
    return 1 + 0.04 * (1 - math.cos(2 * math.pi * clock / 300))


def _moving(values: Setting) -> Any:
    """Moving activations binds: recomputing them is faster, from 16 samples on."""
    pays = (np.asarray(values["ckpt"]) == 1) & (np.asarray(values["batch"]) >= 16)
    return np.where(pays, 0.7, 1.0)


INSTANCES: dict[str, dict[str, Any]] = {
    "memory_in_steps": {"memory": _workspaces},
    "memory_flat_first": {"memory": _flat, "activations": 0.2},
    "time_in_waves": {"time": _waves},
    "workers_take_cores": {"time": _competing, "cpu_share": 1.0, "sample": 0.5e-3},
    "workers_thrash": {"loading": _thrashing, "sample": 8e-3},
    "machine_drifts": {"machine": _throttled},
    "recomputing_pays": {"time": _moving, "activations": 0.3},
    "many_stalls": {"stalls": 0.06},
}
"""Family → what makes it; each is false to one assumption, in the order of this module's text."""


def make(name: str, jitter: int | None = None) -> Family:
    """Return a family; with `jitter` its rates and sizes are scaled by half to twice."""
    plain = Family(name=name, **INSTANCES[name])
    if jitter is None:
        return plain
    source = np.random.default_rng([29, jitter])
    scaled = ("alpha", "beta", "sample", "activations")
    return replace(
        plain,
        **{each: getattr(plain, each) * math.exp(source.uniform(-0.7, 0.7)) for each in scaled},
    )
