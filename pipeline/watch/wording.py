"""Times as the watch writes them."""

from datetime import UTC, datetime


def when(seconds: float | None) -> str:
    """``2026-11-29 14:00`` in UTC; a dash where there is no time."""
    return "–" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"
