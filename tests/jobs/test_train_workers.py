"""Real Ray Train workers: one that is lost, and one that finds that its run cannot go on."""

import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
import ray.train
import torch

import drafter.train
import jobs.train
from drafter import train as stage
from drafter.precision import has_fast_bfloat16
from jobs import train_workers
from jobs.session import ray_session
from jobs.train_workers import require_visible, train_on_workers
from pipeline.errors import StageError
from tests.jobs.frail_training import ends_with_an_error_of_its_own

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "drafter"))

import toys


@pytest.fixture(scope="module", autouse=True)
def on_ray():
    with ray_session():
        yield


def site(root):
    """A configuration, and a cache of rows of very different lengths."""
    toys.target_folder(root / "target")
    rows = [("train", toys.counting_row(3 * i, 14 + 9 * i, 3)) for i in range(5)]
    rows += [("train", toys.row(3, 1, seed=8)), ("validation", toys.counting_row(1, 20, 4))]
    settings = {"steps": 200, "checkpoint_every": 20, "num_workers": 2, "patience": None}
    return toys.config(root, **settings), toys.cache(root, rows)


def trained(root):
    config, states = site(root)

    def execute(folder):
        train_on_workers(folder, stage.resolved(config, ()), states, None)

    return stage.run(config, states, start=None, role="champion", execute=execute)


def workers():
    """This Ray's training workers."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it ended while we looked
            if "RayTrainWorker" in " ".join(child.cmdline()):
                found.append(child)
    return found


def kill_one_amid(root, killed):
    """Signal 9 to one of two workers, once there is a checkpoint."""
    deadline = time.monotonic() + 600  # a busy machine takes minutes to start them
    while len(there := workers()) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    # They are looked up first: a tiny run is over in less time than that takes on a busy machine.
    while not list(root.glob("drafters/*/resume.pt")) and time.monotonic() < deadline:
        time.sleep(0.01)
    for worker in there[:1]:
        worker.send_signal(signal.SIGKILL)
        killed.append(worker.pid)


def test_a_run_that_loses_a_worker_ends_as_one_that_lost_none(tmp_path):
    straight = trained(tmp_path / "straight")
    killed = []
    killer = threading.Thread(target=kill_one_amid, args=(tmp_path / "lost", killed))
    killer.start()
    lost = trained(tmp_path / "lost")
    killer.join()
    assert killed, "it was through before anyone was killed"
    assert (lost.folder / "model.safetensors").read_bytes() == (straight.folder / "model.safetensors").read_bytes()
    assert lost.manifest.walk == straight.manifest.walk
    steps = [point["step"] for point in lost.manifest.curve]
    assert steps == [point["step"] for point in straight.manifest.curve] == sorted(set(steps))


def test_an_error_of_the_stage_ends_the_run_at_once(tmp_path):
    config, states = site(tmp_path)
    started = time.monotonic()
    with pytest.raises(StageError, match="not finite"):
        train_on_workers(tmp_path / "run", config, states, None, work=ends_with_an_error_of_its_own)
    assert time.monotonic() - started < 120
    assert [(tmp_path / "run" / f"tries-{rank}").read_text() for rank in (0, 1)] == ["x", "x"]
    assert not list((tmp_path / "run").glob(".workers-*"))


def test_a_worker_that_does_not_see_the_folder_says_where_root_belongs(tmp_path):
    with pytest.raises(StageError, match="every node mounts"):
        require_visible(tmp_path / "elsewhere" / ".workers-1", within_s=0.1)


def test_what_auto_computes_in_is_that_of_the_machines_that_train_not_of_the_one_that_asks(tmp_path, monkeypatch):
    are_fast = has_fast_bfloat16()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: not are_fast)
    monkeypatch.setattr("drafter.precision._vendor", lambda: "")
    config = toys.config(tmp_path)
    assert jobs.train.resolved(config, ()).train.compute == ("bfloat16" if are_fast else "float32")
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0, "GPU": 2.0})
    assert jobs.train.resolved(config, ()).train.compute == "bfloat16", "of GPUs that this machine has not"
    for compute in ("float32", "bfloat16"):
        assert jobs.train.resolved(toys.config(tmp_path, compute=compute), ()).train.compute == compute


def test_a_worker_trains_without_denormals_and_says_what_its_cpu_is_slow_at(tmp_path, monkeypatch, caplog):
    left = []
    monkeypatch.setattr(drafter.train, "train_in", lambda *_: left.append(torch.full((9,), 1.2e-38).mul(0.1)))
    monkeypatch.setattr(ray.train, "get_context", lambda: SimpleNamespace(get_local_world_size=lambda: 1))
    monkeypatch.setattr("drafter.precision.has_fast_bfloat16", lambda: False)
    monkeypatch.setattr(train_workers, "start_logging", lambda: None)
    arguments = (tmp_path, toys.config(tmp_path, compute="bfloat16"))
    with caplog.at_level("WARNING", logger="slipstream"):
        thread = threading.Thread(target=train_workers._work, args=({"arguments": arguments, "marker": tmp_path},))
        thread.start()
        thread.join()
    assert not left[0].count_nonzero()
    assert "where float32 is faster" in caplog.text
