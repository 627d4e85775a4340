import json
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
import toys
import transformers

from drafter import frozen
from drafter.checkpoint import cold_start
from drafter.families import FAMILIES, read_target_shape
from drafter.frozen import read_frozen
from drafter.shape import cold_shape, config_of
from pipeline.errors import ConfigError

SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
SHARED = {"shared_expert_intermediate_size": 16, **EXPERTS, **LINEAR}
GEMMA = {"query_pre_attn_scalar": 8, "sliding_window": 16}
MODELS = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "mistral": {},
    "ministral3": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": EXPERTS,
    "qwen3_next": SHARED,
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": SHARED,
    "gemma2": GEMMA | {"final_logit_softcapping": 3.0},
    "gemma2, untied": GEMMA | {"tie_word_embeddings": False},
    "gemma3_text": GEMMA,
    "gemma4_text": {"sliding_window": 16, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "phi3": {},
}


def build(name):
    """A random model of a family, its norms away from what does nothing."""
    config = transformers.AutoConfig.for_model(name.partition(",")[0], **SMALL | MODELS[name])
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        for module, parameter in model.named_parameters():
            if "norm" in module:
                parameter.data += 0.3 * torch.randn(parameter.shape)
    return model


@contextmanager
def tensors_opened():
    """The names of every tensor that is read from a file meanwhile."""
    names, open_file = [], safetensors.safe_open

    class Watched:
        def __init__(self, *args, **kwargs):
            self._file = open_file(*args, **kwargs)

        def __enter__(self):
            self._opened = self._file.__enter__()
            return self

        def __exit__(self, *error):
            return self._file.__exit__(*error)

        def keys(self):
            return self._opened.keys()

        def get_tensor(self, name):
            names.append(name)
            return self._opened.get_tensor(name)

    with patch.object(frozen, "safe_open", Watched):
        yield names


def test_every_family_is_tried():
    assert {name.partition(",")[0] for name in MODELS} == set(FAMILIES)


@pytest.mark.parametrize("name", MODELS)
def test_the_last_layers_states_give_the_models_own_next_tokens_back(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path)
    with tensors_opened() as names:
        borrowed, target = read_frozen(tmp_path), read_target_shape(tmp_path)
    assert len(names) == (2 if target.is_tied else 3), "embedding, final norm, and a head of its own"
    assert target.is_tied == model.config.tie_word_embeddings == (borrowed.head is borrowed.embedding)

    states = []
    model.get_decoder().layers[-1].register_forward_hook(
        lambda _module, _inputs, out: states.append(out if isinstance(out, torch.Tensor) else out[0])
    )
    ids = torch.randint(0, 48, (2, 24), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = torch.softmax(model(input_ids=ids, use_cache=False).logits, dim=-1)
    x = states[0]
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps) * borrowed.final_norm
    logits = normed @ borrowed.head.T
    if borrowed.logit_soft_cap is not None:
        logits = borrowed.logit_soft_cap * torch.tanh(logits / borrowed.logit_soft_cap)
    rebuilt = torch.softmax(logits * target.logit_scale, dim=-1)
    assert (rebuilt - expected).abs().max() < 1e-3
    assert torch.equal(rebuilt.argmax(-1), expected.argmax(-1))
    embedded = model.get_input_embeddings().weight
    assert torch.equal(borrowed.embedding, embedded), "the rows as they are stored, which is what vLLM hands a drafter"


@pytest.mark.parametrize("name", MODELS)
def test_a_new_drafter_of_every_family_scales_its_logits_as_the_target_does(name, tmp_path):
    build(name).save_pretrained(tmp_path)
    shape = cold_shape(read_target_shape(tmp_path), num_layers=2, block_size=4, mask_token_id=47)
    assert shape.logit_scale == (0.25 if name == "granite" else 1.0)
    assert config_of(shape)["logit_scale"] == shape.logit_scale
    assert (shape.hidden_size, shape.vocab_size, shape.num_target_layers) == (32, 48, 4)
    drafter = cold_start(shape, read_frozen(tmp_path), seed=0)
    assert torch.equal(drafter.norm.weight, read_frozen(tmp_path).final_norm)


def test_a_gain_that_is_stored_without_its_one_is_seen(tmp_path):
    model = build("gemma3_text")
    model.save_pretrained(tmp_path)
    stored = model.get_decoder().norm.weight
    assert torch.allclose(read_frozen(tmp_path).final_norm, 1 + stored)


def test_only_the_shards_that_hold_them_are_opened(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    with tensors_opened() as names:
        borrowed = read_frozen(tmp_path)
    assert names == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert torch.equal(borrowed.head, model.lm_head.weight)


NESTED = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
}


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("outer", NESTED)
def test_the_text_part_of_a_multimodal_target_is_found(outer, prefix, tmp_path):
    model = build(NESTED[outer])
    text = model.config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": outer, "text_config": text}))
    names = {name: name.replace("model.", prefix, 1) for name in model.state_dict()}
    tensors = {new: model.state_dict()[old].clone() for old, new in names.items() if "visual" not in old}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    target, borrowed = read_target_shape(tmp_path), read_frozen(tmp_path)
    assert (target.num_layers, target.raw["vocab_size"]) == (4, 48)
    assert torch.equal(borrowed.embedding, model.get_input_embeddings().weight)
    assert target.is_tied == outer.startswith("gemma")


@pytest.mark.parametrize("kind", ["mamba2", "cohere", "llava", None])
def test_another_family_is_refused_by_name_with_those_that_are_known(kind, tmp_path):
    folder = toys.target_folder(tmp_path, model_type=kind)
    for read in (read_target_shape, read_frozen):
        with pytest.raises(ConfigError, match=f"model_type {kind!r} is not supported; supported: gemma2, .*qwen3_moe"):
            read(folder)


def test_a_quantised_or_missing_tensor_is_refused_by_name(tmp_path):
    folder = toys.target_folder(tmp_path)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file(
        tensors | {"lm_head.weight": torch.ones(3, 3, dtype=torch.int8)}, folder / "model.safetensors"
    )
    with pytest.raises(ConfigError, match=r"lm_head\.weight is torch\.int8, a quantised tensor"):
        read_frozen(folder)
    del tensors["lm_head.weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no tensor lm_head\.weight"):
        read_frozen(folder)


def test_theta_is_that_of_the_layers_that_see_everything(tmp_path):
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    folder = toys.target_folder(tmp_path, rope_theta=None, rope_parameters=ropes)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))
    assert cold_shape(read_target_shape(folder), num_layers=1, block_size=4, mask_token_id=31).rope.theta == 1e6
