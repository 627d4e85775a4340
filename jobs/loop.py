"""The loop: collect → regenerate → capture → train → evaluate → gate → promote → deploy; complete stages are skipped.

python jobs/loop.py --config slipstream.toml
ray job submit --working-dir . -- python jobs/loop.py --config slipstream.toml
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs import capture, collect, deploy, evaluate, promote, regenerate, replicas, speed, stream, train, unlearn
from jobs.session import job_main
from pipeline import lease, stages
from pipeline.artifacts import (
    AcceptanceReport,
    DrafterCheckpoint,
    GateDecision,
    HiddenStateCache,
    PromptSet,
    Release,
    ResponseSet,
)
from pipeline.config import Config
from pipeline.engines import Engines
from pipeline.stages import Artifact

logger = logging.getLogger("slipstream")


@dataclass(frozen=True)
class Learned:
    """What one round of traffic left behind, up to the drafters that want to serve."""

    prompts: Artifact[PromptSet]
    responses: Artifact[ResponseSet]
    states: Artifact[HiddenStateCache]
    """Of the held-out rows alone, where the train rows were streamed (capture.stream)."""
    drafters: dict[str, Artifact[DrafterCheckpoint]]
    """champion, challenger and, where ``train.control`` asks for it, control; the champion alone where it has learned
    from these very states already."""


def learn(
    config: Config, *, champion: Artifact[DrafterCheckpoint] | None = None, engines: Engines | None = None
) -> Learned:
    """From the traffic log to drafters trained from the champion (the current one by default).

    Raises: StageError when there is no champion to start from.
    """
    champion = champion or stages.current(config.root, "champion", DrafterCheckpoint)
    layers = capture.layers_to_capture(config)
    engines = engines or regenerate.engines_of(config, layers)
    prompts, responses, states = _gather(config, layers, engines)
    drafters = {"champion": champion}
    start = unlearn.clean_start(config, champion)
    if start is champion and champion.manifest.parents.get("states") == states.id:
        return Learned(prompts, responses, states, drafters)
    replay = train.to_replay(config, states, role="challenger")
    drafters["challenger"] = (
        stream.train_on(config, responses, states, start=start, role="challenger", replay=replay, engines=engines)
        if config.capture.stream
        else train.run(config, states, start=start, role="challenger", replay=replay)
    )
    stages.set_current(config.root, "challenger", drafters["challenger"])
    if config.train.control:
        general = stages.current(config.root, "general-states", HiddenStateCache)
        drafters["control"] = train.run(config, general, start=start, role="control")
        stages.set_current(config.root, "control", drafters["control"])
    return Learned(prompts, responses, states, drafters)


def judge(config: Config, learned: Learned) -> tuple[Artifact[AcceptanceReport], Artifact[GateDecision]]:
    """The drafters measured on one engine, and the verdict; the challenger's speed first, where it is asked for."""
    if config.speed.concurrencies and "challenger" in learned.drafters:
        found = speed.run(config, learned.drafters["challenger"], learned.responses)
        stages.set_current(config.root, "speed", found)
    report, decision = evaluate.run(config, learned.drafters, learned.responses, states=learned.states)
    stages.set_current(config.root, "report", report)
    stages.set_current(config.root, "decision", decision)
    return report, decision


def run(config: Config) -> Release | None:
    """The release that the loop ends with; None where there was nothing to deploy, or no replicas to deploy to.

    Raises: Declined with the gate's reasons where it does not promote; StageError when another run is under way.
    """
    with lease.turn(config.root):
        return _run(config)


def _run(config: Config) -> Release | None:
    learned = learn(config)
    if "challenger" not in learned.drafters:
        logger.info("loop: the champion has learned from this traffic already; nothing to do")
        return None
    _, decision = judge(config, learned)
    version = promote.run(config, decision, learned.drafters["challenger"])
    if not replicas.are_named(config):
        logger.info("loop: version %s is approved; set serving.replicas to deploy it", version)
        return None
    return deploy.run(config)


def _gather(
    config: Config, layers: Sequence[int], engines: Engines
) -> tuple[Artifact[PromptSet], Artifact[ResponseSet], Artifact[HiddenStateCache]]:
    prompts = collect.run(config)
    stages.set_current(config.root, "prompts", prompts)
    responses = regenerate.run(config, prompts, target_layer_ids=layers, engines=engines)
    stages.set_current(config.root, "responses", responses)
    take = stream.held_out if config.capture.stream else capture.run
    states = take(config, responses, target_layer_ids=layers, engines=engines)
    stages.set_current(config.root, "states", states)
    return prompts, responses, states


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Run every stage that is not complete."""
    release = run(config)
    print(f"version {release.version} is champion" if release else "approved; nothing to deploy to")


if __name__ == "__main__":
    job_main(__doc__, main)
