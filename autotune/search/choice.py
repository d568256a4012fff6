"""Which of those that raced is the pick: the fastest, or among equals the one that needs least."""

import math
from collections.abc import Sequence

from autotune.knobs import CHECKPOINTING
from autotune.search.fits import Fits
from autotune.search.race import TIE, Standing
from autotune.search.task import KEPT_THROUGHPUT
from autotune.space import Config, Goal


def in_order(standings: Sequence[Standing], *, goal: Goal, fits: Fits) -> list[Standing]:
    """Return who raced to its end, the best first.

    With the goal `throughput` all within 1 % of the fastest are equal, and the one that needs
    least comes first; with the goal `memory` the smallest peak of those that keep 95 % of the best
    throughput does. All others follow by their speed.
    """
    ranked = sorted(filter(has_finished, standings), key=_loss)
    least = min(map(_loss, ranked), default=0.0)
    slack = TIE if goal == "throughput" else -math.log(KEPT_THROUGHPUT)
    equals = [standing for standing in ranked if standing.loss - least <= slack]

    def order(standing: Standing) -> tuple[float, ...]:
        peak = fits.peak_of(standing.config) if goal == "memory" else 0.0
        return (peak, *needs(standing.config))

    return sorted(equals, key=order) + ranked[len(equals) :]


def has_finished(standing: Standing) -> bool:
    """Whether a config was measured in its race, and was not put out by a failure."""
    return standing.loss < math.inf


def _loss(standing: Standing) -> float:
    return standing.loss


def needs(config: Config) -> tuple[int, bool, int, bool, bool, int, int, int]:
    """Return what a config needs: workers, another precision, recomputation, another layout, …."""
    return (
        config.num_workers,
        config.amp != "off",
        CHECKPOINTING.index(config.checkpointing),
        config.channels_last,
        config.optimizer_impl != "default",
        config.batch_size,
        config.prefetch_factor or 0,
        config.threads or 0,
    )
