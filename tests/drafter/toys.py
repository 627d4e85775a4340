"""Toy shapes, replies, caches and targets for the drafter's tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.oracles.plain_reference import Document, Numbers
from bench.oracles.plain_rope import Rotation
from drafter.dataset import CachedRow
from drafter.frozen import FrozenTarget
from drafter.model import Drafter
from drafter.rope import Rope
from drafter.shape import DrafterShape, LayerAttention
from pipeline.artifacts import HiddenStateCache, TargetFingerprint, commit, load
from pipeline.config import Config
from pipeline.schemas import CACHE
from pipeline.shards import PartWriter, write_table
from pipeline.stages import Artifact
from pipeline.states import StateShards

VOCAB, MASK_TOKEN_ID = 32, 31
FINGERPRINT = TargetFingerprint(
    config="c", tokenizer="t", chat_template="p", weights="w", dtype="bfloat16", target_layer_ids=(1, 2, 3)
)


def _rope(kind: str = "default", *, theta: float = 100.0, rotary_dim: int = 6, **parameters) -> Rope:
    return Rope(theta=theta, rotary_dim=rotary_dim, kind=kind, parameters=parameters)


_YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0, "beta_slow": 1.0}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, causal": {"layers": (LayerAttention(is_causal=True),) * 2},
    "window": {"layers": (LayerAttention(window=3),) * 2},
    "window, causal": {"layers": (LayerAttention(window=3, is_causal=True),) * 2},
    "window of one position": {"layers": (LayerAttention(window=1),) * 2},
    "mixed layers": {"layers": (LayerAttention(), LayerAttention(window=5, is_causal=True))},
    "a key a head": {"num_key_value_heads": 4},
    "one key, a block of two": {"num_key_value_heads": 1, "block_size": 2},
    "one layer, a longer block": {"num_hidden_layers": 1, "block_size": 7},
    "biases": {"has_attention_bias": True},
    "sinks": {"has_attention_sinks": True},
    "sinks in windows": {"has_attention_sinks": True, "layers": (LayerAttention(window=3),) * 2},
    "scaled values": {"value_scale": 0.6},
    "scaled logits": {"logit_scale": 0.25},
    "its own mask embedding": {"has_mask_embedding": True},
    "another theta": {"rope": _rope(theta=10000.0)},
    "partial rope": {"rope": _rope(rotary_dim=4)},
    "neighbours turn": {"rope": Rope(theta=100.0, rotary_dim=6, is_interleaved=True)},
    "neighbours turn, partial": {"rope": Rope(theta=100.0, rotary_dim=4, is_interleaved=True)},
    "linear rope": {"rope": _rope("linear", factor=4.0)},
    "ntk rope": {"rope": _rope("ntk", factor=4.0)},
    "mixed ntk rope": {"rope": _rope("ntk", factor=4.0, mixed_b=0.7)},
    "dynamic rope": {
        "rope": _rope("dynamic", factor=4.0, max_trained_positions=64, max_position_embeddings=256),
    },
    "dynamic rope by alpha": {"rope": _rope("dynamic", alpha=50.0, factor=1.0)},
    "yarn": {"rope": _rope("yarn", **_YARN)},
    "yarn with its own length": {"rope": _rope("yarn", **_YARN, attention_factor=1.5, truncate=False)},
    "yarn with two scales": {"rope": _rope("yarn", **_YARN, mscale=1.0, mscale_all_dim=0.5)},
    "yarn, partial": {"rope": _rope("yarn", rotary_dim=4, **_YARN)},
    "llama3 rope": {"rope": _rope("llama3", **_LLAMA3)},
    "proportional rope": {"rope": _rope("proportional", num_turning_pairs=2)},
}
"""Every kind of drafter, as changes of ``shape()``."""


def shape(**changes) -> DrafterShape:
    """Two layers, four heads that share two keys, heads that are not width / heads, three states of another width."""
    settings = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope": Rope(theta=100.0, rotary_dim=6),
        "max_position_embeddings": 256,
        "block_size": 4,
        "mask_token_id": MASK_TOKEN_ID,
        "target_layer_ids": (1, 2, 3),
        "num_target_layers": 6,
        "target_hidden_size": 10,
    }
    settings |= changes
    return DrafterShape(**{"layers": (LayerAttention(),) * settings["num_hidden_layers"], **settings})


def drafter(of: DrafterShape | None = None, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Drafter:
    """Random weights, gains included."""
    model = Drafter(of or shape())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.4 if parameter.dim() == 2 else 1 + 0.3 * noise)
    return model.to(dtype)


def numbers(of: DrafterShape) -> Numbers:
    """What the plain reference needs beside the weights."""
    return Numbers(
        block_size=of.block_size,
        num_heads=of.num_attention_heads,
        num_kv_heads=of.num_key_value_heads,
        head_dim=of.head_dim,
        eps=of.rms_norm_eps,
        rotation=Rotation(
            kind=of.rope.kind,
            theta=of.rope.theta,
            size=of.rope.rotary_dim,
            are_neighbours_paired=of.rope.is_interleaved,
            settings=of.rope.parameters,
        ),
        layers=[(layer.window, layer.is_causal) for layer in of.layers],
        value_scale=1.0 if of.value_scale is None else of.value_scale,
    )


def frozen(*, seed: int = 5, hidden: int = 16, dtype: torch.dtype = torch.float64) -> FrozenTarget:
    """Random embedding and head."""
    generator = torch.Generator().manual_seed(seed)
    embedding, head = torch.randn(2, VOCAB, hidden, generator=generator).to(dtype)
    return FrozenTarget(embedding, head, torch.ones(hidden, dtype=dtype))


def row(
    num_tokens: int,
    num_prompt_tokens: int,
    *,
    seed: int = 0,
    width: int = 30,
    name: str | None = None,
    slice: str = "a",
) -> CachedRow:
    """A reply of random tokens with random bf16 states."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, MASK_TOKEN_ID, (num_tokens,), generator=generator)
    states = torch.randn(num_tokens - 1, width, generator=generator).to(torch.bfloat16)
    return CachedRow(name or f"row-{seed}", slice, ids, num_prompt_tokens, states)


def counting_row(start: int, num_tokens: int, num_prompt_tokens: int, *, width: int = 30, name: str = "") -> CachedRow:
    """A reply whose tokens count upwards, and whose states are a code of the token: easy to learn."""
    ids = (start + torch.arange(num_tokens)) % MASK_TOKEN_ID
    code = torch.randn(VOCAB, width, generator=torch.Generator().manual_seed(99))
    return CachedRow(name or f"count-{start}", "a", ids, num_prompt_tokens, code[ids[:-1]].to(torch.bfloat16))


def document(of: CachedRow, anchors: Sequence[int], dtype: torch.dtype = torch.float64) -> Document:
    """The row for the plain reference."""
    return Document(ids=of.ids.tolist(), states=of.states.to(dtype), anchors=list(anchors))


def weights_of(model: Drafter) -> dict[str, Tensor]:
    """Its parameters by name, as leaves of their own."""
    return {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}


def cache(
    root: Path,
    rows: Sequence[tuple[str, CachedRow]],
    *,
    fingerprint: TargetFingerprint | None = FINGERPRINT,
    derivation: str = "cache",
    num_layers: int = 3,
    states_format: str = "bf16",
    shard_bytes: int = 1 << 28,
    **table_changes,
) -> Artifact[HiddenStateCache]:
    """A complete HiddenStateCache of (split, row) pairs, in one part."""
    folder = Path(root) / "states" / derivation
    writer = PartWriter(folder)
    width = rows[0][1].states.shape[1] if rows else 30
    sink = StateShards(
        folder,
        0,
        num_layers=num_layers,
        hidden_size=width // num_layers,
        states_format=states_format,
        shard_bytes=shard_bytes,
    )
    where = []
    for _, row in rows:
        n = row.states.shape[0]
        words = row.states.contiguous().view(torch.int16).numpy().view(np.uint16).reshape(n, num_layers, -1)
        where.append(sink.add(row.row_id, words, num_states=n))
    assert not [captured for captured in where if captured.reason]
    table = [
        {
            "row_id": row.row_id,
            "conversation": row.row_id,
            "split": split,
            "slice": row.slice,
            "weight": row.weight,
            "ids": row.ids.tolist(),
            "num_prompt_tokens": row.num_prompt_tokens,
            "num_states": row.states.shape[0],
            "states_file": captured.states_file,
            "states_batch": captured.states_batch,
        }
        | table_changes
        for captured, (split, row) in zip(where, rows, strict=True)
    ]
    writer.commit(
        0,
        {
            **sink.files(),
            "rows-00000.parquet": (len(rows), write_table(pa.Table.from_pylist(table, schema=CACHE))),
        },
    )
    shards, rejects, counts = writer.finish(1)
    num_states = sum(row.states.shape[0] for _, row in rows)
    manifest = HiddenStateCache(
        derivation_id=derivation,
        parents={},
        fingerprint=fingerprint,
        shards=shards,
        rejects=rejects,
        counts=counts,
        hidden_size=width // num_layers,
        num_states=num_states,
        states_format=states_format,
    )
    commit(folder, manifest)
    return Artifact(folder, load(folder, HiddenStateCache))


def target_folder(folder: Path, *, hidden: int = 10, seed: int = 5, **config) -> Path:
    """A target as the trainer reads it: config.json, embedding, head and final norm; no decoder layers."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 24,
        "num_hidden_layers": 6,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps({**settings, **config}))
    generator = torch.Generator().manual_seed(seed)
    embedding, head = torch.randn(2, VOCAB, hidden, generator=generator)
    tensors = {
        "model.embed_tokens.weight": embedding.clone(),
        "lm_head.weight": head.clone(),
        "model.norm.weight": torch.ones(hidden),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def config(root: Path, **train) -> Config:
    """A configuration of a few steps on the toy target."""
    settings = {
        "steps": 8,
        "blocks_per_step": 8,
        "anchors_per_row": 4,
        "learning_rate": 5e-3,
        "checkpoint_every": 2,
        "walk_rows": 4,
    }
    return Config.model_validate(
        {
            "root": root,
            "target": {"model": root / "target"},
            "drafter": {
                "num_layers": 1,
                "block_size": 4,
                "mask_token_id": MASK_TOKEN_ID,
                "target_layer_ids": [1, 2, 3],
            },
            "train": settings | train,
        }
    )
