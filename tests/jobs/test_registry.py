"""The registry against a real MLflow on SQLite."""

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jobs.registry import FAILED, PASSED, PENDING, Registry
from pipeline.artifacts import DrafterCheckpoint, commit, describe_file
from pipeline.errors import SchemaError, StageError
from pipeline.stages import Artifact

MODEL = "toy--mails"
CURVE = [{"step": 10, "loss": 2.0}, {"step": 20, "loss": 1.5, "walk": 1.7}]


def make_checkpoint(root: Path, name: str, *, files=("config.json", "model.safetensors")) -> Artifact:
    folder = root / "drafters" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"block_size": 8, "name": name}))
    save_file({"fc.weight": np.full((4, 4), len(name), np.float32)}, folder / "model.safetensors")
    (folder / "step-10.tmp").write_text("a training checkpoint that is no part of the drafter")
    manifest = DrafterCheckpoint(
        derivation_id=name,
        parents={"states": "5a", "champion": "c0"},
        shards=tuple(describe_file(folder / file) for file in files),
        config={"train": {"steps": 20}},
        role="challenger",
        block_size=8,
        mask_token_id=3,
        curve=CURVE,
    )
    commit(folder, manifest)
    return Artifact(folder, manifest)


def test_a_version_comes_back_byte_for_byte_into_its_own_folder(registry, tmp_path):
    checkpoint = make_checkpoint(tmp_path, "d1")
    version = registry.register(MODEL, checkpoint)
    folder = registry.download(MODEL, version)
    assert folder == tmp_path / "versions" / MODEL / "1"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]
    for path in folder.iterdir():
        assert path.read_bytes() == (checkpoint.folder / path.name).read_bytes()
        assert path.stat().st_mode & 0o222 == 0
    assert registry.download(MODEL, version) == folder


def test_lineage_parameters_and_curve_are_logged_with_the_version(registry, tmp_path):
    from mlflow import MlflowClient

    checkpoint = make_checkpoint(tmp_path, "d1")
    version = registry.register(MODEL, checkpoint, tags={"note": "first"})
    client = MlflowClient(tracking_uri=registry.uri, registry_uri=registry.uri)
    made = client.get_model_version(MODEL, version)
    assert made.tags["slipstream.derivation_id"] == "d1"
    assert made.tags["slipstream.parent.states"] == "5a"
    assert made.tags["slipstream.content_id"] == checkpoint.manifest.content_id
    assert made.tags["note"] == "first"
    run = client.get_run(made.run_id)
    assert run.data.params["train.steps"] == "20"
    assert run.info.status == "FINISHED"
    assert [(m.step, m.value) for m in client.get_metric_history(made.run_id, "loss")] == [(10, 2.0), (20, 1.5)]
    assert [(m.step, m.value) for m in client.get_metric_history(made.run_id, "walk")] == [(20, 1.7)]


def test_the_same_derivation_is_registered_once(registry, tmp_path):
    checkpoint = make_checkpoint(tmp_path, "d1")
    assert registry.register(MODEL, checkpoint) == registry.register(MODEL, checkpoint) == "1"
    assert registry.register(MODEL, make_checkpoint(tmp_path, "d2")) == "2"


def test_training_that_was_logged_first_and_its_version_share_one_run(registry, tmp_path):
    from mlflow import MlflowClient

    checkpoint = make_checkpoint(tmp_path, "d1")
    run_id = registry.log_training("r", {"a": 1}, CURVE, experiment=MODEL, derivation_id="d1")
    version = registry.register(MODEL, checkpoint)
    client = MlflowClient(tracking_uri=registry.uri, registry_uri=registry.uri)
    assert client.get_model_version(MODEL, version).run_id == run_id
    assert len(client.get_metric_history(run_id, "loss")) == 2


@pytest.mark.parametrize("roots", ["one root", "a root each"])
def test_case_82_eight_registrations_at_once_on_one_sqlite_get_eight_versions(registry, tmp_path, roots):
    checkpoints = [make_checkpoint(tmp_path, f"d{i}") for i in range(8)]
    registries = [registry if roots == "one root" else Registry(registry.uri, tmp_path / f"r{i}") for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(lambda r, checkpoint: r.register(MODEL, checkpoint), registries, checkpoints))
    assert sorted(map(int, versions)) == list(range(1, 9))
    for version, checkpoint in zip(versions, checkpoints, strict=True):
        assert registry.derivation(MODEL, version) == checkpoint.id


def test_one_checkpoint_that_machines_register_at_once_is_one_version_to_all(registry, tmp_path):
    checkpoint = make_checkpoint(tmp_path, "d1")
    registries = [Registry(registry.uri, tmp_path / f"r{i}") for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda r: r.register(MODEL, checkpoint), registries)) == {"1"}
    assert [version.number for version in registry.versions(MODEL)] == ["1"]
    registry.download(MODEL, "1")


@pytest.mark.parametrize("step", ["log_batch", "log_artifact", "create_registered_model", "create_model_version"])
def test_a_process_killed_between_two_steps_leaves_a_registration_that_finishes_once(registry, tmp_path, step):
    checkpoint = make_checkpoint(tmp_path, "d1")
    child = os.fork()
    if child == 0:
        client = type(registry.mlflow.client)
        real = getattr(client, step)

        def then_die(*args, **kwargs):
            real(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(client, step, then_die)
        Registry(None, tmp_path).register(MODEL, checkpoint)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert registry.register(MODEL, checkpoint) == "1"
    assert registry.register(MODEL, make_checkpoint(tmp_path, "d2")) == "2"
    registry.download(MODEL, "1")


def test_case_34_a_checkpoint_without_its_weights_is_not_registered(registry, tmp_path):
    with pytest.raises(SchemaError, match=r"missing: model\.safetensors"):
        registry.register(MODEL, make_checkpoint(tmp_path, "config-only", files=("config.json",)))
    gone = make_checkpoint(tmp_path, "gone")
    (gone.folder / "model.safetensors").unlink()
    with pytest.raises(SchemaError, match="missing"):
        registry.register(MODEL, gone)
    empty = make_checkpoint(tmp_path, "no-folder")
    shutil.rmtree(empty.folder)
    with pytest.raises(SchemaError, match="missing"):
        registry.register(MODEL, empty)
    assert registry.alias(MODEL, "challenger") is None


@pytest.mark.parametrize("damage", ["absent", "config only", "changed", "added", "exchanged"])
def test_case_34_a_version_whose_stored_files_differ_does_not_come_back(registry, tmp_path, damage):
    checkpoint = make_checkpoint(tmp_path, "d1")
    version = registry.register(MODEL, checkpoint)
    stored = next((tmp_path / "mlartifacts").rglob("drafter"))
    if damage == "absent":
        shutil.rmtree(stored)
    elif damage == "config only":
        (stored / "model.safetensors").unlink()
        (stored / "manifest.json").unlink()
    elif damage == "changed":
        body = bytearray((stored / "model.safetensors").read_bytes())
        body[-1] ^= 1
        (stored / "model.safetensors").write_bytes(bytes(body))
    elif damage == "added":
        (stored / "adapter.bin").write_bytes(b"x")
    else:
        other = make_checkpoint(tmp_path, "another-drafter")
        for name in ("config.json", "model.safetensors", "manifest.json"):
            shutil.copy(other.folder / name, stored / name)
    with pytest.raises((SchemaError, StageError)):
        registry.download(MODEL, version)
    versions = tmp_path / "versions" / MODEL
    assert [path.name for path in versions.iterdir() if path.is_dir()] == []


def test_a_version_made_by_someone_else_is_not_trusted(registry, tmp_path):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=registry.uri, registry_uri=registry.uri)
    client.create_registered_model(MODEL)
    client.create_model_version(MODEL, source="file:///nowhere/at/all")
    with pytest.raises(StageError, match="not registered by Slipstream"):
        registry.download(MODEL, "1")
    with pytest.raises(StageError, match="no version 7"):
        registry.download(MODEL, "7")


def test_a_folder_of_a_version_that_was_touched_is_refused(registry, tmp_path):
    version = registry.register(MODEL, make_checkpoint(tmp_path, "d1"))
    weights = registry.download(MODEL, version) / "model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(b"other")
    with pytest.raises(SchemaError):
        registry.download(MODEL, version)


def test_case_84_no_alias_is_an_answer_and_a_broken_registry_is_not(registry, tmp_path):
    from mlflow.exceptions import MlflowException

    assert registry.alias(MODEL, "champion") is None
    registry.register(MODEL, make_checkpoint(tmp_path, "d1"))
    assert registry.alias(MODEL, "champion") is None
    registry.set_alias(MODEL, "challenger", "1", expected=None)
    assert registry.alias(MODEL, "challenger") == "1"
    registry.mlflow.client = type(registry.mlflow.client)(
        tracking_uri=registry.uri, registry_uri="http://127.0.0.1:18499"
    )
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    try:
        with pytest.raises(MlflowException):
            registry.alias(MODEL, "challenger")
    finally:
        del os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"]


def test_a_version_starts_as_pending_and_only_a_passed_one_may_be_served(registry, tmp_path):
    registry.register(MODEL, make_checkpoint(tmp_path, "d1"))
    assert registry.state(MODEL, "1") == PENDING
    for state in (PENDING, FAILED):
        registry.set_state(MODEL, "1", state, reason="a test")
        for alias in ("approved", "champion"):
            with pytest.raises(StageError, match=f"version 1 is {state}, so {alias} cannot name it"):
                registry.set_alias(MODEL, alias, "1")
            assert registry.alias(MODEL, alias) is None
    registry.set_state(MODEL, "1", PASSED, reason="a test")
    registry.set_alias(MODEL, "champion", "1", expected=None)
    assert registry.alias(MODEL, "champion") == "1"


def test_what_is_attached_comes_back_and_is_sent_again_where_the_store_lost_it(registry, tmp_path):
    registry.register(MODEL, make_checkpoint(tmp_path, "d1"))
    assert registry.attached(MODEL, "1") == {}
    files = {"README.md": b"# a card", "manifests/states-5a.json": b"{}"}
    registry.attach(MODEL, "1", files, folder="attached/g1")
    assert registry.attached(MODEL, "1") == files
    stored = next((tmp_path / "mlartifacts").rglob("README.md"))
    stored.write_bytes(b"# a lie")
    with pytest.raises(SchemaError, match=r"README\.md.*differ"):
        registry.attached(MODEL, "1")
    stored.unlink()
    with pytest.raises(SchemaError, match=r"README\.md.*missing"):
        registry.attached(MODEL, "1")
    registry.attach(MODEL, "1", files, folder="attached/g1")
    assert registry.attached(MODEL, "1") == files


def test_figures_are_metrics_of_the_run_and_are_logged_once(registry, tmp_path):
    registry.register(MODEL, make_checkpoint(tmp_path, "d1"))
    for _ in range(2):
        registry.log_figures(MODEL, "1", {"gate/lift": 1.25, "champion/tokens_per_s": 80.0})
    client = registry.mlflow.client
    run_id = client.get_model_version(MODEL, "1").run_id
    assert [point.value for point in client.get_metric_history(run_id, "gate/lift")] == [1.25]
    assert client.get_run(run_id).data.metrics["champion/tokens_per_s"] == 80.0


@pytest.mark.parametrize("kept", [True, False])
def test_case_86_an_upload_that_ends_in_an_error_is_looked_at_and_not_believed(registry, tmp_path, kept):
    from mlflow.exceptions import MlflowException

    real, calls = registry.mlflow.client.log_artifact, []

    def times_out_once(run_id, path, folder):
        calls.append(Path(path).name)
        if kept or len(calls) > 1:
            real(run_id, path, folder)
        if len(calls) == 1 or (kept and len(calls) <= 3):
            raise MlflowException("504 gateway time-out")

    registry.mlflow.client.log_artifact = times_out_once
    version = registry.register(MODEL, make_checkpoint(tmp_path, "d1"))
    assert len(calls) > 1
    registry.download(MODEL, version)


def test_a_store_that_keeps_nothing_fails_the_registration(registry, tmp_path, monkeypatch):
    monkeypatch.setattr("jobs.registry.connection.FIRST_WAIT_S", 0.001)
    registry.mlflow.client.log_artifact = lambda *_: None
    with pytest.raises(StageError, match="did not keep the files"):
        registry.register(MODEL, make_checkpoint(tmp_path, "d1"))
    assert registry.version_of(MODEL, "d1") is None
