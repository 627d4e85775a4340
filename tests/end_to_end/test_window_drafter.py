"""A drafter that is as unlike the plainest one as an engine on a CPU serves: every draft it makes is ours."""

import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT, ROOT / "tests", ROOT / "tests" / "drafter")
sys.path[:0] = [str(folder) for folder in FOLDERS if str(folder) not in sys.path]

import tiny  # noqa: E402
import toys  # noqa: E402

from bench.oracles.real_drafts import Comparison, Recorder, close_engine, greedy, open_engine  # noqa: E402
from drafter.checkpoint import Kept, load_drafter, save_drafter  # noqa: E402
from drafter.frozen import read_frozen  # noqa: E402
from drafter.model import Drafter  # noqa: E402
from drafter.rope import Rope  # noqa: E402
from drafter.shape import LayerAttention, config_of  # noqa: E402


def odd_drafter(folder, *, is_causal):
    """Windows, biases, sinks, scaled values and logits, a partial and interleaved rope; own gains in each layer."""
    shape = toys.shape(
        hidden_size=128,
        intermediate_size=192,
        head_dim=32,
        vocab_size=tiny.VOCAB_SIZE,
        mask_token_id=tiny.MASK_TOKEN_ID,
        target_layer_ids=tiny.TARGET_LAYER_IDS,
        target_hidden_size=128,
        max_position_embeddings=2048,
        rope=Rope(theta=1e4, rotary_dim=16, is_interleaved=True),
        layers=(LayerAttention(window=40, is_causal=is_causal),) * 2,
        has_attention_bias=True,
        has_attention_sinks=True,
        value_scale=0.7,
        logit_scale=0.5,
    )
    model, generator = Drafter(shape), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            noise *= parameter.shape[1] ** -0.5 if parameter.dim() == 2 else 0.3
            parameter.copy_(1 + noise if name.endswith("norm.weight") else noise)
    dtypes = {name: torch.float32 for name, _ in model.named_parameters()}
    save_drafter(folder, model, replace(Kept.of(config_of(shape)), dtypes=dtypes))
    return folder


@pytest.mark.parametrize("is_causal", [False, True])
def test_every_draft_of_an_engine_is_ours(is_causal, tmp_path):
    target = tiny.tiny_target(tmp_path / "target", favourite=433)
    folder = odd_drafter(tmp_path / "drafter", is_causal=is_causal)
    (model, _), frozen = load_drafter(folder), read_frozen(target)
    recorder, comparison, rng = Recorder(), Comparison(), random.Random(7)
    llm = open_engine(target, folder, num_draft_tokens=3)
    llm.collective_rpc(recorder.install)
    for num_tokens in (5, 70, 150):  # within the window, beyond it, and over a KV block's edge
        recorder.clear()
        greedy(llm, [0] + [rng.randrange(6, 512) for _ in range(num_tokens)], max_tokens=20)
        comparison.add(recorder, model, frozen)
    del llm
    close_engine()
    assert comparison.num_same == comparison.num_slots > 100
    assert comparison.max_abs_difference < 1e-4 and comparison.largest_logit > 0.5
