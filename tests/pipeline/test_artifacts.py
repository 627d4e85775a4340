import hashlib
import json

import pytest
from pydantic import ValidationError

from pipeline.artifacts import (
    PromptSet,
    Shard,
    TargetFingerprint,
    commit,
    describe_file,
    find,
    load,
    verify,
    write_durably,
)
from pipeline.errors import FingerprintError, SchemaError
from pipeline.fingerprint import target_fingerprint


def manifest(**more):
    return PromptSet(derivation_id="d" * 16, parents={}, **more)


def fingerprint(**more):
    values = {"config": "c", "tokenizer": "t", "chat_template": "x", "weights": "w", "dtype": "bfloat16"}
    return TargetFingerprint(**{**values, "target_layer_ids": (1, 3), **more})


def test_a_manifest_comes_back_as_it_went_in(tmp_path):
    written = manifest(
        fingerprint=fingerprint(),
        counts={"rows": 3},
        rejects={"odd": 1},
        shards=(Shard(path="a", rows=3, bytes=1, sha256="0"),),
    )
    commit(tmp_path, written)
    assert load(tmp_path, PromptSet) == written


def test_no_manifest_means_not_complete(tmp_path):
    assert find(tmp_path, PromptSet) is None
    with pytest.raises(SchemaError, match="no complete prompts artifact"):
        load(tmp_path, PromptSet)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99}, "schema version 99, this Slipstream reads 1"),
        ({"kind": "responses"}, "not a prompts manifest"),
        ({"surprise": 1}, "not a readable prompts manifest"),
    ],
)
def test_a_manifest_of_another_kind_or_version_is_refused(tmp_path, change, message):
    commit(tmp_path, manifest())
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(SchemaError, match=message):
        load(tmp_path, PromptSet)


def test_half_a_manifest_is_refused(tmp_path):
    commit(tmp_path, manifest())
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text()[:40])
    with pytest.raises(SchemaError, match="remove the folder to redo it"):
        load(tmp_path, PromptSet)


def test_a_shard_records_the_bytes_and_hash_of_its_file_and_any_change_is_found(tmp_path):
    path = tmp_path / "rows.bin"
    path.write_bytes(b"0123456789")
    shard = describe_file(path, rows=2)
    assert (shard.rows, shard.bytes, shard.sha256) == (2, 10, hashlib.sha256(b"0123456789").hexdigest())
    written = manifest(shards=(shard,))
    verify(tmp_path, written)
    path.write_bytes(b"012345678x")
    with pytest.raises(SchemaError, match="sha256"):
        verify(tmp_path, written)
    path.write_bytes(b"0123")
    with pytest.raises(SchemaError, match="4 bytes, the manifest says 10"):
        verify(tmp_path, written)
    path.unlink()
    with pytest.raises(SchemaError, match="missing"):
        verify(tmp_path, written)


def test_a_manifest_cannot_change_and_knows_no_other_keys():
    with pytest.raises(ValidationError):
        manifest(surprise=1)
    with pytest.raises(ValidationError, match="frozen"):
        manifest().derivation_id = "x"


def test_the_content_id_depends_on_the_data_alone():
    shards = (Shard(path="a.parquet", rows=1, bytes=1, sha256="0"),)
    other = (Shard(path="a.parquet", rows=1, bytes=1, sha256="1"),)
    report = Shard(path="report.json", rows=0, bytes=1, sha256="2")
    assert manifest(shards=shards).content_id == manifest(shards=(*shards, report), seconds=9.0).content_id
    assert manifest(shards=shards).content_id != manifest(shards=other).content_id


def test_a_reader_sees_the_old_file_or_the_new_one_and_no_temporary_is_left(tmp_path):
    write_durably(tmp_path / "a", b"old")
    write_durably(tmp_path / "a", b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"new")]


def test_a_fingerprint_mismatch_names_every_differing_field_with_both_values():
    with pytest.raises(FingerprintError) as error:
        fingerprint().require_same(fingerprint(dtype="float32", target_layer_ids=(1, 4)), where="responses abc")
    message = str(error.value)
    assert "responses abc" in message
    assert "dtype: bfloat16 != float32" in message
    assert "target_layer_ids: (1, 3) != (1, 4)" in message
    assert "tokenizer" not in message
    fingerprint().require_same(fingerprint(), where="same")


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8, "_name_or_path": "here"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    header = b'{"w": {}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(5000))
    return folder


def print_of(folder, **more):
    return target_fingerprint(folder, **{"dtype": "bfloat16", "target_layer_ids": [1, 3], **more})


@pytest.mark.parametrize(
    ("file", "content", "field"),
    [
        ("config.json", '{"hidden_size": 9}', "config"),
        ("tokenizer.json", '{"a": 1}', "tokenizer"),
        ("chat_template.jinja", "{{ other }}", "chat_template"),
    ],
)
def test_each_part_of_a_target_has_its_own_field(target, file, content, field):
    before = print_of(target)
    (target / file).write_text(content)
    after = print_of(target)
    assert {name for name in type(before).model_fields if getattr(before, name) != getattr(after, name)} == {field}


def test_changed_weights_are_another_target_and_a_moved_folder_is_not(target, tmp_path):
    before = print_of(target)
    (target / "config.json").write_text('{"hidden_size": 8, "_name_or_path": "elsewhere"}')
    moved = target.rename(tmp_path / "moved")
    assert print_of(moved) == before
    weights = bytearray((moved / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (moved / "model.safetensors").write_bytes(weights)
    assert print_of(moved).weights != before.weights
