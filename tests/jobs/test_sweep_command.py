"""What `slipstream sweep` runs and prints."""

import argparse

import pytest

from jobs import sweep, train
from pipeline import stages
from pipeline.artifacts import DrafterCheckpoint, HiddenStateCache, commit
from pipeline.config import Config
from pipeline.errors import DivergedError
from pipeline.stages import Artifact

ACCEPTED = {5e-4: 30, 1e-3: 60, 2e-3: 45, 1.0: None}


@pytest.fixture
def config(tmp_path):
    config = Config.model_validate(
        {"root": tmp_path, "target": {"model": tmp_path}, "sweep": {"learning_rates": list(ACCEPTED), "steps": 30}}
    )
    cache = HiddenStateCache(derivation_id="now", parents={}, hidden_size=8, num_states=1)
    champion = DrafterCheckpoint(derivation_id="c0", parents={}, role="champion", block_size=4, mask_token_id=2)
    for name, manifest in (("states", cache), ("champion", champion)):
        folder = tmp_path / manifest.kind / manifest.derivation_id
        commit(folder, manifest)
        stages.set_current(tmp_path, name, Artifact(folder, manifest))
    return config


def test_every_rate_is_run_from_the_champion_on_current_states_and_the_best_is_named(config, monkeypatch, capsys):
    asked = []

    def trained(config, states, *, start, role, replay):
        rate = config.train.learning_rate
        asked.append((rate, config.train.steps, states.id, start.id, role))
        if ACCEPTED[rate] is None:
            raise DivergedError("step 3: the gradient is not finite")
        manifest = DrafterCheckpoint(
            derivation_id=f"run-{rate}",
            parents={},
            role=role,
            block_size=4,
            mask_token_id=2,
            walk={"acceptance_length": 1 + ACCEPTED[rate] / 50, "step": 30},
            curve=[{"step": 0.0, "walk_acceptance_length": 1.5}, {"step": 30.0, "loss": 2.0}],
            counts={"steps": 30},
        )
        return Artifact(config.root / manifest.derivation_id, manifest)

    monkeypatch.setattr(train, "run", trained)
    sweep.main(config, argparse.Namespace(replay=[]))
    assert asked == [(rate, 30, "now", "c0", "sweep") for rate in ACCEPTED]
    said = capsys.readouterr().out
    assert "| 0.001 | 2.000 | 1.200 | 2.400 × | 30 |" in said and "learning_rate = 0.001" in said
    assert "| 1 | diverged |" in said, "too high a rate is a result, and takes no other rate's away"
    assert "Sweep again" not in said, "the best rate is inside the range"
