"""The verdict: fresh pairs of launches, baseline and pick in turns, until it is sure or hopeless.

Choosing and confirming are separate acts: the launches that chose the pick are not used again. The
bounds are those of `bounds`, so that looking after every pair claims no more than looking once.
"""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import stats

from autotune.outcome import Trial
from autotune.search.bounds import FIRST_LOOK, LAST_LOOK, t_bounds
from autotune.search.launcher import Ask, Entry, Launcher, windows_ahead
from autotune.search.plan import Plan
from autotune.search.task import KEPT_THROUGHPUT
from autotune.space import Config
from autotune.verdict import Estimate

LEAST_GAIN = 0.02
"""The smallest log ratio that is claimed: below it a change is not worth having (METHOD.md D.3)."""

CLAIM_ERROR = 0.01
"""Chance of claiming a gain where there is none, all looks together."""

INTERVAL_ERROR = 0.025
"""Chance that the interval misses on one side, all looks together: 95 % of intervals hold."""

LEAST_SPREAD = 0.003
"""No machine repeats better; four pairs that agree closer do so by luck (METHOD.md D.3)."""

FUTILE = 0.975
"""Quantile of the plain interval below which the smallest gain is out of reach."""

UNSTABLE_SPREAD = 0.05
"""Pairs that differ by more make a machine unstable (METHOD.md D.3)."""

Ending = Literal["won", "lost", "failed", "unfinished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What is to be shown.

    Args:
        margin: Log ratio that the pairs must be surely above.
        least_gain: Log ratio that their mean must reach.
    """

    margin: float = 0.0
    least_gain: float = LEAST_GAIN


HARDLY_SLOWER = Claim(margin=math.log(KEPT_THROUGHPUT), least_gain=math.log(KEPT_THROUGHPUT))
"""The claim where less memory is the aim: the pick keeps 95 % of the reference's throughput."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """How the verdict went.

    Args:
        ending: `won`; `lost`, at the cap or hopeless; `failed`, where a launch did; `unfinished`,
            where the budget ended before the first look.
        estimate: The ratio; None with fewer than two pairs.
        reference: The trial of the reference; None where it was not launched.
        pick: The trial of the pick; None where it was not launched.
        spread: Standard deviation of the pairs' log ratios; None with fewer than two.
    """

    ending: Ending
    estimate: Estimate | None
    reference: Trial | None
    pick: Trial | None
    spread: float | None


def estimated(ratios: Sequence[float], *, is_confirmed: bool) -> Estimate | None:
    """Return the ratio of pairs with its interval, corrected for when they were stopped.

    Args:
        ratios: Log ratios, baseline's time to the pick's, in the order of the pairs.
        is_confirmed: Whether the claim was won.
    """
    pairs = len(ratios)
    if pairs < 2:  # noqa: PLR2004  # one pair has no spread
        return None
    mean, error = statistics.fmean(ratios), _error(ratios)
    half = error * _bound(pairs, INTERVAL_ERROR)
    return Estimate(
        value=math.exp(mean),
        low=math.exp(mean - half),
        high=math.exp(mean + half),
        pairs=pairs,
        is_confirmed=is_confirmed,
    )


def judged(ratios: Sequence[float], claim: Claim) -> Ending:
    """Return how the pairs so far end the verdict; `unfinished` where they don't."""
    pairs = len(ratios)
    if pairs < FIRST_LOOK:
        return "unfinished"
    if _is_won(ratios, claim):
        return "won"
    return "lost" if pairs >= LAST_LOOK or _is_futile(ratios, claim) else "unfinished"


def _is_won(ratios: Sequence[float], claim: Claim) -> bool:
    """Whether the mean reaches the least gain, and is surely above the margin."""
    mean, error = statistics.fmean(ratios), _error(ratios)
    bound = _bound(len(ratios), CLAIM_ERROR)
    return mean >= claim.least_gain and mean - claim.margin > bound * error


def _is_futile(ratios: Sequence[float], claim: Claim) -> bool:
    """Whether the least gain is out of reach."""
    quantile = float(stats.t.ppf(FUTILE, len(ratios) - 1))
    return statistics.fmean(ratios) + quantile * _error(ratios) < claim.least_gain


def detectable_gain(spread: float, pairs: int) -> float:
    """Return the smallest gain that so many pairs find four times in five, as a share.

    The formula is METHOD.md C.1's minimum detectable difference.
    """
    quantiles = float(stats.t.ppf(FUTILE, pairs - 1)) + float(stats.t.ppf(0.8, pairs - 1))
    return math.expm1(quantiles * spread / math.sqrt(pairs))


def _error(ratios: Sequence[float]) -> float:
    return max(statistics.stdev(ratios), LEAST_SPREAD) / math.sqrt(len(ratios))


def _bound(pairs: int, error: float) -> float:
    """Return the bound of a look; before the first one, at the significance of the first."""
    if pairs >= FIRST_LOOK:
        return t_bounds(error)[min(pairs, LAST_LOOK)]
    level = float(stats.t.sf(t_bounds(error)[FIRST_LOOK], FIRST_LOOK - 1))
    return float(stats.t.isf(level, pairs - 1))


def confirm(
    launcher: Launcher, plan: Plan, *, reference: Config, pick: Config, claim: Claim
) -> Confirmation:
    """Return whether fresh pairs of launches confirm a pick.

    Args:
        launcher: What runs them.
        plan: How long a launch is, and what can be afforded.
        reference: What the pick is compared with.
        pick: What is to be confirmed.
        claim: What is to be shown of it.
    """
    pairing = _Pairing(launcher, plan, claim=claim)
    cycles = plan.cycles_together((reference, pick))
    asks = [
        Ask(
            config=config,
            purpose="train",
            phase="verdict",
            cycles=cycles[config],
            skip_windows=windows_ahead((reference, pick)),
        )
        for config in (reference, pick)
    ]
    with launcher.racing(asks) as entries:
        ending = pairing.run(*entries)
        entries[0].is_settled = True
        entries[1].is_settled = ending == "won"
    ratios = pairing.ratios
    return Confirmation(
        ending=ending,
        estimate=estimated(ratios, is_confirmed=ending == "won"),
        reference=entries[0].trial,
        pick=entries[1].trial,
        spread=statistics.stdev(ratios) if len(ratios) > 1 else None,
    )


class _Pairing:
    """Pairs of launches, until they end the verdict or the budget does."""

    def __init__(self, launcher: Launcher, plan: Plan, *, claim: Claim) -> None:
        self._launcher = launcher
        self._plan = plan
        self._claim = claim
        self._random = random.Random(f"{launcher.task.seed} verdict")  # noqa: S311  # a coin
        self._has_failed = False
        self.ratios: list[float] = []

    def run(self, reference: Entry, pick: Entry) -> Ending:
        """Return how the verdict ended."""
        while (ending := judged(self.ratios, self._claim)) == "unfinished":
            times = self._pair(reference, pick) if self._can_pair(pick.ask.config) else None
            if times is None:
                return self._ending_without_pair()
            self.ratios.append(times[0] - times[1])
        return ending

    def _ending_without_pair(self) -> Ending:
        """Return how the verdict ended, where another pair could not be had."""
        if self._has_failed:
            return "failed"
        return "lost" if len(self.ratios) >= FIRST_LOOK else "unfinished"

    def _can_pair(self, pick: Config) -> bool:
        budget = self._launcher.budget
        has_time = budget.remaining_seconds >= self._plan.pair_seconds(pick)
        return has_time and budget.remaining_launches >= 2  # noqa: PLR2004  # of a pair

    def _pair(self, reference: Entry, pick: Entry) -> tuple[float, float] | None:
        """Return log seconds per sample of both, launched in an order by coin on the same data."""
        seed = self._launcher.new_seed("verdict", reference.ask.config, pick.ask.config)
        order = [reference, pick]
        self._random.shuffle(order)
        times: dict[int, float] = {}
        for entry in order:
            time = self._launcher.timed(entry, seed=seed)
            if time is None:  # given up because the budget ended is no failure
                self._has_failed = not self._launcher.budget.is_done
                return None
            times[id(entry)] = time
        return times[id(reference)], times[id(pick)]
