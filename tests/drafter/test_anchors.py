import pytest
import torch

from drafter.anchors import draw_anchors, legal_anchors


@pytest.mark.parametrize(
    ("supervised", "expected"), [([11], []), ([8, 9, 10, 11], [8]), ([2, 3, 4], [2, 3, 4]), ([], [])]
)
def test_legal_anchors_are_supervised_and_leave_room_for_the_block(supervised, expected):
    mask = torch.zeros(12, dtype=torch.bool)
    mask[supervised] = True
    assert legal_anchors(mask, 4).tolist() == expected


def test_a_row_shorter_than_a_block_has_no_anchor():
    assert legal_anchors(torch.ones(3, dtype=torch.bool), 4).tolist() == []
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
