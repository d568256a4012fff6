"""Sizes and durations: what people write is what is understood, and the rest is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import OptionInvalid
from autotune.units import format_bytes, format_duration, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1024, 1024),
        (2.9, 2),
        ("1024", 1024),
        ("1 KiB", 1024),
        ("512M", 512 * 2**20),
        ("1.5 GB", 1_500_000_000),
        ("20GiB", 20 * 2**30),
        ("20gib", 20 * 2**30),
        ("1TB", 10**12),
        ("2 b", 2),
        ("80%", 800),
    ],
)
def test_a_size_is_understood(text: str | float, expected: int) -> None:
    """Plain numbers are bytes, `i` or a bare prefix means binary, `B` decimal, `%` a share."""
    assert parse_bytes(text, free_bytes=1000) == expected


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "0", 0, -5, "12 apples", "101%", "x%", "1e3GiB", math.nan]
)
def test_what_is_no_size_is_refused(text: str | float) -> None:
    """The error names what was seen and says what to write."""
    with pytest.raises(OptionInvalid, match="not a memory size") as caught:
        parse_bytes(text, free_bytes=1000)

    assert "GiB" in caught.value.hint


def test_a_share_of_nothing_is_refused() -> None:
    """Without something to take a share of, a share means nothing."""
    with pytest.raises(OptionInvalid):
        parse_bytes("50%")


@given(st.integers(min_value=1, max_value=2**50))
def test_bytes_survive_as_text(count: int) -> None:
    """A whole number of bytes, written as text, is the same number."""
    assert parse_bytes(str(count)) == parse_bytes(count) == count


@given(st.integers(min_value=1, max_value=2**50))
def test_shown_bytes_are_close(count: int) -> None:
    """What is shown can be read back, to its digits."""
    shown = parse_bytes(format_bytes(count))

    assert abs(shown - count) <= max(0.05 * 2**30 if count >= 2**30 else count * 0.05, 512)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(None, "unknown"), (0, "0 B"), (1023, "1023 B"), (2048, "2 KiB"), (2**41, "2048.0 GiB")],
)
def test_bytes_are_shown_in_the_unit_that_fits(count: int | None, expected: str) -> None:
    """None is said in a word; nothing is shown in a larger unit than GiB."""
    assert format_bytes(count) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [(3, 3.0), ("90", 90.0), ("90s", 90.0), ("5min", 300.0), ("1h30m", 5400.0), ("2 d", 172800.0)],
)
def test_a_duration_is_understood(text: str | float, expected: float) -> None:
    """A bare number is seconds; units may be put together."""
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "-5", 0, "5 minutes or so", float("inf"), "1h-30m"])
def test_what_is_no_duration_is_refused(text: str | float) -> None:
    """The error names what was seen."""
    with pytest.raises(OptionInvalid, match="not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.5, "500.0 ms"),
        (59.94, "59.9 s"),
        (60, "1 min 0 s"),
        (3600, "1 h 0 min"),
        (9000, "2 h 30 min"),
    ],
)
def test_a_duration_is_shown_as_people_say_it(seconds: float, expected: str) -> None:
    """The unit grows with the duration."""
    assert format_duration(seconds) == expected
