import pytest

from jobs import status
from pipeline.config import Config
from pipeline.fingerprint import fingerprint_id, target_fingerprint
from tests.jobs.test_alias_log import registry, three_versions  # noqa: F401
from tests.jobs.test_registry import MODEL


@pytest.fixture
def config(tmp_path):
    return Config.model_validate({"workload": "mails", "root": tmp_path, "target": {"model": "/models/toy"}})


def test_every_alias_has_its_version_and_state_and_one_moved_by_hand_is_named(config, registry):  # noqa: F811
    lines = status.run(config)
    assert any(line.split() == ["champion", "version", "1,", registry.state(MODEL, "1")] for line in lines)
    assert any(line.split() == ["approved", "-"] for line in lines)
    registry.mlflow.client.set_registered_model_alias(MODEL, "champion", "3")
    assert "moved by hand" in status.run(config)[-1]


def test_the_targets_fingerprint_id_is_there_for_the_tap(config, tmp_path):
    assert "target /models/toy: not on this machine" in status.run(config)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    there = config.model_copy(update={"target": config.target.model_copy(update={"model": model})})
    (line,) = [line for line in status.run(there) if line.startswith("target")]
    expected = fingerprint_id(target_fingerprint(model, dtype="bfloat16", target_layer_ids=(1, 2)))
    assert line == f"target {model}, bfloat16: {expected}"
