"""Evaluate: champion, challenger and control on the gate prompts → AcceptanceReport → GateDecision.

python jobs/evaluate.py --config slipstream.toml
ray job submit --working-dir . -- python jobs/evaluate.py --config slipstream.toml
"""

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs.alone import run_alone
from jobs.session import job_main
from jobs.speed_report import speed_of
from pipeline import evaluate, gate, stages
from pipeline.artifacts import (
    AcceptanceReport,
    DrafterCheckpoint,
    GateDecision,
    HiddenStateCache,
    ResponseSet,
    load,
)
from pipeline.config import Config
from pipeline.gate_prompts import GatePrompts, from_responses
from pipeline.measured import Walks
from pipeline.sittings import ROLES, Candidates
from pipeline.stages import Artifact

logger = logging.getLogger("slipstream")


def run(
    config: Config,
    candidates: Candidates | None = None,
    responses: Artifact[ResponseSet] | None = None,
    *,
    states: Artifact[HiddenStateCache] | None = None,
    recorded: float | None = None,
) -> tuple[Artifact[AcceptanceReport], Artifact[GateDecision]]:
    """The report and the verdict on these candidates (the current ones by default).

    Each candidate is also walked over the gate rows of ``states`` (the current ones by default).
    ``recorded`` is the champion's served acceptance length when it was last measured; by default what the last
    report of this root found for it.
    """
    candidates = candidates or _current_candidates(config)
    evaluate.require_one_engine(candidates)
    responses = responses or stages.current(config.root, "responses", ResponseSet)
    states = states or stages.current(config.root, "states", HiddenStateCache)
    if recorded is None:
        recorded = _recorded(config, candidates["champion"])
    report = run_alone("evaluate", _serve, config, dict(candidates), responses, states, recorded)
    return report, gate.run(config, report, speed=speed_of(config, candidates["challenger"]))


def walk_gate_rows(
    config: Config, candidates: Candidates, prompts: GatePrompts, states: Artifact[HiddenStateCache]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Role → row → counts of the walk over what is served, up to its budget. Empty without such states.

    Only replies that were drawn as they are served now are walked: a greedy answer says nothing of a sampled one.
    """
    from dataclasses import replace

    from drafter.checkpoint import load_drafter
    from drafter.dataset import read_rows
    from drafter.frozen import read_frozen
    from drafter.walk import walk

    served = {r["row_id"]: r for r in prompts.gate if r["temperature"] == r["sampling"].get("temperature") == 0.0}
    rows = []
    for row in read_rows(states, "gate", staging_bytes=config.capture.staging_bytes):
        if row.row_id in served:
            end = min(row.num_tokens, row.num_prompt_tokens + served[row.row_id]["num_tokens"])
            # Each row is its own slice: what is served and counted in the end decides which rows are compared.
            rows.append(replace(row, slice=row.row_id, ids=row.ids[:end], states=row.states[: end - 1]))
    if not rows:
        return {}
    frozen = read_frozen(config.target.model)
    walks = {}
    for role, candidate in candidates.items():
        counts, by_row = walk(load_drafter(candidate.folder)[0], frozen, rows)
        walks[role] = {row_id: one.as_dict() for row_id, one in by_row.items()}
        logger.info("evaluate: walk of the %s over %d gate rows: %.3f", role, len(rows), counts.acceptance_length)
    return walks


def _serve(
    config: Config,
    candidates: Candidates,
    responses: Artifact[ResponseSet],
    states: Artifact[HiddenStateCache],
    recorded: float | None,
) -> Artifact[AcceptanceReport]:
    from jobs.served import ServedDrafters

    block_size = candidates["champion"].manifest.block_size
    prompts = from_responses(config, responses, block_size=block_size)

    def walk() -> Walks:
        return walk_gate_rows(config, candidates, prompts, states)

    with ServedDrafters(config, folders=[candidate.folder for candidate in candidates.values()]) as server:
        return evaluate.run(config, candidates, prompts, server=server, walk=walk, states=states, recorded=recorded)


def _current_candidates(config: Config) -> dict[str, Artifact[DrafterCheckpoint]]:
    names = config.root / "current.json"
    known = json.loads(names.read_text()) if names.exists() else {}
    roles = [role for role in ROLES if role in known or role != "control"]
    return {role: stages.current(config.root, role, DrafterCheckpoint) for role in roles}


def _recorded(config: Config, champion: Artifact[DrafterCheckpoint]) -> float | None:
    """What the champion was last measured at, in whichever role; None where no report of this root knows it."""
    folder = config.root / AcceptanceReport.kind
    for path in sorted(folder.glob("*/manifest.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        report = load(path.parent, AcceptanceReport)
        for role, one in report.measured.items():
            if report.parents.get(role) == champion.id and one["served_acceptance_length"] is not None:
                return one["served_acceptance_length"]
    return None


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Run the stage, remember its results as ``report`` and ``decision``, and say where the page is."""
    report, decision = run(config)
    stages.set_current(config.root, "report", report)
    stages.set_current(config.root, "decision", decision)
    print(f"{decision.manifest.decision}: {decision.folder / 'report.html'}")


if __name__ == "__main__":
    job_main(__doc__, main)
