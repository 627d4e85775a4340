"""Drafters served on one vLLM in turns, and how many more drafts one has accepted a step than another."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from jobs.served import ServedDrafters
from pipeline import evaluate
from pipeline.artifacts import DrafterCheckpoint, ResponseSet, sha256_file
from pipeline.bootstrap import Interval, resample
from pipeline.config import Config
from pipeline.gate_prompts import from_responses
from pipeline.stages import Artifact

RESAMPLES, TAIL = 10_000, 0.025


def served(
    config: Config, drafters: Mapping[str, Artifact[DrafterCheckpoint]], responses: Artifact[ResponseSet]
) -> list[dict[str, Any]]:
    """Rows of schemas.ACCEPTANCE over the gate prompts of these responses, and over general ones; made once."""
    block_size = next(iter(drafters.values())).manifest.block_size
    prompts = from_responses(config, responses, block_size=block_size)
    with ServedDrafters(config, folders=[one.folder for one in drafters.values()]) as server:
        report = evaluate.run(config, drafters, prompts, server=server)
    return pq.read_table(report.folder / "acceptance.parquet").to_pylist()


def checkpoint(folder: Path) -> Artifact[DrafterCheckpoint]:
    """A drafter's folder, in the z-lab layout, as the evaluation takes it."""
    config = json.loads((folder / "config.json").read_text())
    files = sha256_file(folder / "config.json") + sha256_file(folder / "model.safetensors")
    manifest = DrafterCheckpoint(
        derivation_id=hashlib.sha256(files.encode()).hexdigest()[:16],
        parents={},
        role="champion",
        block_size=config["block_size"],
        mask_token_id=config["dflash_config"]["mask_token_id"],
    )
    return Artifact(folder, manifest)


def accepted_ratio(rows: list[dict[str, Any]], first: str, second: str, *, prompt_set: str = "gate") -> Interval:
    """Accepted drafts a step, role ``first`` over role ``second``, with a 95% interval over whole conversations.

    Requests that either was flagged for are left out of both.
    """
    own = [row for row in rows if row["prompt_set"] == prompt_set and row["role"] in (first, second)]
    flagged = {row["row_id"] for row in own if row["flag"]}
    sums: dict[str, list[float]] = {}
    for row in own:
        if row["row_id"] not in flagged:
            one = sums.setdefault(row["conversation"], [0.0] * 4)
            start = 0 if row["role"] == first else 2
            one[start] += row["num_accepted_tokens"]
            one[start + 1] += row["num_drafts"]
    counts = np.array([sums[name] for name in sorted(sums)]).reshape(-1, 4).T
    return resample(counts, resamples=RESAMPLES, seed=0).interval(TAIL)


def accepted_per_step(rows: list[dict[str, Any]], role: str, *, prompt_set: str = "gate") -> float:
    """Accepted drafts a step of one role."""
    own = [row for row in rows if (row["role"], row["prompt_set"]) == (role, prompt_set) and not row["flag"]]
    return sum(row["num_accepted_tokens"] for row in own) / max(1, sum(row["num_drafts"] for row in own))
