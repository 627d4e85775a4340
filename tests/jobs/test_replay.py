"""What a run replays, and that lineage knows the rows of it."""

import functools
import shutil

import pytest

from jobs import attachments, lineage, model_card, stream
from jobs.adopt import first_champion
from jobs.registry import Registry
from jobs.train import to_replay
from pipeline import disk, stages
from pipeline.artifacts import HiddenStateCache, commit
from pipeline.config import Config
from pipeline.errors import ConfigError, SchemaError
from tests.jobs.checkpoints import as_checkpoint
from tests.jobs.verdicts import FINGERPRINT, make_data


@pytest.fixture
def config(mlflow_root, tiny):
    for name in ("general", "mails", "older"):
        make_data(mlflow_root, name, {f"{name}-1": "train", f"{name}-2": "gate"})
    return Config.model_validate({"workload": "mails", "root": mlflow_root, "target": {"model": tiny[0]}})


def states(config, name):
    return stages.open_artifact(config.root, HiddenStateCache, f"{name}-states")


def replayed(config, on="mails", *, role="challenger", named=(), **train):
    config = config.model_copy(update={"train": config.train.model_copy(update=train)})
    return [cache.id for cache in to_replay(config, states(config, on), role=role, named=named)]


def test_a_challenger_replays_the_general_states_and_what_is_named_each_once(config, caplog):
    caplog.set_level("INFO", logger="slipstream")
    assert replayed(config) == [] and caplog.text.count("nothing to replay") == 1
    stages.set_current(config.root, "general-states", states(config, "general"))
    assert replayed(config) == ["general-states"]
    assert replayed(config, named=["older-states", "general-states"]) == ["general-states", "older-states"]
    assert replayed(config, role="control", on="general") == [], "it learns from them anyway"
    assert replayed(config, role="control", on="general", named=["older-states"]) == ["older-states"]
    assert replayed(config, on="general") == [], "the same cache is no replay"
    assert replayed(config, replay_share=0) == []


def test_what_cannot_be_replayed_is_refused(config):
    with pytest.raises(ConfigError, match=r"needs train\.replay_share above 0"):
        replayed(config, named=["older-states"], replay_share=0)
    with pytest.raises(SchemaError, match="no complete states artifact"):
        replayed(config, named=["nowhere"])


def test_general_states_that_were_removed_are_not_replayed_and_said_to_be(config, caplog):
    stages.set_current(config.root, "general-states", states(config, "general"))
    shutil.rmtree(config.root / "states" / "general-states")
    assert replayed(config) == [] and "the general states are not replayed" in caplog.text


@pytest.mark.parametrize(
    "change",
    [{"hidden_size": 16}, {"fingerprint": FINGERPRINT.model_copy(update={"target_layer_ids": (0, 2)})}],
    ids=["another width", "other layers"],
)
def test_general_states_that_do_not_fit_are_left_out_unless_they_are_named(config, caplog, change):
    general = states(config, "general")
    commit(general.folder, general.manifest.model_copy(update=change))
    stages.set_current(config.root, "general-states", general)
    assert replayed(config) == [] and "the general states are not replayed" in caplog.text
    assert replayed(config, named=["general-states"]) == ["general-states"], "training says why it cannot"


def test_a_streamed_run_keeps_what_is_to_be_replayed_and_looks_it_up_before_it_captures(config, monkeypatch):
    own, captured, taken = states(config, "mails"), [], []

    def held_out(config, responses, **named):
        captured.append(disk.sweep(config.root, max_bytes=0, ttl_hours=None))
        return own

    monkeypatch.setattr(stream, "held_out", held_out)
    monkeypatch.setattr(stream, "train_on", lambda *a, replay, **named: taken.extend(replay))
    run = functools.partial(stream.run, config, None, start=None, target_layer_ids=(1,), engines=object())
    with pytest.raises(SchemaError, match="no complete states artifact"):
        run(replay=["older-states", "nowhere"])
    assert not captured
    run(replay=["older-states"])
    assert [cache.id for cache in taken] == ["older-states"]
    assert sorted(captured[0]) == ["general-states", "mails-states"], "what went to make room"
    assert disk.sweep(config.root, max_bytes=0, ttl_hours=None) == ["older-states"], "it is let go"


def test_lineage_knows_the_replayed_rows_and_their_data(config, tiny):
    parents = {"states": "mails-states", "replay_1": "general-states", "replay_2": "older-states"}
    checkpoint = as_checkpoint(config.root, tiny[1][0], name="d1", parents=parents)
    first_champion(config, checkpoint)
    text = "\n".join(lineage.run(config, "1", prompts=True))
    for name in ("general", "older", "mails"):
        assert f"(train rows of states {name}-states):\n{name}-1" in text
        for what in (f"{name}-prompts", f"{name}-responses", f"{name}-states", f"{name}-1"):
            assert lineage.run(config, what)[-1].startswith("  version 1"), what
    assert "replayed   states general-states" in text
    assert lineage.run(config, "general-2")[-1] == "  no registered version", "held out"
    (version,) = Registry(None, config.root).versions(config.model_name)
    assert version.data["states"] == "mails-states" and version.data["replay_2.prompts"] == "older-prompts"


def test_an_mlflow_run_shows_the_data_and_every_curve(config, registry):
    parents = {"states": "mails-states", "replay_1": "general-states", "start": "c0"}
    curve = [{"step": 2.0, "loss": 1.0, "walk_slice/lang=de, ≤ 8": 1.5, "walk_replay/general-states": 1.4}]
    datasets = attachments.datasets_behind(config.root, parents)
    for _ in range(2):
        run_id = registry.log_training(
            "r", {"learning_rate": 1e-3}, curve, experiment="m", derivation_id="d", datasets=datasets
        )
    run = registry.mlflow.client.get_run(run_id)
    inputs = {one.dataset.name: (one.dataset.digest, one.tags[0].value) for one in run.inputs.dataset_inputs}
    assert inputs["states"] == ("mails-states", "training") and inputs["responses"] == ("mails-responses", "training")
    assert inputs["replay_1.prompts"] == ("general-prompts", "replay") and len(inputs) == 6
    assert {name.split("/")[0] for name in run.data.metrics} == {"loss", "walk_slice", "walk_replay"}


def test_the_card_tells_how_a_drafter_was_trained(config, tiny):
    trained = {
        "config": config.train.model_dump(mode="json") | {"steps": 400, "patience": 2, "compute": "bfloat16"},
        "counts": {"steps": 300, "parameters": 1792},
        "walk": {"step": 100, "acceptance_length": 2.5},
        "walks": {"general-states": {"acceptance_length": 1.75, "num_drafts": 80}},
        "curve": [{"step": float(step)} for step in (0, 100, 200, 300)],
    }
    parents = {"states": "mails-states", "replay_1": "general-states"}
    checkpoint = as_checkpoint(config.root, tiny[1][0], name="d1", parents=parents)
    manifest = checkpoint.manifest.model_copy(update=trained)
    checkpoint = stages.Artifact(checkpoint.folder, manifest)
    card = model_card.render(config, "2", checkpoint, behind={}, decision=None, report=None)
    for told in (
        "| steps | 300 of 400, stopped early, at most 64 blocks each |",
        "| replay | 50% of each step's rows, of general-states |",
        "| anchors | on_policy |",
        "| learning rate | 0.002, muon |",
        "| best step | 100, walk acceptance 2.500 on validation |",
        "| walk on `general-states` | 1.750 over 80 steps, as on disk |",
        "| computed in | bfloat16 |",
    ):
        assert told in card, card
