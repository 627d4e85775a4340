from collections import Counter

import pytest
import torch
import toys

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


def test_anchors_are_drawn_anew_each_epoch_and_for_each_row():
    rows = [toys.row(60, 4, seed=i) for i in range(2)]
    order = Order(2, 1, seed=0)

    def draw(*picks):
        return [a.tolist() for a in order.anchors_of(rows, picks, limit=5, block_size=4)]

    assert draw((0, 0)) == draw((0, 0))
    assert draw((0, 0)) != draw((1, 0))
    assert draw((0, 0)) != draw((0, 1))
    assert all(torch.tensor(a).ge(4).all() and torch.tensor(a).le(56).all() for a in draw((0, 0), (5, 1)))


def test_another_seed_is_another_order():
    assert [Order(20, 20, seed=0).rows_of(0)] != [Order(20, 20, seed=1).rows_of(0)]
