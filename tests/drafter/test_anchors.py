import numpy as np
import pytest

from drafter.anchors import anchor_seed, draw_anchors, num_legal_anchors
from drafter.order import Order


@pytest.mark.parametrize(
    ("num_prompt_tokens", "expected"), [(12, []), (11, []), (9, []), (8, [8]), (7, [7, 8]), (0, list(range(9)))]
)
def test_legal_anchors_are_the_replys_and_leave_room_for_the_block(num_prompt_tokens, expected):
    assert draw_anchors(num_prompt_tokens, 12, 4, 99, seed=0).tolist() == expected
    assert num_legal_anchors(12 - num_prompt_tokens, 4) == len(expected)


def test_a_row_shorter_than_a_block_has_no_anchor():
    assert num_legal_anchors(3, 4) == num_legal_anchors(0, 4) == 0
    assert draw_anchors(0, 3, 4, 10, seed=0).tolist() == []
    assert draw_anchors(1, 4, 4, 10, seed=0).tolist() == []
    assert draw_anchors(1, 5, 4, 10, seed=0).tolist() == [1]


def test_anchors_are_drawn_without_replacement_and_reach_both_ends():
    seen = set()
    for seed in range(200):
        drawn = draw_anchors(5, 30, 4, 6, seed=seed).tolist()
        assert drawn == sorted(set(drawn)) and len(drawn) == 6
        assert drawn == draw_anchors(5, 30, 4, 6, seed=seed).tolist()
        seen.update(drawn)
    assert seen == set(range(5, 27)), "every legal start and nothing else, 26 the last one"


def test_a_date_and_the_largest_seed_can_be_drawn_by():
    assert anchor_seed(0, 0, 5) == 5 and anchor_seed(3, 2, 1) == (3 * 1_000_003 + 2) * 1_000_003 + 1
    for seed in (20240601, 2**32 - 1):
        drawn = [draw_anchors(0, 40, 4, 6, anchor_seed(seed, epoch, 9)).tolist() for epoch in range(5)]
        assert len({tuple(anchors) for anchors in drawn}) > 1
        np.random.default_rng(anchor_seed(seed, 7, 9))  # on-policy anchors
        Order(9, seed).dealt(range(20))
