import pytest
import torch
import toys

from drafter.anchors import draw_anchors, legal_anchors
from drafter.dataset import CachedRow, collate


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


def test_slot_k_of_a_block_at_the_anchor_is_labelled_with_the_token_k_positions_on():
    # Token at p is p mod 100 and the state at p encodes p; one block of 4 at anchor 9.
    ids = torch.arange(120) % 100
    states = torch.arange(119)[:, None].expand(119, 3).to(torch.bfloat16)
    batch = collate([CachedRow("r", "s", ids, 5, states)], [torch.tensor([9])], 4, torch.float64)
    assert batch.labels.tolist() == [[[10, 11, 12]]]
    assert batch.anchor_ids.tolist() == [[9]]
    assert batch.states[0, :, 0].tolist() == list(range(9)), "context is every position before the anchor"


def test_the_last_legal_block_is_labelled_to_the_last_token():
    row = toys.row(12, 3)
    batch = collate([row], [torch.tensor([8])], 4, torch.float64)
    assert batch.labels[0, 0].tolist() == row.ids[9:].tolist()
