import json

import pytest
import torch
import toys
from safetensors.torch import load_file, save_file

from drafter.checkpoint import cold_start, load_drafter, save_drafter
from drafter.shape import cold_shape, config_of, read_target_shape, shape_of, spread_layers
from pipeline.errors import ConfigError, SchemaError


def saved(folder, *, of=None, **config):
    model = toys.drafter(of, dtype=torch.float32)
    save_drafter(folder, model, {**config_of(model.shape), **config})
    return folder


def test_a_drafter_comes_back_bit_for_bit_with_its_config(tmp_path):
    first = saved(tmp_path / "1", release="kept", extra={"nested": [1, 2]}, target_hidden_size=10)
    model, config = load_drafter(first)
    save_drafter(tmp_path / "2", model, config)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "2" / name).read_bytes() == (first / name).read_bytes()
    assert config["release"] == "kept"
    assert model.shape == toys.shape()
    tensors = load_file(first / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(parameter, tensors[name].float())


def test_the_tensors_are_the_z_lab_layouts(tmp_path):
    tensors = load_file(saved(tmp_path, of=toys.shape(num_hidden_layers=1)) / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (16, 30),
        "hidden_norm.weight": (16,),
        "norm.weight": (16,),
        "layers.0.self_attn.q_proj.weight": (24, 16),
        "layers.0.self_attn.k_proj.weight": (12, 16),
        "layers.0.self_attn.v_proj.weight": (12, 16),
        "layers.0.self_attn.o_proj.weight": (16, 24),
        "layers.0.self_attn.q_norm.weight": (6,),
        "layers.0.self_attn.k_norm.weight": (6,),
        "layers.0.mlp.gate_proj.weight": (24, 16),
        "layers.0.mlp.up_proj.weight": (24, 16),
        "layers.0.mlp.down_proj.weight": (16, 24),
        "layers.0.input_layernorm.weight": (16,),
        "layers.0.post_attention_layernorm.weight": (16,),
    }


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda t: t.pop("fc.weight"), "missing \\['fc.weight'\\]"),
        (lambda t: t.update({"lm_head.weight": torch.ones(2)}), "unexpected \\['lm_head.weight'\\]"),
        (lambda t: t.update({"norm.weight": torch.ones(7)}), "norm.weight \\(7,\\) instead of \\(16,\\)"),
        (lambda t: t["fc.weight"][3].fill_(float("nan")), "not finite: \\['fc.weight'\\]"),
    ],
    ids=["missing", "extra", "misshapen", "not a number"],
)
def test_wrong_tensors_are_refused_by_name(spoil, words, tmp_path):
    folder = saved(tmp_path, target_hidden_size=10)
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SchemaError, match=words):
        load_drafter(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("share", [0.5, 0.0, None], ids=["cut", "empty", "absent"])
def test_a_file_that_is_not_whole_is_refused(name, share, tmp_path):
    path = saved(tmp_path, target_hidden_size=10) / name
    body = path.read_bytes()
    path.unlink() if share is None else path.write_bytes(body[: int(len(body) * share)])
    with pytest.raises(SchemaError, match=name):
        load_drafter(tmp_path)


UNSUPPORTED = {
    "architectures": ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    "sliding layers": ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
    "sliding by flag": ({"dflash_config": {"use_swa": True}}, "sliding"),
    "causal": ({"dflash_config": {"causal": True}}, "causal"),
    "biases": ({"attention_bias": True}, "biases"),
    "scaled rope": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    "scaled rope, new key": ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 100.0}}, "llama3"),
    "scaled rope beside an empty old key": (
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0}},
        "yarn",
    ),
    "partial rope": ({"partial_rotary_factor": 0.5}, "rope"),
    "interleaved rope": ({"is_neox_style": False}, "rope"),
    "two rope bases": ({"rope_theta": 5.0}, "rope_theta = 5.0"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantisation"),
    "slot 0": ({"dflash_config": {"predicts_from_slot0": True}}, "slot 0"),
    "own vocabulary": ({"draft_vocab_size": 8}, "vocabulary"),
    "activation": ({"hidden_act": "gelu"}, "gelu"),
    "no layers": ({"dflash_config": {"target_layer_ids": []}}, "target_layer_ids"),
    "unsorted layers": ({"dflash_config": {"target_layer_ids": [3, 1, 2]}}, "unsorted"),
    "repeated layers": ({"dflash_config": {"target_layer_ids": [1, 1, 2]}}, "repeated"),
    "no mask": ({"dflash_config": {"mask_token_id": None}}, "mask_token_id"),
    "no block size": ({"block_size": None}, "block_size"),
    "no width": ({"hidden_size": None}, "no hidden_size"),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_vllm_would_run_differently_is_refused_by_name(what):
    changes, words = UNSUPPORTED[what]
    config = config_of(toys.shape())
    for key, value in changes.items():
        config[key] = {**config[key], **value} if key == "dflash_config" else value
    with pytest.raises(ConfigError, match=words):
        shape_of(config, where="somewhere/config.json")


def test_a_new_drafters_config_describes_its_own_shape():
    shape = toys.shape(target_hidden_size=16)
    config = config_of(shape)
    assert shape_of(json.loads(json.dumps(config)), where="x") == shape
    assert config["block_size"] == 4 and shape.num_draft_tokens == 3


def test_layers_spread_as_released_drafters_have_them_and_small_targets_are_refused():
    assert spread_layers(36) == (1, 9, 17, 25, 33)
    assert spread_layers(6) == (1, 2, 3)
    for num_layers in (4, 5, 6, 8):
        ids = spread_layers(num_layers)
        assert list(ids) == sorted(set(ids)) and ids[0] >= 0 and ids[-1] < num_layers
    for num_layers in (2, 3):
        with pytest.raises(ConfigError, match="target_layer_ids"):
            spread_layers(num_layers)


@pytest.mark.parametrize(
    "changes", [{"mask_token_id": 32}, {"mask_token_id": -1}, {"target_layer_ids": (6,)}, {"target_layer_ids": (3, 1)}]
)
def test_a_new_drafter_must_fit_its_target(changes, tmp_path):
    target = read_target_shape(toys.target_folder(tmp_path))
    settings = {"num_layers": 1, "block_size": 4, "mask_token_id": 31, "target_layer_ids": (1, 2)} | changes
    with pytest.raises(ConfigError):
        cold_shape(target, **settings)


def test_a_cold_start_is_its_seeds_and_takes_the_targets_final_gain():
    target = toys.frozen(dtype=torch.float32)
    target.final_norm.mul_(1.5)
    a, b, c = (cold_start(toys.shape(), target, seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["fc.weight"], c["fc.weight"])
    assert torch.equal(a["norm.weight"], target.final_norm)


def test_case_62_the_block_layout_is_always_written_and_another_one_is_refused(tmp_path):
    dflash = json.loads((saved(tmp_path) / "config.json").read_text())["dflash_config"]
    assert (dflash["predicts_from_slot0"], dflash["causal"]) == (False, False)
    with pytest.raises(ConfigError, match="predicts from slot 0"):
        shape_of({**config_of(toys.shape()), "dflash_config": {**dflash, "predicts_from_slot0": True}}, where="x")


@pytest.mark.parametrize("layers", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("causal", [False, True])
def test_case_66_of_the_four_kinds_of_mask_the_one_that_is_trained_comes_back_and_the_others_are_refused(
    layers, causal, tmp_path
):
    config = config_of(toys.shape())
    dflash = {**config["dflash_config"], "causal": causal}
    changed = {**config, "layer_types": [layers] * len(config["layer_types"]), "dflash_config": dflash}
    if layers == "full_attention" and not causal:
        model, again = load_drafter(saved(tmp_path, **changed, target_hidden_size=10))
        assert (again["layer_types"], again["dflash_config"]) == (changed["layer_types"], dflash)
        assert model.shape == toys.shape()
    else:
        with pytest.raises(ConfigError, match="sliding" if layers == "sliding_attention" else "causal"):
            shape_of(changed, where="x")


def test_case_67_rope_is_written_out_and_a_scaling_that_training_does_not_use_is_refused(tmp_path):
    wanted = {"rope_theta": 1e5, "rope_parameters": {"rope_theta": 1e5}, "target_hidden_size": 10}
    _, config = load_drafter(saved(tmp_path, **wanted))
    assert config["rope_theta"] == 1e5
    assert config["max_position_embeddings"] == toys.shape().max_position_embeddings
    scaled = {**config, "rope_parameters": {"rope_type": "yarn", "factor": 16.0, "rope_theta": 1e5}}
    with pytest.raises(ConfigError, match=r"does not run rope .*yarn"):
        shape_of(scaled, where="x")


def test_case_89_a_drafter_says_that_it_ties_nothing_and_its_vocabulary_is_the_targets():
    config = config_of(toys.shape())
    assert config["tie_word_embeddings"] is False
    with pytest.raises(ConfigError, match="its own vocabulary"):
        shape_of({**config, "draft_vocab_size": 8}, where="x")
