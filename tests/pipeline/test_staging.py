"""States on storage: nothing is lost on the way, nothing wrong is read back, and the disk stays bounded."""

import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pipeline import staging as staging_module
from pipeline import storage as storage_module
from pipeline.artifacts import HiddenStateCache, verify
from pipeline.errors import ConfigError, SchemaError, StageError
from pipeline.shards import PartWriter, commit_part, part_path, read_part
from pipeline.staging import Staging
from pipeline.states import StateShards
from pipeline.storage import Storage, move_part, storage_of


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(storage_module, "RETRY_WAIT_S", 0.0)


def words(n, seed):
    return np.random.default_rng(seed).integers(1, 0x7F00, (n, 2, 64)).astype(np.uint16)


def committed(folder, index=0, *, num_rows=6):
    """A part of one row of about 10 kB a states file."""
    with StateShards(folder, index, num_layers=2, hidden_size=64, shard_bytes=12_000) as sink:
        for n in range(num_rows):
            sink.add(f"row-{n}", words(40, n), num_states=40)
        files = sink.files() | {f"rows-{index:05d}.parquet": (num_rows, lambda path: path.write_bytes(b"rows"))}
        return commit_part(folder, index, files)


def uri_of(tmp_path):
    (tmp_path / "bucket").mkdir(exist_ok=True)
    return f"file://{tmp_path}/bucket/prefix"


def staging(tmp_path, part, *, num_files=3, folder="staged", uri=None):
    largest = max(shard.bytes for shard in part.shards)
    return Staging(uri or uri_of(tmp_path), part.shards, tmp_path / folder, max_bytes=num_files * largest)


def states_in(folder):
    return sorted(path.name for path in folder.glob("*.arrow"))


def test_a_moved_part_is_on_storage_alone_and_still_counts_as_done(tmp_path):
    folder = tmp_path / "states"
    before = committed(folder)
    names = states_in(folder)
    bodies = {name: (folder / name).read_bytes() for name in names}
    after = move_part(folder, 0, uri_of(tmp_path))
    assert after.shards == before.shards and after.storage == uri_of(tmp_path)
    assert states_in(folder) == [] and (folder / "rows-00000.parquet").exists()
    assert {path.name: path.read_bytes() for path in (tmp_path / "bucket/prefix").iterdir()} == bodies
    manifest = {"derivation_id": "x", "parents": {}, "hidden_size": 64, "num_states": 1, "shards": after.shards}
    verify(folder, HiddenStateCache(**manifest, storage=after.storage))
    with pytest.raises(SchemaError, match="missing"):
        verify(folder, HiddenStateCache(**manifest))
    writer = PartWriter(folder)
    assert writer.is_done(0) and {shard.path for shard in writer.finish(1)[0]} >= set(names)
    assert read_part(part_path(folder, 0)) == after


def test_a_part_is_moved_once_and_a_killed_move_is_finished(tmp_path, monkeypatch):
    folder, uri = tmp_path / "states", uri_of(tmp_path)
    committed(folder)
    kept = tmp_path / "kept"
    shutil.copytree(folder, kept)  # as if killed after the uploads, before the record
    move_part(folder, 0, uri)
    recorded = (folder / "part-00000.json").stat().st_mtime_ns
    monkeypatch.setattr(Storage, "upload", lambda *_: pytest.fail("stored already"))
    move_part(folder, 0, uri)
    assert (folder / "part-00000.json").stat().st_mtime_ns == recorded
    assert move_part(kept, 0, uri).storage == uri and states_in(kept) == []
    # Killed after the record, before the local files went: they are leftovers, to the mover and to the writer.
    for finish in (lambda: move_part(folder, 0, uri), lambda: PartWriter(folder)):
        (folder / "states-00000-00.arrow").write_bytes(b"left")
        finish()
        assert states_in(folder) == []


def test_half_an_upload_is_sent_again_and_the_local_file_stays_until_its_hash_was_read_back(tmp_path, monkeypatch):
    folder, uri = tmp_path / "states", uri_of(tmp_path)
    committed(folder)
    real, tries = Storage.upload, []

    def cut(self, path, shard):
        tries.append(shard.path)
        half = tmp_path / "half"
        half.write_bytes(path.read_bytes()[:-1] + b"?")  # of the right size
        real(self, half if len(tries) < broken_until else path, shard)

    monkeypatch.setattr(Storage, "upload", cut)
    broken_until = 1000
    with pytest.raises(StageError, match=r"upload failed 4 times.*read back with sha256"):
        move_part(folder, 0, uri)
    assert len(states_in(folder)) == 6 and read_part(part_path(folder, 0)).storage is None
    broken_until = len(tries) + 3
    move_part(folder, 0, uri)
    assert states_in(folder) == [] and tries.count("states-00000-00.arrow") == 4 + 3


def test_staged_files_are_the_stored_ones_and_the_longest_unused_makes_room(tmp_path):
    part = committed(tmp_path / "states")
    move_part(tmp_path / "states", 0, uri_of(tmp_path))
    stage = staging(tmp_path, part, num_files=3)
    names = [shard.path for shard in part.shards if shard.path.endswith(".arrow")]
    for n in (0, 1, 2, 0, 3):
        assert stage.open(names[n]).words(0).tobytes() == words(40, n).tobytes()
    staged = {name.split("-", 2)[2] for name in states_in(tmp_path / "staged")}
    assert staged == {names[0], names[2], names[3]}
    assert stage.num_stalls == 4
    with pytest.raises(SchemaError, match="not among the files"):
        stage.open("states-00009-00.arrow")


def test_what_was_made_again_under_the_same_name_is_not_read_from_an_older_copy(tmp_path):
    for seeds in ((0, 1), (1, 0)):
        shutil.rmtree(tmp_path / "states", ignore_errors=True)
        with StateShards(tmp_path / "states", 0, num_layers=2, hidden_size=64) as sink:
            for seed in seeds:
                sink.add(f"row-{seed}", words(40, seed), num_states=40)
            part = commit_part(tmp_path / "states", 0, sink.files())
        move_part(tmp_path / "states", 0, uri_of(tmp_path))
        found = staging(tmp_path, part).open("states-00000-00.arrow")
        assert [found.words(n).tobytes() for n in (0, 1)] == [words(40, seed).tobytes() for seed in seeds]


def test_a_budget_that_holds_no_file_is_refused_at_once(tmp_path):
    part = committed(tmp_path / "states")
    with pytest.raises(ConfigError, match=r"staging_bytes = 100.*shard_bytes"):
        Staging(uri_of(tmp_path), part.shards, tmp_path / "staged", max_bytes=100)


def test_other_bytes_than_the_manifests_never_become_readable(tmp_path):
    part = committed(tmp_path / "states")
    move_part(tmp_path / "states", 0, uri_of(tmp_path))
    stored = tmp_path / "bucket/prefix/states-00000-00.arrow"
    whole = stored.read_bytes()
    stage = staging(tmp_path, part)
    for damage in (whole[:-1] + b"?", whole[: len(whole) // 2], b""):
        stored.write_bytes(damage)
        with pytest.raises(SchemaError, match=r"the manifest says.*capture again"):
            stage.open(stored.name)
        assert states_in(tmp_path / "staged") == [] and not list((tmp_path / "staged").glob(".*.tmp"))
    stored.unlink()
    with pytest.raises(StageError, match="download failed 4 times"):
        stage.open(stored.name)
    stored.write_bytes(whole)
    assert stage.open(stored.name).words(0).tobytes() == words(40, 0).tobytes()


_KILLED = """
import sys, time
from pathlib import Path
from pipeline.storage import Storage
from tests.pipeline.test_staging import staging
from pipeline.shards import part_path, read_part
root = Path(sys.argv[1])
def hangs(self, shard, take):
    take(b"half")
    (root / "downloading").touch()
    time.sleep(600)
Storage.download = hangs
staging(root, read_part(part_path(root / "states", 0)), num_files=1).open("states-00000-00.arrow")
"""


def test_what_a_killed_reader_left_is_removed_and_what_a_living_one_writes_is_waited_for(tmp_path, monkeypatch, caplog):
    logging.getLogger("slipstream").propagate = True
    part = committed(tmp_path / "states")
    move_part(tmp_path / "states", 0, uri_of(tmp_path))
    checkout = Path(__file__).resolve().parents[2]
    process = subprocess.Popen([sys.executable, "-c", _KILLED, str(tmp_path)], cwd=checkout)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "downloading").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        (left,) = (tmp_path / "staged").glob(".*.tmp")
        stage = staging(tmp_path, part, num_files=1)
        monkeypatch.setattr(staging_module, "SAY_EVERY_S", 0.1)
        stage.ahead(["states-00000-01.arrow"])  # there is room for one file, which the other process has
        deadline = time.monotonic() + 60
        while "waiting for room" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.02)
        assert states_in(tmp_path / "staged") == [] and left.exists() and "waiting for room" in caplog.text
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert stage.open("states-00000-01.arrow").words(0).tobytes() == words(40, 1).tobytes()
    assert not left.exists()
    assert stage.open("states-00000-00.arrow").words(0).tobytes() == words(40, 0).tobytes()


def bytes_in(folder):
    """What a folder holds, temporaries included; a file that goes meanwhile counts for nothing."""
    total = 0
    for path in folder.iterdir():
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _reader(root, seed, failures):
    part = read_part(part_path(root / "states", 0))
    stage = staging(root, part, num_files=2)
    order = np.random.default_rng(seed).integers(0, 6, 60)
    try:
        for n in order:
            if stage.open(f"states-00000-{n:02d}.arrow").words(0).tobytes() != words(40, n).tobytes():
                failures.put(f"row {n} differs")
            if (used := bytes_in(root / "staged")) > 2 * max(shard.bytes for shard in part.shards):
                failures.put(f"{used} bytes")
    except Exception as error:
        failures.put(repr(error))


def test_two_processes_share_a_folder_within_one_budget(tmp_path):
    committed(tmp_path / "states")
    move_part(tmp_path / "states", 0, uri_of(tmp_path))
    context = multiprocessing.get_context("fork")
    failures = context.Queue()
    readers = [context.Process(target=_reader, args=(tmp_path, seed, failures)) for seed in (1, 2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert [reader.exitcode for reader in readers] == [0, 0] and failures.empty()


def test_a_slow_storage_is_counted_said_and_hidden_by_staging_ahead(tmp_path, monkeypatch, caplog):
    part = committed(tmp_path / "states")
    move_part(tmp_path / "states", 0, uri_of(tmp_path))
    real = Storage.download

    def stalls(self, shard, take):
        time.sleep(1.1)
        return real(self, shard, take)

    monkeypatch.setattr(Storage, "download", stalls)
    stage = staging(tmp_path, part)
    logging.getLogger("slipstream").propagate = True
    with caplog.at_level(logging.WARNING, logger="slipstream"):
        stage.open("states-00000-00.arrow")
    assert stage.num_stalls == 1 and stage.stalled_s > 1.0
    assert "reading waited" in caplog.text and "staging_bytes" in caplog.text
    stage.ahead(["states-00000-01.arrow", "states-00000-01.arrow"])
    deadline = time.monotonic() + 30
    while len(states_in(tmp_path / "staged")) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    stage.open("states-00000-01.arrow")
    assert stage.num_stalls == 1


def test_storage_is_named_by_uri_and_each_cache_has_its_own_place():
    assert storage_of("s3://bucket/a/", "0123") == storage_of("s3://bucket/a", "0123") == "s3://bucket/a/states/0123"
    for uri in ("bucket/prefix", "nonsense://x"):
        with pytest.raises(ConfigError, match="expected s3://bucket/prefix"):
            Storage(uri)


def test_caches_that_share_a_folder_do_not_read_each_others_files(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    parts = [committed(folders[0], num_rows=1), committed(folders[1], num_rows=2)]
    uris = [storage_of(uri_of(tmp_path), folder.name) for folder in folders]
    os.makedirs(tmp_path / "bucket/prefix", exist_ok=True)
    for folder, uri in zip(folders, uris, strict=True):
        move_part(folder, 0, uri)
    stages = [staging(tmp_path, part, uri=uri, num_files=8) for part, uri in zip(parts, uris, strict=True)]
    for stage in stages:
        assert stage.open("states-00000-00.arrow").words(0).tobytes() == words(40, 0).tobytes()
    assert len(states_in(tmp_path / "staged")) == 2
