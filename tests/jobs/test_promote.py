"""From a verdict to an alias, on a real MLflow."""

import json

import pytest

from jobs import adopt, promote
from jobs.adopt import first_champion
from jobs.registry import Registry
from pipeline.artifacts import AcceptanceReport, GateDecision, commit, describe_file
from pipeline.config import Config
from pipeline.errors import ConfigError, SchemaError, StageError
from pipeline.stages import Artifact
from tests.jobs.checkpoints import as_checkpoint
from tests.tiny import tiny_drafter, tiny_target


@pytest.fixture
def config(mlflow_root, tiny):
    return Config.model_validate({"workload": "mails", "root": mlflow_root, "target": {"model": tiny[0]}})


@pytest.fixture
def challenger(config, tiny):
    return as_checkpoint(config.root, tiny[1][1], name="d1")


def make_decision(root, verdict, *, champion="c0", challenger="d1"):
    report = AcceptanceReport(derivation_id="r1", parents={"champion": champion, "challenger": challenger})
    commit(root / "reports" / "r1", report)
    folder = root / "decisions" / f"g-{verdict}"
    folder.mkdir(parents=True)
    (folder / "decision.json").write_text(json.dumps({"decision": verdict}))
    (folder / "report.html").write_text("<html></html>")
    reasons = [
        {"message": "2 conversations, 30 are needed", "passed": False},
        {"message": "speed is fine", "passed": True},
    ]
    manifest = GateDecision(
        derivation_id=folder.name,
        parents={"report": "r1"},
        shards=tuple(describe_file(folder / name) for name in ("decision.json", "report.html")),
        decision=verdict,
        reasons=reasons,
        lift=1.2,
        ci_low=1.1,
        ci_high=1.3,
    )
    commit(folder, manifest)
    return Artifact(folder, manifest)


@pytest.fixture
def crowned(config, tiny):
    """Version 1, champion: what the verdicts compare with."""
    return first_champion(config, as_checkpoint(config.root, tiny[1][0], name="c0", role="champion"))


def test_a_pass_approves_the_version_with_its_verdict_beside_it(config, crowned, challenger):
    from mlflow import MlflowClient

    decision = make_decision(config.root, "promote")
    assert promote.run(config, decision, challenger) == "2"
    assert promote.run(config, decision, challenger) == "2"
    registry = Registry(None, config.root)
    aliases = {name: registry.alias(config.model_name, name) for name in ("champion", "challenger", "approved")}
    assert aliases == {"champion": "1", "challenger": "2", "approved": "2"}
    assert len(registry.history(config.model_name, "approved")) == 1
    client = MlflowClient(tracking_uri=registry.uri, registry_uri=registry.uri)
    run_id = client.get_model_version(config.model_name, "2").run_id
    attached = {entry.path for entry in client.list_artifacts(run_id, "gate/g-promote")}
    assert attached == {"gate/g-promote/decision.json", "gate/g-promote/report.html"}


@pytest.mark.parametrize("verdict", ["reject", "hold", "cannot_say"])
def test_any_other_verdict_keeps_the_version_and_approves_nothing(config, crowned, challenger, verdict):
    with pytest.raises(StageError, match="2 conversations, 30 are needed") as refusal:
        promote.run(config, make_decision(config.root, verdict), challenger)
    assert verdict in str(refusal.value) and "speed is fine" not in str(refusal.value)
    registry = Registry(None, config.root)
    assert registry.alias(config.model_name, "challenger") == "2"
    assert registry.alias(config.model_name, "approved") is None
    assert registry.tags(config.model_name, "2")["slipstream.decision"].startswith(verdict)


def test_a_verdict_about_another_challenger_approves_nothing(config, crowned, challenger):
    with pytest.raises(StageError, match="is about challenger other, not d1"):
        promote.run(config, make_decision(config.root, "promote", challenger="other"), challenger)
    assert Registry(None, config.root).alias(config.model_name, "challenger") is None


def test_a_verdict_against_a_champion_that_no_longer_serves_approves_nothing(config, tiny, challenger):
    decision = make_decision(config.root, "promote")
    with pytest.raises(StageError, match="slipstream adopt"):
        promote.run(config, decision, challenger)
    first_champion(config, as_checkpoint(config.root, tiny[1][2], name="another", role="champion"))
    with pytest.raises(StageError, match=r"compared with champion c0.*another.*champion now"):
        promote.run(config, decision, challenger)
    assert Registry(None, config.root).alias(config.model_name, "approved") is None


def test_a_verdict_whose_page_was_changed_approves_nothing(config, crowned, challenger):
    decision = make_decision(config.root, "promote")
    (decision.folder / "decision.json").write_text('{"decision": "promote!"}')
    with pytest.raises(SchemaError):
        promote.run(config, decision, challenger)
    assert Registry(None, config.root).alias(config.model_name, "approved") is None


def test_a_version_whose_weights_were_lost_in_the_store_is_not_approved(config, crowned, challenger):
    with pytest.raises(StageError):
        promote.run(config, make_decision(config.root, "hold"), challenger)
    weights = (challenger.folder / "model.safetensors").read_bytes()
    for stored in (config.root / "mlartifacts").rglob("model.safetensors"):
        if stored.read_bytes() == weights:
            stored.unlink()
    with pytest.raises(SchemaError, match=r"model\.safetensors"):
        promote.run(config, make_decision(config.root, "promote"), challenger)
    assert Registry(None, config.root).alias(config.model_name, "approved") is None


def test_an_adopted_drafter_is_version_1_and_champion_and_comes_back_as_it_was(config, tmp_path):
    folder = tiny_drafter(tmp_path / "released", config.target.model)
    (folder / "README.md").write_text("not part of a drafter")
    checkpoint = adopt.run(config, folder)
    assert adopt.run(config, folder).id == checkpoint.id
    registry = Registry(None, config.root)
    assert registry.alias(config.model_name, "champion") == "1"
    assert checkpoint.manifest.block_size == 4 and checkpoint.manifest.role == "champion"
    assert checkpoint.manifest.fingerprint.target_layer_ids == (1, 3, 4)
    served = registry.download(config.model_name, "1")
    for name in ("config.json", "model.safetensors"):
        assert (served / name).read_bytes() == (folder / name).read_bytes()
    with pytest.raises(ConfigError, match="version 1 is champion already"):
        adopt.run(config, tiny_drafter(tmp_path / "second", config.target.model, seed=2))


def test_a_drafter_of_another_target_is_not_adopted(config, tmp_path):
    other = tiny_target(tmp_path / "other", hidden=64, heads=2, kv_heads=1)
    with pytest.raises(ConfigError, match="not a drafter that can serve"):
        adopt.run(config, tiny_drafter(tmp_path / "d", other))
    assert Registry(None, config.root).alias(config.model_name, "champion") is None


def test_a_checkpoint_that_no_engine_could_serve_is_kept_and_not_approved(config, crowned, tiny):
    from safetensors.torch import load_file, save_file

    broken = as_checkpoint(config.root, tiny[1][1], name="d0")
    weights = load_file(broken.folder / "model.safetensors")
    del weights["norm.weight"]
    save_file(weights, broken.folder / "model.safetensors")
    shards = tuple(describe_file(broken.folder / name) for name in ("config.json", "model.safetensors"))
    manifest = broken.manifest.model_copy(update={"derivation_id": "d1", "shards": shards})
    commit(broken.folder, manifest)
    with pytest.raises(ConfigError, match=r"norm\.weight"):
        promote.run(config, make_decision(config.root, "promote"), Artifact(broken.folder, manifest))
    registry = Registry(None, config.root)
    assert registry.alias(config.model_name, "challenger") == "2"
    assert registry.alias(config.model_name, "approved") is None
