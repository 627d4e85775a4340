import json

import pytest
import toys

from bench.oracles.plain_reference import Document, dense_mask
from drafter.families import read_target_shape
from drafter.shape import LayerAttention, cold_shape, config_of, shape_of, spread_layers
from pipeline.errors import ConfigError


@pytest.mark.parametrize("variant", toys.VARIANTS)
def test_a_new_drafters_config_describes_its_own_shape(variant):
    shape = toys.shape(**toys.VARIANTS[variant])
    config = json.loads(json.dumps(config_of(shape)))
    assert shape_of(config, where="x", has_mask_embedding=shape.has_mask_embedding) == shape


def test_every_key_that_changes_the_meaning_is_written_out():
    config = config_of(toys.shape())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert (config["block_size"], config["dtype"], config["tie_word_embeddings"]) == (4, "bfloat16", False)
    assert (config["layer_types"], config["sliding_window"], config["use_sliding_window"]) == (
        ["full_attention"] * 2,
        None,
        False,
    )
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100.0}
    assert (config["is_neox_style"], config["rope_theta"], config["max_position_embeddings"]) == (True, 100.0, 256)
    assert config["dflash_config"] == {
        "attention_sink_bias": False,
        "causal": False,
        "mask_token_id": 31,
        "predicts_from_slot0": False,
        "target_layer_ids": [1, 2, 3],
    }
    assert not [key for key in config if "quant" in key]


def test_nothing_of_a_quantised_or_tied_target_leaks_into_its_drafter(tmp_path):
    folder = toys.target_folder(
        tmp_path,
        tie_word_embeddings=True,
        quantization_config={"bits": 4, "quant_method": "awq"},
        torch_dtype="float16",
    )
    shape = cold_shape(read_target_shape(folder), num_layers=1, block_size=4, mask_token_id=31)
    config = config_of(shape)
    assert "quantization_config" not in config
    assert (config["tie_word_embeddings"], config["dtype"]) == (False, "bfloat16")
    assert (config["vocab_size"], "draft_vocab_size" in config) == (toys.VOCAB, False)


# What vLLM 0.32 resolves (its own table in qwen3_dflash.py, and transformers' Qwen3Config before it): the changes of
# config.json and of dflash_config, and (window, causal) of each of two layers.
FULL, SLIDING = "full_attention", "sliding_attention"
RESOLVED = {
    "nothing said": ({"layer_types": None}, {"causal": None}, [(None, False)] * 2),
    "full": ({}, {"causal": None}, [(None, False)] * 2),
    "full, causal": ({}, {"causal": True}, [(None, True)] * 2),
    "is_causal wins": ({"is_causal": True}, {"causal": False}, [(None, True)] * 2),
    "sliding is causal": (
        {"layer_types": [SLIDING] * 2, "use_sliding_window": True, "sliding_window": 5},
        {"causal": None},
        [(5, True)] * 2,
    ),
    "sliding, not causal": (
        {"layer_types": [SLIDING] * 2, "use_sliding_window": True, "sliding_window": 5},
        {"causal": False},
        [(5, False)] * 2,
    ),
    "mixed": (
        {"layer_types": [FULL, SLIDING], "use_sliding_window": True, "sliding_window": 5},
        {"causal": None},
        [(None, False), (5, True)],
    ),
    "mixed, causal": (
        {"layer_types": [FULL, SLIDING], "use_sliding_window": True, "sliding_window": 5},
        {"causal": True},
        [(None, True), (5, True)],
    ),
    "use_swa makes full layers slide": ({}, {"causal": None, "use_swa": True, "swa_window_size": 7}, [(7, False)] * 2),
    "use_swa leaves mixed layers alone": (
        {"layer_types": [FULL, SLIDING]},
        {"causal": None, "use_swa": True, "swa_window_size": 7},
        [(None, False), (7, True)],
    ),
    "dflash_config's window wins": (
        {"layer_types": [SLIDING] * 2, "use_sliding_window": True, "sliding_window": 5},
        {"causal": None, "swa_window_size": 7},
        [(7, True)] * 2,
    ),
    "layers from max_window_layers": (
        {"layer_types": None, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        {"causal": None},
        [(None, False), (5, True)],
    ),
    "a window that is not in use": ({"layer_types": None, "sliding_window": 5}, {"causal": None}, [(None, False)] * 2),
}


def changed(top, dflash):
    config = config_of(toys.shape())
    nested = {k: v for k, v in {**config["dflash_config"], **dflash}.items() if v is not None}
    return {k: v for k, v in {**config, **top, "dflash_config": nested}.items() if v is not None}


@pytest.mark.parametrize("what", RESOLVED)
def test_windows_and_causality_resolve_as_in_vllm(what):
    top, dflash, expected = RESOLVED[what]
    found = shape_of(changed(top, dflash), where="x").layers
    assert [(layer.window, layer.is_causal) for layer in found] == expected


@pytest.mark.parametrize("what", RESOLVED)
def test_what_this_table_expects_is_what_vllms_own_functions_say(what):
    from unittest.mock import Mock, patch

    from transformers import Qwen3Config
    from vllm.model_executor.models import qwen3_dflash

    top, dflash, expected = RESOLVED[what]
    config = Qwen3Config(**changed(top, dflash))
    with patch.object(qwen3_dflash, "get_current_vllm_config", lambda: Mock(use_v2_model_runner=True)):
        assert [qwen3_dflash._resolve_layer_attention(config, i) for i in range(2)] == expected


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_mask_that_is_trained_is_the_one_that_comes_back(window, is_causal):
    shape = toys.shape(layers=(LayerAttention(window=window, is_causal=is_causal),) * 2)
    again = shape_of(json.loads(json.dumps(config_of(shape))), where="x")
    before, after = mask_of(shape), mask_of(again)
    assert before.equal(after)
    others = [LayerAttention(window=w, is_causal=c) for w in (None, 3) for c in (False, True)]
    same = [other for other in others if mask_of(toys.shape(layers=(other,) * 2)).equal(before)]
    assert same == [shape.layers[0]], "the four masks differ"


def mask_of(shape):
    from bench.oracles.plain_reference import _Place

    row = Document(ids=range(12), states=None, anchors=[2, 7])
    queries = [_Place(0, b, anchor + slot) for b, anchor in enumerate(row.anchors) for slot in range(shape.block_size)]
    keys = [_Place(0, None, position) for position in range(11)] + queries
    (layer,) = set(shape.layers)
    return dense_mask(queries, keys, [row.anchors], layer.window, layer.is_causal)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((LayerAttention(window=3), LayerAttention(window=5)), r"windows of \[3, 5\]"),
        ((LayerAttention(), LayerAttention(is_causal=True)), "not the sliding ones"),
        ((LayerAttention(window=3), LayerAttention(is_causal=True)), "not the sliding ones"),
    ],
)
def test_layers_that_no_config_can_describe_are_not_written(layers, words):
    with pytest.raises(ConfigError, match=words):
        config_of(toys.shape(layers=layers))


UNSUPPORTED = {
    "architectures": ({"architectures": ["LlamaForCausalLM"]}, {}, "LlamaForCausalLM"),
    "sliding without a window": ({"layer_types": [SLIDING] * 2}, {}, "sliding layers without a window"),
    "a forgotten window": (
        {"layer_types": [SLIDING] * 2, "sliding_window": 5},
        {},
        "use_sliding_window",
    ),
    "sliding by flag without a window": ({}, {"use_swa": True}, "without a window"),
    "another kind of layer": ({"layer_types": [FULL, "chunked_attention"]}, {}, "chunked_attention"),
    "too few kinds of layers": ({"layer_types": [FULL]}, {}, "1 layer_types for 2 layers"),
    "quantised": ({"quantization_config": {"bits": 4}}, {}, "quantisation.*bf16"),
    "slot 0": ({}, {"predicts_from_slot0": True}, "predicts from slot 0"),
    "slot 0, vLLM's word": ({}, {"sample_from_anchor": True}, "predicts from slot 0"),
    "no states": ({}, {"use_aux_hidden_state": False}, "reads no target states"),
    "own vocabulary": ({"draft_vocab_size": 8}, {}, "its own vocabulary"),
    "own head": ({"has_own_lm_head": True}, {}, "its own head.*export it without"),
    "another base's settings": ({"eagle_config": {"mask_token_id": 3}}, {}, "eagle_config"),
    "activation": ({"hidden_act": "gelu"}, {}, "gelu"),
    "no layers": ({}, {"target_layer_ids": []}, "target_layer_ids"),
    "unsorted layers": ({}, {"target_layer_ids": [3, 1, 2]}, "unsorted"),
    "repeated layers": ({}, {"target_layer_ids": [1, 1, 2]}, "repeated"),
    "no mask": ({}, {"mask_token_id": None}, "mask_token_id"),
    "no block size": ({"block_size": None}, {}, "block_size"),
    "no width": ({"hidden_size": None}, {}, "no hidden_size"),
    "no logits": ({"logit_scale": 0.0}, {}, "logit_scale"),
    "rope": ({"rope_parameters": {"rope_type": "longrope"}}, {}, "longrope"),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_vllm_would_not_run_or_run_differently_is_refused_by_name(what):
    top, dflash, words = UNSUPPORTED[what]
    with pytest.raises(ConfigError, match=words):
        shape_of(changed(top, dflash), where="somewhere/config.json")


def test_another_block_layout_is_refused_and_ours_is_always_written():
    assert config_of(toys.shape())["dflash_config"]["predicts_from_slot0"] is False
    with pytest.raises(ConfigError, match="predicts from slot 0"):
        shape_of(changed({}, {"predicts_from_slot0": True}), where="x")


def test_layers_spread_as_released_drafters_have_them_and_small_targets_are_refused():
    assert spread_layers(36) == (1, 9, 17, 25, 33)
    assert spread_layers(6) == (1, 2, 3)
    for num_layers in (4, 5, 6, 8):
        ids = spread_layers(num_layers)
        assert list(ids) == sorted(set(ids)) and ids[0] >= 0 and ids[-1] < num_layers
    for num_layers in (2, 3):
        with pytest.raises(ConfigError, match="target_layer_ids"):
            spread_layers(num_layers)


def test_as_many_states_as_fc_reads(tmp_path):
    target = read_target_shape(toys.target_folder(tmp_path))
    for num_layers, ids in ((1, ()), (1, (2,)), (3, (0, 1, 2, 3, 5))):
        shape = cold_shape(target, num_layers=num_layers, block_size=4, mask_token_id=31, target_layer_ids=ids)
        assert shape.context_size == len(shape.target_layer_ids) * 10
        assert toys.drafter(shape).fc.weight.shape == (10, shape.context_size)


@pytest.mark.parametrize(
    "changes", [{"mask_token_id": 32}, {"mask_token_id": -1}, {"target_layer_ids": (6,)}, {"target_layer_ids": (3, 1)}]
)
def test_a_new_drafter_must_fit_its_target(changes, tmp_path):
    target = read_target_shape(toys.target_folder(tmp_path))
    settings = {"num_layers": 1, "block_size": 4, "mask_token_id": 31, "target_layer_ids": (1, 2)} | changes
    with pytest.raises(ConfigError):
        cold_shape(target, **settings)
