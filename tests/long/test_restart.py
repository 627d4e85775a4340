"""A supervised server: crashes, ordered restarts and lost engines end with a drafter that proved itself serving."""

import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from tiny import tiny_drafter, tiny_target

from serving.deploy import status, swap_replica
from serving.errors import DeployError
from serving.kept_drafter import read_kept
from serving.launch import VllmServer
from serving.load import Driver, drive_sync
from serving.preflight import sha256_file

TOKEN = "test token"
REQUEST = {"prompt": [0, 9, 10, 11], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    root = tmp_path_factory.mktemp("restart")
    target = tiny_target(root / "target", favourite=433)
    folders = {
        "1": tiny_drafter(root / "versions" / "1", target, seed=1),
        "2": tiny_drafter(root / "versions" / "2", target, seed=2, proposes=433),
    }
    server = VllmServer(
        model=target,
        drafter=folders["1"],
        version="1",
        log=root / "server.log",
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        token=TOKEN,
        drafter_roots=[root / "versions"],
        keep=root / "kept.json",
        env={"OMP_NUM_THREADS": "1"},
    )
    with server:
        yield SimpleNamespace(server=server, url=server.base_url, root=root, folders=folders)


def order(fleet, version, expected, folder=None, **changes):
    folder = folder or fleet.folders[version]
    sha256 = sha256_file(folder / "model.safetensors")
    asked = {"folder": folder, "version": version, "sha256": sha256, "expected_version": expected}
    return asked | {"probe": [REQUEST], "timeout_s": 300.0} | changes


def serves(fleet, version, not_epoch, timeout_s=300):
    """Return once another start of the engine serves this version."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            now = status(fleet.url, TOKEN, timeout_s=10)
        except DeployError:
            time.sleep(0.3)
            continue
        if now["epoch"].split(".")[0] != not_epoch.split(".")[0]:
            assert now["version"] == version
            return now
        time.sleep(0.3)
    raise AssertionError(fleet.server.log_tail())


def test_an_engine_that_is_killed_comes_up_with_the_drafter_that_was_swapped_in(fleet):
    swap_replica(fleet.url, TOKEN, **order(fleet, "2", "1"))
    before = status(fleet.url, TOKEN)
    assert read_kept(fleet.root / "kept.json").serve.version == "2"
    (engine,) = [p for p in psutil.Process(fleet.server.pid).children(recursive=True) if "EngineCore" in p.name()]
    engine.kill()
    now = serves(fleet, "2", before["epoch"])
    assert now["live_fingerprint"] == before["live_fingerprint"]
    assert drive_sync(fleet.url, [REQUEST], concurrency=1)[0].ok


def test_a_restart_is_the_same_order_requests_in_flight_end_and_others_are_told_to_go_elsewhere(fleet):
    with Driver(fleet.url, [REQUEST | {"max_tokens": 64}], concurrency=4) as driver:
        driver.wait_for(4)
        outcome = swap_replica(fleet.url, TOKEN, **order(fleet, "1", "2", how="restart"))
        driver.wait_for(len([r for r in driver.replies if r.ok]) + 4)
        failed = [reply for reply in driver.stop() if not reply.ok]
    # A connection that is refused, or the answer that says to come again: both are what client libraries retry.
    assert {reply.status for reply in failed} <= {0, 503}
    assert not [reply for reply in failed if reply.text or reply.token_ids], "an answer was cut off"
    assert (outcome.how, outcome.version, outcome.changed_outputs) == ("restart", "1", 0)
    assert outcome.live_fingerprint != outcome.previous_live_fingerprint
    assert outcome.pause_s > 1
    kept = read_kept(fleet.root / "kept.json")
    assert (kept.serve.version, kept.previous) == ("1", None)


def test_a_drafter_that_does_not_come_up_leaves_the_old_one_serving(fleet):
    before = status(fleet.url, TOKEN)
    folder = shutil.copytree(fleet.folders["2"], fleet.root / "versions" / "gone")
    asked = order(fleet, "9", "1", folder=folder, how="restart")
    drop_once_ordered(folder, fleet.root / "kept.json")
    with pytest.raises(DeployError, match="did not come up with version 9; version 1 serves there"):
        swap_replica(fleet.url, TOKEN, **asked)
    now = status(fleet.url, TOKEN)
    assert (now["version"], now["sha256"]) == ("1", before["sha256"])


def drop_once_ordered(folder, keep):
    """Lose the folder between the order and the start, as a disk does."""

    def wait():
        deadline = time.monotonic() + 300
        while read_kept(keep).serve.version != "9":
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        (Path(folder) / "config.json").unlink()

    threading.Thread(target=wait, daemon=True).start()
