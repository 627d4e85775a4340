"""Init-drafter: general prompts → a cold-started drafter, version 1 and `champion`.

python jobs/init_drafter.py --config slipstream.toml
python jobs/init_drafter.py --config slipstream.toml --set 'init.sources=["prompts.jsonl"]'

For a target that has a drafter already, `slipstream adopt FOLDER` is the way in.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs import adopt, capture, collect, regenerate, train
from jobs.engines import EnginePool
from jobs.registry import Registry
from jobs.session import job_main
from pipeline import stages
from pipeline.artifacts import DrafterCheckpoint, HiddenStateCache, write_durably
from pipeline.collect_config import WindowConfig
from pipeline.config import Config
from pipeline.engines import Engines
from pipeline.stages import Artifact
from pipeline.workloads import general


def run(config: Config, *, engines: Engines | None = None) -> Artifact[DrafterCheckpoint]:
    """The new drafter, registered and champion; remembers the general states, which a control is trained on.

    Raises: ConfigError when another drafter is champion already.
    """
    layers = layers_of(config)
    states = general_states(config, layers, engines=engines or EnginePool(config, target_layer_ids=layers))
    checkpoint = train.run(training(config), states, start=None, role="champion")
    version = adopt.first_champion(config, checkpoint)
    if version == Registry(config.promote.tracking_uri, config.root).alias(config.model_name, "champion"):
        stages.set_current(config.root, "champion", checkpoint)
    return checkpoint


def general_states(config: Config, layers: Sequence[int], *, engines: Engines) -> Artifact[HiddenStateCache]:
    """The states of the target's answers to general prompts: ``init.sources``, or ours."""
    sources = config.init.sources or (_write_general_prompts(config),)
    collecting = config.collect.model_copy(
        update={
            "sources": sources,
            "consent": "allow_all",
            "redaction": "none",
            "served_models": (),  # nobody served these, nor asked them at any time
            "window": WindowConfig(),
            "near_similarity": "off",
            "max_prompt_tokens": None,
            "max_prompts": config.init.num_prompts,
            "gate_share": config.init.gate_share,
        }
    )
    cached = config.capture.model_copy(update={"stream": False})  # a cold start sees its few rows many times
    config = config.model_copy(update={"collect": collecting, "capture": cached})
    prompts = collect.run(config)
    responses = regenerate.run(config, prompts, target_layer_ids=layers, engines=engines)
    states = capture.run(config, responses, target_layer_ids=layers, engines=engines)
    stages.set_current(config.root, "general-states", states)
    return states


def layers_of(config: Config) -> tuple[int, ...]:
    """The target's layers that a new drafter reads."""
    from drafter.families import read_target_shape
    from drafter.shape import spread_layers

    return config.drafter.target_layer_ids or spread_layers(read_target_shape(config.target.model).num_layers)


def training(config: Config) -> Config:
    """The configuration of the cold start: its own budget and learning rate."""
    update = {"steps": config.init.steps, "learning_rate": config.init.learning_rate}
    return config.model_copy(update={"train": config.train.model_copy(update=update)})


def _write_general_prompts(config: Config) -> Path:
    path = config.root / "general" / "prompts.jsonl"
    wanted = config.init.num_prompts
    lines = [json.dumps(request, sort_keys=True) for request in islice(general.prompts(wanted, seed=0), wanted)]
    write_durably(path, ("\n".join(lines) + "\n").encode())
    return path


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Run the stage and say what is champion."""
    checkpoint = run(config)
    print(f"{checkpoint.folder} is champion of {config.model_name}")


if __name__ == "__main__":
    job_main(__doc__, main)
