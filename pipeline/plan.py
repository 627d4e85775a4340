"""What is asked of the target for a prompt: the policy on top of the traffic's own sampling, and what is on record."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config import Config
from pipeline.engines import GenerateRequest, Reply
from pipeline.sampling import measured, within


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
    clamped: bool
    reply: Reply


def plan(
    config: Config,
    row: Mapping[str, Any],
    prompt_ids: Sequence[int],
    *,
    target_id: str,
    end_ids: Collection[int] = (),
) -> Planned | Served | dict[str, Any]:
    """The request for a row, its budget clamped to the context; or the reject when the prompt alone fills it.

    ``target_id`` names this target as it is served (fingerprint_id), ``end_ids`` the tokens that end its turns
    (Renderer.end_ids): what a served reply must be of before it stands for an answer.
    """
    settings, context = config.regenerate, usable_context(config)
    if len(prompt_ids) >= context:
        return {"reason": "prompt_too_long", "prompt_tokens": len(prompt_ids), "usable_context": context}
    asked = min(row["max_tokens"] or settings.max_tokens, settings.max_tokens)
    budget = min(asked, context - len(prompt_ids))
    temperature = row["temperature"] if settings.temperature is None else settings.temperature
    sampling = within(row["sampling"], max_tokens=budget)
    if row["split"] != "train":
        temperature = 0.0  # what is measured is served greedily, and the walk over it has to cover the same replies
        sampling = measured(row["sampling"], temperature=temperature, max_tokens=budget)
    seed = row_seed(settings.seed, row["row_id"])
    request = GenerateRequest(row["row_id"], tuple(prompt_ids), budget, temperature, row["top_p"], seed, sampling)
    reusable = settings.reuse == "exact" and row["split"] == "train" and settings.temperature is None
    if reusable and (reply := _on_record(row, request, target_id=target_id, end_ids=end_ids)):
        return Served(row, request, budget < asked, reply)
    return Planned(row, request, clamped=budget < asked)


def _on_record(
    row: Mapping[str, Any], request: GenerateRequest, *, target_id: str, end_ids: Collection[int]
) -> Reply | None:
    """The served reply that the target could have drawn for this request, by its exact ids; None where there is none.

    A reply that is longer than the budget is cut there: the same draw under this budget would have ended so. It isn't
    drawn anew instead, since a second draw for every long reply would leave too many short ones.
    """
    if row["served_ids"] is None or row["served_by"] != target_id:
        return None
    if tuple(row["served_prompt_ids"]) != request.prompt_ids:
        return None
    ids, reason = tuple(row["served_ids"]), row["served_finish_reason"]
    if not _ended(ids, reason, sampling=json.loads(request.sampling), end_ids=end_ids):
        return None
    if len(ids) > request.max_tokens:
        return Reply(row["row_id"], ids[: request.max_tokens], "length")
    if reason == "length" and len(ids) < request.max_tokens:
        return None  # a smaller limit than the request's own cut it, such as another context length
    return Reply(row["row_id"], ids, reason)


def _ended(ids: Sequence[int], reason: str, *, sampling: Mapping[str, Any], end_ids: Collection[int]) -> bool:
    """Whether the ids end as an engine of ours ends them: an end token is there once, last, if the reason is stop.

    Where a string may have stopped the reply, the record doesn't say whether one did: no.
    """
    if sampling.get("stop"):
        return False
    ends = {*sampling.get("stop_token_ids", ()), *(() if sampling.get("ignore_eos") else end_ids)}
    first = next((place for place, token in enumerate(ids) if token in ends), None)
    return first == (len(ids) - 1 if reason == "stop" else None)


def usable_context(config: Config) -> int:
    """Tokens a prompt and its reply may have together: a block less than the engine's context.

    Within a block of the end vLLM stops drafting, for the whole batch, and a gate on such rows would
    measure that instead of the drafter.
    """
    return config.target.max_model_len - config.drafter.block_size


def row_seed(seed: int, row_id: str) -> int:
    """The sampling seed of a row: the same in every run, and no two rows share one by their place."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{row_id}".encode()).digest()[:4], "big") >> 1
