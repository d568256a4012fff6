"""What each knob is worth around the answer, as rows of words."""

import math
from dataclasses import dataclass

from autotune.knobs import knob_value
from autotune.output import words
from autotune.summary import Effect, Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectRow:
    """What a knob is worth.

    Args:
        knob: Its name.
        change: Its value in the answer, and the one that was put back.
        worth: How many times as fast the answer is for it, with the interval; or why that is not
            known.
        share: The bar to draw, as a share of the largest, on a logarithmic scale; 0 for none.
    """

    knob: str
    change: str
    worth: str
    share: float


def effect_rows(summary: Summary) -> tuple[EffectRow, ...]:
    """Return what was found of each knob, what is worth most first."""
    found = sorted(summary.effects, key=lambda effect: -_log(effect))
    most = max((_log(effect) for effect in found), default=0.0)
    return tuple(
        EffectRow(
            knob=effect.knobs[0],
            change=_change(summary, effect),
            worth=_worth(effect),
            share=max(_log(effect), 0.0) / most if most > 0 else 0.0,
        )
        for effect in found
    )


def _log(effect: Effect) -> float:
    return math.log(effect.estimate.value) if effect.estimate else -math.inf


def _change(summary: Summary, effect: Effect) -> str:
    new = summary.config.to_dict()[effect.knobs[0]]
    return f"{knob_value(new)} instead of {knob_value(effect.value)}"


def _worth(effect: Effect) -> str:
    estimate = effect.estimate
    if estimate is None:
        return effect.reason
    pairs = words.count(estimate.pairs, "pair")
    return f"{estimate.value:.2f}× ({estimate.low:.2f} to {estimate.high:.2f}, {pairs})"
