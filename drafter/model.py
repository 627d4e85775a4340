"""The block-diffusion drafter, as vLLM runs it: one parallel pass predicts a whole block.

Legend: D documents, T target positions, A anchors a document, B block size, H width, F = layers x H_target,
N heads, G key-value heads, E head width. Slot 0 of a block is the known anchor token, the others are masks;
a block sees the target's states strictly before its anchor, and itself in both directions.

Source: DFlash, arXiv 2602.06036, section 3; tensor names as in its released checkpoints.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafter.shape import DrafterShape


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> [..., size]
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Block queries over the target's context and their own block."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.num_heads, self.num_kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self.head_dim, self._rope = shape.head_dim, shape.rope
        self.q_proj = nn.Linear(shape.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, shape.rms_norm_eps)

    def forward(
        self,
        x: Tensor,  # [D, A, B, H]
        context: Tensor,  # [D, T, H]
        hidden_from_block: Tensor,  # [D, 1, A, 1, T], True where a context position is not before the anchor
        rope: tuple[Tensor, Tensor],  # cos and sin of the slots' positions, [D, 1, A, B, R/2]
        context_rope: tuple[Tensor, Tensor],  # of the context's, [1, T, R/2]
    ) -> Tensor:  # [D, A, B, H]
        D, A, B, _ = x.shape
        T, N, G, E = context.shape[1], self.num_heads, self.num_kv_heads, self.head_dim
        q = self._rope.turn(self.q_norm(self.q_proj(x).view(D, A, B, N, E)).permute(0, 3, 1, 2, 4), *rope)
        k = self._rope.turn(self.k_norm(self.k_proj(x).view(D, A, B, G, E)).permute(0, 3, 1, 2, 4), *rope)
        v = self.v_proj(x).view(D, A, B, G, E).permute(0, 3, 1, 2, 4)  # [D, G, A, B, E]
        k_ctx = self._rope.turn(self.k_norm(self.k_proj(context).view(D, T, G, E)).transpose(1, 2), *context_rope)
        v_ctx = self.v_proj(context).view(D, T, G, E).transpose(1, 2)  # [D, G, T, E]

        # Heads that share keys are stacked along the queries, so that no key is copied.
        q = (q * E**-0.5).reshape(D, G, N // G, A, B, E)
        to_context = (q.reshape(D, G, -1, E) @ k_ctx.transpose(-1, -2)).view(D, N, A, B, T)
        to_context = to_context.masked_fill(hidden_from_block, float("-inf"))
        to_block = (q @ k[:, :, None].transpose(-1, -2)).reshape(D, N, A, B, B)
        weights = torch.softmax(torch.cat([to_context, to_block], dim=-1), dim=-1)
        on_context, on_block = weights.split([T, B], dim=-1)
        out = (on_context.reshape(D, G, -1, T) @ v_ctx).view(D, G, N // G, A, B, E)
        out = out + on_block.reshape(D, G, N // G, A, B, B) @ v[:, :, None]
        return self.o_proj(out.permute(0, 3, 4, 1, 2, 5).reshape(D, A, B, N * E))


class MLP(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

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

    def forward(self, x: Tensor, *attention_inputs) -> Tensor:  # [D, A, B, H] -> [D, A, B, H]
        x = x + self.self_attn(self.input_layernorm(x), *attention_inputs)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The drafter without embedding and head, which are the target's (drafter/frozen.py)."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.context_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self,
        states: Tensor,  # [D, T, F], the target's states of positions 0..T-1; anything past a document's end
        anchors: Tensor,  # [D, A], position of each block's slot 0; 1 <= anchor <= T
        anchor_embeddings: Tensor,  # [D, A, H]
        mask_embedding: Tensor,  # [H]
    ) -> Tensor:  # [D, A, B - 1, H], what the head reads for slots 1..B-1
        (D, A), B, T = anchors.shape, self.shape.block_size, states.shape[1]
        context = self.hidden_norm(self.fc(states))
        masks = mask_embedding.expand(D, A, B - 1, -1)
        x = torch.cat([anchor_embeddings[:, :, None], masks], dim=2)
        slots = torch.arange(B, device=anchors.device)
        positions = torch.arange(T, device=anchors.device)
        hidden_from_block = (positions >= anchors[..., None])[:, None, :, None]  # [D, 1, A, 1, T]
        rope = tuple(table[:, None] for table in self.shape.rope.cos_sin(anchors[..., None] + slots, x.dtype))
        context_rope = self.shape.rope.cos_sin(positions[None], x.dtype)
        for layer in self.layers:
            x = layer(x, context, hidden_from_block, rope, context_rope)
        return self.norm(x[:, :, 1:])
