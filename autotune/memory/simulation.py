"""What a trace takes of a GPU: what is reserved, and the smallest limit at which it completes."""

from autotune.memory.allocator import ROUNDED_BYTES, CachingAllocator, LimitReached, Usage
from autotune.memory.expandable import ExpandableAllocator
from autotune.memory.trace import Category, Trace

STEP_SHARE = 0.01
"""Of the bytes in use: finer than any margin that is put on top; no finer than a segment is."""


def simulate(trace: Trace, *, limit_bytes: int | None = None, is_expandable: bool = False) -> Usage:
    """Return what a trace takes of a GPU.

    Args:
        trace: What is allocated and freed.
        limit_bytes: Reserved bytes above which an allocation fails; None for no limit.
        is_expandable: Whether segments may grow, as with `expandable_segments:True`.

    Raises:
        LimitReached: If the trace does not complete within the limit.
    """
    kind = ExpandableAllocator if is_expandable else CachingAllocator
    allocator = kind(limit_bytes=limit_bytes)
    for event in trace.events:
        if trace.categories[max(event, ~event)] is Category.WORKSPACE:
            continue  # a CPU's: a GPU's operators have their own
        if event >= 0:
            allocator.allocate(event, trace.sizes[event])
        else:
            allocator.free(~event)
    return allocator.usage


def smallest_limit_bytes(trace: Trace, *, is_expandable: bool = False) -> int:
    """Return the smallest limit on reserved bytes, in steps of 1 %, at which a trace completes.

    Smaller than what it reserves without a limit: near a limit the allocator gives back what it
    does not use. All steps are tried from below, since one may complete and the next above not.
    """
    most = simulate(trace, is_expandable=is_expandable)
    limit, step = most.allocated_bytes, max(int(most.allocated_bytes * STEP_SHARE), ROUNDED_BYTES)
    while not completes(trace, limit, is_expandable=is_expandable):
        limit += step
    return limit


def completes(trace: Trace, limit_bytes: int, *, is_expandable: bool = False) -> bool:
    """Whether a trace completes within a limit on reserved bytes."""
    try:
        simulate(trace, limit_bytes=limit_bytes, is_expandable=is_expandable)
    except LimitReached:
        return False
    return True
