import time
from collections import Counter

import pytest

from drafter.order import Order


def dealt_in(order, step, num_rows):
    """What a step of so many rows is dealt."""
    return order.dealt(range(step * num_rows, (step + 1) * num_rows))


@pytest.mark.parametrize(("num_rows", "rows_per_step"), [(8, 2), (7, 3), (3, 8), (5, 5)])
def test_every_epoch_deals_each_row_once(num_rows, rows_per_step):
    order = Order(num_rows, seed=3)
    steps = 3 * num_rows  # whole epochs: 3 * rows_per_step of them
    dealt = [pick for step in range(steps) for pick in dealt_in(order, step, rows_per_step)]
    assert [epoch for epoch, _ in dealt] == sorted(epoch for epoch, _ in dealt)
    assert Counter(dealt) == {(e, r): 1 for e in range(3 * rows_per_step) for r in range(num_rows)}
    orders = {tuple(r for e, r in dealt if e == epoch) for epoch in range(3 * rows_per_step)}
    assert len(orders) > 1, "shuffled anew"


@pytest.mark.parametrize("stopped_at", [4, 6], ids=["at an epoch's end", "amid an epoch"])
def test_a_resumed_run_sees_the_rows_that_a_straight_run_sees(stopped_at):
    # 8 rows, 2 a step, 3 epochs: 12 steps
    order, before, after = (Order(8, seed=1) for _ in range(3))
    straight = [dealt_in(order, step, 2) for step in range(12)]
    resumed = [dealt_in(before, step, 2) for step in range(stopped_at)]
    resumed += [dealt_in(after, step, 2) for step in range(stopped_at, 12)]
    assert resumed == straight
    assert Counter(row for step in straight for _, row in step) == {row: 3 for row in range(8)}
    assert {epoch for epoch, _ in straight[4]} == {1}


def test_another_seed_is_another_order():
    assert Order(20, seed=0).dealt(range(20)) != Order(20, seed=1).dealt(range(20))


SHARDS = [5, 1, 7, 3, 9, 2, 6, 4, 8, 5]  # 50 rows


def shard_of(row):
    return next(n for n in range(len(SHARDS)) if row < sum(SHARDS[: n + 1]))


@pytest.mark.parametrize("window", [1, 4, 7, 10, 49, 50, 1000])
def test_with_shards_and_a_window_every_epoch_still_deals_each_row_once(window):
    dealt = Order(50, seed=4, shards=SHARDS, window=window).dealt(range(150))
    assert Counter(dealt) == {(e, r): 1 for e in range(3) for r in range(50)}
    assert len({tuple(r for e, r in dealt if e == epoch) for epoch in range(3)}) == 3


def test_a_window_reaches_over_shards_that_follow_each_other_and_no_further():
    order = Order(50, seed=4, shards=SHARDS, window=10)
    firsts = set()
    for epoch in range(20):
        rows = [row for _, row in dealt_in(order, epoch, 50)]
        windows = [{shard_of(row) for row in rows[start : start + 10]} for start in range(0, 50, 10)]
        # A shard lies in windows that are neighbours: read once, and never again in the epoch.
        for shard in range(len(SHARDS)):
            where = [n for n, window in enumerate(windows) if shard in window]
            assert where == list(range(where[0], where[-1] + 1)) and len(where) <= 2
        assert any(rows[start : start + 10] != sorted(rows[start : start + 10]) for start in range(0, 50, 10))
        firsts.add(shard_of(rows[0]))
    assert len(firsts) > 5, "the shards are shuffled too"


def test_up_to_a_window_of_rows_are_shuffled_as_if_there_were_no_shards():
    plain = Order(50, seed=9)
    windowed = Order(50, seed=9, shards=SHARDS, window=50)
    assert plain.dealt(range(210)) == windowed.dealt(range(210))
    firsts = Counter(shard_of(Order(50, seed, shards=SHARDS).dealt(range(1))[0][1]) for seed in range(300))
    assert set(firsts) == set(range(len(SHARDS)))


def test_a_step_is_the_same_whenever_and_in_whatever_order_it_is_asked_for():
    settings = {"shards": SHARDS, "window": 8}
    straight = [dealt_in(Order(50, 2, **settings), step, 6) for step in range(40)]
    order = Order(50, 2, **settings)
    assert [dealt_in(order, step, 6) for step in reversed(range(40))] == straight[::-1]
    assert [dealt_in(order, step, 6) for step in (39, 0, 20, 8, 39)] == [straight[step] for step in (39, 0, 20, 8, 39)]


def test_a_million_rows_are_ordered_once_an_epoch():
    order = Order(1_000_000, seed=0, shards=[64] * 15_625)
    dealt_in(order, 0, 8)
    started = time.perf_counter()
    for step in range(1, 1001):
        dealt_in(order, step, 8)
    assert time.perf_counter() - started < 2, "a thousand steps; ordering a million rows anew each step takes minutes"


def test_shards_that_are_not_all_rows_are_refused():
    with pytest.raises(ValueError, match="shards of 50 rows together, expected 51"):
        Order(51, seed=0, shards=SHARDS)
