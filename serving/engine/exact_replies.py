"""The exact ids of prompts and replies, taken where the engine's client hands its outputs out.

``AsyncLLM.generate`` of the running server is wrapped at run time, so a client need not ask for ids and no body
changes. Requests find each other by context: whoever serves a request sets ``watched``, and every ``generate`` called
in that context, or in tasks started from it, notes its outputs there. Ids of requests decide nothing, since clients
choose them (X-Request-Id) and may choose alike; the tap compares them with the answer's afterwards.

Source: vllm/v1/engine/async_llm.py (generate), vllm/outputs.py, vllm/v1/metrics/stats.py, and for the ids of requests
vllm/entrypoints/openai/{chat_completion,completion,responses}/serving.py, vLLM 0.32.
"""

import functools
import inspect
import logging
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from typing import Any

from serving.engine.versions import require_supported_vllm
from serving.errors import VersionError

logger = logging.getLogger("vllm.slipstream")


MAX_GENERATIONS = 128  # of one request: a beam search makes one a token and beam, and none of them is its reply


class Generation:
    """What one call of ``generate`` gave: one prompt, and as many choices as were drawn."""

    def __init__(self, request_id: str, *, delta: bool):
        self.request_id, self.delta = request_id, delta
        self.prompt_ids: list[int] | None = None
        self.choices: dict[int, Choice] = {}
        self.broken = False
        """Whether an output could not be read: then what is noted isn't all."""

    def see(self, output: Any) -> None:
        """Note a RequestOutput; it stays as it is."""
        try:
            self._note(output)
        except Exception:  # an output of another shape must not end the request
            self.broken = True

    def _note(self, output: Any) -> None:
        if self.prompt_ids is None:
            self.prompt_ids = output.prompt_token_ids
        for one in output.outputs:
            choice = self.choices.get(one.index)
            if choice is None:
                choice = self.choices[one.index] = Choice()
            if self.delta:
                choice.ids.extend(one.token_ids)
            else:
                choice.ids = list(one.token_ids)
            if one.finish_reason is not None:
                choice.finish_reason = one.finish_reason
                choice.acceptance = _acceptance(one.spec_decode_metrics)


class Choice:
    """One reply, as far as it has come."""

    __slots__ = ("acceptance", "finish_reason", "ids")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.finish_reason: str | None = None
        self.acceptance: dict[str, int] | None = None
        """num_drafts (steps), num_draft_tokens and num_accepted_tokens; None where the engine does not count them."""


watched: ContextVar[list[Generation] | None] = ContextVar("slipstream_watched", default=None)


def watch(engine_client: Any) -> bool:
    """Whether this client's outputs are noted from now on; a log line says why not. Doing it twice is doing it once."""
    try:
        require_supported_vllm()
    except VersionError as error:
        logger.warning("tap: no exact ids but those that clients ask for: %s", error)
        return False
    generate = getattr(engine_client, "generate", None)
    if getattr(generate, "slipstream_watches", False):
        return True
    if not inspect.isasyncgenfunction(generate):
        logger.warning("tap: no exact ids but those that clients ask for: the engine's client is unlike vLLM's own")
        return False
    engine_client.generate = _watching(generate)
    return True


def _watching(generate: Any) -> Any:
    @functools.wraps(generate)
    def watching(
        prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        outputs = generate(prompt, sampling_params, request_id, *args, **kwargs)
        generations = watched.get()
        if generations is None or len(generations) >= MAX_GENERATIONS:
            return outputs
        kind = getattr(getattr(sampling_params, "output_kind", None), "name", None)
        generation = Generation(request_id, delta=kind == "DELTA")
        generations.append(generation)
        return _noting(outputs, generation)

    watching.slipstream_watches = True
    return watching


async def _noting(outputs: AsyncGenerator[Any, None], generation: Generation) -> AsyncGenerator[Any, None]:
    """The same outputs. Closing this one closes the engine's, which is how a request is aborted."""
    try:
        async for output in outputs:
            generation.see(output)
            yield output
    finally:
        await outputs.aclose()


def _acceptance(metrics: Any) -> dict[str, int] | None:
    """The counts of a RequestSpecDecodeMetrics, taken before the reply was trimmed at its end."""
    if metrics is None:
        return None
    return {
        "num_drafts": sum(metrics.histogram),
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_tokens": sum(accepted * count for accepted, count in enumerate(metrics.histogram)),
    }
