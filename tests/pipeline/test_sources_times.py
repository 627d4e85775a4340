"""Times as logs write them, in one unit."""

import pytest

from pipeline.sources.times import seconds

NOON = 1767268800.0  # 2026-01-01 12:00:00 UTC


@pytest.mark.parametrize(
    "written",
    [
        1767268800,
        1767268800.0,
        1767268800_000,
        1767268800_000_000,
        1767268800_000_000_000,
        "1767268800",
        "1767268800.0",
        "1767268800000000000",
        "2026-01-01T12:00:00Z",
        "2026-01-01T12:00:00.000Z",
        "2026-01-01T12:00:00.000000000Z",
        "2026-01-01T13:00:00+01:00",
        "2026-01-01 12:00:00",
        "2026-01-01 12:00:00 UTC",
        "20260101T120000Z",
    ],
)
def test_one_moment_is_one_number_however_it_is_written(written):
    assert seconds(written) == NOON


def test_a_time_without_a_zone_is_in_the_sources_own():
    assert seconds("2026-01-01T12:00:00", timezone="Europe/Paris") == NOON - 3600
    assert seconds("2026-07-01T12:00:00", timezone="Europe/Paris") == seconds("2026-07-01T10:00:00Z")
    assert seconds("2026-01-01T12:00:00Z", timezone="Europe/Paris") == NOON


def test_parts_of_a_second_are_kept():
    assert seconds("2026-01-01T12:00:00.25Z") == NOON + 0.25
    assert seconds(1767268800_250) == NOON + 0.25
    assert seconds("1767268800250000000") == NOON + 0.25


def test_no_time_is_none():
    assert seconds(None) is seconds("") is None


@pytest.mark.parametrize(
    "written",
    [
        True,
        -1,
        float("nan"),
        float("inf"),
        1e30,
        "yesterday",
        "12:00",
        "2026-13-01",
        "²",
        "9" * 5000,
        [],
        {},
        "1.2.3",
        "9999-12-31T23:59:59-05:00",
        "0001-01-01T00:00:00+05:00",
    ],
)
def test_what_is_no_time_says_so(written):
    with pytest.raises(ValueError):
        seconds(written)
