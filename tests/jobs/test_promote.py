"""From a verdict to an alias, on a real MLflow."""

import pytest

from jobs import adopt, promote
from jobs.adopt import first_champion
from jobs.registry import FAILED, PASSED, Registry
from pipeline.artifacts import commit, describe_file
from pipeline.config import Config
from pipeline.errors import ConfigError, SchemaError, StageError
from pipeline.stages import Artifact
from tests.jobs.checkpoints import as_checkpoint
from tests.jobs.verdicts import SECRET, make_data, make_decision
from tests.tiny import tiny_drafter, tiny_target


@pytest.fixture
def config(mlflow_root, tiny):
    return Config.model_validate({"workload": "mails", "root": mlflow_root, "target": {"model": tiny[0]}})


@pytest.fixture
def challenger(config, tiny):
    return as_checkpoint(config.root, tiny[1][1], name="d1")


@pytest.fixture
def crowned(config, tiny):
    """Version 1, champion: what the verdicts compare with."""
    return first_champion(config, as_checkpoint(config.root, tiny[1][0], name="c0", role="champion"))


def test_a_pass_approves_the_version_with_its_verdict_beside_it(config, crowned, challenger):
    decision = make_decision(config.root, "promote")
    assert promote.run(config, decision, challenger) == "2"
    assert promote.run(config, decision, challenger) == "2"
    registry = Registry(None, config.root)
    aliases = {name: registry.alias(config.model_name, name) for name in ("champion", "challenger", "approved")}
    assert aliases == {"champion": "1", "challenger": "2", "approved": "2"}
    assert len(registry.history(config.model_name, "approved")) == 1
    assert registry.state(config.model_name, "2") == PASSED
    attached = registry.attached(config.model_name, "2")
    assert set(attached) >= {"README.md", "decision.json", "policy.toml", "report.html", "fingerprints.json"}
    assert "manifests/decisions-g-d1-c0-promote.json" in attached and "manifests/reports-r-d1-c0.json" in attached
    move = registry.history(config.model_name, "approved")[0]
    assert (move.decision, move.reason, move.previous) == (decision.id, "gate passed", None)


def test_the_figures_in_mlflow_are_those_of_the_json(config, crowned, challenger):
    promote.run(config, make_decision(config.root, "promote", lift=1.25), challenger)
    client = Registry(None, config.root).mlflow.client
    metrics = client.get_run(client.get_model_version(config.model_name, "2").run_id).data.metrics
    assert (metrics["gate/lift"], metrics["gate/ci_low"], metrics["gate/ci_high"]) == (1.25, 1.15, 1.35)
    assert metrics["gate/comparisons/challenger_champion/ratio"] == 1.25
    assert (metrics["champion/tokens_per_s"], metrics["challenger/emitted_tokens_per_step"]) == (50.0, 2.5)


def test_the_card_tells_what_where_from_and_how_much_and_no_text(config, crowned, tiny):
    data = make_data(config.root, "mails", {"a": "train", "b": "train", "c": "gate", "d": "train"})
    parents = {"states": data["states"], "start": "c0"}
    learned = as_checkpoint(config.root, tiny[1][1], name="d1", parents=parents)
    promote.run(config, make_decision(config.root, "promote"), learned)
    attached = Registry(None, config.root).attached(config.model_name, "2")
    card = attached["README.md"].decode()
    for told in (
        "mails-states` | rows 3, states 7, rejected as norm 1",
        "mails-prompts` | rows 4",
        "Trained from drafter `c0`",
        "block size | 4 (3 drafted tokens a step)",
        "| champion | 2.000 | 2.100 | 50.000 |",
        "lift 1.200 (interval 1.100 to 1.300)",
        "slipstream rollback",
        "slipstream deploy 2",
    ):
        assert told in card, card
    assert not any(SECRET.encode() in body for body in attached.values())
    assert {f"manifests/{kind}-mails-{kind}.json" for kind in data} <= set(attached)


@pytest.mark.parametrize("verdict", ["reject", "hold", "cannot_say"])
def test_any_other_verdict_keeps_the_version_and_approves_nothing(config, crowned, challenger, verdict):
    with pytest.raises(StageError, match="2 conversations, 30 are needed") as refusal:
        promote.run(config, make_decision(config.root, verdict), challenger)
    assert verdict in str(refusal.value) and "speed is fine" not in str(refusal.value)
    registry = Registry(None, config.root)
    assert registry.alias(config.model_name, "challenger") == "2"
    assert registry.alias(config.model_name, "approved") is None
    assert registry.tags(config.model_name, "2")["slipstream.decision"].startswith(verdict)
    assert registry.state(config.model_name, "2") == FAILED


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


def test_case_34_a_version_whose_weights_were_lost_in_the_store_is_not_approved(config, crowned, challenger):
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
    assert [registry.alias(config.model_name, alias) for alias in ("challenger", "approved")] == [None, None]
    assert registry.state(config.model_name, "2") == FAILED
