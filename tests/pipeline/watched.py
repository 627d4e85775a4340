"""Hours made up so that what is right is known beforehand: rates are exact, but for a balanced difference."""

from pipeline.watch.hours import HOUR_S, hour_of

START = 1_798_761_600  # Friday, 1 January 2027, 00:00 UTC
DIMENSIONS = ("route", "language")
RATES = {("mail", "en"): 2.0, ("mail", "de"): 1.6, ("code", "en"): 3.0, ("code", "de"): 2.4}
MIX = {("mail", "en"): 30, ("mail", "de"): 20, ("code", "en"): 20, ("code", "de"): 10}


def hour(number, *, mix=MIX, factor=lambda cell: 1.0, version="1", drafts=20, spread=0.3):
    """The hour of that number: so many conversations a cell, of one request each, half a little over, half under."""
    rows = {}
    for cell, conversations in mix.items():
        for i in range(conversations):
            rate = RATES[cell] * factor(cell) * (1 + spread * (1 if i % 2 else -1))
            rows[f"{number}-{cell}-{i}", cell] = [1, drafts, drafts * rate]
    return hour_of(START + number * HOUR_S, version, DIMENSIONS, rows)


def hours(count, *, first=0, **settings):
    """So many hours in a row."""
    return [hour(number, **settings) for number in range(first, first + count)]
