"""Numbers as the page writes them; a dash where there is none."""

from pipeline.bootstrap import Interval
from pipeline.charts import known

NONE = "–"


def figure(value: float | None, digits: int = 2) -> str:
    """A number as the page shows it; a dash where there is none."""
    return f"{value:,.{digits}f}" if known(value) else NONE


def times(one: Interval | None) -> str:
    """``1.46 × (1.39 to 1.54)``."""
    if one is None or not known(one.ratio):
        return NONE
    return f"{one.ratio:.2f} × ({figure(one.low)} to {figure(one.high)})"


def percent(value: float | None, digits: int = 0) -> str:
    """A share in per cent."""
    return f"{100 * value:.{digits}f}%" if known(value) else NONE


def rate(value: float | None) -> str:
    """Tokens a second, to about three digits."""
    return figure(value, 0 if known(value) and value >= 1000 else 1)


def ms(seconds: float | None) -> str:
    """Seconds as milliseconds, to about three digits."""
    return f"{1000 * seconds:,.{1 if seconds < 0.01 else 0}f}" if known(seconds) else NONE
