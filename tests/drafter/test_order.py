import time
from collections import Counter

import pytest

from drafter.order import Order


@pytest.mark.parametrize(("num_rows", "rows_per_step"), [(8, 2), (7, 3), (3, 8), (5, 5)])
def test_every_epoch_deals_each_row_once(num_rows, rows_per_step):
    order = Order(num_rows, rows_per_step, seed=3)
    steps = 3 * num_rows  # whole epochs: 3 * rows_per_step of them
    dealt = [pick for step in range(steps) for pick in order.rows_of(step)]
    assert [epoch for epoch, _ in dealt] == sorted(epoch for epoch, _ in dealt)
    assert Counter(dealt) == {(e, r): 1 for e in range(3 * rows_per_step) for r in range(num_rows)}
    orders = {tuple(r for e, r in dealt if e == epoch) for epoch in range(3 * rows_per_step)}
    assert len(orders) > 1, "shuffled anew"


@pytest.mark.parametrize("stopped_at", [4, 6], ids=["at an epoch's end", "amid an epoch"])
def test_a_resumed_run_sees_the_rows_that_a_straight_run_sees(stopped_at):
    # 8 rows, 2 a step, 3 epochs: 12 steps
    straight = [Order(8, 2, seed=1).rows_of(step) for step in range(12)]
    resumed = [Order(8, 2, seed=1).rows_of(step) for step in range(stopped_at)]
    resumed += [Order(8, 2, seed=1).rows_of(step) for step in range(stopped_at, 12)]
    assert resumed == straight
    assert Counter(row for step in straight for _, row in step) == {row: 3 for row in range(8)}
    assert {epoch for epoch, _ in straight[4]} == {1}


def test_another_seed_is_another_order():
    assert [Order(20, 20, seed=0).rows_of(0)] != [Order(20, 20, seed=1).rows_of(0)]


SHARDS = [5, 1, 7, 3, 9, 2, 6, 4, 8, 5]  # 50 rows


def shard_of(row):
    return next(n for n in range(len(SHARDS)) if row < sum(SHARDS[: n + 1]))


@pytest.mark.parametrize("window", [1, 4, 7, 10, 49, 50, 1000])
def test_with_shards_and_a_window_every_epoch_still_deals_each_row_once(window):
    order = Order(50, 3, seed=4, shards=SHARDS, window=window)
    dealt = [pick for step in range(50) for pick in order.rows_of(step)]
    assert Counter(dealt) == {(e, r): 1 for e in range(3) for r in range(50)}
    assert len({tuple(r for e, r in dealt if e == epoch) for epoch in range(3)}) == 3


def test_a_window_reaches_over_shards_that_follow_each_other_and_no_further():
    order = Order(50, 50, seed=4, shards=SHARDS, window=10)
    firsts = set()
    for epoch in range(20):
        rows = [row for _, row in order.rows_of(epoch)]
        windows = [{shard_of(row) for row in rows[start : start + 10]} for start in range(0, 50, 10)]
        # A shard lies in windows that are neighbours: read once, and never again in the epoch.
        for shard in range(len(SHARDS)):
            where = [n for n, window in enumerate(windows) if shard in window]
            assert where == list(range(where[0], where[-1] + 1)) and len(where) <= 2
        assert any(rows[start : start + 10] != sorted(rows[start : start + 10]) for start in range(0, 50, 10))
        firsts.add(shard_of(rows[0]))
    assert len(firsts) > 5, "the shards are shuffled too"


def test_up_to_a_window_of_rows_are_shuffled_as_if_there_were_no_shards():
    plain = Order(50, 7, seed=9)
    windowed = Order(50, 7, seed=9, shards=SHARDS, window=50)
    assert [plain.rows_of(step) for step in range(30)] == [windowed.rows_of(step) for step in range(30)]
    firsts = Counter(shard_of(Order(50, 1, seed, shards=SHARDS).rows_of(0)[0][1]) for seed in range(300))
    assert set(firsts) == set(range(len(SHARDS)))


def test_a_step_is_the_same_whenever_and_in_whatever_order_it_is_asked_for():
    settings = {"shards": SHARDS, "window": 8}
    straight = [Order(50, 6, 2, **settings).rows_of(step) for step in range(40)]
    order = Order(50, 6, 2, **settings)
    assert [order.rows_of(step) for step in reversed(range(40))] == straight[::-1]
    assert [order.rows_of(step) for step in (39, 0, 20, 8, 39)] == [straight[step] for step in (39, 0, 20, 8, 39)]


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_any_number_of_workers_share_out_a_step_without_gap_or_overlap(world):
    order = Order(50, 6, seed=2, shards=SHARDS, window=8)
    for step in range(9):
        shares = [order.rows_of(step)[rank::world] for rank in range(world)]
        assert Counter(pick for share in shares for pick in share) == Counter(order.rows_of(step))


def test_a_million_rows_are_ordered_once_an_epoch():
    order = Order(1_000_000, 8, seed=0, shards=[64] * 15_625)
    order.rows_of(0)
    started = time.perf_counter()
    for step in range(1, 1001):
        order.rows_of(step)
    assert time.perf_counter() - started < 2, "a thousand steps; ordering a million rows anew each step takes minutes"


def test_shards_that_are_not_all_rows_are_refused():
    with pytest.raises(ValueError, match="shards of 50 rows together, expected 51"):
        Order(51, 1, seed=0, shards=SHARDS)
