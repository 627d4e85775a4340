import json

import pytest
import torch
import toys

from drafter.families import TargetShape
from drafter.rope import Rope
from drafter.rope_config import rope_of, rope_settings
from drafter.shape import cold_shape, config_of, shape_of
from pipeline.errors import ConfigError

ROPES = {name: toys.shape(**changes).rope for name, changes in toys.VARIANTS.items() if "rope" in changes}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("name", ROPES)
def test_each_pair_turns_as_written_out_scalar_by_scalar(name):
    rope, plain = ROPES[name], toys.numbers(toys.shape(**toys.VARIANTS[name])).rotation
    assert len(rope.frequencies) == rope.rotary_dim // 2
    for i, frequency in enumerate(rope.frequencies):
        assert frequency == pytest.approx(plain.frequency(i), abs=1e-14)
    assert rope.length == pytest.approx(plain.length(), abs=1e-14)


@pytest.mark.parametrize("name", ROPES)
def test_cosine_and_sine_are_vllms_table(name):
    from transformers import Qwen3Config
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    shape = toys.shape(**toys.VARIANTS[name])
    config = Qwen3Config(**config_of(shape))
    with set_current_vllm_config(VllmConfig()):
        theirs = get_rope(
            shape.head_dim,
            max_position=config.max_position_embeddings,
            is_neox_style=config.is_neox_style,
            rope_parameters=config.rope_parameters,
            dtype=torch.float32,
        )
    table = theirs.cos_sin_cache[: config.max_position_embeddings]
    assert len(table) == config.max_position_embeddings and theirs.is_neox_style != shape.rope.is_interleaved
    ours = torch.cat(shape.rope.cos_sin(torch.arange(len(table)), torch.float32), dim=-1)
    assert (ours - table).abs().max() < 3e-5  # of angles up to 256 in float32
    x = torch.randn(len(table), shape.head_dim, generator=torch.Generator().manual_seed(1))
    turned, _ = theirs.forward_native(torch.arange(len(table)), x.clone(), x.clone())
    assert (shape.rope.turn(x, *ours.chunk(2, dim=-1)) - turned).abs().max() < 3e-4


@pytest.mark.parametrize("name", ROPES)
def test_a_rope_comes_back_from_config_json(name):
    rope, head_dim = ROPES[name], toys.shape().head_dim
    config = json.loads(json.dumps(rope_settings(rope, head_dim=head_dim))) | {"max_position_embeddings": 256}
    assert rope_of(config, head_dim=head_dim, where="x") == rope


@pytest.mark.parametrize("head_dim", [6, 64, 80, 96, 128, 256])
def test_a_partial_rotation_comes_back_for_every_size(head_dim):
    for size in range(2, head_dim + 1, 2):
        config = rope_settings(Rope(theta=1e4, rotary_dim=size), head_dim=head_dim) | {"max_position_embeddings": 9}
        assert rope_of(config, head_dim=head_dim, where="x").rotary_dim == size


def test_old_and_new_keys_say_the_same():
    new = {"rope_parameters": {**YARN, "rope_theta": 100.0}}
    old = {"rope_scaling": {**YARN, "type": "yarn"}, "rope_theta": 100.0}
    del old["rope_scaling"]["rope_type"]
    both = {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 100.0}, "rope_theta": 100.0}
    found = [rope_of({**c, "max_position_embeddings": 256}, head_dim=6, where="x") for c in (new, old, both)]
    assert found[0] == found[1] == found[2] and found[0].kind == "yarn"


REFUSED = {
    "longrope": ({"rope_parameters": {"rope_type": "longrope"}}, "longrope.*no single table"),
    "longrope, old name": ({"rope_scaling": {"type": "su"}}, "longrope"),
    "deepseek's yarn": ({"rope_parameters": {"rope_type": "deepseek_yarn"}}, "deepseek_yarn.*not split"),
    "image positions": ({"rope_parameters": {"mrope_section": [1, 1, 1]}}, "mrope_section.*text positions"),
    "fourier": ({"rope_parameters": {"use_fope": True}}, "use_fope"),
    "dual chunk": ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
    "unknown": ({"rope_parameters": {"rope_type": "spiral"}}, "'spiral': known kinds: default, linear"),
    "a rope a kind of layer": ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "reads one for all"),
    "no theta": ({"rope_theta": None}, "neither rope_theta"),
    "theta where it is not read": (
        {"rope_theta": None, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5.0}},
        "rope_parameters.rope_theta is not read beside rope_scaling",
    ),
    "two thetas": ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta = 100.0, but"),
    "two scalings": ({"rope_scaling": {"factor": 2.0}, "rope_parameters": {"factor": 4.0}}, "keep one"),
    "a setting that is lost": ({"rope_scaling": YARN, "rope_parameters": {"beta_fast": 4.0}}, "beta_fast.*not read"),
    "no factor": ({"rope_parameters": {"rope_type": "linear"}}, "'linear' has no factor"),
    "telechat without a factor": ({"rope_parameters": {"rope_type": "telechat3-yarn"}}, "'yarn' has no factor"),
    "null": ({"rope_parameters": {**YARN, "factor": None}}, "'yarn' has no factor"),
    "text": ({"rope_parameters": {**YARN, "factor": "4"}}, "'factor': '4'.*positive numbers"),
    "a whole factor": ({"rope_parameters": {"rope_type": "linear", "factor": 4}}, r"factor 4, vLLM wants 4\.0"),
    "a short table": ({"rope_parameters": YARN, "max_position_embeddings": 257}, "knows 256 positions"),
    "an odd size": ({"partial_rotary_factor": 0.5}, "3 of 6 dimensions"),
    "too large a share": ({"partial_rotary_factor": 1.5}, "at most 1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_rope_that_vllms_dflash_does_not_run_is_refused_by_name(what):
    changes, words = REFUSED[what]
    config = {"rope_theta": 100.0, "max_position_embeddings": 256, **changes}
    with pytest.raises(ConfigError, match=words):
        rope_of(config, head_dim=6, where="somewhere/config.json")


def target(**changes):
    raw = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "head_dim": 6,
        "vocab_size": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "max_position_embeddings": 32768,
    }
    return TargetShape(raw | changes, is_tied=False)


LONG = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048}


def cold(of, **changes):
    return cold_shape(of, num_layers=1, block_size=4, mask_token_id=31, **changes)


def test_a_new_drafter_of_a_target_with_plain_rope_has_plain_rope():
    assert cold(target()).rope == Rope(theta=100.0, rotary_dim=6)
    assert cold(target(rope_parameters={"rope_type": "default", "rope_theta": 100.0})).rope == cold(target()).rope


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_new_drafter_takes_its_targets_scaling_over_unless_it_is_told_not_to(key):
    scaled, plain = cold(target(**{key: LONG})), cold(target(**{key: LONG}), keeps_rope_scaling=False)
    assert (scaled.rope.kind, scaled.rope.parameters["factor"]) == ("yarn", 16.0)
    assert plain.rope == Rope(theta=100.0, rotary_dim=6)
    for shape in (scaled, plain):
        config = config_of(shape)
        assert shape_of(config, where="x").rope == shape.rope, "what is trained is what is exported"
        assert config["rope_parameters"]["rope_type"] == shape.rope.kind
        assert config["max_position_embeddings"] == 32768


def test_the_targets_original_length_is_written_out_where_its_config_leaves_it_at_the_top():
    shape = cold(target(rope_scaling={"type": "yarn", "factor": 16.0}, original_max_position_embeddings=2048))
    assert shape.rope.parameters["original_max_position_embeddings"] == 2048


def test_yarn_of_a_target_without_a_factor_has_transformers_own():
    rope = cold(target(rope_scaling={**LONG, "factor": None})).rope
    assert (rope.kind, rope.parameters["factor"]) == ("yarn", 16.0), "32768 positions of 2048"


def test_of_a_rope_for_each_kind_of_layer_a_new_drafter_takes_that_of_the_layers_that_see_everything():
    linear, local = {"rope_type": "linear", "factor": 8.0}, {"rope_type": "default", "rope_theta": 5.0}
    nested = {"full_attention": {**linear, "rope_theta": 100.0}, "sliding_attention": local}
    assert cold(target(rope_parameters=nested)).rope == cold(target(rope_scaling=linear)).rope
    assert cold(target(rope_parameters=nested), keeps_rope_scaling=False).rope == Rope(theta=100.0, rotary_dim=6)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
        {"rope_type": "default", "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5},
        {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5}, "sliding_attention": {}},
    ],
    ids=["longrope", "image positions", "a rope a kind of layer"],
)
def test_a_new_drafter_takes_theta_alone_of_a_rope_that_a_drafter_cannot_have(rope):
    assert cold(target(rope_parameters=rope)).rope == Rope(theta=100.0, rotary_dim=6)
