"""On-policy anchors against uniform ones: the same states, at equal steps and at equal wall-clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.oracles.trainer_speed import say
from drafter import train
from drafter.checkpoint import load_drafter
from drafter.dataset import read_rows
from drafter.frozen import read_frozen
from drafter.walk import walk
from pipeline.artifacts import HiddenStateCache
from pipeline.config import Config
from pipeline.stages import Artifact


@dataclass(frozen=True)
class Run:
    """One training run."""

    accepted: float  # drafts a step, of the walk over the held-out rows
    seconds: float  # of training, walks left out
    steps: int


def compared(config: Config, states: Artifact[HiddenStateCache], *, seeds: Sequence[int]) -> dict[str, list[Run]]:
    """ "uniform", "on_policy" at as many steps, and "on_policy_equal_time" at as many seconds; a run for each seed."""
    found: dict[str, list[Run]] = {"uniform": [], "on_policy": [], "on_policy_equal_time": []}
    for seed in seeds:
        # Who comes first takes turns: what else the machine does must not decide.
        pair = {
            anchors: _run(config, states, anchors=anchors, seed=seed)
            for anchors in ("uniform", "on_policy")[:: 1 if seed % 2 else -1]
        }
        uniform, on_policy = pair["uniform"], pair["on_policy"]
        a_step = on_policy.seconds / on_policy.steps
        steps = max(1, round(uniform.seconds / a_step))
        found["uniform"].append(uniform)
        found["on_policy"].append(on_policy)
        found["on_policy_equal_time"].append(_run(config, states, anchors="on_policy", seed=seed, steps=steps))
        say(f"anchors, seed {seed}: " + ", ".join(f"{name} {runs[-1]}" for name, runs in found.items()))
    return found


def _run(config: Config, states: Artifact[HiddenStateCache], **settings: Any) -> Run:
    # One measurement, at the end: what is compared is the training.
    steps = settings.get("steps", config.train.steps)
    update = {**settings, "steps": steps, "checkpoint_every": steps, "patience": None}
    config = config.model_copy(update={"train": config.train.model_copy(update=update)})
    trained = train.run(config, states, start=None, role="champion")
    drafter, _ = load_drafter(trained.folder)
    counts, _ = walk(drafter, read_frozen(config.target.model), read_rows(states, "gate"))
    last = trained.manifest.curve[-1]
    return Run(counts.num_accepted_tokens / max(1, counts.num_drafts), last["seconds"], steps)
