import pytest
import torch
import toys

from drafter.dataset import CachedRow
from drafter.deal import Deal
from drafter.packing import nothing, pack


def test_slot_k_of_a_block_at_the_anchor_is_labelled_with_the_token_k_positions_on():
    # Token at p is p mod 100 and the state at p encodes p; one block of 4 at anchor 9.
    ids = torch.arange(120) % 100
    states = torch.arange(119)[:, None].expand(119, 3).to(torch.bfloat16)
    packed = pack([Deal(CachedRow("r", "s", ids, 5, states), torch.tensor([9]), 1.0)], 4, torch.float64)
    assert packed.labels.tolist() == [[10, 11, 12]]
    assert packed.anchor_ids.tolist() == [9]
    assert packed.states[:, 0].tolist() == list(range(9)), "context is every position before the anchor"


def test_the_last_legal_block_is_labelled_to_the_last_token_and_a_later_one_repeats_it():
    row = toys.row(12, 3)
    packed = pack([Deal(row, torch.tensor([8, 10]), 1.0)], 4, torch.float64)
    assert packed.labels[0].tolist() == row.ids[9:].tolist()
    assert packed.labels[1].tolist() == [int(row.ids[11])] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_lie_one_after_the_other_each_cut_at_its_last_anchor(dtype):
    rows = [toys.row(12, 3, seed=1), toys.row(9, 2, seed=3), toys.row(30, 4, seed=2)]
    anchors = [torch.tensor([3, 8]), torch.empty(0, dtype=torch.int64), torch.tensor([20])]
    packed = pack([Deal(row, some, w) for row, some, w in zip(rows, anchors, (1.0, 5.0, 2.5), strict=True)], 4, dtype)
    assert packed.num_positions == (8, 0, 20) and packed.num_blocks == (2, 0, 1)
    assert torch.equal(packed.states, torch.cat([rows[0].states[:8], rows[2].states[:20]]).to(dtype))
    assert packed.anchors.tolist() == [3, 8, 20] and packed.weights.tolist() == [1, 1, 2.5]
    assert packed.anchor_ids.tolist() == [*rows[0].ids[[3, 8]].tolist(), int(rows[2].ids[20])]
    assert torch.equal(
        packed.labels,
        torch.stack([row.ids[a + 1 : a + 4] for row, a in zip((rows[0], rows[0], rows[2]), (3, 8, 20), strict=True)]),
    )


def test_nothing_is_a_pass_without_positions_and_blocks():
    packed = nothing(30, 4, torch.float32)
    assert packed.states.shape == (0, 30) and packed.labels.shape == (0, 3) and len(packed.anchors) == 0
    assert packed.num_positions == packed.num_blocks == ()
