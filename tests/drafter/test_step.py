import math
from functools import partial
from pathlib import Path

import pytest
import torch
import toys

from bench.oracles.plain_reference import decay, dpace, draft_hidden, full_logit_loss
from drafter import attention
from drafter.deal import Deal
from drafter.processes import prepare
from drafter.step import backward, passes_of, slot_weights_of

WEIGHINGS = {"dpace": dpace(0.5), "decay": decay(1.75)}


def deals_of(rows, anchors, weights):
    several = zip(rows, anchors, weights, strict=True)
    return [Deal(row, torch.tensor(some, dtype=torch.int64), weight) for row, some, weight in several]


@pytest.mark.parametrize("loss", WEIGHINGS)
@pytest.mark.parametrize("variant", toys.VARIANTS)
def test_a_training_step_has_the_plain_references_loss_and_gradients(variant, loss, tmp_path):
    model, frozen = toys.drafter(toys.shape(**toys.VARIANTS[variant])), toys.frozen()
    rows = [toys.row(22, 3, seed=1), toys.row(14, 5, seed=2), toys.row(12, 2, seed=4), toys.row(16, 2, seed=3)]
    anchors, row_weights = [[3, 6, 14], [5], [], [2, 9]], [1.0, 3.0, 1.0, 0.5]
    slot_weights = slot_weights_of(toys.config(tmp_path, loss=loss).train, model.shape.block_size)
    deals = deals_of(rows, anchors, row_weights)
    found = backward(model, frozen, deals, slot_weights, normalizer=7, tokens_per_pass=1000)

    weights, K = toys.weights_of(model), model.shape.num_draft_tokens
    documents = [toys.document(row, a) for row, a in zip(rows, anchors, strict=True)]
    hidden = draft_hidden(weights, toys.numbers(model.shape), documents, frozen.embedding, toys.MASK_TOKEN_ID)
    labels = torch.stack([row.ids[a + 1 : a + 1 + K] for row, some in zip(rows, anchors, strict=True) for a in some])
    weigh = WEIGHINGS[loss] if loss == "dpace" else decay(max(1.0, 7.0 * model.shape.block_size / 16))
    of_block = [weight for some, weight in zip(anchors, row_weights, strict=True) for _ in some]
    losses = [
        weight
        * full_logit_loss(
            hidden[i : i + 1], frozen.head, labels[i : i + 1], weigh, 7, logit_scale=model.shape.logit_scale
        )
        for i, weight in enumerate(of_block)
    ]
    expected = sum(losses)
    expected.backward()

    assert abs(found.loss - float(expected.detach())) < 1e-9
    for name, parameter in model.named_parameters():
        assert (parameter.grad - weights[name].grad).abs().max() < 1e-9, name
    right = (hidden.detach() @ frozen.head.T).argmax(-1) == labels
    assert found.hits.tolist() == right.sum(0).tolist()
    prefixes = [next((k for k, is_right in enumerate(slots) if not is_right), K) for slots in right.tolist()]
    assert [a.tolist() for a in found.accepted] == [prefixes[:3], prefixes[3:4], [], prefixes[4:]]


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def test_a_step_is_the_same_in_every_number_of_passes():
    model, frozen = toys.drafter(), toys.frozen()
    rows = [toys.row(20 + 3 * i, 3, seed=i) for i in range(5)]
    deals = deals_of(rows, [[3, 9], [4], [5, 6, 17], [], [22]], [1.0, 2.0, 1.0, 1.0, 4.0])
    slot_weights = slot_weights_of(toys.config(Path("x")).train, 4)
    results = []
    for tokens, num_passes in ((1000, None), (1000, 1), (1000, 3), (20, None), (1, None), (26, 7)):
        result = backward(
            model, frozen, deals, slot_weights, normalizer=11, tokens_per_pass=tokens, num_passes=num_passes
        )
        results.append((result, gradients(model)))
    for result, gradient in results[1:]:
        assert result.loss == pytest.approx(results[0][0].loss, abs=1e-12)
        assert torch.equal(result.hits, results[0][0].hits)
        assert [a.tolist() for a in result.accepted] == [a.tolist() for a in results[0][0].accepted]
        assert all((gradient[name] - results[0][1][name]).abs().max() < 1e-12 for name in gradient)


@pytest.mark.parametrize("variant", ["full", "mixed layers", "sinks in windows"])
def test_gradients_do_not_depend_on_how_blocks_are_grouped(variant, monkeypatch):
    model, frozen = toys.drafter(toys.shape(**toys.VARIANTS[variant])), toys.frozen()
    deals = deals_of([toys.row(60, 2, seed=1), toys.row(30, 2, seed=2)], [list(range(2, 50, 2)), [9, 20]], [1.0, 2.0])
    found = []
    for span in (0, 5, 100):
        monkeypatch.setattr(attention, "_SPAN", span)
        backward(model, frozen, deals, torch.ones_like, normalizer=9, tokens_per_pass=1000)
        found.append(gradients(model))
    for other in found[1:]:
        assert all((other[name] - found[0][name]).abs().max() < 1e-9 for name in other)


@pytest.mark.parametrize("computes_again", [False, True])
def test_compiled_layers_have_the_same_gradients_in_passes_of_any_length(computes_again, monkeypatch, tmp_path):
    # All that the compiler does, but for the machine code, which takes it a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    config, found = toys.config(tmp_path, compile=True, activation_checkpointing=computes_again).train, []
    for prepares in (False, True):
        model, frozen = toys.drafter(toys.shape(num_hidden_layers=1, has_attention_sinks=True)), toys.frozen()
        if prepares:
            prepare(model, config)
        for num_tokens in (14, 31):
            deals = deals_of([toys.row(num_tokens, 3, seed=num_tokens)], [[3, 5, 9]], [1.0])
            weigh = slot_weights_of(config, model.shape.block_size)
            backward(model, frozen, deals, weigh, normalizer=3, tokens_per_pass=1000)
        found.append(gradients(model))
    assert all((found[1][name] - gradient).abs().max() < 1e-12 for name, gradient in found[0].items())


def test_passes_hold_at_most_the_tokens_asked_for_in_the_deals_order():
    rows = [toys.row(40, 3, seed=i) for i in range(6)]
    deals = deals_of(rows, [[10], [9], [], [30], [5], [5]], [1.0] * 6)
    passes = passes_of(deals, 20)
    assert [[int(deal.anchors[-1]) if len(deal.anchors) else 0 for deal in some] for some in passes] == [
        [10, 9, 0],
        [30],
        [5, 5],
    ]
    assert passes_of([], 20) == []


def test_a_pass_over_nothing_takes_every_parameter_along_with_a_zero_gradient():
    for variant in ("full", "sinks", "biases", "its own mask embedding", "window"):
        model = toys.drafter(toys.shape(**toys.VARIANTS[variant]))
        result = backward(
            model,
            toys.frozen(),
            [],
            slot_weights_of(toys.config(Path("x")).train, 4),
            normalizer=1,
            tokens_per_pass=9,
            num_passes=2,
        )
        assert (result.loss, result.accepted) == (0.0, []) and result.hits.tolist() == [0, 0, 0]
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters()), variant


def test_a_row_of_2_and_one_of_200_blocks_report_their_common_loss_in_every_grouping():
    # A head of zeros: each slot's cross-entropy is log 32, whatever the drafter says.
    model, frozen = toys.drafter(), toys.frozen()
    frozen.head.zero_()
    few, many = toys.row(20, 3, seed=1), toys.row(240, 3, seed=2)
    deals = deals_of([few, many], [[3, 9], list(range(3, 203))], [1.0, 1.0])

    def uniform(cross_entropy):
        return torch.full_like(cross_entropy, 1 / (3 * math.log(32)))

    for ranks in ([deals], [deals[:1], deals[1:]], [deals[::-1]], [[], deals]):
        for tokens in (1, 100, 1000):
            losses = [
                backward(model, frozen, some, uniform, normalizer=202, tokens_per_pass=tokens).loss for some in ranks
            ]
            assert sum(losses) == pytest.approx(1.0, abs=1e-9)
