"""What learning from a workload is worth: a general champion, the challenger that learned from the workload, and a
control that learned as long from more general prompts; the three served in turns on held-out prompts.

Everything is an artifact under one root: a workload that was measured is not measured again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bench.oracles.captured import Captured, captured, requests_of, write_requests
from bench.oracles.orders import prompts as orders
from bench.oracles.served_pairs import accepted_per_step, accepted_ratio, served
from bench.oracles.trainer_speed import say
from drafter import train
from pipeline.artifacts import DrafterCheckpoint
from pipeline.bootstrap import Interval
from pipeline.config import Config
from pipeline.stages import Artifact
from pipeline.workloads import general, support_mails


@dataclass(frozen=True)
class Budget:
    """How much of everything."""

    general_prompts: int
    prompts: int
    """Of a workload, the held-out ones among them."""
    max_tokens: int
    """Of a reply to a prompt from a file."""
    champion_steps: int
    steps: int
    """Of a challenger, and of the control."""
    champion_rate: float
    rate: float


@dataclass(frozen=True)
class Won:
    """One workload's outcome."""

    over_champion: Interval
    over_control: Interval
    general: Interval
    """Challenger over champion on general prompts."""
    accepted: dict[str, float]
    """Role → accepted drafts a step."""


def workload_files(root: Path, budget: Budget, outside: Sequence[Path]) -> dict[str, Path]:
    """Workload → its traffic: two that are generated, and a file of prompts each."""
    wanted = budget.prompts
    made: dict[str, Callable[[int, int], Any]] = {"mails": support_mails.prompts, "orders": orders}
    files = {
        name: write_requests(root / f"{name}-{wanted}.jsonl", islice(prompts(wanted, 21), wanted))
        for name, prompts in made.items()
    }
    for path in outside:
        requests = requests_of(path, limit=wanted, max_tokens=budget.max_tokens)
        files[path.stem] = write_requests(root / f"{path.stem}-{wanted}-{budget.max_tokens}.jsonl", requests)
    return files


def general_champion(config: Config, budget: Budget, *, threads: int) -> tuple[Captured, Artifact[DrafterCheckpoint]]:
    """The states of general prompts, and a drafter that is trained on them from nothing."""
    found = _general(config, budget.general_prompts, seed=0, threads=threads)
    settings = _training(config, steps=budget.champion_steps, learning_rate=budget.champion_rate)
    return found, train.run(settings, found.states, start=None, role="champion")


def more_general(config: Config, budget: Budget, *, threads: int) -> Captured:
    """As many general prompts as a workload has that the champion has never seen: what a control learns from."""
    return _general(config, budget.prompts, seed=2, threads=threads)  # the gate serves those of seed 1


def won(
    config: Config, budget: Budget, path: Path, general_states: tuple[Captured, Captured],
    champion: Artifact[DrafterCheckpoint], *, threads: int,
) -> Won:  # fmt: skip
    """Train a challenger on a workload and a control beside it, and serve all three.

    ``general_states``: what the champion has learned from, which is replayed, and what the control learns from.
    """
    found = _captured(config, path, threads=threads)
    say(f"{path.stem}: {found.states.manifest.counts}")
    settings = _training(config, steps=budget.steps, learning_rate=budget.rate)
    replay, more = (general_states[0].states,), general_states[1].states
    drafters = {
        "champion": champion,
        "challenger": train.run(settings, found.states, start=champion, role="challenger", replay=replay),
        "control": train.run(settings, more, start=champion, role="control"),
    }
    rows = served(settings, drafters, found.responses)
    return Won(
        accepted_ratio(rows, "challenger", "champion"),
        accepted_ratio(rows, "challenger", "control"),
        accepted_ratio(rows, "challenger", "champion", prompt_set="general"),
        {role: round(accepted_per_step(rows, role), 3) for role in drafters},
    )


def _general(config: Config, wanted: int, *, seed: int, threads: int) -> Captured:
    name = f"general-{wanted}{f'-{seed}' if seed else ''}.jsonl"
    path = write_requests(config.root / name, islice(general.prompts(wanted, seed=seed), wanted))
    return _captured(config, path, threads=threads)


def _captured(config: Config, path: Path, *, threads: int) -> Captured:
    collect = config.collect.model_copy(update={"sources": (path,)})
    layers = config.drafter.target_layer_ids
    return captured(config.model_copy(update={"collect": collect}), layers, num_threads=threads)


def _training(config: Config, **update: Any) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update=update)})
