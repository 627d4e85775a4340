"""What is asked of the target for a prompt: the policy on top of the traffic's own sampling, and what is on record."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config import Config
from pipeline.engines import GenerateRequest, Reply


@dataclass(frozen=True)
class Planned:
    """A prompt that fits, and the request made of it."""

    row: Mapping[str, Any]
    request: GenerateRequest
    clamped: bool


@dataclass(frozen=True)
class Served:
    """A prompt whose reply is on record, and the request that it answers: nothing is asked."""

    row: Mapping[str, Any]
    request: GenerateRequest
    reply: Reply


def plan(
    config: Config, row: Mapping[str, Any], prompt_ids: Sequence[int], *, target_id: str
) -> Planned | Served | dict[str, Any]:
    """The request for a row, its budget clamped to the context; or the reject when the prompt alone fills it."""
    settings, context = config.regenerate, usable_context(config)
    if len(prompt_ids) >= context:
        return {"reason": "prompt_too_long", "prompt_tokens": len(prompt_ids), "usable_context": context}
    asked = min(row["max_tokens"] or settings.max_tokens, settings.max_tokens)
    budget = min(asked, context - len(prompt_ids))
    temperature = row["temperature"] if settings.temperature is None else settings.temperature
    if row["split"] != "train":
        temperature = 0.0  # what is measured is served greedily, and the walk over it has to cover the same replies
    request = GenerateRequest(
        row["row_id"], tuple(prompt_ids), budget, temperature, row["top_p"], row_seed(settings.seed, row["row_id"])
    )
    return Planned(row, request, clamped=budget < asked)


def usable_context(config: Config) -> int:
    """Tokens a prompt and its reply may have together: a block less than the engine's context.

    Within a block of the end vLLM stops drafting, for the whole batch, and a gate on such rows would
    measure that instead of the drafter.
    """
    return config.target.max_model_len - config.drafter.block_size


def row_seed(seed: int, row_id: str) -> int:
    """The sampling seed of a row: the same in every run, and no two rows share one by their place."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{row_id}".encode()).digest()[:4], "big") >> 1
