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

from bench.oracles.plain_rope import Rotation


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
    rotation: Rotation
    layers: Sequence[tuple[int | None, bool]]  # of each layer: the positions that a slot sees, and is it causal
    value_scale: float = 1.0


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
    mask = weights["mask_embedding"] if "mask_embedding" in weights else embedding[mask_token_id]
    context, keys, queries, rows = [], [], [], []
    for d, document in enumerate(documents):
        for position, state in enumerate(document.states):
            context.append(_norm(weights["fc.weight"] @ state, weights["hidden_norm.weight"], numbers.eps))
            keys.append(_Place(d, None, position))
        for b, anchor in enumerate(document.anchors):
            for slot in range(numbers.block_size):
                rows.append(embedding[document.ids[anchor]] if slot == 0 else mask)
                queries.append(_Place(d, b, anchor + slot))
    x = torch.stack(rows)
    for i, (window, is_causal) in enumerate(numbers.layers):
        visible = dense_mask(queries, keys + queries, [d.anchors for d in documents], window, is_causal)
        layer = {n.removeprefix(f"layers.{i}."): w for n, w in weights.items() if n.startswith(f"layers.{i}.")}
        x = x + _attention(layer, numbers, x, torch.stack(context), queries, keys, visible)
        y = _norm(x, layer["post_attention_layernorm.weight"], numbers.eps)
        gate = y @ layer["mlp.gate_proj.weight"].T
        up = y @ layer["mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ layer["mlp.down_proj.weight"].T
    x = _norm(x, weights["norm.weight"], numbers.eps)
    slots = [i for i in range(len(queries)) if i % numbers.block_size]
    return x[slots].view(-1, numbers.block_size - 1, x.shape[-1])


def dense_mask(
    queries: Sequence[_Place],
    keys: Sequence[_Place],
    anchors: Sequence[Sequence[int]],
    window: int | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Bool [Q, S]: a block sees its own document's states strictly before its anchor, and itself.

    Causal: of itself no later slot. With a window: nothing that is ``window`` or more positions away.
    """
    mask = torch.zeros(len(queries), len(keys), dtype=torch.bool)
    for q, query in enumerate(queries):
        for k, key in enumerate(keys):
            if key.document != query.document:
                continue
            if window is not None and abs(query.position - key.position) >= window:
                continue
            if key.block is None:
                mask[q, k] = key.position < anchors[query.document][query.block]
            elif key.block == query.block:
                mask[q, k] = key.position <= query.position or not is_causal
    return mask


def _attention(layer, numbers, x, context, queries, keys, visible) -> Tensor:  # [Q, H]
    y = _norm(x, layer["input_layernorm.weight"], numbers.eps)
    sources = torch.cat([context, y])  # context enters every layer as it is
    places = list(keys) + list(queries)
    E, group = numbers.head_dim, numbers.num_heads // numbers.num_kv_heads
    heads = []
    for head in range(numbers.num_heads):
        q = _project(layer, "q", y, head, E)
        k = _project(layer, "k", sources, head // group, E)
        v = _project(layer, "v", sources, head // group, E) * numbers.value_scale
        q = _turn(_norm(q, layer["self_attn.q_norm.weight"], numbers.eps), queries, numbers.rotation)
        k = _turn(_norm(k, layer["self_attn.k_norm.weight"], numbers.eps), places, numbers.rotation)
        out = []
        for i in range(len(queries)):
            seen = visible[i].nonzero().squeeze(-1)
            scores = (k[seen] * q[i]).sum(-1) / math.sqrt(E)
            top = scores.max().detach()
            weights = torch.exp(scores - top)
            total = weights.sum()
            if "self_attn.attention_sink_bias" in layer:  # takes its share of the attention and gives nothing
                total = total + torch.exp(layer["self_attn.attention_sink_bias"][head] - top)
            out.append((weights[:, None] * v[seen]).sum(0) / total)
        heads.append(torch.stack(out))
    out = torch.cat(heads, dim=-1) @ layer["self_attn.o_proj.weight"].T
    return out + layer["self_attn.o_proj.bias"] if "self_attn.o_proj.bias" in layer else out


def _project(layer, name, x, head, size) -> Tensor:  # [n, H] -> [n, E]
    rows = slice(head * size, (head + 1) * size)
    out = x @ layer[f"self_attn.{name}_proj.weight"][rows].T
    return out + layer[f"self_attn.{name}_proj.bias"][rows] if f"self_attn.{name}_proj.bias" in layer else out


def _norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def _turn(x: Tensor, places: Sequence[_Place], rotation: Rotation) -> Tensor:  # [n, E]
    """Each pair turned by its position's angle; what belongs to no pair stays."""
    pairs = rotation.size // 2
    columns = list(x.unbind(-1))
    for i in range(pairs):
        a, b = (2 * i, 2 * i + 1) if rotation.are_neighbours_paired else (i, i + pairs)
        angles = [place.position * rotation.frequency(i) for place in places]
        cos = torch.tensor([math.cos(angle) for angle in angles], dtype=x.dtype) * rotation.length()
        sin = torch.tensor([math.sin(angle) for angle in angles], dtype=x.dtype) * rotation.length()
        columns[a], columns[b] = x[:, a] * cos - x[:, b] * sin, x[:, b] * cos + x[:, a] * sin
    return torch.stack(columns, dim=-1)


def full_logit_loss(
    hidden: Tensor,  # [N, K, H]
    head: Tensor,  # [V, H]
    labels: Tensor,  # [N, K]
    weigh: Callable[[list[float]], list[float]],
    normalizer: float,
    *,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
) -> Tensor:
    """Weighted cross-entropy over whole logits; ``weigh`` maps a block's label probabilities to slot weights."""
    total = hidden.new_zeros(())
    for block, wanted in zip(hidden, labels, strict=True):
        logits = block @ head.T
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        log_probability = torch.log_softmax(logit_scale * logits, dim=-1)
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
