"""A training step in float64 against the plain reference, for every kind of drafter that vLLM runs."""

import torch
import toys

from bench.oracles import plain_reference as plain
from drafter.deal import Deal
from drafter.loss import SlotWeights, decay_weights, dpace_weights
from drafter.step import backward

ROWS = ((18, 3), (10, 5), (13, 2))  # tokens, tokens of the prompt
ANCHORS = ([3, 6, 14], [5], [2, 9])
TOKENS_PER_PASS = 20  # several passes


def largest_differences() -> dict[str, float]:
    """Kind of drafter → largest difference of its loss, or of a gradient, under both losses."""
    return {name: max(_differences(**changes)) for name, changes in toys.VARIANTS.items()}


def _differences(**changes) -> list[float]:
    shape = toys.shape(**changes)
    last = shape.block_size
    # A longer block leaves less room in a row.
    anchors = [[a for a in some if a + last <= n] for some, (n, _) in zip(ANCHORS, ROWS, strict=True)]
    rows = [toys.row(n, prompt, seed=i + 1) for i, (n, prompt) in enumerate(ROWS)]
    found = []
    for ours, theirs in ((dpace_weights(0.5), plain.dpace(0.5)), (decay_weights(last, 1.75), plain.decay(1.75))):
        found += _step_differences(shape, rows, anchors, ours, theirs)
    return found


def _step_differences(shape, rows, anchors, slot_weights: SlotWeights, weigh) -> list[float]:
    model, frozen = toys.drafter(shape), toys.frozen()
    deals = [Deal(row, torch.tensor(some, dtype=torch.int64), 1.0) for row, some in zip(rows, anchors, strict=True)]
    normalizer = sum(map(len, anchors))
    found = backward(model, frozen, deals, slot_weights, normalizer=normalizer, tokens_per_pass=TOKENS_PER_PASS)
    weights = toys.weights_of(model)
    documents = [toys.document(row, some) for row, some in zip(rows, anchors, strict=True)]
    hidden = plain.draft_hidden(weights, toys.numbers(shape), documents, frozen.embedding, toys.MASK_TOKEN_ID)
    labels = [row.ids[a + 1 : a + shape.block_size] for row, some in zip(rows, anchors, strict=True) for a in some]
    scale = shape.logit_scale
    expected = plain.full_logit_loss(hidden, frozen.head, torch.stack(labels), weigh, normalizer, logit_scale=scale)
    expected.backward()
    gradients = [float((p.grad - weights[name].grad).abs().max()) for name, p in model.named_parameters()]
    return [abs(found.loss - float(expected.detach())), *gradients]
