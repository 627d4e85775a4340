"""A conversation as the exact token ids that the target is given."""

import json
from collections.abc import Mapping, Sequence
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

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a turn."""
        return self._tokenizer.eos_token_id

    @property
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

        Raises: RenderError when the template refuses the conversation, or the ids begin with two BOS.
        """
        chat = [_as_vllm_reads(message) for message in messages]
        try:
            ids = self._tokenizer.apply_chat_template(
                chat,
                tools=list(tools) if tools else None,
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


def _as_vllm_reads(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as vLLM hands it to the template: text content as a string, tool arguments as an object."""
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        if len(content) != 1 or content[0].get("type") != "text":
            kinds = [part.get("type") for part in content]
            raise RenderError("content_parts", f"{kinds}: only a single text part has one rendering for every template")
        message["content"] = content[0]["text"]
    if message.get("tool_calls"):
        message["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
    return message


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(arguments := function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(arguments or "{}")
        except ValueError as error:
            raise RenderError("tool_arguments", f"not JSON: {error}")
    return {**call, "function": function}
