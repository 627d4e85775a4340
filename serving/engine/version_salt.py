"""Prefix-cache blocks of after a swap apart from those of before, so that no request reads another drafter's keys.

Source: vllm/v1/engine/input_processor.py (cache_salt), vLLM 0.32.
"""

import functools
from collections.abc import AsyncGenerator
from typing import Any

_ATTRIBUTE = "slipstream_cache_salt"


def is_possible(engine_client: Any) -> bool:
    """Whether requests can be told apart there."""
    return getattr(engine_client, "generate", None) is not None


def use(engine_client: Any, salt: str) -> None:
    """Requests from now on, of this API server, share cached blocks with those of the same salt alone.

    A version's name is none: between two times that it serves, another drafter may write under it.
    """
    if not hasattr(engine_client, _ATTRIBUTE):
        engine_client.generate = _salting(engine_client, engine_client.generate)
    setattr(engine_client, _ATTRIBUTE, salt)


def _salting(engine_client: Any, generate: Any) -> Any:
    @functools.wraps(generate)
    async def salting(prompt: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        if isinstance(prompt, dict):  # what the routes hand over; a client's own salt keeps its meaning
            own = prompt.get("cache_salt") or ""
            prompt = {**prompt, "cache_salt": f"{own}|drafter {getattr(engine_client, _ATTRIBUTE)}"}
        outputs = generate(prompt, *args, **kwargs)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()

    return salting
