"""The times that logs write, as seconds since 1970 (UTC)."""

import math
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

# Each unit ends where the one before it would be in the year 5138.
_PER_SECOND = ((1e11, 1), (1e14, 10**3), (1e17, 10**6), (math.inf, 10**9))


def seconds(value: Any, *, timezone: str = "UTC") -> float | None:
    """A time as seconds: a number of s, ms, µs or ns by its size, or ISO 8601; None for None and "".

    ``timezone`` is that of ISO times which name none.

    Raises: ValueError for anything else, and for a year that nobody could write out again.
    """
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a time")
    if isinstance(value, str):
        text = value.strip()
        if not text.replace(".", "", 1).isdigit():
            return _iso(text, timezone)
        value = int(text) if text.isdigit() else float(text)
    if not 0 <= value < 1e20:  # NaN, too
        raise ValueError("not a time")
    return value / next(unit for end, unit in _PER_SECOND if value < end)


def _iso(text: str, timezone: str) -> float:
    when = datetime.fromisoformat(text.removesuffix(" UTC") + ("+00:00" if text.endswith(" UTC") else ""))
    if when.tzinfo is None:
        when = when.replace(tzinfo=ZoneInfo(timezone))
    try:
        return when.astimezone(UTC).timestamp()
    except OverflowError:
        raise ValueError("not a time")
