"""A new revision of the target: what the old one made serves, trains and rolls back no more."""

import json
import shutil

import pytest

from jobs import capture, deploy, preflight, retire
from jobs.adopt import first_champion
from jobs.adopt import run as adopt
from jobs.registry import PASSED, RETIRED, Registry
from pipeline import lease
from pipeline.artifacts import HiddenStateCache, PromptSet, ResponseSet, artifact_dir, commit
from pipeline.config import Config
from pipeline.errors import ConfigError, FingerprintError, StageError
from pipeline.fingerprint import target_fingerprint
from pipeline.stages import Artifact, current_names, set_current


@pytest.fixture
def config(tmp_path, empty_database, tiny):
    """A champion that was adopted, with prompts, answers and states of the target as it was then."""
    root, model = tmp_path / "root", tmp_path / "model"
    root.mkdir()
    shutil.copy(empty_database, root / "mlflow.db")
    shutil.copytree(tiny[0], model)
    config = Config.model_validate({"root": root, "target": {"model": model, "dtype": "float32"}})
    set_current(root, "champion", adopt(config, tiny[1][0]))
    made_for = target_fingerprint(model, dtype="float32", target_layer_ids=(1, 3, 4))
    shape = {"hidden_size": 128, "num_states": 3}
    for name, manifest in {
        "prompts": PromptSet(derivation_id="p", parents={}),
        "responses": ResponseSet(derivation_id="r", parents={}, fingerprint=made_for),
        "states": HiddenStateCache(derivation_id="s", parents={}, fingerprint=made_for, **shape),
    }.items():
        folder = artifact_dir(root, type(manifest), manifest.derivation_id)
        commit(folder, manifest)
        set_current(root, name, Artifact(folder, manifest))
    return config


def new_revision(config):
    path = config.target.model / "model.safetensors"
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)


def registry_of(config):
    return Registry(None, config.root)


def test_where_nothing_changed_nothing_is_retired(config):
    before = current_names(config.root)
    assert retire.run(config).lines()[1:] == ["everything here was made for it"]
    assert current_names(config.root) == before
    assert registry_of(config).state(config.model_name, "1") == PASSED


def test_a_layer_more_or_less_that_is_read_is_no_other_target(config):
    made_for = target_fingerprint(config.target.model, dtype="float32", target_layer_ids=(0,))
    cache = HiddenStateCache(derivation_id="s2", parents={}, fingerprint=made_for, hidden_size=128, num_states=1)
    commit(artifact_dir(config.root, HiddenStateCache, "s2"), cache)
    assert retire.run(config).caches == ()


def test_one_bit_of_the_weights_retires_every_version_and_cache_and_keeps_the_prompts(config):
    new_revision(config)
    listed = retire.run(config, only_list=True)
    assert (listed.versions, listed.caches) == (("1",), ("s",))
    assert (config.root / "states" / "s" / "manifest.json").exists()
    done = retire.run(config)
    assert lease.holder(config.root) is None
    assert (done.versions, done.caches, set(done.names)) == (("1",), ("s",), {"champion", "responses", "states"})
    assert not (config.root / "states" / "s").exists()
    assert set(current_names(config.root)) == {"prompts"}
    assert registry_of(config).state(config.model_name, "1") == RETIRED
    assert retire.run(config).lines()[1:] == ["everything here was made for it"]


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("step", ["_retire_versions", "_remove", "stages.forget_current"])
def test_killed_at_any_step_the_same_call_goes_on(config, monkeypatch, step, after):
    (config.root / "queue" / "q").mkdir(parents=True)
    new_revision(config)
    module = retire.stages if step.startswith("stages.") else retire
    works = getattr(module, step.removeprefix("stages."))

    def killed(*arguments, **more):
        if after:
            works(*arguments, **more)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, step.removeprefix("stages."), killed)
        with pytest.raises(KeyboardInterrupt):
            retire.run(config)
    retire.run(config)
    assert registry_of(config).state(config.model_name, "1") == RETIRED
    assert set(current_names(config.root)) == {"prompts"}
    assert not (config.root / "states" / "s").exists() and not (config.root / "queue" / "q").exists()


def test_a_cache_that_is_read_stays_until_the_next_call_and_is_named(config):
    from pipeline.stages import hold_for_reading

    new_revision(config)
    held = hold_for_reading(config.root / "states" / "s")
    assert retire.run(config).in_use == ("s",)
    held.close()
    assert retire.run(config).caches == ("s",)


def test_a_revision_in_a_folder_of_another_name_retires_the_versions_of_the_old_name(config):
    new_revision(config)
    folder = config.target.model.with_name("model-2")
    config.target.model.rename(folder)
    renamed = config.model_copy(update={"target": config.target.model_copy(update={"model": folder})})
    assert retire.run(renamed).versions == ("model--default 1",)
    assert registry_of(config).state(config.model_name, "1") == RETIRED


def test_what_was_interrupted_goes_with_the_champion_and_stays_with_a_new_one(config):
    def interrupt():
        half, queue = config.root / "states" / "half", config.root / "queue" / "q"
        for left in (half, queue):
            left.mkdir(parents=True, exist_ok=True)
            (left / "part-000000.arrow").write_bytes(b"x")
        return half, queue

    half, queue = interrupt()
    assert retire.run(config).caches == ()
    assert half.exists() and queue.exists()
    new_revision(config)
    assert set(retire.run(config).caches) == {"s", "half", "q"}
    assert not half.exists() and not queue.exists()


def test_before_anybody_retires_it_an_old_drafter_is_refused_by_every_way_in(config):
    folder = registry_of(config).download(config.model_name, "1")
    new_revision(config)
    with pytest.raises(FingerprintError, match=r"another target .*weights.*slipstream retire"):
        preflight.check(config, folder)
    with pytest.raises(FingerprintError, match="slipstream retire"):
        capture.layers_to_capture(config)


def test_a_retired_version_is_deployed_no_more_and_a_new_first_champion_may_take_its_place(config, tiny, monkeypatch):
    new_revision(config)
    with pytest.raises(ConfigError, match=r"version 1 is champion already.*slipstream retire"):
        adopt(config, tiny[1][1])
    retire.run(config)
    monkeypatch.setenv(config.serving.token_env, "t")
    serving = config.serving.model_copy(update={"replicas": ("http://127.0.0.1:9",)})
    with pytest.raises(StageError, match="version 1 is retired now"):
        deploy.run(config.model_copy(update={"serving": serving}), "1")
    checkpoint = adopt(config, tiny[1][0])  # the same files, for another target: another version
    registry = registry_of(config)
    champion = registry.alias(config.model_name, "champion")
    assert registry.derivation(config.model_name, champion) == checkpoint.id
    assert champion != "1"
    assert first_champion(config, checkpoint) == champion


def test_during_a_run_nothing_is_retired(config):
    new_revision(config)
    lease.take(config.root, "dag", with_process=False)
    with pytest.raises(StageError, match="run dag is under way"):
        retire.run(config)
    assert retire.run(config, only_list=True).versions == ("1",)


def test_a_version_of_before_fingerprints_were_kept_stays_as_it_is(config):
    registry = registry_of(config)
    new_revision(config)
    registry.mlflow.client.delete_model_version_tag(config.model_name, "1", "slipstream.target")
    assert retire.run(config).versions == ()


def test_what_is_kept_of_a_version_says_which_target_it_was_made_for(config):
    from pipeline.fingerprint import fingerprint_id

    made_for = target_fingerprint(config.target.model, dtype="float32", target_layer_ids=())
    assert registry_of(config).tags(config.model_name, "1")["slipstream.target"] == fingerprint_id(made_for)
    assert json.loads((config.root / "states" / "s" / "manifest.json").read_text())["fingerprint"]["weights"]
