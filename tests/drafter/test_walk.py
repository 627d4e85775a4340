import pytest
import torch
import toys
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.oracles.plain_reference import draft_hidden, speculate
from drafter.walk import WalkCounts, accepted_everywhere, jumps, walk


def test_jumps_counted_by_hand():
    # The reply's first token is at 3, its last at 12.
    accepted = [9, 9, 9, 2, 0, 0, 0, 3, 0, 0, 0, 1, 9]
    # 3 takes two drafts and one token of the target's: 6; 6 takes none: 7; 7 takes three: 11; 11 takes one: 13, out.
    assert jumps(accepted, 3, 12) == [3, 6, 7, 11]
    assert jumps(accepted, 12, 12) == []
    assert jumps([0] * 5, 1, 4) == [1, 2, 3]


def test_speculation_counted_by_hand():
    reply = [5, 6, 7, 8, 9, 10]
    drafts = {0: [6, 7, 0], 3: [0, 10, 1], 4: [10, 11, 12]}
    assert speculate(reply, drafts.__getitem__) == [2, 0, 1]


def plain_drafts(model, frozen, row):
    """What the drafter proposes after reply token i, by the plain reference, a block at a time."""

    def draft(i):
        document = toys.document(row, [row.num_prompt_tokens + i])
        weights = {name: p.detach() for name, p in model.named_parameters()}
        hidden = draft_hidden(weights, toys.numbers(model.shape), [document], frozen.embedding, toys.MASK_TOKEN_ID)
        return (hidden[0] @ frozen.head.T).argmax(-1).tolist()

    return draft


def test_the_walk_is_greedy_speculative_decoding():
    model, frozen = toys.drafter(toys.shape(num_hidden_layers=1)), toys.frozen()
    rows = []
    for seed, (num_tokens, num_prompt_tokens) in enumerate([(24, 3), (12, 9), (17, 1), (8, 7), (19, 5)]):
        row = toys.row(num_tokens, num_prompt_tokens, seed=seed, slice="ab"[seed % 2])
        rows.append(partly_right(model, frozen, row))
    steps = {}
    for row in rows:
        reply = row.ids[row.num_prompt_tokens :].tolist()
        steps[row.row_id] = speculate(reply, plain_drafts(model, frozen, row)) if len(reply) > 1 else []
    with torch.no_grad():
        total, slices = walk(model, frozen, rows, pass_bytes=1 << 15)
    everything = [accepted for some in steps.values() for accepted in some]
    assert 0 < sum(everything) < 3 * len(everything), "some drafts are right and some are wrong"
    assert {0, 1, 2, 3} == set(everything)
    assert total.num_drafts == len(everything)
    assert total.num_accepted_tokens == sum(everything)
    assert total.num_accepted_tokens_per_pos == [sum(a > k for a in everything) for k in range(3)]
    assert total.acceptance_length == pytest.approx(1 + sum(everything) / len(everything))
    for name in "ab":
        some = [a for row in rows if row.slice == name for a in steps[row.row_id]]
        assert (slices[name].num_drafts, slices[name].num_accepted_tokens) == (len(some), sum(some))


def partly_right(model, frozen, row):
    """The row with its reply bent, from left to right, towards what the drafter proposes (two blocks in three)."""
    draft, at, block = plain_drafts(model, frozen, row), 0, 0
    last = row.num_tokens - row.num_prompt_tokens - 1
    while at < last:
        right = (block % 4) if block % 4 < 3 else 3
        for k, guess in enumerate(draft(at)[:right]):
            if at + 1 + k <= last:
                row.ids[row.num_prompt_tokens + at + 1 + k] = guess
        at, block = at + right + 1, block + 1
    return row


class Memory(TorchDispatchMode):
    """The most bytes of tensors made inside that were there at once."""

    def __init__(self):
        super().__init__()
        self.peak, self._live = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)):
            storage = tensor.untyped_storage()
            self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out


@pytest.mark.parametrize(
    "changes, budgets",
    [({}, (23,)), ({"intermediate_size": 400}, (23, 24)), ({"num_attention_heads": 32}, (26,))],
)
def test_a_walk_stays_within_its_memory_however_long_the_replies_and_counts_the_same(changes, budgets):
    model, frozen = toys.drafter(toys.shape(**changes)), toys.frozen()
    rows = [toys.row(n, 5, seed=n) for n in (300, 40, 2, 90, 200)]
    whole = accepted_everywhere(model, frozen, rows, pass_bytes=1 << 40)
    found, taken = [], []
    for pass_bytes in (1 << exponent for exponent in budgets):
        with Memory() as memory:
            found.append(accepted_everywhere(model, frozen, rows, pass_bytes=pass_bytes))
        taken.append(memory.peak / pass_bytes)
    assert max(taken) < 1, taken
    assert all(torch.equal(a, b) for other in found for a, b in zip(whole, other, strict=True))


def test_a_walk_keeps_nothing_for_a_gradient():
    model, frozen = toys.drafter(toys.shape(has_attention_sinks=True, num_attention_heads=32)), toys.frozen()
    with Memory() as memory:
        accepted_everywhere(model, frozen, [toys.row(400, 5)])
    softmax_of_all = 8 * 32 * 4 * 395 * 200  # over 200 positions on average, in one of two layers
    assert memory.peak < softmax_of_all


def test_a_reply_that_ends_inside_a_block_counts_only_what_it_emitted():
    # All drafts right, 6 reply tokens: one from prefill, then 3 + 1, then 1 of the 3.
    counts = WalkCounts()
    counts.add(speculate([1, 2, 3, 4, 5, 6], lambda i: [i + 2, i + 3, i + 4]), 6, 3)
    assert (counts.num_drafts, counts.num_accepted_tokens) == (2, 4)
    assert counts.num_accepted_tokens_per_pos == [2, 1, 1]
    assert counts.emitted_tokens_per_step == pytest.approx(2.5)


def test_counts_of_replies_add_up_and_lengths_are_derived():
    counts = WalkCounts()
    counts.add([3, 0], 6, 3)
    counts.add([0, 0, 0, 0], 5, 3)
    assert counts.acceptance_length == pytest.approx(1 + 3 / 6)
    assert counts.emitted_tokens_per_step == pytest.approx(9 / 6)
    assert counts.as_dict()["num_accepted_tokens_per_pos"] == [1, 1, 1]
    assert WalkCounts().acceptance_length == 1
