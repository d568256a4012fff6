"""What rounds of launches say of configs: all of them together, not only the latest race.

A round launches some configs one after the other on the same data, so that what is true of that
time and of that data is true of all of them. A config's level is what is left when that is taken
off, by robust least squares over all rounds: two configs that never met are compared by whom both
met.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from autotune.space import Config

USUAL_SPREAD = 0.02
"""Spread of the log time of a launch while few were seen: 1 to 3 % (METHOD.md C.1)."""

USUAL_WEIGHT = 4.0
"""So many degrees of freedom that guess is worth."""


OUTLYING = 1.345
"""Residuals of more spreads than this count by their size alone, not by its square (Huber, Robust
Statistics, 1981): one stall in a launch then moves no level by much."""

OF_MEDIAN = 1.4826
"""Standard deviation of a normal law in terms of the median of its sizes."""

LEAST_SPREAD = 0.004
"""No machine repeats better; few residuals that are smaller are so by luck."""

REPEATS = 8
"""Of the reweighted least squares; more change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """How configs compare by all rounds so far.

    Args:
        levels: Config → log seconds per sample, but for a constant that all share.
        launches: Config → launches that this comes from.
        spread: Standard deviation of the log time of a launch, of the same config at one time.
    """

    levels: Mapping[Config, float]
    launches: Mapping[Config, int]
    spread: float

    def fastest(self, configs: Iterable[Config]) -> Config | None:
        """Return the fastest of some configs; None where none was measured."""
        known = [config for config in configs if config in self.levels]
        return min(known, key=self.levels.__getitem__, default=None)

    def loss(self, config: Config, leader: Config) -> float:
        """Return the log ratio of a config's time to the leader's; infinite where it has none."""
        return self.levels.get(config, math.inf) - self.levels[leader]

    def error(self, config: Config, leader: Config) -> float:
        """Return the standard error of that."""
        shares = (1 / self.launches[config], 1 / self.launches[leader])
        return self.spread * math.sqrt(sum(shares))


class Rounds:
    """The rounds of a search, in which configs were launched in turns."""

    def __init__(self) -> None:
        self._rounds: list[dict[Config, float]] = []

    def add(self, times: Mapping[Config, float]) -> None:
        """Take note of a round: config → log seconds per sample."""
        if times:
            self._rounds.append(dict(times))

    def levels(self) -> Levels:
        """Return how all configs compare that were in a round."""
        launches = Counter(config for times in self._rounds for config in times)
        places = {config: place for place, config in enumerate(launches)}
        rows = [
            (places[config], number, time)
            for number, times in enumerate(self._rounds)
            for config, time in times.items()
        ]
        if not rows:
            return Levels(levels={}, launches={}, spread=USUAL_SPREAD)
        found, spread = _fitted(rows, configs=len(places), rounds=len(self._rounds))
        levels = {config: float(found[place]) for config, place in places.items()}
        return Levels(levels=levels, launches=launches, spread=spread)


def _fitted(
    rows: list[tuple[int, int, float]], *, configs: int, rounds: int
) -> tuple[np.ndarray, float]:
    """Return the level of each config and the spread about them, by least squares.

    Args:
        rows: Place of the config, number of the round, and log seconds of each launch.
        configs: How many configs there are.
        rounds: How many rounds there are.
    """
    design = np.zeros((len(rows), configs + rounds))
    for row, (place, number, _) in enumerate(rows):
        design[row, place] = design[row, configs + number] = 1.0
    times = np.array([time for *_, time in rows])
    found, spread, weights = np.zeros(configs), USUAL_SPREAD, np.ones(len(rows))
    for _ in range(REPEATS):
        root = np.sqrt(weights)
        found, _, rank, _ = np.linalg.lstsq(design * root[:, None], times * root, rcond=None)
        sizes = np.abs(times - design @ found)
        freedom = len(rows) - int(rank) + USUAL_WEIGHT
        left = float(np.sum(weights * sizes**2)) + USUAL_WEIGHT * USUAL_SPREAD**2
        spread = math.sqrt(left / freedom)
        usual = max(OF_MEDIAN * float(np.median(sizes)), LEAST_SPREAD)
        weights = np.minimum(1.0, OUTLYING * usual / np.maximum(sizes, usual))
    return found[:configs], spread
