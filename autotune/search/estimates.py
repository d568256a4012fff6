"""What a step may take at best that was not timed, by those that were: enough to rule it out."""

import math
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter

from autotune.search.proposals import SWITCHES, with_size_of, without_switches
from autotune.space import Config

DIP = 1.5
"""Of the time of its neighbours, what a size that kernels suit may spare: where time is left, the
neighbours of sizes this close to the best are measured too."""

Seconds = Mapping[Config, float]
"""Config → seconds per sample without a loader; all have the same loader settings."""


def estimated_seconds(seconds: Seconds, config: Config) -> float:
    """Return seconds per sample, where they were not measured as they are likely at best.

    Switches are taken to act as elsewhere, a size to be a dip beside those measured, and
    recomputing to cost nothing; 0 where nothing of its cell was measured.
    """
    if config in seconds:
        return seconds[config]
    plain = without_switches(config)
    likely = _switched(seconds, config) * seconds.get(plain, _dip_beside(seconds, plain))
    is_unknown = not likely and config.checkpointing != "off"
    return (
        estimated_seconds(seconds, replace(config, checkpointing="off")) if is_unknown else likely
    )


def _switched(seconds: Seconds, config: Config) -> float:
    """Return what the switches of a config make of a step: what each did where it was turned.

    In the same precision, if it was turned there; 0 where one never was.
    """
    own, usual = config.to_dict(), Config(batch_size=1).to_dict()
    turned = [knob for knob in ("threads", *SWITCHES) if own[knob] != usual[knob]]
    return math.prod(_turned(seconds, config, knob) for knob in turned)


def _turned(seconds: Seconds, config: Config, knob: str) -> float:
    """Return the ratio of times with a knob as a config has it and by default; 0 if unknown."""
    value, usual = getattr(config, knob), getattr(Config(batch_size=1), knob)
    found = [
        (other.amp != config.amp, taken / seconds[plain])
        for other, taken in seconds.items()
        if getattr(other, knob) == value
        and (plain := Config.from_dict(other.to_dict() | {knob: usual})) in seconds
    ]
    return min(found, default=(False, 0.0), key=itemgetter(0))[1]


def _dip_beside(seconds: Seconds, plain: Config) -> float:
    """Return what a size takes at best, by the nearest ones of its cell."""
    sizes = {
        other.batch_size: taken
        for other, taken in seconds.items()
        if with_size_of(plain, other) == other
    }
    near = sorted(sizes, key=lambda size: abs(math.log(size / plain.batch_size)))[:2]
    return min((sizes[size] for size in near), default=0.0) / DIP
