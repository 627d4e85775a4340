"""Following the engines: retries are summed, rejects end a run and its engines in time, estimates are honest."""

import logging

import pytest

from pipeline import progress
from pipeline.engines import PartDone
from pipeline.errors import StageError
from pipeline.follow import STATES, Limit, follow
from pipeline.progress import Progress


class Pool:
    """Hands out what it was given; says when it was closed."""

    def __init__(self, done):
        self._done, self.handed, self.closed = done, 0, False

    def run(self, work, parts):
        try:
            for one in self._done:
                self.handed += 1
                yield one
        finally:
            self.closed = True


def followed(done, *, total_rows=100, share=0.1, states_share=None):
    pool = Pool(done)
    states = None if states_share is None else Limit("capture", states_share)
    limit = Limit("regenerate", share)
    try:
        return pool, follow(pool, None, [], progress=Progress("x", total_rows=total_rows), rows=limit, states=states)
    except StageError as error:
        return pool, error


def test_engines_that_died_are_counted_over_all_parts():
    pool, retries = followed([PartDone(0, 1, 1), PartDone(1, 1, 1, tries=3), PartDone(2, 1, 1, tries=2)])
    assert retries == 3 and pool.closed


def test_a_run_ends_with_the_first_reject_beyond_the_share_of_all_rows():
    done = [PartDone(n, 10, 1, {"too_long": 4}) for n in range(10)]
    pool, error = followed(done)
    assert "12 of 100 rows rejected ({'too_long': 12}), more than regenerate.max_reject_share = 0.1" in str(error)
    assert pool.handed == 3 and pool.closed


def test_states_that_are_kept_out_have_a_limit_of_their_own():
    done = [PartDone(n, 10, 1, {STATES + "zero_states": 4}) for n in range(10)]
    assert followed(done)[1] == 0
    pool, error = followed(done, states_share=0.05)
    assert "capture: 8 of 100 rows rejected ({'zero_states': 8})" in str(error) and pool.handed == 2


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, ["70 of 100 rows, 50 tokens/s, about 30 s left", "80 of 100 rows, 67 tokens/s, about 15 s left"]),
        # The engine was loading for the first 6 of the 10 seconds.
        (4.0, ["70 of 100 rows, 125 tokens/s, about 12 s left", "80 of 100 rows, 111 tokens/s, about 9 s left"]),
    ],
)
def test_the_estimate_is_of_this_runs_speed_without_what_was_there_and_what_engines_load(
    monkeypatch, caplog, seconds, expected
):
    clock = iter([100.0, 110.0, 115.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(logging.getLogger("slipstream"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("slipstream"), "handlers", [])  # pytest's own is the root's too
    with caplog.at_level(logging.INFO, "slipstream"):
        following = Progress("regenerate", total_rows=100, rows_before=60)
        following.add(rows=10, tokens=500, seconds=seconds)
        following.add(rows=10, tokens=500, seconds=seconds)
    assert caplog.messages == [
        "regenerate: 60 of 100 rows were there already",
        *(f"regenerate: {line}" for line in expected),
    ]


@pytest.mark.parametrize("total", [0, 5])
def test_nothing_rejected_is_within_any_limit(total):
    Limit("capture", 0.0).require({}, total)


@pytest.mark.parametrize("kept", [8, 10])
def test_a_row_that_is_lost_or_there_twice_is_no_success(kept):
    limit = Limit("capture", 0.5)
    limit.require_all(9, {"holes": 1}, 10)
    with pytest.raises(StageError, match=f"{kept} rows kept and 1 rejected of 10"):
        limit.require_all(kept, {"holes": 1}, 10)
