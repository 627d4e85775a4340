import pytest
import torch
import toys

from bench.oracles.plain_reference import draft_hidden
from drafter import attention
from drafter.dataset import CachedRow
from drafter.deal import Deal
from drafter.packing import pack
from drafter.shape import LayerAttention
from drafter.step import hidden_of

BOTH_WAYS, CAUSAL = LayerAttention(), LayerAttention(is_causal=True)


def packed_of(model, rows, anchors, dtype=torch.float64):
    deals = [Deal(row, torch.tensor(some, dtype=torch.int64), 1.0) for row, some in zip(rows, anchors, strict=True)]
    return pack(deals, model.shape.block_size, dtype)


def ours(model, frozen, rows, anchors):
    return hidden_of(model, frozen, packed_of(model, rows, anchors))


def plain(model, frozen, rows, anchors):
    documents = [toys.document(row, a) for row, a in zip(rows, anchors, strict=True)]
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return draft_hidden(weights, toys.numbers(model.shape), documents, frozen.embedding, model.shape.mask_token_id)


@pytest.mark.parametrize("variant", toys.VARIANTS)
def test_the_drafter_is_the_plain_reference(variant):
    model, frozen = toys.drafter(toys.shape(**toys.VARIANTS[variant])), toys.frozen()
    rows = [toys.row(30, 4, seed=1), toys.row(9, 2, seed=2), toys.row(12, 2, seed=4), toys.row(14, 1, seed=3)]
    anchors = [[4, 5, 11, 12, *range(14, 23)], [2], [], [1, 6]]
    with torch.no_grad():
        difference = ours(model, frozen, rows, anchors) - plain(model, frozen, rows, anchors)
    assert difference.abs().max() < 1e-12


@pytest.mark.parametrize("span", [0, 7, 40])
def test_blocks_taken_in_groups_are_the_plain_reference(span, monkeypatch):
    monkeypatch.setattr(attention, "_SPAN", span)
    model, frozen = toys.drafter(toys.shape(**toys.VARIANTS["mixed layers"])), toys.frozen()
    rows, anchors = [toys.row(70, 2, seed=1), toys.row(50, 2, seed=2)], [list(range(2, 60, 3)), [40]]
    with torch.no_grad():
        difference = ours(model, frozen, rows, anchors) - plain(model, frozen, rows, anchors)
    assert difference.abs().max() < 1e-12


@pytest.mark.parametrize("kind", [BOTH_WAYS, CAUSAL])
def test_a_block_sees_states_strictly_before_its_anchor(kind):
    model, frozen, row = toys.drafter(toys.shape(layers=(kind,) * 2)), toys.frozen(), toys.row(16, 2)
    with torch.no_grad():
        before = ours(model, frozen, [row], [[5, 9]])
        for position in range(12):
            states = row.states.clone()
            states[position] += 1
            changed = CachedRow("", "", row.ids, 2, states)
            moved = [
                not torch.equal(a, b) for a, b in zip(ours(model, frozen, [changed], [[5, 9]]), before, strict=True)
            ]
            assert moved == [position < 5, position < 9], position


def outputs(model, frozen, masks):  # [K, H] -> [K, H], of a block with another input in each masked slot
    packed = packed_of(model, [toys.row(16, 2)], [[5]])
    return model(packed, frozen.embedding[packed.anchor_ids], masks)[0]


@pytest.mark.parametrize(("kind", "is_causal"), [(BOTH_WAYS, False), (CAUSAL, True)])
def test_a_block_sees_itself_in_both_directions_unless_it_is_causal(kind, is_causal):
    model, frozen = toys.drafter(toys.shape(layers=(kind,) * 2)), toys.frozen()
    masks = torch.ones(3, 16, dtype=torch.float64)
    with torch.no_grad():
        before = outputs(model, frozen, masks)
        for changed_slot in range(3):
            changed = masks.clone()
            changed[changed_slot] *= -0.5
            moved = (outputs(model, frozen, changed) - before).abs().amax(-1) > 1e-4
            assert moved.tolist() == [not is_causal or slot >= changed_slot for slot in range(3)]


def test_blocks_are_blind_to_each_other_and_to_other_rows():
    model, frozen = toys.drafter(), toys.frozen()
    rows = [toys.row(20, 4, seed=1), toys.row(16, 2, seed=2)]
    with torch.no_grad():
        together = ours(model, frozen, rows, [[4, 7, 8], [3, 9]])
        alone = [ours(model, frozen, [rows[d]], [[a]]) for d, a in ((0, 4), (0, 7), (0, 8), (1, 3), (1, 9))]
    assert (together - torch.cat(alone)).abs().max() < 1e-12
