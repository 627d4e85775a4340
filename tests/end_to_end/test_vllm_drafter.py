"""Every kind of drafter that is trained gives the logits of vLLM's own module, slot by slot.

Both get the same weights, states and positions in float32. vLLM's module is driven without an engine
(bench/oracles/drafter_module.py): an engine for each kind would take minutes. Mixed layers run under the V2 runner
alone, which needs a GPU; here that one check is switched off, and each layer is given its own attention metadata, as
that runner does.
"""

import json
import os
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

from bench.oracles.drafter_module import DrafterModule, one_process  # noqa: E402
from drafter.checkpoint import Kept, load_drafter, save_drafter  # noqa: E402
from drafter.frozen import read_frozen  # noqa: E402
from drafter.model import Drafter  # noqa: E402
from drafter.packing import Packed  # noqa: E402
from drafter.shape import config_of  # noqa: E402
from serving.errors import PreflightError  # noqa: E402
from serving.preflight import check_drafter  # noqa: E402

NUM_POSITIONS = (1, 4, 41, 97)  # shorter and longer than the windows, within and across KV blocks of 32
HEAD_DIM = 32  # the smallest of vLLM's CPU attention


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    with one_process():
        yield tiny.tiny_target(tmp_path_factory.mktemp("target"))


def real_size(variant):
    """The toy's shape in a size that vLLM's kernels take."""
    changes = dict(toys.VARIANTS[variant])
    rope = changes.get("rope", toys.shape().rope)
    wider = {6: HEAD_DIM, 4: HEAD_DIM // 2}[rope.rotary_dim]
    parameters = rope.parameters | ({"num_turning_pairs": 6} if rope.kind == "proportional" else {})
    return toys.shape(
        **changes
        | {
            "rope": rope.model_copy(update={"rotary_dim": wider, "parameters": parameters}),
            "hidden_size": 128,
            "intermediate_size": 192,
            "head_dim": HEAD_DIM,
            "vocab_size": tiny.VOCAB_SIZE,
            "mask_token_id": tiny.MASK_TOKEN_ID,
            "target_layer_ids": tiny.TARGET_LAYER_IDS,
            "target_hidden_size": 128,
            "max_position_embeddings": changes.get("max_position_embeddings", 256),
        }
    )


def random_drafter(shape):
    """Matrices that keep the size of what flows through them; gains, biases, sinks away from what does nothing."""
    model, generator = Drafter(shape), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                noise *= parameter.shape[1] ** -0.5
            parameter.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else noise)
    return model


def write(folder, model, **config):
    kept = Kept.of(config_of(model.shape) | config)
    save_drafter(folder, model, replace(kept, dtypes={name: torch.float32 for name, _ in model.named_parameters()}))
    return folder


@torch.no_grad()
def our_logits(model, frozen, states, anchor_id):  # [n, F] -> [K, V]
    n, ids = len(states), torch.tensor([anchor_id])
    labels = torch.zeros(1, model.shape.num_draft_tokens, dtype=torch.int64)
    packed = Packed(states, (n,), (1,), torch.tensor([n]), ids, labels, torch.ones(1, dtype=torch.float64))
    hidden = model(packed, frozen.embedding[ids], frozen.embedding[model.shape.mask_token_id])
    return hidden[0] @ frozen.head.T * model.shape.logit_scale


# What this project's serving does not take although vLLM's module runs it, and under which code it says so.
REFUSED = {"mixed layers": "mixed_layers", "its own mask embedding": "mask_embedding"}


def preflight_of(folder, target):
    try:
        check_drafter(folder, target_config=json.loads((target / "config.json").read_text()))
    except PreflightError as error:
        return error.code
    return None


@pytest.mark.parametrize("variant", toys.VARIANTS)
def test_the_logits_are_vllms(variant, target, tmp_path):
    shape = real_size(variant)
    folder = write(tmp_path / "drafter", random_drafter(shape))
    model, _ = load_drafter(folder)
    assert model.shape == shape
    assert preflight_of(folder, target) == REFUSED.get(variant)
    theirs, frozen = DrafterModule(target, folder, tmp_path), read_frozen(target)
    generator = torch.Generator().manual_seed(4)
    for n in NUM_POSITIONS:
        states = torch.randn(n, shape.context_size, generator=generator)
        expected, found = theirs.logits(states, 77), our_logits(model, frozen, states, 77)
        assert expected.shape == found.shape == (shape.num_draft_tokens, tiny.VOCAB_SIZE)
        assert expected.abs().max() > 0.5
        assert (found - expected).abs().max() < 1e-4, n
