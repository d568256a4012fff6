"""How long a launch takes: learnt from those that ran, so that a plan can keep to its budget."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping

from autotune.outcome import Measurement, Purpose
from autotune.space import Config

WARM_UP_CYCLES = 3
"""Optimizer steps that a timed launch is taken to spend before it measures."""

SHRINKING = 0.5
"""Time of a micro-batch is taken to fall with this power of its size: between a device that is
busy (1) and one that is waiting for launches (0)."""

LIMIT_FACTOR = 3.0
"""A launch that takes longer than this many times what was expected is not worth waiting for."""

LIMIT_FLOOR_SECONDS = 10.0
"""The shortest time limit of a launch: a busy machine may be late by as much."""

RECOMPUTING = 4 / 3
"""A step that recomputes is taken to take so many times as long, while none was timed: a forward
pass more, where backward takes as long as two."""

NEARLY = 0.85
"""A loader that takes more than this share of a step's time is waited for now and then."""

Kind = tuple[str, str]
"""Precision and checkpointing: the sizes of one kind tell of each other."""

_LOADING: tuple[Purpose, ...] = ("train", "verify", "loader")
"""Launches that wait for their loader."""

_FEW_MICRO_BATCHES: dict[Purpose, int] = {"memory": 2, "check": 2}
"""Launches that run no more micro-batches of a cycle: further ones change neither peak nor sums."""

_SOME_CYCLES: dict[Purpose, float] = {"memory": 0, "verify": 2, "check": 2, "loader": 1}


class Costs:
    """What launches cost in seconds, as far as it has been seen.

    Args:
        world_size: Number of data-parallel ranks.
    """

    def __init__(self, *, world_size: int = 1) -> None:
        self._world_size = world_size
        self._computed: dict[tuple[Kind, int], float] = {}
        self._trained: dict[tuple[Kind, int], float] = {}
        self._waited: dict[tuple[Kind, int, int], float] = {}
        self._loaded: dict[int, float] = {}
        self._starts: defaultdict[Purpose, list[float]] = defaultdict(list)
        self._ratios: defaultdict[Purpose, list[float]] = defaultdict(list)

    def learn(
        self, config: Config, purpose: Purpose, *, cycles: int, wall: float, seen: Measurement
    ) -> None:
        """Take note of a launch that ran to its end within `wall` seconds."""
        if purpose in {"compute", "train"} and seen.samples_per_second:
            micro = config.batch_size * self._world_size / seen.samples_per_second
            self._learn_step(config, purpose, seconds=micro)
            spent = (cycles + WARM_UP_CYCLES) * micro * config.accumulation_steps
            self._starts[purpose].append(max(wall - spent, 0.0))
        if purpose == "loader" and seen.samples_per_second:
            self._loaded[config.num_workers] = 1 / seen.samples_per_second
        if (expected := self._raw_seconds(config, purpose, cycles)) > 0:
            self._ratios[purpose].append(wall / expected)

    def _learn_step(self, config: Config, purpose: Purpose, *, seconds: float) -> None:
        """Take note of what a micro-batch took, without its loader or with it."""
        size = (kind_of(config), config.batch_size)
        if purpose == "compute":
            self._computed[size] = seconds
        else:
            self._trained[size] = seconds
            self._waited[*size, config.num_workers] = seconds

    @property
    def start_seconds(self) -> float:
        """Seconds of a launch that are not steps; 0 while none was seen."""
        starts = [statistics.median(found) for found in self._starts.values()]
        return min(starts, default=0.0)

    def cycle_seconds(self, config: Config, *, shrinking: float | None = None) -> float:
        """Return what one optimizer step of a config takes; 0 while nothing was timed.

        Args:
            config: What runs.
            shrinking: Power of the size that the time of a smaller micro-batch falls with; None
                takes it from what was seen.
        """
        points = _nearest_kind(self._trained | self._computed, config)
        if not points:
            return 0.0
        wanted = config.batch_size
        nearest = min(points, key=lambda size: abs(math.log(size / wanted)))
        power = self._shrinking() if shrinking is None else shrinking
        scale = math.pow(wanted / nearest, 1.0 if wanted > nearest else power)
        return points[nearest] * scale * config.accumulation_steps

    def _shrinking(self) -> float:
        """Return the least power that two sizes of one kind, the smallest or all, suggest."""
        powers = [SHRINKING]
        for kind in _kinds(self._computed):
            powers += _powers(_times_of(self._computed, kind))
        return max(min(powers), 0.0)

    def launch_seconds(self, config: Config, purpose: Purpose, *, cycles: int) -> float:
        """Return what a launch is expected to take."""
        ratio = statistics.median(self._ratios[purpose] or [1.0])
        return self._raw_seconds(config, purpose, cycles) * ratio

    def limit_seconds(self, config: Config, purpose: Purpose, *, cycles: int) -> float:
        """Return after which time a launch of it is given up; infinite while nothing was timed.

        A smaller micro-batch takes at most as long as a larger one, so that is allowed for.
        """
        if not self._trained and not self._computed:
            return math.inf
        slowest = self.cycle_seconds(config, shrinking=0.0)
        likely = max(self.cycle_seconds(config), 1e-9)
        expected = self.launch_seconds(config, purpose, cycles=cycles) * slowest / likely
        return LIMIT_FLOOR_SECONDS + LIMIT_FACTOR * expected

    def _raw_seconds(self, config: Config, purpose: Purpose, cycles: int) -> float:
        start = statistics.median(self._starts.get(purpose) or [self.start_seconds])
        steps = cycles + _SOME_CYCLES.get(purpose, WARM_UP_CYCLES)
        cycle = self.cycle_seconds(config)
        if purpose not in _LOADING:
            few = _FEW_MICRO_BATCHES.get(purpose, config.accumulation_steps)
            return start + steps * cycle * min(few / config.accumulation_steps, 1.0)
        loading = self.loading_seconds(config)
        pulled = (config.num_workers + 1) / config.accumulation_steps  # before anything is timed
        ahead = pulled * loading if purpose == "train" else 0.0
        cycle = max(cycle * self._stall(config.num_workers), loading)
        return start + ahead + steps * cycle

    def loading_seconds(self, config: Config) -> float:
        """Return what the loader takes for an optimizer step, by itself; 0 where unknown."""
        fewer = [count for count in self._loaded if count <= config.num_workers]
        per_sample = self._loaded[max(fewer)] if fewer else 0.0
        return per_sample * config.samples_per_optimizer_step * self._world_size

    def waits(self, config: Config) -> bool:
        """Whether a step is likely to wait for its loader's workers."""
        computing = self.cycle_seconds(config)
        return config.num_workers > 0 and self.loading_seconds(config) > NEARLY * computing > 0

    def _stall(self, num_workers: int) -> float:
        """Return how much longer a step takes with its loader than without; at least once.

        With more workers than were seen it is taken to be nearer to that, by its square root.
        """
        stalls = self._stalls()
        seen = max((workers for workers in stalls if workers <= num_workers), default=None)
        if seen is None:
            return max(stalls.values(), default=1.0)
        return stalls[seen] if seen == num_workers else math.sqrt(stalls[seen])

    def _stalls(self) -> dict[int, float]:
        """Return workers → the longest stall that was seen with so many; at least 1."""
        found: dict[int, float] = {}
        for (kind, size, workers), seconds in self._waited.items():
            computed = self._computed.get((kind, size), math.inf)
            if not math.isinf(computed):
                found[workers] = max(found.get(workers, 1.0), seconds / computed)
        return found


def kind_of(config: Config) -> Kind:
    """Return the kind of a config."""
    return config.amp, config.checkpointing


def _nearest_kind(known: Mapping[tuple[Kind, int], float], config: Config) -> dict[int, float]:
    """Return size → seconds of a config's own kind, or of the one that is most like it."""
    amp, checkpointing = own = kind_of(config)
    nearest = min(
        _kinds(known), key=lambda kind: (kind[0] != amp, kind[1] != checkpointing), default=own
    )
    slowdown = RECOMPUTING if nearest[1] == "off" != checkpointing else 1.0
    return {size: slowdown * seconds for size, seconds in _times_of(known, nearest).items()}


def _kinds(known: Mapping[tuple[Kind, int], float]) -> list[Kind]:
    return list(dict.fromkeys(kind for kind, _ in known))


def _times_of(known: Mapping[tuple[Kind, int], float], kind: Kind) -> dict[int, float]:
    """Return size → seconds of one kind."""
    return {size: seconds for (other, size), seconds in known.items() if other == kind}


def _powers(times: Mapping[int, float]) -> list[float]:
    """Return the powers of the size by which the second size and the last take longer."""
    low, *larger = sorted(times)
    return [
        math.log(times[high] / times[low]) / math.log(high / low)
        for high in (*larger[:1], *larger[-1:])
    ]
