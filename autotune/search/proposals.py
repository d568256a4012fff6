"""Configs near others: a box around the leader, its neighbours, and the nearest one of a space."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from autotune.knobs import Value
from autotune.space import Config, SearchSpace

Item = TypeVar("Item")

BOX_POSITIONS = 2
"""How many positions from the leader a box reaches in each ordered knob (METHOD.md, head 8)."""

SWITCHES = ("cudnn_benchmark", "channels_last", "optimizer_impl")
"""Knobs of which each value is timed at the best size, threads apart."""

_ORDERED = ("batch_size", "num_workers", "prefetch_factor", "threads")
_UNORDERED = (
    "amp",
    "checkpointing",
    "pin_memory",
    "cudnn_benchmark",
    "channels_last",
    "optimizer_impl",
)

_FAR = ("batch_size", "prefetch_factor")
"""Knobs of which the second neighbours are neighbours too."""


def set_as(model: Config, config: Config) -> Config:
    """Return a config with the threads and the switches of another."""
    own = {knob: getattr(model, knob) for knob in ("threads", *SWITCHES)}
    return _with(config, own)


def without_switches(config: Config) -> Config:
    """Return a config with the threads and the switches that are so by default."""
    return set_as(Config(batch_size=1), config)


def with_size_of(config: Config, model: Config) -> Config:
    """Return a config with the batch size and the accumulation of another."""
    return replace(config, batch_size=model.batch_size, accumulation_steps=model.accumulation_steps)


def ordered_values(space: SearchSpace, knob: str) -> tuple[Value, ...]:
    """Return the values of a knob that can be had, ascending; batch sizes only where they split."""
    if knob == "batch_size":
        return tuple(size for size, _ in space.splits())
    return space.choices(knob)


def beside(items: Sequence[Item], place: int, *, distance: int = 1) -> list[Item]:
    """Return what stands so far before and behind a place; none beyond the ends.

    >>> beside("abc", 1), beside("abc", 0)
    (['a', 'c'], ['b'])
    """
    places = (place - distance, place + distance)
    return [items[other] for other in places if 0 <= other < len(items)]


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
    for knob in _ORDERED:
        yield from _moved(space, leader, knob=knob, distance=1)
    for knob in _FAR:
        yield from _moved(space, leader, knob=knob, distance=BOX_POSITIONS)
    for knob in _UNORDERED:
        yield from _switched(space, leader, knob=knob)


def _moved(space: SearchSpace, leader: Config, *, knob: str, distance: int) -> Iterator[Config]:
    for value in _values_beside(space, leader, knob=knob, distance=distance):
        yield with_value(space, leader, knob=knob, value=value)


def _values_beside(
    space: SearchSpace, leader: Config, *, knob: str, distance: int
) -> Sequence[Value]:
    choices = ordered_values(space, knob)
    is_idle = knob == "prefetch_factor" and not leader.num_workers
    if is_idle or not choices:
        return ()
    return beside(choices, _place(choices, getattr(leader, knob)), distance=distance)


def _switched(space: SearchSpace, leader: Config, *, knob: str) -> Iterator[Config]:
    for value in space.choices(knob):
        if value != getattr(leader, knob):
            yield _with(leader, {knob: value})


def moves(space: SearchSpace, config: Config, other: Config) -> list[tuple[str, Value]]:
    """Return each knob that the second of two configs sets otherwise, with its value there.

    What follows from another knob is left out; so is what an idle loader would prefetch.
    """
    knobs = [knob for knob in (*_ORDERED, *_UNORDERED) if ordered_values(space, knob)]
    if not (config.num_workers and other.num_workers):
        knobs = [knob for knob in knobs if knob != "prefetch_factor"]
    pairs = [(knob, getattr(other, knob)) for knob in knobs]
    return [(knob, value) for knob, value in pairs if value != getattr(config, knob)]


def with_value(space: SearchSpace, config: Config, *, knob: str, value: Value) -> Config:
    """Return `config` with another value of one knob, and what follows from it."""
    if knob == "num_workers":
        return space.with_workers(config, int(value or 0))
    if knob == "batch_size":
        steps = dict(space.splits())
        return _with(config, {knob: value, "accumulation_steps": steps[int(value or 1)]})
    return _with(config, {knob: value})


def snapped(values: Mapping[str, Value], space: SearchSpace, *, leader: Config) -> Config:
    """Return the config of a space that is nearest to proposed values.

    Args:
        values: Knob → value, anywhere between the candidates; what is missing is the leader's.
        space: Which configs may be tried.
        leader: The best config so far.
    """
    wanted = {**leader.to_dict(), **values}
    config = leader
    for knob in ("batch_size", "num_workers"):
        config = with_value(space, config, knob=knob, value=_nearest(space, wanted, knob=knob))
    changes = {knob: wanted[knob] for knob in _UNORDERED if wanted[knob] in space.choices(knob)}
    for knob in ("threads", *_prefetching(space, config)):
        changes[knob] = _nearest(space, wanted, knob=knob)
    return _with(config, changes)


def _prefetching(space: SearchSpace, config: Config) -> tuple[str, ...]:
    """Return the knob of batches made ahead, where a config and a space leave it to choose."""
    is_choice = config.num_workers and space.choices("prefetch_factor")
    return ("prefetch_factor",) if is_choice else ()


def _with(config: Config, changes: Mapping[str, Value]) -> Config:
    return Config.from_dict({**config.to_dict(), **changes})


def _nearest(space: SearchSpace, wanted: Mapping[str, Value], *, knob: str) -> Value:
    """Return the value of a space that is nearest to what is wanted of a knob."""
    choices = ordered_values(space, knob)
    return choices[_place(choices, wanted[knob])] if choices else wanted[knob]


def _place(choices: tuple[Value, ...], wanted: Value) -> int:
    """Return the position of the choice that is nearest to a value, on a logarithmic scale."""
    if wanted in choices:
        return choices.index(wanted)
    scaled = math.log1p(_number(wanted))
    return min(range(len(choices)), key=lambda n: abs(math.log1p(_number(choices[n])) - scaled))


def _number(value: Value) -> float:
    return float(value) if isinstance(value, int) else 0.0
