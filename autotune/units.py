"""Sizes and durations as people write them, and as a report shows them."""

import re

from autotune.errors import OptionInvalid

_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<prefix>[kmgt]?)(?P<infix>i?)b?", re.IGNORECASE)
_SECONDS = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(sec|min|s|m|h|d)", re.IGNORECASE)
_KIB = 1024
_MINUTE = _HOUR_IN_MINUTES = 60


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
        return _positive(int(text), text)
    cleaned = text.strip()
    if cleaned.endswith("%"):
        return _positive(_share(cleaned, free_bytes), text)
    match = _SIZE.fullmatch(cleaned)
    if match is None:
        raise _not_a_size(text)
    is_decimal = not match["infix"] and cleaned.lower().endswith("b") and match["prefix"]
    factors = _DECIMAL if is_decimal else _BINARY
    return _positive(int(float(match["number"]) * factors[match["prefix"].lower()]), text)


def _share(text: str, free_bytes: int | None) -> int:
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        raise _not_a_size(text) from None
    if free_bytes is None or not 0 < share <= 1:
        raise _not_a_size(text)
    return int(share * free_bytes)


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
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < _KIB or unit == "GiB":
            return f"{size:.0f} {unit}" if unit in {"B", "KiB"} else f"{size:.1f} {unit}"
        size /= _KIB
    return f"{size:.1f} GiB"


def parse_duration(text: str | float) -> float:
    """Return the seconds that `text` means: a number, or `"90s"`, `"5min"`, `"1h30m"`.

    Raises:
        OptionInvalid: If `text` is no duration, or not above zero.

    >>> parse_duration("1h30m")
    5400.0
    """
    if isinstance(text, int | float):
        seconds = float(text)
    else:
        cleaned = text.strip()
        parts = _DURATION.findall(cleaned)
        if re.fullmatch(r"\d+(\.\d+)?", cleaned):
            seconds = float(cleaned)
        elif parts and not _DURATION.sub("", cleaned).strip():
            seconds = sum(float(number) * _SECONDS[unit.lower()] for number, unit in parts)
        else:
            seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise OptionInvalid(
            f"{text!r} is not a duration", hint='write seconds, "90s", "5min" or "1h30m"'
        )
    return seconds


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
