"""Forward and backward traced alone, and put in the place of those of a whole step pair.

What an optimizer allocates does not depend on the batch, and its many small operators take most of
the time of a trace. So one pair of steps is traced whole; at other sizes a single pass is, and
takes the place of both passes of the pair, where all three do the same things in the same order.
"""

from dataclasses import replace

from autotune.memory.trace import Phase, Trace

Events = tuple[int, ...]


def with_pass(pair: Trace, single: Trace) -> Trace | None:
    """Return a step pair at the size of a single pass; None where they do not match.

    Args:
        pair: Two whole optimizer steps.
        single: Forward and backward of the first step, at another size.
    """
    passes = [_pass_of(pair, step) for step in range(len(pair.steps))]
    own = _pass_of(single, 0)
    if any(_renumbered(each) != _renumbered(own) for each in passes):
        return None
    sizes = list(pair.sizes)
    before = min(_made(own), default=len(single.sizes))  # what is held from the start
    sizes[:before] = single.sizes[:before]
    for each in passes:
        for number, number_there in zip(_made(each), _made(own), strict=True):
            sizes[number] = single.sizes[number_there]
    return replace(pair, batch_size=single.batch_size, sizes=tuple(sizes))


def _pass_of(trace: Trace, step: int) -> Events:
    """Return the events of a step from its beginning to the end of its last backward."""
    start = trace.steps[step]
    end = (*trace.steps, len(trace.events) + 1)[step + 1]
    ends = [at for at, phase in trace.phases if phase is Phase.OPTIMIZER and start <= at < end]
    return trace.events[start : max(ends, default=start)]


def _made(events: Events) -> list[int]:
    return [event for event in events if event >= 0]


def _renumbered(events: Events) -> list[int]:
    """Return events numbered from 0, without the frees of what was there before."""
    places = {number: place for place, number in enumerate(_made(events))}
    return [
        places[event] if event >= 0 else ~places[~event]
        for event in events
        if event >= 0 or ~event in places
    ]
