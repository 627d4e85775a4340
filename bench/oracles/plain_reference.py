"""The drafter, its mask, its losses and greedy speculative decoding, written out plainly: slow, and to be believed.

Nothing here calls or copies the code that it checks. Loops stand where that code has shapes; every query
sees every key of the whole batch through one dense mask, other documents and other blocks included.

Legend: Q queries, S keys, H width, E head width, B block size, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Document:
    """A reply as the drafter sees it while it learns: states of its positions, and where blocks start."""

    ids: Sequence[int]
    states: Tensor  # [n, F], n >= len(ids) - 1
    anchors: Sequence[int]


@dataclass(frozen=True)
class Numbers:
    """What the shapes of the weights do not tell."""

    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float


@dataclass(frozen=True)
class _Place:
    document: int
    block: int | None  # None for a context key
    position: int


def draft_hidden(
    weights: Mapping[str, Tensor],
    numbers: Numbers,
    documents: Sequence[Document],
    embedding: Tensor,  # [V, H]
    mask_token_id: int,
) -> Tensor:  # [blocks, B - 1, H]
    """What the head reads for slots 1..B-1 of every block, documents and anchors in order.

    Source: DFlash, arXiv 2602.06036, section 3, and the released checkpoints' own modelling file.
    """
    context, keys, queries, rows = [], [], [], []
    for d, document in enumerate(documents):
        for position, state in enumerate(document.states):
            context.append(_norm(weights["fc.weight"] @ state, weights["hidden_norm.weight"], numbers.eps))
            keys.append(_Place(d, None, position))
        for b, anchor in enumerate(document.anchors):
            for slot in range(numbers.block_size):
                rows.append(embedding[document.ids[anchor] if slot == 0 else mask_token_id])
                queries.append(_Place(d, b, anchor + slot))
    visible = dense_mask(queries, keys + queries, [document.anchors for document in documents])
    x = torch.stack(rows)
    num_layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    for i in range(num_layers):
        layer = {n.removeprefix(f"layers.{i}."): w for n, w in weights.items() if n.startswith(f"layers.{i}.")}
        x = x + _attention(layer, numbers, x, torch.stack(context), queries, keys, visible)
        y = _norm(x, layer["post_attention_layernorm.weight"], numbers.eps)
        gate = y @ layer["mlp.gate_proj.weight"].T
        up = y @ layer["mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ layer["mlp.down_proj.weight"].T
    x = _norm(x, weights["norm.weight"], numbers.eps)
    slots = [i for i in range(len(queries)) if i % numbers.block_size]
    return x[slots].view(-1, numbers.block_size - 1, x.shape[-1])


def dense_mask(queries: Sequence[_Place], keys: Sequence[_Place], anchors: Sequence[Sequence[int]]) -> Tensor:
    """Bool [Q, S]: a block sees itself both ways, and its own document's states strictly before its anchor."""
    mask = torch.zeros(len(queries), len(keys), dtype=torch.bool)
    for q, query in enumerate(queries):
        for k, key in enumerate(keys):
            if key.document != query.document:
                continue
            if key.block is None:
                mask[q, k] = key.position < anchors[query.document][query.block]
            else:
                mask[q, k] = key.block == query.block
    return mask


def _attention(layer, numbers, x, context, queries, keys, visible) -> Tensor:  # [Q, H]
    y = _norm(x, layer["input_layernorm.weight"], numbers.eps)
    sources = torch.cat([context, y])  # context enters every layer as it is
    places = list(keys) + list(queries)
    E, group = numbers.head_dim, numbers.num_heads // numbers.num_kv_heads
    heads = []
    for head in range(numbers.num_heads):
        kv = head // group
        q = y @ layer["self_attn.q_proj.weight"][head * E : (head + 1) * E].T
        k = sources @ layer["self_attn.k_proj.weight"][kv * E : (kv + 1) * E].T
        v = sources @ layer["self_attn.v_proj.weight"][kv * E : (kv + 1) * E].T
        q = _turn(_norm(q, layer["self_attn.q_norm.weight"], numbers.eps), queries, numbers.rope_theta)
        k = _turn(_norm(k, layer["self_attn.k_norm.weight"], numbers.eps), places, numbers.rope_theta)
        out = []
        for i in range(len(queries)):
            seen = visible[i].nonzero().squeeze(-1)
            scores = (k[seen] * q[i]).sum(-1) / math.sqrt(E)
            weights = torch.exp(scores - scores.max().detach())
            out.append((weights[:, None] * v[seen]).sum(0) / weights.sum())
        heads.append(torch.stack(out))
    return torch.cat(heads, dim=-1) @ layer["self_attn.o_proj.weight"].T


def _norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def _turn(x: Tensor, places: Sequence[_Place], theta: float) -> Tensor:  # [n, E]
    """Each pair (i, i + E/2) turned by its position's angle (rotate-half layout)."""
    half = x.shape[-1] // 2
    angles = [[p.position * theta ** (-i / half) for i in range(half)] for p in places]
    cos = torch.tensor([[math.cos(a) for a in row] for row in angles], dtype=x.dtype)
    sin = torch.tensor([[math.sin(a) for a in row] for row in angles], dtype=x.dtype)
    first, second = x[:, :half], x[:, half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def full_logit_loss(
    hidden: Tensor,  # [N, K, H]
    head: Tensor,  # [V, H]
    labels: Tensor,  # [N, K]
    weigh: Callable[[list[float]], list[float]],
    normalizer: float,
) -> Tensor:
    """Weighted cross-entropy over whole logits; ``weigh`` maps a block's label probabilities to slot weights."""
    total = hidden.new_zeros(())
    for block, wanted in zip(hidden, labels, strict=True):
        log_probability = torch.log_softmax(block @ head.T, dim=-1)
        at_label = [log_probability[k, int(label)] for k, label in enumerate(wanted)]
        weights = weigh([math.exp(float(value.detach())) for value in at_label])
        for weight, value in zip(weights, at_label, strict=True):
            total = total - weight * value
    return total / normalizer


def decay(gamma: float) -> Callable[[list[float]], list[float]]:
    """exp(-(k - 1) / gamma) for slot k."""
    return lambda probabilities: [math.exp(-k / gamma) for k in range(len(probabilities))]


def dpace(alpha: float) -> Callable[[list[float]], list[float]]:
    """The sum, over every m at or after the slot, of the product of the first m smoothed probabilities."""

    def weigh(probabilities: list[float]) -> list[float]:
        smooth = [(1 - alpha) * p + alpha for p in probabilities]
        reached = [math.prod(smooth[: m + 1]) for m in range(len(smooth))]
        return [sum(reached[j:]) for j in range(len(smooth))]

    return weigh


def speculate(
    reply: Sequence[int],
    draft: Callable[[int], Sequence[int]],
) -> list[int]:
    """Accepted drafts of each step of greedy speculative decoding, when the target says ``reply``.

    ``draft(i)`` proposes what follows reply token i. The first token comes from prefill; each step emits what
    was right and one token of the target's own, and drafts past the end of the reply do not count.
    """
    emitted, steps = [reply[0]], []
    while len(emitted) < len(reply):
        accepted = 0
        for guess in draft(len(emitted) - 1):
            if len(emitted) == len(reply) or guess != reply[len(emitted)]:
                break
            emitted.append(guess)
            accepted += 1
        if len(emitted) < len(reply):
            emitted.append(reply[len(emitted)])
        steps.append(accepted)
    return steps
