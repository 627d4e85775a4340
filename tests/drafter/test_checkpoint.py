import json
from dataclasses import replace

import pytest
import torch
import toys
from safetensors.torch import load_file, save_file

from drafter.checkpoint import Kept, cold_start, files_of, load_drafter, save_drafter
from drafter.shape import config_of
from pipeline.errors import ConfigError, SchemaError


def saved(folder, *, of=None, kept=None, **config):
    model = toys.drafter(of, dtype=torch.float32)
    save_drafter(folder, model, kept or Kept.of({**config_of(model.shape), **config}))
    return folder


def bytes_of(folder):
    return {name: (folder / name).read_bytes() for name in files_of(folder)}


@pytest.mark.parametrize("variant", toys.VARIANTS)
def test_a_drafter_that_was_only_read_is_written_bit_for_bit(variant, tmp_path):
    first = saved(tmp_path / "1", of=toys.shape(**toys.VARIANTS[variant]), release="kept", extra={"nested": [1, 2]})
    model, kept = load_drafter(first)
    save_drafter(tmp_path / "2", model, kept)
    assert bytes_of(tmp_path / "2").keys() == bytes_of(first).keys()
    for name in ("config.json", "model.safetensors"):
        assert bytes_of(tmp_path / "2")[name] == bytes_of(first)[name]
    assert kept.config["release"] == "kept"
    assert model.shape == toys.shape(**toys.VARIANTS[variant])
    tensors = load_file(first / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name != "mask_embedding":
            assert tensors[name].dtype == torch.bfloat16
            assert torch.equal(parameter, tensors[name].float())


def test_a_config_comes_back_to_the_byte_however_it_was_written(tmp_path):
    folder = saved(tmp_path / "1")
    text = json.dumps(dict(reversed(json.loads((folder / "config.json").read_text()).items())), indent=7) + "\n\n"
    (folder / "config.json").write_text(text)
    save_drafter(tmp_path / "2", *load_drafter(folder))
    assert (tmp_path / "2" / "config.json").read_text() == text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_warm_start_keeps_the_dtype_and_the_metadata_of_its_file(dtype, tmp_path):
    model = toys.drafter(dtype=torch.float32)
    dtypes = {name: dtype for name, _ in model.named_parameters()}
    kept = replace(Kept.of(config_of(model.shape)), dtypes=dtypes, metadata={"made by": "a release"})
    first = saved(tmp_path / "1", kept=kept)
    assert {t.dtype for t in load_file(first / "model.safetensors").values()} == {dtype}
    loaded, again = load_drafter(first)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    save_drafter(tmp_path / "2", loaded, again)
    assert bytes_of(first) == bytes_of(tmp_path / "2")
    assert again.metadata == {"made by": "a release"}


def test_a_drafter_in_shards_is_read_as_one(tmp_path):
    whole = saved(tmp_path / "whole")
    tensors = load_file(whole / "model.safetensors")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "config.json").write_bytes((whole / "config.json").read_bytes())
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({n: tensors[n] for n in tensors if places[n] == file}, tmp_path / "shards" / file, {"format": "pt"})
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    one, other = load_drafter(whole), load_drafter(tmp_path / "shards")
    for name, parameter in one[0].named_parameters():
        assert torch.equal(parameter, other[0].get_parameter(name))
    save_drafter(tmp_path / "again", *other)
    assert bytes_of(tmp_path / "again") == bytes_of(whole)
    (tmp_path / "shards" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SchemaError, match=r"model-00002-of-00002\.safetensors: missing"):
        load_drafter(tmp_path / "shards")


@pytest.mark.parametrize("as_dict", [False, True])
def test_a_mask_embedding_of_its_own_is_read_trained_and_written_in_the_form_it_had(as_dict, tmp_path):
    folder, mask = saved(tmp_path / "1"), torch.linspace(-1, 1, 16)
    form = {"embedding": mask.view(1, 16), "mask_token_id": toys.MASK_TOKEN_ID} if as_dict else mask.bfloat16()
    torch.save(form, folder / "mask_embedding.pt")
    model, kept = load_drafter(folder)
    assert model.shape == toys.shape(has_mask_embedding=True)
    assert torch.equal(model.mask_embedding, mask if as_dict else mask.bfloat16().float())
    paths = save_drafter(tmp_path / "2", model, kept)
    assert [path.name for path in paths] == ["config.json", "model.safetensors", "mask_embedding.pt"]
    assert "mask_embedding" not in load_file(tmp_path / "2" / "model.safetensors")
    again = torch.load(tmp_path / "2" / "mask_embedding.pt", weights_only=True)
    found, given = (again["embedding"], form["embedding"]) if as_dict else (again, form)
    assert torch.equal(found, given) and found.dtype == given.dtype
    with torch.no_grad():
        model.mask_embedding += 1
    save_drafter(tmp_path / "3", model, kept)
    assert torch.allclose(load_drafter(tmp_path / "3")[0].mask_embedding, mask + 1, atol=0.01)


def test_a_mask_embedding_that_is_not_this_drafters_is_refused(tmp_path):
    path = saved(tmp_path) / "mask_embedding.pt"
    for given, words in (
        ({"embedding": torch.ones(16), "mask_token_id": 3}, "of token 3, dflash_config.mask_token_id is 31"),
        (torch.ones(9), r"mask_embedding \(9,\) instead of \(16,\)"),
        ({"embedded": torch.ones(16)}, "expected a tensor"),
    ):
        torch.save(given, path)
        with pytest.raises(SchemaError, match=words):
            load_drafter(tmp_path)
    path.write_bytes(b"no pickle")
    with pytest.raises(SchemaError, match="read safely"):
        load_drafter(tmp_path)


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
        (lambda t: t.update({"layers.9.bias": torch.ones(2)}), "unexpected \\['layers.9.bias'\\]"),
        (lambda t: t.update({"lm_head.weight": torch.ones(2)}), "holds \\['lm_head.weight'\\].*where it was made"),
        (lambda t: t.update({"embed_tokens.weight": torch.ones(2)}), "holds \\['embed_tokens.weight'\\]"),
        (lambda t: t.update({"d2t": torch.ones(2)}), "holds \\['d2t'\\], an embedding, a head or a vocabulary"),
        (lambda t: t.update({"fc.weight": torch.ones(16, 30, dtype=torch.int8)}), "fc.weight.*int8.*quantised"),
        (lambda t: t.update({"norm.weight": torch.ones(7)}), "norm.weight \\(7,\\) instead of \\(16,\\)"),
        (lambda t: t["fc.weight"][3].fill_(float("nan")), "not finite: \\['fc.weight'\\]"),
    ],
    ids=["missing", "extra", "own head", "own embedding", "own vocabulary", "quantised", "misshapen", "not a number"],
)
def test_wrong_tensors_are_refused_by_name(spoil, words, tmp_path):
    folder = saved(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SchemaError, match=words):
        load_drafter(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("share", [0.5, 0.0, None], ids=["cut", "empty", "absent"])
def test_a_file_that_is_not_whole_is_refused(name, share, tmp_path):
    path = saved(tmp_path) / name
    body = path.read_bytes()
    path.unlink() if share is None else path.write_bytes(body[: int(len(body) * share)])
    with pytest.raises(SchemaError, match=name):
        load_drafter(tmp_path)


def test_a_cold_start_is_its_seeds_and_takes_the_targets_final_gain():
    target = toys.frozen(dtype=torch.float32)
    target.final_norm.mul_(1.5)
    a, b, c = (cold_start(toys.shape(), target, seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["fc.weight"], c["fc.weight"])
    assert torch.equal(a["norm.weight"], target.final_norm)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
        {"rope_parameters": {}, "rope_theta": 7.0},
        {"is_causal": True},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3, "use_sliding_window": True},
        {"logit_scale": 2.0},
    ],
    ids=["scaling", "theta", "causal", "window", "logit scale"],
)  # fmt: skip
def test_a_config_that_describes_another_drafter_than_was_trained_is_never_written(changes, tmp_path):
    model = toys.drafter(dtype=torch.float32)
    with pytest.raises(ConfigError, match="would not describe the drafter that was trained"):
        save_drafter(tmp_path / "x", model, Kept.of({**config_of(model.shape), **changes}))
    assert not (tmp_path / "x").exists()
