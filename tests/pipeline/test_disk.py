"""What a capture takes is said before its first row; old states go for new ones, and never what is in use."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from pipeline import disk
from pipeline.artifacts import HiddenStateCache, ResponseSet, commit, find, load
from pipeline.config import Config
from pipeline.disk import estimate, make_room, sweep
from pipeline.errors import StageError
from pipeline.shards import commit_part, part_path, read_part
from pipeline.stages import Artifact, exclusive, hold_for_reading, set_current
from pipeline.staging import STAGED, Staging
from pipeline.states import StateShards
from pipeline.storage import move_part

HOUR = 3600
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def logged(caplog):
    logging.getLogger("slipstream").propagate = True
    caplog.set_level(logging.INFO, logger="slipstream")
    return caplog


def config_for(root, **capture):
    return Config.model_validate({"root": root, "target": {"model": root / "model"}, "capture": capture})


def cache(root, name, *, hours_old=0.0, complete=True, num_rows=4):
    """About 10 kB a row."""
    folder = root / "states" / name
    with StateShards(folder, 0, num_layers=2, hidden_size=64) as sink:
        for n in range(num_rows):
            words = np.random.default_rng(n).integers(1, 0x7F00, (40, 2, 64)).astype(np.uint16)
            sink.add(f"row-{n}", words, num_states=40)
        shards = commit_part(folder, 0, sink.files()).shards
    if complete:
        commit(folder, HiddenStateCache(derivation_id=name, parents={}, hidden_size=64, num_states=1, shards=shards))
    changed = time.time() - hours_old * HOUR
    for path in (*folder.iterdir(), folder):
        os.utime(path, (changed, changed))
    return folder


def names(root):
    return sorted(path.name for path in (root / "states").iterdir() if path.is_dir())


def bytes_of(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def one_megabyte(config, **changes):
    settings = {"num_rows": 10, "num_tokens": 1000, "num_layers": 5, "hidden_size": 100} | changes
    return estimate(config, **settings)


def free(monkeypatch, num_bytes):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, num_bytes + disk.RESERVE_BYTES))


def test_an_estimate_is_close_to_what_a_capture_takes(tmp_path):
    for form in ("bf16", "int8"):
        folder = tmp_path / form
        with StateShards(folder, 0, num_layers=5, hidden_size=576, states_format=form) as sink:
            for n in range(20):
                words = np.random.default_rng(n).integers(1, 0x7F00, (100, 5, 576)).astype(np.uint16)
                sink.add(f"row-{n}", words, num_states=100)
            commit_part(folder, 0, sink.files())
        config = config_for(tmp_path, states_format=form)
        expected = estimate(config, num_rows=20, num_tokens=2000, num_layers=5, hidden_size=576)
        took = sum(path.stat().st_size for path in folder.glob("*.arrow"))
        assert took <= expected.num_bytes <= 1.02 * took
        assert expected.seconds is None and "about" not in str(expected)


def test_the_time_is_told_by_the_last_responses(tmp_path):
    for n, seconds in enumerate((10.0, 100.0)):
        folder = tmp_path / "responses" / f"r{n}"
        counts = {"prompt_tokens": 3000, "response_tokens": 7000}
        commit(folder, ResponseSet(derivation_id=f"r{n}", parents={}, counts=counts, seconds=seconds))
        os.utime(folder / "manifest.json", (n, n))
    (tmp_path / "responses" / "old").mkdir()
    (tmp_path / "responses" / "old" / "manifest.json").write_text('{"kind": "responses", "schema_version": 0}')
    assert disk.tokens_per_s(tmp_path) == 100.0
    expected = estimate(
        config_for(tmp_path), num_rows=10, num_tokens=60_000, num_layers=5, hidden_size=4096, is_bound=True
    )
    assert expected.seconds == 600
    assert str(expected) == "10 rows, at most 60000 tokens, at most 2.5 GB of states as bf16, about 10 min"


def test_the_estimate_is_said_before_anything_is_done(tmp_path, logged):
    config = config_for(tmp_path)
    make_room(config, "new", one_megabyte(config))
    assert "capture: 10 rows, 1000 tokens, 1.0 MB of states as bf16" in logged.text


def test_a_disk_that_is_too_small_stops_there_and_nothing_is_removed_for_it(tmp_path, monkeypatch):
    cache(tmp_path, "old")
    config = config_for(tmp_path)
    free(monkeypatch, 500_000)
    with pytest.raises(StageError) as stopped:
        make_room(config, "new", one_megabyte(config, is_bound=True))
    message = str(stopped.value)
    room = (500_000 + bytes_of(tmp_path / "states" / "old")) / 1000
    assert "needs 1.0 MB for 10 rows, at most 1000 tokens" in message and f"has {room:.1f} kB for it" in message
    assert 'capture.states_format = "int8" (5' in message and "capture.stream = true" in message
    assert "more disk" in message and "regenerate.max_tokens" in message
    assert names(tmp_path) == ["old"]


def test_old_caches_go_for_a_new_one_when_the_disk_is_short_of_room(tmp_path, monkeypatch, logged):
    sizes = {name: bytes_of(cache(tmp_path, name, hours_old=h)) for name, h in (("a", 3), ("b", 2), ("c", 1))}
    config = config_for(tmp_path)
    there = {"free": 1_010_240 - sizes["a"] - 1000}

    def usage(path):
        gone = sum(size for name, size in sizes.items() if not (tmp_path / "states" / name).exists())
        return Usage(0, 0, there["free"] + gone + disk.RESERVE_BYTES)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    make_room(config, "new", one_megabyte(config))
    assert names(tmp_path) == ["c"], "the oldest two: one alone was not enough"
    assert "states a: removed" in logged.text and "the oldest" in logged.text


def test_a_byte_budget_holds_for_all_states_together(tmp_path):
    for name, hours in (("a", 3), ("b", 2), ("c", 1)):
        cache(tmp_path, name, hours_old=hours, num_rows=50)
    each = bytes_of(tmp_path / "states" / "a")
    config = config_for(tmp_path, max_bytes=3 * each)
    make_room(config, "new", one_megabyte(config, num_tokens=int(1.5 * each / 1000)))
    assert names(tmp_path) == ["c"]
    small = config_for(tmp_path, max_bytes=each)
    with pytest.raises(StageError, match=rf"max_bytes = {each} leaves .*larger capture.max_bytes"):
        make_room(small, "new", one_megabyte(small, num_tokens=2000))
    assert names(tmp_path) == ["c"]


def test_what_a_stream_has_on_its_way_counts_for_other_runs(tmp_path):
    queued = tmp_path / "queue" / "run" / "states-00000-00.arrow"
    queued.parent.mkdir(parents=True)
    queued.write_bytes(bytes(900_000))
    config = config_for(tmp_path, max_bytes=1_500_000)
    with pytest.raises(StageError, match=r"max_bytes = 1500000 leaves 600\.0 kB beside the states that stay"):
        make_room(config, "new", one_megabyte(config))
    queued.unlink()
    make_room(config, "new", one_megabyte(config))


def test_what_an_interrupted_try_left_counts_for_it(tmp_path):
    folder = cache(tmp_path, "new", complete=False, num_rows=50)
    there = bytes_of(folder)
    config = config_for(tmp_path, max_bytes=there + 10_000)
    make_room(config, "new", one_megabyte(config, num_rows=1, num_tokens=there // 1000))
    with pytest.raises(StageError, match=rf"capture\.max_bytes = .*interrupted runs have left.*{folder}"):
        make_room(config, "another", one_megabyte(config, num_rows=1, num_tokens=there // 1000))


def test_states_that_move_to_storage_need_room_for_the_parts_in_the_making_alone(tmp_path, monkeypatch):
    free(monkeypatch, 100_000)
    (tmp_path / "bucket").mkdir()
    big = {"num_rows": 10_000, "num_tokens": 100_000}
    with pytest.raises(StageError):
        make_room(config_for(tmp_path), "new", one_megabyte(config_for(tmp_path), **big))
    stored = config_for(tmp_path, storage=f"file://{tmp_path}/bucket")
    with pytest.raises(StageError):
        make_room(stored, "new", one_megabyte(stored, **big))  # two parts of 64 rows are over 1 MB
    free(monkeypatch, 2_000_000)
    make_room(stored, "new", one_megabyte(stored, **big))


def test_current_states_those_being_built_and_those_in_use_stay(tmp_path, logged):
    for name in ("current", "building", "locked", "read", "unused"):
        cache(tmp_path, name, hours_old=50)
    manifest = load(tmp_path / "states" / "current", HiddenStateCache)
    set_current(tmp_path, "states", Artifact(tmp_path / "states" / "current", manifest))
    config = config_for(tmp_path, ttl_hours=1, max_bytes=10_000_000)
    held = hold_for_reading(tmp_path / "states" / "read")
    with exclusive(tmp_path / "states" / "locked", "test"):
        make_room(config, "building", one_megabyte(config))
    assert names(tmp_path) == ["building", "current", "locked", "read"]
    assert "states read are in use and stay" in logged.text
    held.close()
    assert sweep(tmp_path, max_bytes=None, ttl_hours=1, keep=["current"]) and names(tmp_path) == ["current"]


def test_what_is_older_than_its_time_goes_whole_and_interrupted_caches_alike(tmp_path, logged):
    cache(tmp_path, "old", hours_old=30)
    cache(tmp_path, "young", hours_old=5)
    cache(tmp_path, "stopped", hours_old=30, complete=False)
    cache(tmp_path, "going", hours_old=5, complete=False)
    assert sorted(sweep(tmp_path, max_bytes=None, ttl_hours=24)) == ["old", "stopped"]
    assert names(tmp_path) == ["going", "young"]
    assert "30.0 h old, capture.ttl_hours = 24" in logged.text
    assert sweep(tmp_path, max_bytes=None, ttl_hours=None) == []
    # A budget takes complete caches alone: an interrupted one may be going on right now.
    assert sweep(tmp_path, max_bytes=1, ttl_hours=None) == ["young"] and names(tmp_path) == ["going"]
    assert sweep(tmp_path / "nowhere", max_bytes=1, ttl_hours=1) == []


def test_states_on_storage_and_their_local_copies_go_with_their_cache(tmp_path):
    (tmp_path / "bucket").mkdir()
    for name in ("a", "b"):
        part = move_part(cache(tmp_path, name, hours_old=9), 0, f"file://{tmp_path}/bucket/{name}")
        Staging(part.storage, part.shards, tmp_path / STAGED, max_bytes=10**6).open("states-00000-00.arrow")
        os.utime(tmp_path / "states" / name / "manifest.json", (1, 1) if name == "a" else None)
    assert len(list((tmp_path / "bucket").rglob("*.arrow"))) == len(list((tmp_path / STAGED).glob("*.arrow"))) == 2
    assert sweep(tmp_path, max_bytes=None, ttl_hours=1) == ["a"]
    assert [path.parent.name for path in (tmp_path / "bucket").rglob("*.arrow")] == ["b"]
    (left,) = (tmp_path / STAGED).glob("*.arrow")
    assert left.read_bytes() == (tmp_path / "bucket/b/states-00000-00.arrow").read_bytes()


_KILLED = """
import shutil, sys, time
from pathlib import Path
from pipeline.disk import sweep
root = Path(sys.argv[1])
def hangs(folder):
    next(folder.glob("*.arrow")).unlink()
    (root / "removing").touch()
    time.sleep(600)
shutil.rmtree = hangs
sweep(root, max_bytes=1, ttl_hours=None)
"""


def test_a_kill_amid_a_removal_leaves_no_half_cache_and_the_next_sweep_ends_it(tmp_path):
    folder = cache(tmp_path, "old")
    process = subprocess.Popen([sys.executable, "-c", _KILLED, str(tmp_path)], cwd=Path(__file__).resolve().parents[2])
    deadline = time.monotonic() + 60
    while not (tmp_path / "removing").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert find(folder, HiddenStateCache) is None and not folder.exists()
    made_again = cache(tmp_path, "old")
    assert sweep(tmp_path, max_bytes=None, ttl_hours=None) == []
    assert names(tmp_path) == ["old"] and read_part(part_path(made_again, 0)).shards


def test_what_is_left_of_a_removal_takes_nothing_from_a_cache_that_was_made_again(tmp_path):
    uri = f"file://{tmp_path}/bucket/old"
    (tmp_path / "bucket").mkdir()
    folder = cache(tmp_path, "old")
    move_part(folder, 0, uri)
    folder.rename(folder.with_name(".removed-old-123"))
    made_again = cache(tmp_path, "old")
    move_part(made_again, 0, uri)
    sweep(tmp_path, max_bytes=None, ttl_hours=None)
    assert names(tmp_path) == ["old"] and len(list((tmp_path / "bucket").rglob("*.arrow"))) == 1
