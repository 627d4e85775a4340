"""One exchange as the record that later stages read: the request in chat form, the reply, and the engine's own ids."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from serving.tap.exchange import ExactReply, Taken
from serving.tap.replies import read_reply
from serving.tap.responses import Inexact, chat_form, read_response

PARAMS = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "seed", "n", "stop",
    "stop_token_ids", "ignore_eos", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "bad_words", "allowed_token_ids", "best_of", "use_beam_search", "repetition_detection",
    "thinking_token_budget", "response_format", "structured_outputs", "tool_choice", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "chat_template", "documents", "reasoning_effort", "echo",
    "truncate_prompt_tokens", "vllm_xargs",
)  # fmt: skip
ASKED = ("messages", "prompt", "tools")
COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


class NotWritten(Exception):
    """An exchange that gives no record; the text is its outcome."""


def build_record(exchange: Taken, *, target: str | None) -> tuple[dict[str, Any], str]:
    """The record, without its probability, and the event that says where its ids are from.

    Fields that nobody asked for by name are left behind. A request of the responses route that has no chat form is
    marked ``unsupported`` and carries no content. Raises: NotWritten.
    """
    request, reply = _bodies(exchange)
    verdict, record_id = exchange.verdict, uuid.uuid4().hex
    record: dict[str, Any] = {
        "id": record_id,
        "ts": exchange.started,
        "model": request.get("model"),
        "target": target,
        "route": exchange.route,
        "slice": verdict.slice,
        "tenant": verdict.tenant,
        "subject": verdict.subject,
        "consent": "recorded",
        "consent_source": verdict.consent_source,
        "stream": exchange.stream,
        "drafter_version": exchange.drafter_version,
        "acceptance": None,
    }
    if verdict.one_request_subject:
        record["subject"] = f"request:{record_id}"
    if exchange.route == "responses":
        try:
            request = chat_form(request)
        except Inexact as reason:
            return {**record, "unsupported": str(reason)}, "unsupported"
    reply_id = reply.pop("id", None)
    exact = with_exact(reply, exchange.generations, reply_id=reply_id, route=exchange.route, n=request.get("n") or 1)
    record["acceptance"] = _summed([choice.get("acceptance") for choice in reply["choices"]])
    record |= {key: request[key] for key in ASKED if request.get(key) is not None}
    record |= {"params": {key: request[key] for key in PARAMS if request.get(key) is not None}, "response": reply}
    asked_for = any(choice.get("token_ids") for choice in reply["choices"])
    return record, "exact_ids" if exact else "ids_from_client" if asked_for else "no_ids"


def with_exact(
    reply: dict[str, Any], generations: Sequence[ExactReply], *, reply_id: str | None, route: str, n: int
) -> bool:
    """Whether the engine's ids, ends and counts were put into a reply: only where every choice has its own.

    Prompt i of a request is its i-th call of the engine, and its choices are numbered on through the prompts. The
    ids of those calls have to be what the route makes of the reply's own id.
    """
    separator = {"chat": None, "completions": "-", "responses": "_"}[route]
    expected = [reply_id if separator is None else f"{reply_id}{separator}{i}" for i in range(len(generations))]
    found = [(one.prompt_ids, *choice) for one in generations for choice in one.choices]
    if (
        not generations
        or (route != "completions" and len(generations) > 1)  # tools that the server ran between: several prompts
        or [one.request_id for one in generations] != expected
        or any(len(one.choices) != n for one in generations)
        or any(reason in (None, "abort", "error") for _, _, reason, _ in found)
        or [choice["index"] for choice in reply["choices"]] != list(range(len(found)))
    ):
        return False
    for choice, (prompt_ids, ids, reason, acceptance) in zip(reply["choices"], found, strict=True):
        choice["token_ids"] = ids.tolist()
        choice["finish_reason"] = choice["finish_reason"] or reason
        if acceptance:
            choice["acceptance"] = dict(acceptance)
        if len(generations) > 1:
            choice["prompt_token_ids"] = prompt_ids.tolist()
    if len(generations) == 1:
        reply["prompt_token_ids"] = generations[0].prompt_ids.tolist()
    reply["finish_reason"] = reply["choices"][0]["finish_reason"]
    if not reply["usage"]:
        prompts, replies = sum(len(one.prompt_ids) for one in generations), sum(len(ids) for _, ids, _, _ in found)
        reply["usage"] = {"prompt_tokens": prompts, "completion_tokens": replies, "total_tokens": prompts + replies}
    return True


def _bodies(exchange: Taken) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        request = json.loads(exchange.request)
        if not isinstance(request, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError):
        raise NotWritten("malformed_request")
    read = read_response if exchange.route == "responses" else read_reply
    try:
        return request, read(exchange.response, stream=exchange.stream)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        raise NotWritten("malformed_reply")


def _summed(counts: Sequence[Mapping[str, int] | None]) -> dict[str, int] | None:
    """The acceptance of a whole request, None where any of its choices has no counts."""
    if not counts or not all(counts):
        return None
    return {name: sum(one[name] for one in counts) for name in COUNTS}
