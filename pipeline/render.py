"""A conversation as the exact token ids that the target is given."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.errors import SlipstreamError


class RenderError(SlipstreamError):
    """This conversation has no rendering; the row is rejected and counted."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class Renderer:
    """The target's own chat template and tokenizer, used as vLLM's chat route uses them."""

    def __init__(self, model: Path):
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
        self._model = Path(model)
        self._knows_developer = any(f"{quote}developer{quote}" in str(self._tokenizer.chat_template) for quote in "'\"")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a turn."""
        return self._tokenizer.eos_token_id

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Every token that ends a turn on vLLM: the tokenizer's, and those of the model's generation settings."""
        files = (self._model / name for name in ("generation_config.json", "config.json"))
        settings = next((json.loads(file.read_text()) for file in files if file.exists()), {})
        own = settings.get("eos_token_id")
        own = own if isinstance(own, list) else [own]
        return frozenset(token for token in [self.eos_token_id, *own] if token is not None)

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt's ids, generation prompt included. The template alone decides about a BOS: none is added.

        Raises: RenderError when the conversation has no rendering, or the ids begin with two BOS.
        """
        chat = [_as_vllm_reads(message, knows_developer=self._knows_developer) for message in messages]
        known_tools = [_tool_as_vllm_reads(tool) for tool in tools] if tools else None
        try:
            ids = self._tokenizer.apply_chat_template(
                chat,
                tools=known_tools,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **(template_args or {}),
            )
        except Exception as error:  # a template is a program: whatever it raises concerns this row alone
            raise RenderError("template_failed", f"{type(error).__name__}: {error}"[:300])
        bos = self._tokenizer.bos_token_id
        if bos is not None and list(ids[:2]) == [bos, bos]:
            raise RenderError("double_bos", f"the prompt begins with token {bos} twice")
        if not ids:
            raise RenderError("empty_prompt", "the template rendered to nothing")
        return [int(token) for token in ids]

    def row_ids(self, row: Mapping[str, Any]) -> list[int]:
        """The prompt's ids of a row of schemas.PROMPTS. Raises: RenderError."""
        return self.prompt_ids(
            json.loads(row["messages"]),
            tools=json.loads(row["tools"]) if row["tools"] else None,
            template_args=json.loads(row["template_args"] or "{}"),
        )


def _as_vllm_reads(message: Mapping[str, Any], *, knows_developer: bool) -> dict[str, Any]:
    """The message as vLLM hands it to the template: these fields in this order, content as text, arguments parsed.

    Templates may write a whole message out, so its order and what is left out of it are part of the prompt.
    """
    role = message["role"]
    turn: dict[str, Any] = {"role": role, "content": _text(message.get("content"))}
    if role == "developer" and not knows_developer:
        turn["role"] = "system"
    if role == "assistant":
        if message.get("tool_calls"):
            turn["tool_calls"] = [_call_as_vllm_reads(call) for call in message["tool_calls"]]
        reasoning = message.get("reasoning", message.get("reasoning_content"))
        if reasoning is not None:
            turn |= {"reasoning": reasoning, "reasoning_content": reasoning}  # templates know it by either name
    if role == "tool" and "tool_call_id" in message:
        turn["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        turn["name"] = message["name"]
    return turn


def _text(content: Any) -> str:
    if not isinstance(content, list):
        return content or ""
    if len(content) > 1 or any(part.get("type", "text") != "text" for part in content):
        kinds = [part.get("type") for part in content]
        raise RenderError("content_parts", f"{kinds}: only a single text part has one rendering for every template")
    return content[0]["text"] if content else ""


def _call_as_vllm_reads(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object; what is none becomes an empty one, as there."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise RenderError("malformed_tool_call", "expected an object with a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = {}
    arguments = arguments if isinstance(arguments, dict) else {}
    own_id = {"id": call["id"]} if "id" in call else {}
    return {**own_id, "function": {"arguments": arguments, "name": function.get("name")}, "type": "function"}


def _tool_as_vllm_reads(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with the fields that vLLM's chat route knows, in its order, absent ones as null."""
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RenderError("malformed_tool", "expected an object with a function and its name")
    known = {name: function.get(name) for name in ("name", "description", "parameters")}
    optional = {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
    return {"type": "function", "function": {**known, **optional}}
