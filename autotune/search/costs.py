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

Kind = tuple[str, str]
"""Precision and checkpointing: the sizes of one kind tell of each other."""

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
        self._starts: defaultdict[Purpose, list[float]] = defaultdict(list)
        self._ratios: defaultdict[Purpose, list[float]] = defaultdict(list)

    def learn(
        self, config: Config, purpose: Purpose, *, cycles: int, wall: float, seen: Measurement
    ) -> None:
        """Take note of a launch that ran to its end within `wall` seconds."""
        rate = seen.samples_per_second
        if purpose in {"compute", "train"} and rate:
            micro = config.batch_size * self._world_size / rate
            known = self._computed if purpose == "compute" else self._trained
            known[kind_of(config), config.batch_size] = micro
            if purpose == "train":
                self._waited[kind_of(config), config.batch_size, config.num_workers] = micro
            spent = (cycles + WARM_UP_CYCLES) * micro * config.accumulation_steps
            self._starts[purpose].append(max(wall - spent, 0.0))
        if (expected := self._raw_seconds(config, purpose, cycles)) > 0:
            self._ratios[purpose].append(wall / expected)

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
        for kind in dict.fromkeys(kind for kind, _ in self._computed):
            times = {size: t for (other, size), t in self._computed.items() if other == kind}
            low, *larger = sorted(times)
            powers += [
                math.log(times[high] / times[low]) / math.log(high / low)
                for high in (*larger[:1], *larger[-1:])
            ]
        return max(min(powers), 0.0)

    def launch_seconds(self, config: Config, purpose: Purpose, *, cycles: int) -> float:
        """Return what a launch is expected to take."""
        ratios = self._ratios[purpose]
        return self._raw_seconds(config, purpose, cycles) * (
            statistics.median(ratios) if ratios else 1.0
        )

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
        starts = self._starts.get(purpose)
        start = statistics.median(starts) if starts else self.start_seconds
        return start + (cycles + _SOME_CYCLES.get(purpose, WARM_UP_CYCLES)) * self._cycle(
            config, purpose
        )

    def _cycle(self, config: Config, purpose: Purpose) -> float:
        waits = purpose in {"train", "verify", "loader"}
        return self.cycle_seconds(config) * (self._stall(config.num_workers) if waits else 1.0)

    def _stall(self, num_workers: int) -> float:
        """Return how much longer a step takes with its loader than without; at least once.

        With more workers than were seen it is taken to be nearer to that, by its square root.
        """
        stalls: dict[int, float] = {}
        for (kind, size, workers), seconds in self._waited.items():
            if (kind, size) in self._computed:
                ratio = seconds / self._computed[kind, size]
                stalls[workers] = max(stalls.get(workers, 1.0), ratio)
        fewer = [workers for workers in stalls if workers <= num_workers]
        if not fewer:
            return max(stalls.values(), default=1.0)
        seen = max(fewer)
        return stalls[seen] if seen == num_workers else math.sqrt(stalls[seen])


def kind_of(config: Config) -> Kind:
    """Return the kind of a config."""
    return config.amp, config.checkpointing


def _nearest_kind(known: Mapping[tuple[Kind, int], float], config: Config) -> dict[int, float]:
    """Return size → seconds of a config's own kind, or of the one that is most like it."""
    amp, checkpointing = kind_of(config)
    kinds = dict.fromkeys(kind for kind, _ in known)
    nearest = min(kinds, key=lambda k: (k[0] != amp, k[1] != checkpointing), default=None)
    slowdown = RECOMPUTING if nearest and nearest[1] == "off" != checkpointing else 1.0
    return {size: slowdown * t for (kind, size), t in known.items() if kind == nearest}
