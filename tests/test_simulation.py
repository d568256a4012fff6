"""What a trace takes of a simulated GPU; and of a real one, where there is one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import trace_of

from autotune.memory.allocator import MIB, LimitReached
from autotune.memory.simulation import completes, simulate, smallest_limit_bytes
from autotune.memory.trace import Trace, peak_bytes

SIZES = st.sampled_from([300, 5000, MIB // 2, MIB + 5, 3 * MIB, 16 * MIB, 64 * MIB + 7])


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Traces of up to 60 allocations of all classes."""
    sizes = draw(st.lists(SIZES, min_size=1, max_size=60))
    events, live = list[int](), list[int]()
    for number in range(len(sizes)):
        events.append(number)
        live.append(number)
        if draw(st.booleans()):
            events.append(~live.pop(draw(st.integers(0, len(live) - 1))))
    return trace_of(tuple(sizes), tuple(events))


@given(traces(), st.booleans())
@settings(max_examples=60)
def test_reserved_is_never_below_allocated(trace: Trace, is_expandable: bool) -> None:
    """Nor is what is allocated, rounded as it is, below what is alive."""
    usage = simulate(trace, is_expandable=is_expandable)

    assert usage.reserved_bytes >= usage.allocated_bytes >= peak_bytes(trace)


@given(traces(), st.booleans())
@settings(max_examples=30)
def test_a_trace_completes_at_its_smallest_limit(trace: Trace, is_expandable: bool) -> None:
    """And the limit is no lower than what is alive."""
    limit = smallest_limit_bytes(trace, is_expandable=is_expandable)

    assert completes(trace, limit, is_expandable=is_expandable)
    assert limit >= peak_bytes(trace)


def test_a_limit_may_be_below_what_would_be_reserved() -> None:
    """30 MiB freed and 40 asked for: 70 are reserved without a limit, and 40 will do."""
    trace = trace_of((30 * MIB, 40 * MIB), (0, ~0, 1))

    assert simulate(trace).reserved_bytes == 70 * MIB
    assert smallest_limit_bytes(trace) == 40 * MIB


def test_a_trace_that_does_not_complete_says_so() -> None:
    """20 MiB are a segment, whatever is asked of it."""
    trace = trace_of((2 * MIB,), (0,))

    with pytest.raises(LimitReached):
        simulate(trace, limit_bytes=19 * MIB)
    assert not completes(trace, 19 * MIB)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_the_real_allocator_reserves_as_much(seed: int) -> None:
    """The same allocations and frees, made on the device, reserve what the simulation says."""
    trace = _random_trace(seed)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    alive: dict[int, torch.Tensor] = {}
    for event in trace.events:
        if event >= 0:
            alive[event] = torch.empty(trace.sizes[event], dtype=torch.uint8, device="cuda")
        else:
            del alive[~event]
    reserved = torch.cuda.max_memory_reserved() - before
    alive.clear()
    torch.cuda.empty_cache()

    assert reserved == simulate(trace).reserved_bytes


def _random_trace(seed: int) -> Trace:
    source = torch.Generator().manual_seed(seed)
    choices = (300, 5000, MIB // 2, MIB + 5, 3 * MIB, 16 * MIB, 64 * MIB + 7)
    sizes, events, live = list[int](), list[int](), list[int]()
    for number in range(400):
        events.append(number)
        live.append(number)
        sizes.append(choices[int(torch.randint(len(choices), (), generator=source))])
        while len(live) > int(torch.randint(1, 60, (), generator=source)):
            events.append(~live.pop(int(torch.randint(len(live), (), generator=source))))
    return trace_of(tuple(sizes), tuple(events))
