"""What a trace says of its peak."""

from hypothesis import given
from hypothesis import strategies as st
from traces import trace_of

from autotune.memory.trace import Category, Phase, in_free_order, peak_bytes, peak_of


def test_the_peak_is_what_lived_at_once() -> None:
    """What was freed before does not count."""
    trace = trace_of((10, 5, 7), (0, 1, ~1, 2))

    assert peak_bytes(trace) == 17


def test_the_instant_names_its_phase() -> None:
    """The phase is the one of the event at which most was alive."""
    phases = ((0, Phase.FORWARD), (2, Phase.BACKWARD), (3, Phase.OPTIMIZER))
    trace = trace_of((10, 5, 7), (0, 1, 2, ~2), phases=phases)

    assert peak_of(trace).phase is Phase.BACKWARD


def test_the_largest_owners_come_first() -> None:
    """Activations are told by the module that made them."""
    trace = trace_of((10, 5, 7), (0, 1, 2))

    assert list(peak_of(trace).by_owner.items()) == [("layer2", 7), ("layer1", 5)]


def test_an_empty_trace_has_no_peak() -> None:
    """Nothing was allocated, so nothing was alive."""
    trace = trace_of((1,), ())

    assert peak_bytes(trace) == 0
    assert peak_of(trace).peak_bytes == 0


def test_borders_end_a_run_of_frees() -> None:
    """Frees are sorted on either side of a border, and not across it."""
    assert in_free_order([0, 1, 2, ~2, ~1, ~0], [4]) == (0, 1, 2, ~2, ~0, ~1)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.randoms())
def test_categories_add_up_to_the_peak(sizes: list[int], random: object) -> None:
    """Every byte of the peak is of one category (CASES.md row 120)."""
    trace = trace_of(tuple(sizes), _shuffled(len(sizes), random))
    instant = peak_of(trace)

    assert sum(instant.by_category.values()) == instant.peak_bytes == peak_bytes(trace)
    assert instant.by_category[Category.OPTIMIZER_STATE] == 0


@given(st.integers(1, 20), st.randoms())
def test_the_order_of_frees_changes_no_peak(count: int, random: object) -> None:
    """Live bytes only fall in a run of frees, in whatever order."""
    events = _shuffled(count, random)
    sizes = tuple(range(1, count + 1))

    assert peak_bytes(trace_of(sizes, in_free_order(events))) == peak_bytes(trace_of(sizes, events))


def _shuffled(count: int, random: object) -> tuple[int, ...]:
    """Return events that make so many allocations, and free some of them."""
    events, live = list[int](), list[int]()
    for number in range(count):
        events.append(number)
        live.append(number)
        while live and random.random() < 0.4:  # type: ignore[attr-defined]  # hypothesis's own
            events.append(~live.pop(random.randrange(len(live))))  # type: ignore[attr-defined]
    return tuple(events)
