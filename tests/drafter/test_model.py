import pytest
import torch
import toys

from bench.oracles.plain_reference import draft_hidden
from drafter.dataset import collate
from drafter.rope import Rope


def ours(model, frozen, rows, anchors):
    batch = collate(rows, [torch.tensor(a) for a in anchors], model.shape.block_size, torch.float64)
    hidden = model(
        batch.states,
        batch.anchors,
        frozen.embedding[batch.anchor_ids],
        frozen.embedding[model.shape.mask_token_id],
    )
    return hidden[batch.is_real]


def plain(model, frozen, rows, anchors):
    documents = [toys.document(row, a) for row, a in zip(rows, anchors, strict=True)]
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return draft_hidden(weights, toys.numbers(model.shape), documents, frozen.embedding, model.shape.mask_token_id)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "block_size": 2},
        {"num_hidden_layers": 1, "block_size": 7, "rope": Rope(theta=10000.0, rotary_dim=6)},
    ],
    ids=["grouped keys", "a key a head", "one key", "one layer"],
)
def test_the_drafter_is_the_plain_reference(changes):
    model, frozen = toys.drafter(toys.shape(**changes)), toys.frozen()
    rows = [toys.row(20, 4, seed=1), toys.row(9, 2, seed=2), toys.row(14, 1, seed=3)]
    anchors = [[4, 5, 11, 12], [2], [1, 6]]
    with torch.no_grad():
        difference = ours(model, frozen, rows, anchors) - plain(model, frozen, rows, anchors)
    assert difference.abs().max() < 1e-12


def inputs(model, *, anchor=5, num_positions=8):
    generator = torch.Generator().manual_seed(4)
    states = torch.randn(1, num_positions, model.shape.context_size, generator=generator, dtype=torch.float64)
    embedding = torch.randn(1, 1, 16, generator=generator, dtype=torch.float64)
    return states, torch.tensor([[anchor]]), embedding


def test_a_block_sees_states_strictly_before_its_anchor():
    model, mask = toys.drafter(), torch.ones(16, dtype=torch.float64)
    states, anchors, embedding = inputs(model, anchor=5)
    with torch.no_grad():
        before = model(states, anchors, embedding, mask)
        for position in range(8):
            changed = states.clone()
            changed[0, position] += 1
            moved = not torch.equal(model(changed, anchors, embedding, mask), before)
            assert moved == (position < 5), position


def test_a_block_sees_itself_in_both_directions():
    model = toys.drafter()
    states, anchors, embedding = inputs(model)
    masks = torch.ones(3, 16, dtype=torch.float64)
    with torch.no_grad():
        before = block_with_mask_inputs(model, states, anchors, embedding, masks)
        for changed_slot in range(3):
            changed = masks.clone()
            changed[changed_slot] *= -0.5
            after = block_with_mask_inputs(model, states, anchors, embedding, changed)
            assert (after - before).abs().amax(-1).min() > 1e-4, "every slot's output moves"


def block_with_mask_inputs(model, states, anchors, embedding, masks):  # [3, H] -> [3, H]
    """The drafter with another input in each mask slot, which it never needs itself."""

    class PerSlot:
        def expand(self, *sizes):
            return masks.expand(*sizes)

    return model(states, anchors, embedding, PerSlot())[0, 0]


def test_blocks_are_blind_to_each_other_and_to_other_documents():
    model, frozen = toys.drafter(), toys.frozen()
    rows = [toys.row(20, 4, seed=1), toys.row(16, 2, seed=2)]
    with torch.no_grad():
        together = ours(model, frozen, rows, [[4, 7, 8], [3, 9]])
        alone = [ours(model, frozen, [rows[d]], [[a]]) for d, a in ((0, 4), (0, 7), (0, 8), (1, 3), (1, 9))]
    assert (together - torch.cat(alone)).abs().max() < 1e-12


def test_what_lies_past_a_documents_end_and_padding_blocks_do_not_matter():
    model, frozen = toys.drafter(), toys.frozen()
    row = toys.row(9, 2, seed=2)
    batch = collate([row, toys.row(30, 2, seed=6)], [torch.tensor([3]), torch.tensor([2, 9, 25])], 4, torch.float64)
    states, anchors = batch.states.clone(), batch.anchors.clone()
    states[0, 8:] = 1e3
    anchors[0, 1:] = 17
    mask = frozen.embedding[31]
    with torch.no_grad():
        before = model(batch.states, batch.anchors, frozen.embedding[batch.anchor_ids], mask)
        after = model(states, anchors, frozen.embedding[batch.anchor_ids], mask)
    assert torch.allclose(before[batch.is_real], after[batch.is_real], atol=1e-12)
    assert torch.isfinite(before).all() and torch.isfinite(after).all()
