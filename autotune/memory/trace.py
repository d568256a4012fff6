"""What a training step allocates and frees, in order: plain data, to be replayed and compared.

A trace is two optimizer steps, so that the second meets the optimizer's state. Storages are counted
as `device.tracker` counts them, and so its peak is the tracker's.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, pairwise


class Category(StrEnum):
    """What memory is for."""

    PARAMETERS = "parameters"
    """Parameters and buffers."""
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    """What a forward pass, or a recomputed one, leaves for backward."""
    TEMPORARIES = "temporaries"
    """All else that operators make."""
    INPUTS = "inputs"
    """The batch in hand."""
    WORKSPACE = "workspace"
    """What a CPU's operators hold while they run: no tensor, and in no limit (see `peak_of`)."""


class Phase(StrEnum):
    """Where in a step an instant is."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The allocations of a step pair, and the order in which they were made and freed.

    Args:
        batch_size: Samples of each micro-batch.
        sizes: Bytes of each allocation.
        categories: What each is for.
        owners: The module that made each; empty where none did.
        events: In order of time: `n` where allocation `n` is made, `~n` where it is freed.
        phases: Where each phase begins: index of an event, and the phase.
        steps: Where each optimizer step begins.
        hidden: Operators that were met whose scratch a trace cannot see.
    """

    batch_size: int
    sizes: tuple[int, ...]
    categories: tuple[Category, ...]
    owners: tuple[str, ...]
    events: tuple[int, ...]
    phases: tuple[tuple[int, Phase], ...] = ((0, Phase.FORWARD),)
    steps: tuple[int, ...] = (0,)
    hidden: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """What was alive when most was.

    Args:
        peak_bytes: All bytes.
        phase: The phase of that moment.
        by_category: Category → its bytes; they add up to the peak.
        by_owner: The modules that own most of its activations → their bytes, most first.
    """

    peak_bytes: int
    phase: Phase
    by_category: Mapping[Category, int]
    by_owner: Mapping[str, int]


OWNERS_SHOWN = 5
"""Modules of an `Instant`: a reader looks for the few that matter."""


def peak_of(trace: Trace, *, with_workspace: bool = False) -> Instant:
    """Return the instant of a trace at which most bytes were alive.

    Args:
        trace: What was allocated and freed.
        with_workspace: Whether what operators hold while they run counts, as for PyTorch's
            allocator, or tensors alone, as for the tracker and a limit.

    >>> twice = Trace(
    ...     batch_size=1,
    ...     sizes=(5, 7),
    ...     categories=(Category.PARAMETERS, Category.ACTIVATIONS),
    ...     owners=("", "layer"),
    ...     events=(0, 1, ~1),
    ... )
    >>> peak_of(twice).peak_bytes
    12
    """
    sizes = _counted(trace, with_workspace=with_workspace)
    end = _end_of_peak(trace, sizes)
    alive = _alive_after(trace.events[:end])
    by_category = dict.fromkeys(Category, 0)
    for number in alive:
        by_category[trace.categories[number]] += sizes[number]
    return Instant(
        peak_bytes=sum(by_category.values()),
        phase=_phase_at(trace, end - 1),
        by_category=by_category,
        by_owner=_owners(trace, alive),
    )


def peak_bytes(trace: Trace, *, with_workspace: bool = False) -> int:
    """Return the most bytes that were alive at once; of what, `peak_of` says."""
    sizes = _counted(trace, with_workspace=with_workspace)
    return max(_live_bytes(trace.events, sizes), default=0)


def _counted(trace: Trace, *, with_workspace: bool) -> Sequence[int]:
    """Return the sizes, those of workspace as nothing where it does not count."""
    if with_workspace:
        return trace.sizes
    pairs = zip(trace.sizes, trace.categories, strict=True)
    return [0 if category is Category.WORKSPACE else size for size, category in pairs]


def _live_bytes(events: Iterable[int], sizes: Sequence[int]) -> Iterator[int]:
    """Yield the live bytes after each event."""
    live = 0
    for event in events:
        live += sizes[event] if event >= 0 else -sizes[~event]
        yield live


def _end_of_peak(trace: Trace, sizes: Sequence[int]) -> int:
    """Return how many events lead to the first instant of the peak."""
    live = list(_live_bytes(trace.events, sizes))
    return live.index(max(live)) + 1 if live else 0


def _alive_after(events: Iterable[int]) -> list[int]:
    alive: dict[int, None] = {}
    for event in events:
        if event >= 0:
            alive[event] = None
        else:
            del alive[~event]
    return list(alive)


def _phase_at(trace: Trace, index: int) -> Phase:
    begun = [phase for start, phase in trace.phases if start <= index]
    return begun[-1] if begun else Phase.FORWARD


def _owners(trace: Trace, alive: Iterable[int]) -> dict[str, int]:
    """Return the owners of most activations, with the bytes of each, most first."""
    found: dict[str, int] = {}
    for number in alive:
        if trace.categories[number] is Category.ACTIVATIONS and trace.owners[number]:
            owner = trace.owners[number]
            found[owner] = found.get(owner, 0) + trace.sizes[number]
    most = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return dict(most[:OWNERS_SHOWN])


def in_free_order(events: Sequence[int], borders: Iterable[int] = ()) -> tuple[int, ...]:
    """Return events with each run of frees sorted, which changes no peak.

    Autocast's cache frees its copies in the order of a hash, another in every run (MEMORY.md A3).

    Args:
        events: As those of a `Trace`.
        borders: Indices at which a run ends, whatever follows.

    >>> in_free_order([0, 1, 2, ~2, ~0, 3])
    (0, 1, 2, -1, -3, 3)
    """
    ends = sorted({0, *borders, len(events)})
    parts = (events[start:end] for start, end in pairwise(ends))
    return tuple(event for part in parts for event in _sorted_frees(part))


def _sorted_frees(events: Iterable[int]) -> Iterator[int]:
    for is_freed, run in groupby(events, key=lambda event: event < 0):
        together = list(run)
        yield from sorted(together, reverse=True) if is_freed else together
