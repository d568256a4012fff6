"""Sizes and durations as people write them, and as a report shows them."""

import math
import re
from typing import TypeGuard

from autotune.errors import OptionInvalid

_PREFIXES = tuple(enumerate(("", "k", "m", "g", "t")))
_BINARY = {f"{prefix}{end}": 2 ** (10 * n) for n, prefix in _PREFIXES for end in ("", "i", "ib")}
_FACTORS = _BINARY | {f"{prefix}b": 10 ** (3 * n) for n, prefix in _PREFIXES}
"""Unit → bytes: binary, as memory is, but for kB, MB, GB and TB."""

_SHOWN = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_TENTHS_FROM = 2**20
"""Bytes of the smallest unit that is shown with tenths."""

_NUMBER = r"\d+(?:\.\d+)?"
_SIZE = re.compile(rf"(?P<number>{_NUMBER})\s*(?P<unit>[kmgt]?i?b?)", re.IGNORECASE)
_SECONDS = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(rf"({_NUMBER})\s*(sec|min|s|m|h|d)", re.IGNORECASE)
_MINUTE = _HOUR_IN_MINUTES = 60


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number; True and False are none.

    >>> is_whole(3), is_whole(True), is_whole(3.0)
    (True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool)


def parse_bytes(text: str | float, *, free_bytes: int | None = None) -> int:
    """Return the number of bytes that `text` means.

    Args:
        text: A number of bytes, `"20GiB"`, `"1.5 GB"` (decimal), `"512M"` (binary, as memory
            is), or `"80%"` of what is free.
        free_bytes: What a share is taken of; without it a share is refused.

    Raises:
        OptionInvalid: If `text` is no size, or not above zero.

    >>> parse_bytes("20GiB") == 20 * 2**30
    True
    >>> parse_bytes("50%", free_bytes=1000)
    500
    """
    if isinstance(text, int | float):
        return _positive(int(text) if math.isfinite(text) else 0, text)
    if text.strip().endswith("%"):
        return _positive(_share(text.strip(), free_bytes), text)
    return _positive(_size(text), text)


def _share(text: str, free_bytes: int | None) -> int:
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        raise _not_a_size(text) from None
    if free_bytes is None or not 0 < share <= 1:
        raise _not_a_size(text)
    return int(share * free_bytes)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise _not_a_size(text)
    return int(float(match["number"]) * _FACTORS[match["unit"].lower()])


def _positive(number: int, text: str | float) -> int:
    if number <= 0:
        raise _not_a_size(text)
    return number


def _not_a_size(text: str | float) -> OptionInvalid:
    return OptionInvalid(
        f"{text!r} is not a memory size",
        hint='write bytes, "20GiB", "512MiB", or a share of what is free such as "80%"',
    )


def format_bytes(count: int | None) -> str:
    """Return `count` bytes as a person reads them.

    >>> format_bytes(int(23.6 * 2**30))
    '23.6 GiB'
    >>> format_bytes(None)
    'unknown'
    """
    if count is None:
        return "unknown"
    factor, unit = unit_for(count)
    digits = 1 if factor >= _TENTHS_FROM else 0
    return f"{count / factor:.{digits}f} {unit}"


def unit_for(count: float) -> tuple[int, str]:
    """Return the unit in which so many bytes read best: its bytes, and its name.

    >>> unit_for(3 * 2**20)
    (1048576, 'MiB')
    """
    return next((unit for unit in _SHOWN if abs(count) >= unit[0]), (1, "B"))


def parse_duration(text: str | float) -> float:
    """Return the seconds that `text` means: a number, or `"90s"`, `"5min"`, `"1h30m"`.

    Raises:
        OptionInvalid: If `text` is no duration, or not above zero.

    >>> parse_duration("1h30m")
    5400.0
    """
    seconds = float(text) if isinstance(text, int | float) else _seconds(text.strip())
    if not 0 < seconds < float("inf"):
        raise OptionInvalid(
            f"{text!r} is not a duration", hint='write seconds, "90s", "5min" or "1h30m"'
        )
    return seconds


def _seconds(text: str) -> float:
    """Return what a text means in seconds; 0 where that is nothing."""
    if re.fullmatch(_NUMBER, text):
        return float(text)
    if _DURATION.sub("", text).strip():
        return 0.0
    return sum(float(number) * _SECONDS[unit.lower()] for number, unit in _DURATION.findall(text))


def format_duration(seconds: float) -> str:
    """Return a duration as a person reads it.

    >>> format_duration(95)
    '1 min 35 s'
    >>> format_duration(0.0123)
    '12.3 ms'
    """
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), _MINUTE)
    if minutes < _HOUR_IN_MINUTES:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, _HOUR_IN_MINUTES)
    return f"{hours} h {minutes} min"
