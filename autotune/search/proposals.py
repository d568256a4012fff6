"""Configs near others: a box around the leader, its neighbours, and the nearest one of a space."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from autotune.space import Config, SearchSpace, Value

BOX_POSITIONS = 2
"""How many positions from the leader a box reaches in each ordered knob (METHOD.md, head 8)."""

_ORDERED = ("batch_size", "num_workers", "prefetch_factor", "threads")
_UNORDERED = ("amp", "checkpointing", "pin_memory", "cudnn_benchmark")


def ordered_values(space: SearchSpace, knob: str) -> tuple[Value, ...]:
    """Return the values of a knob that can be had, ascending; batch sizes only where they split."""
    if knob == "batch_size":
        return tuple(size for size, _ in space.splits())
    return space.choices(knob)


def box_around(space: SearchSpace, leader: Config) -> SearchSpace:
    """Return the part of a space within two positions of the leader in each ordered knob."""
    values = dict(space.values)
    for knob in _ORDERED:
        choices = ordered_values(space, knob)
        if choices:
            place = _place(choices, getattr(leader, knob))
            values[knob] = choices[max(place - BOX_POSITIONS, 0) : place + BOX_POSITIONS + 1]
    return replace(space, values=values)


def neighbours(space: SearchSpace, leader: Config) -> Iterator[Config]:
    """Yield the configs of a space that differ from the leader in one knob, the nearest first.

    Workers by one position, batch sizes by one and two, prefetch and threads by one, each switch,
    each other precision and kind of checkpointing.
    """
    for distance in range(1, BOX_POSITIONS + 1):
        for knob in _ORDERED:
            if distance == 1 or knob == "batch_size":
                yield from _moved(space, leader, knob=knob, distance=distance)
    for knob in _UNORDERED:
        for value in space.choices(knob):
            if value != getattr(leader, knob):
                yield _with(leader, {knob: value})


def _moved(space: SearchSpace, leader: Config, *, knob: str, distance: int) -> Iterator[Config]:
    if knob == "prefetch_factor" and not leader.num_workers:
        return
    choices = ordered_values(space, knob)
    if not choices:
        return
    place = _place(choices, getattr(leader, knob))
    for other in (place - distance, place + distance):
        if 0 <= other < len(choices):
            yield with_value(space, leader, knob=knob, value=choices[other])


def with_value(space: SearchSpace, config: Config, *, knob: str, value: Value) -> Config:
    """Return `config` with another value of one knob, and what follows from it."""
    if knob == "num_workers":
        return space.with_workers(config, int(value or 0))
    if knob == "batch_size":
        return _with(
            config, {knob: value, "accumulation_steps": dict(space.splits())[int(value or 1)]}
        )
    return _with(config, {knob: value})


def snapped(values: Mapping[str, Value], space: SearchSpace, *, leader: Config) -> Config:
    """Return the config of a space that is nearest to proposed values.

    Args:
        values: Knob → value, anywhere between the candidates; what is missing is the leader's.
        space: Which configs may be tried.
        leader: The best config so far.
    """
    wanted = {**leader.to_dict(), **values}
    size = _nearest(ordered_values(space, "batch_size"), wanted["batch_size"])
    config = with_value(space, leader, knob="batch_size", value=size)
    workers = _nearest(space.choices("num_workers"), wanted["num_workers"])
    config = space.with_workers(config, int(workers or 0))
    changes: dict[str, Value] = {"threads": _nearest(space.choices("threads"), wanted["threads"])}
    if config.num_workers and space.choices("prefetch_factor"):
        changes["prefetch_factor"] = _nearest(
            space.choices("prefetch_factor"), wanted["prefetch_factor"]
        )
    for knob in _UNORDERED:
        if wanted[knob] in space.choices(knob):
            changes[knob] = wanted[knob]
    return _with(config, changes)


def _with(config: Config, changes: Mapping[str, Value]) -> Config:
    return Config.from_dict({**config.to_dict(), **changes})


def _nearest(choices: tuple[Value, ...], wanted: Value) -> Value:
    return choices[_place(choices, wanted)] if choices else wanted


def _place(choices: tuple[Value, ...], wanted: Value) -> int:
    """Return the position of the choice that is nearest to a value, on a logarithmic scale."""
    if wanted in choices:
        return choices.index(wanted)
    scaled = math.log1p(_number(wanted))
    return min(range(len(choices)), key=lambda n: abs(math.log1p(_number(choices[n])) - scaled))


def _number(value: Value) -> float:
    return float(value) if isinstance(value, int) else 0.0
