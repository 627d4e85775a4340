"""What `slipstream regenerate` keeps beside the replies: the states of the layers that a drafter is known to read."""

import json

import pytest

from jobs import capture, regenerate
from pipeline import stages
from pipeline.artifacts import DrafterCheckpoint
from pipeline.engines import CaptureRequest
from pipeline.errors import ConfigError, StageError
from tests.pipeline import test_regenerate as toys
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"), layers=1)


@pytest.fixture
def config(model, tmp_path):
    return toys.config_for(model, tmp_path)


@pytest.fixture
def prompts(tmp_path):
    return toys.prompt_set(tmp_path, [toys.prompt(n) for n in range(4)])


def with_champion(config, layers):
    """A champion that reads these layers, as far as anyone asks."""

    def build(folder, derivation):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"dflash_config": {"target_layer_ids": layers}}))
        return DrafterCheckpoint(derivation_id=derivation, parents={}, role="champion", block_size=8, mask_token_id=2)

    champion = stages.complete(
        config.root, DrafterCheckpoint, stage="train", version=1, parents={}, meaning={"layers": layers}, build=build
    )
    stages.set_current(config.root, "champion", champion)
    return champion


def configured(config, **drafter):
    return config.model_copy(update={"drafter": config.drafter.model_copy(update=drafter)})


def test_the_champions_layers_are_captured_in_the_pass_and_capture_has_nothing_to_do(model, config, prompts):
    with_champion(config, [0])
    responses = regenerate.run(config, prompts, engines=toys.scripted(model))
    engines = toys.scripted(model)
    states = capture.run(config, responses, engines=engines)
    assert states.manifest.fingerprint.target_layer_ids == (0,) and engines.requests == []
    assert states.manifest.counts["rows"] == 4


def test_the_configured_layers_are_where_there_is_no_champion(model, config, prompts):
    engines = toys.scripted(model)
    regenerate.run(configured(config, target_layer_ids=(0,)), prompts, engines=engines)
    assert len(engines.checked) == 1 and (config.root / "states").exists()


def test_nothing_is_captured_while_nobody_knows_the_layers(model, config, prompts):
    engines = toys.scripted(model)
    responses = regenerate.run(config, prompts, engines=engines)
    assert engines.checked == [] and not (config.root / "states").exists()
    later = toys.scripted(model)
    states = capture.run(config, responses, target_layer_ids=(0,), engines=later)
    assert set(later.asked(CaptureRequest)) == {f"row-{n}" for n in range(4)} and states.manifest.counts["rows"] == 4


def test_other_layers_than_the_champions_are_refused(config, prompts):
    with_champion(config, [0])
    with pytest.raises(ConfigError, match=r"target_layer_ids = \[1\], but the champion .* reads \[0\]"):
        regenerate.run(configured(config, target_layer_ids=(1,)), prompts)


def test_the_champion_drafts_where_it_is_asked_to_and_must_be_there(config):
    speculating = config.model_copy(
        update={"regenerate": config.regenerate.model_copy(update={"speculate": "champion"})}
    )
    with pytest.raises(StageError, match="no champion yet"):
        regenerate.engines_of(speculating, (0,))
    champion = with_champion(config, [0])
    assert regenerate.engines_of(speculating, (0,))._start.keywords["drafter"] == champion.folder
    assert regenerate.engines_of(config, (0,))._start.keywords["drafter"] is None
