"""The block-diffusion drafter, as vLLM runs it: one parallel pass predicts a whole block.

Legend: T context positions of all rows, A blocks of all rows, B block size, K = B - 1 predicted slots, H width,
F = layers x H_target, N heads, G key-value heads, E head width, R rotary dimensions. Slot 0 of a block is the known
anchor token, the others are masks.

Parameters are masters of any precision; they are cast to the dtype of what flows through (drafter/precision.py).

Source: DFlash, arXiv 2602.06036, section 3; tensor names as in its released checkpoints.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafter.attention import Seen, attend, view
from drafter.norm import RMSNorm
from drafter.packing import Packed
from drafter.shape import DrafterShape


class Linear(nn.Linear):
    """A linear layer whose parameters are cast to the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Attention(nn.Module):
    """Block queries over the target's context and their own block."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.num_heads, self.num_kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self.head_dim, self._rope, self._value_scale = shape.head_dim, shape.rope, shape.value_scale
        bias, E = shape.has_attention_bias, shape.head_dim
        self.q_proj = Linear(shape.hidden_size, self.num_heads * E, bias=bias)
        self.k_proj = Linear(shape.hidden_size, self.num_kv_heads * E, bias=bias)
        self.v_proj = Linear(shape.hidden_size, self.num_kv_heads * E, bias=bias)
        self.o_proj = Linear(self.num_heads * E, shape.hidden_size, bias=bias)
        self.q_norm = RMSNorm(E, shape.rms_norm_eps)
        self.k_norm = RMSNorm(E, shape.rms_norm_eps)
        self.attention_sink_bias = nn.Parameter(torch.zeros(self.num_heads)) if shape.has_attention_sinks else None

    def forward(
        self,
        x: Tensor,  # [A, B, H]
        context: Tensor,  # [T, H]
        rope: tuple[Tensor, Tensor],  # cos and sin of the slots' positions, [A, B, 1, R/2]
        context_rope: tuple[Tensor, Tensor],  # of the context's, [T, 1, R/2]
        seen: Seen,
    ) -> Tensor:  # [A, B, H]
        q = self.q_norm.and_turn(self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim)), self._rope, *rope)
        k, v = self._keys_and_values(x, rope)
        context_k, context_v = self._keys_and_values(context, context_rope)
        out = attend(q, k, v, context_k, context_v, seen, self.attention_sink_bias)
        return self.o_proj(out.flatten(-2))

    def _keys_and_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # 2 x [..., G, E]
        heads = (self.num_kv_heads, self.head_dim)
        k = self.k_norm.and_turn(self.k_proj(x).unflatten(-1, heads), self._rope, *rope)
        v = self.v_proj(x).unflatten(-1, heads)
        return k, v if self._value_scale is None else v * self._value_scale


class MLP(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [..., H] -> [..., H]
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One drafter layer."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, *attention_inputs) -> Tensor:  # [A, B, H] -> [A, B, H]
        x = x + self.self_attn(self.input_layernorm(x), *attention_inputs)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The drafter without embedding and head, which are the target's (drafter/frozen.py)."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.shape = shape
        self.fc = Linear(shape.context_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(shape.hidden_size)) if shape.has_mask_embedding else None

    def forward(
        self,
        packed: Packed,
        anchor_embeddings: Tensor,  # [A, H]
        mask_embedding: Tensor,  # [H] or, of each masked slot, [K, H]; not used by a drafter that has its own
    ) -> Tensor:  # [A, K, H], what the head reads for slots 1..K
        shape = self.shape
        A, B, device = len(packed.anchors), shape.block_size, packed.anchors.device
        if self.mask_embedding is not None:
            mask_embedding = self.mask_embedding.to(anchor_embeddings.dtype)
        x = torch.cat([anchor_embeddings[:, None], mask_embedding.expand(A, B - 1, -1)], dim=1)
        context = self.hidden_norm(self.fc(packed.states))
        wide = torch.promote_types(x.dtype, torch.float32)
        slots = packed.anchors[:, None, None] + torch.arange(B, device=device)[:, None]  # [A, B, 1]
        positions = torch.cat([torch.arange(n, device=device) for n in (*packed.num_positions, 0)])
        rope = shape.rope.cos_sin(slots, wide)
        context_rope = shape.rope.cos_sin(positions[:, None], wide)
        views = {layer: view(layer, packed, B) for layer in set(shape.layers)}
        for layer, kind in zip(self.layers, shape.layers, strict=True):
            x = layer(x, context, rope, context_rope, views[kind])
        return self.norm(x[:, 1:])
