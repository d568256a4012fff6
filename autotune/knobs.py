"""Knobs: what can be set, to which values, and how a value is read and said."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import OptionInvalid
from autotune.units import is_whole

Value = bool | int | str | None
"""What a knob may be set to."""

PRECISIONS = ("off", "bf16", "fp16")
"""Every value of the knob `amp`."""

CHECKPOINTING = ("off", "selective", "selective_matmul", "alternate", "full")
"""Every value of the knob `checkpointing`, cheapest first (MEMORY.md D)."""

IN_PART = ("selective", "selective_matmul")
"""Those of its values that keep some results of each block."""

OPTIMIZER_IMPLS = ("default", "foreach", "fused")
"""Every value of the knob `optimizer_impl`; the first is what the user's optimizer does itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """What may be set: on or off, one of some words, or else a whole number.

    Args:
        words: The words; none for a switch or a number.
        is_switch: Whether it is on or off.
        least: The smallest number.
        has_default: Whether None leaves what PyTorch does.
    """

    words: tuple[str, ...] = ()
    is_switch: bool = False
    least: int = 1
    has_default: bool = False

    def wanted(self, value: object) -> str:
        """Return what is wanted in place of a value; empty where the value is right."""
        if self.is_switch:
            return "" if isinstance(value, bool) else "on or off"
        if self.words:
            return "" if value in self.words else f"one of {', '.join(self.words)}"
        is_right = self.has_default if value is None else self._counts(value)
        return "" if is_right else f"a whole number of at least {self.least}"

    def _counts(self, value: object) -> bool:
        return is_whole(value) and value >= self.least


_SWITCH = Knob(is_switch=True)

KNOBS: Mapping[str, Knob] = {
    "batch_size": Knob(),
    "accumulation_steps": Knob(),
    "amp": Knob(words=PRECISIONS),
    "checkpointing": Knob(words=CHECKPOINTING),
    "num_workers": Knob(least=0),
    "prefetch_factor": Knob(has_default=True),
    "persistent_workers": _SWITCH,
    "pin_memory": _SWITCH,
    "cudnn_benchmark": _SWITCH,
    "threads": Knob(has_default=True),
    "channels_last": _SWITCH,
    "optimizer_impl": Knob(words=OPTIMIZER_IMPLS),
}
"""Every knob, in the order in which a config shows them."""

_ON_OFF: Mapping[object, bool] = {"on": True, "off": False, True: True, False: False}


def knob_names() -> tuple[str, ...]:
    """Return the names of all knobs, in the order in which a config shows them."""
    return tuple(KNOBS)


def unknown_knob(name: str) -> OptionInvalid:
    """Return the error that says which knobs there are."""
    return OptionInvalid(
        f"there is no knob named {name!r}", hint=f"the knobs are: {', '.join(KNOBS)}"
    )


def require_value(name: str, value: object) -> None:
    """Refuse what a knob cannot be set to.

    Raises:
        OptionInvalid: If it is none of its values; the message says which these are.
    """
    if wanted := KNOBS[name].wanted(value):
        raise OptionInvalid(f"{name} needs {wanted}, but got {value!r}")


def parse_value(knob: str, value: Any) -> Any:
    """Return `value` as a config holds it: switches from on and off, numbers from text.

    What it cannot read it returns as it is; `Config` says what is wrong with it.

    Raises:
        OptionInvalid: If the knob is unknown, or is a switch and `value` is neither on nor off.

    >>> parse_value("pin_memory", "on"), parse_value("num_workers", "4")
    (True, 4)
    """
    if knob not in KNOBS:
        raise unknown_knob(knob)
    if KNOBS[knob].is_switch:
        return _switch(knob, value)
    if KNOBS[knob].words:
        return "off" if "off" in KNOBS[knob].words and value is False else value
    return _number(value)


def _switch(knob: str, value: Any) -> bool:
    if not isinstance(value, bool | str) or value not in _ON_OFF:
        raise OptionInvalid(f"{knob} needs on or off, but got {value!r}")
    return _ON_OFF[value]


def _number(value: Any) -> Any:
    """Return a number that is written as text, None for the default, else what was given."""
    if value == "default":
        return None
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


def knob_value(value: Value) -> str:
    """Return a knob's value as a reader says it.

    >>> knob_value(True), knob_value(None), knob_value(4)
    ('on', 'default', '4')
    """
    if isinstance(value, bool):
        return "on" if value else "off"
    return "default" if value is None else str(value)
