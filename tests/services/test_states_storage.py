"""States files on real S3: moved there, checked, staged back; a retried upload is found by its hash."""

import hashlib
import shutil

import numpy as np
import pytest

from pipeline.errors import SchemaError, StageError
from pipeline.shards import commit_part, part_path, read_part
from pipeline.staging import Staging
from pipeline.states import StateShards
from pipeline.storage import Storage, move_part, storage_of

BUCKET = "states"


def words(seed):
    return np.random.default_rng(seed).integers(1, 0x7F00, (2000, 5, 576)).astype(np.uint16)


def committed(folder, *, num_rows=3):
    with StateShards(folder, 0, num_layers=5, hidden_size=576, shard_bytes=12_000_000) as sink:
        for n in range(num_rows):
            sink.add(f"row-{n}", words(n), num_states=2000)
        return commit_part(folder, 0, sink.files())


def test_states_go_to_s3_and_come_back_bit_for_bit_within_the_budget(s3, tmp_path):
    part = committed(tmp_path / "cache")
    uri = storage_of(f"s3://{BUCKET}/there", "0123")
    bodies = {shard.path: (tmp_path / "cache" / shard.path).read_bytes() for shard in part.shards}
    moved = move_part(tmp_path / "cache", 0, uri)
    assert moved.storage == f"s3://{BUCKET}/there/states/0123" and not list((tmp_path / "cache").glob("*.arrow"))
    for name, body in bodies.items():
        assert s3.read(BUCKET, f"there/states/0123/{name}") == body
    stage = Staging(uri, part.shards, tmp_path / "staged", max_bytes=2 * part.shards[0].bytes)
    for n in (0, 1, 2, 0):
        assert stage.open(part.shards[n].path).words(0).tobytes() == words(n).tobytes()
        assert sum(path.stat().st_size for path in (tmp_path / "staged").iterdir()) <= 2 * part.shards[0].bytes
    assert stage.num_stalls == 4


def test_an_upload_that_was_interrupted_is_repaired_and_one_that_was_done_is_not_repeated(s3, tmp_path, monkeypatch):
    part = committed(tmp_path / "cache")
    shutil.copytree(tmp_path / "cache", tmp_path / "again")
    first = part.shards[0]
    s3.client().put_object(Bucket=BUCKET, Key=f"repaired/{first.path}", Body=b"half")
    move_part(tmp_path / "cache", 0, f"s3://{BUCKET}/repaired")
    assert hashlib.sha256(s3.read(BUCKET, f"repaired/{first.path}")).hexdigest() == first.sha256
    monkeypatch.setattr(Storage, "upload", lambda *_: pytest.fail("stored already"))
    assert move_part(tmp_path / "again", 0, f"s3://{BUCKET}/repaired").storage


def test_a_damaged_object_is_refused(s3, tmp_path):
    part = committed(tmp_path / "cache", num_rows=1)
    move_part(tmp_path / "cache", 0, f"s3://{BUCKET}/damaged")
    (shard,) = part.shards
    body = s3.read(BUCKET, f"damaged/{shard.path}")
    s3.client().put_object(Bucket=BUCKET, Key=f"damaged/{shard.path}", Body=body[:-1] + b"?")
    stage = Staging(f"s3://{BUCKET}/damaged", part.shards, tmp_path / "staged", max_bytes=shard.bytes)
    with pytest.raises(SchemaError, match=r"the manifest says.*capture again"):
        stage.open(shard.path)


def test_keys_that_are_refused_leave_the_part_whole(s3, tmp_path, monkeypatch):
    part = committed(tmp_path / "cache", num_rows=1)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StageError, match="upload failed 4 times"):
        move_part(tmp_path / "cache", 0, f"s3://{BUCKET}/refused")
    assert read_part(part_path(tmp_path / "cache", 0)) == part
