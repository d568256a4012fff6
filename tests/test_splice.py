"""A single pass put in the place of those of a step pair."""

from dataclasses import replace

from traces import trace_of

from autotune.memory.splice import with_pass
from autotune.memory.trace import Phase, Trace

PASS = ((1, Phase.FORWARD), (2, Phase.BACKWARD), (4, Phase.OPTIMIZER))


def pair(batch_size: int) -> Trace:
    """Two steps: an activation, a gradient, and what the optimizer makes; the gradient stays."""
    grown = 10 * batch_size
    return trace_of(
        (100, grown, 40, 7, grown, 40, 7),
        (0, 1, 2, ~1, 3, ~3, ~2, 4, 5, ~4, 6, ~6),
        batch_size=batch_size,
        phases=(*PASS, (6, Phase.FORWARD), (8, Phase.BACKWARD), (10, Phase.OPTIMIZER)),
        steps=(1, 6),
    )


def single(batch_size: int) -> Trace:
    """Forward and backward of the first step."""
    return trace_of(
        (100, 10 * batch_size, 40),
        (0, 1, 2, ~1),
        batch_size=batch_size,
        phases=PASS,
        steps=(1,),
    )


def test_a_single_pass_tells_the_pair_at_its_size() -> None:
    """Both passes grow with the batch, and the optimizer's allocations stay."""
    assert with_pass(pair(2), single(5)) == pair(5)


def test_inputs_are_taken_from_the_pass() -> None:
    """What is held from the start grows as well."""
    larger = replace(single(5), sizes=(250, 50, 40))

    told = with_pass(pair(2), larger)

    assert told is not None
    assert told.sizes[0] == 250


def test_a_pass_that_does_other_things_is_refused() -> None:
    """Its gradient comes first: then nothing can be said of the pair."""
    other = replace(single(5), events=(0, 1, 2, ~2))

    assert with_pass(pair(2), other) is None


def test_a_pair_whose_steps_differ_is_refused() -> None:
    """What the first step made once, the second did not make again."""
    lazy = replace(pair(2), events=(0, 1, 2, ~1, 3, ~3, ~2, 4, ~4, 5, 6, ~6))

    assert with_pass(lazy, single(5)) is None
