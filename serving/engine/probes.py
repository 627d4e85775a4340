"""Probe prompts put to the engine itself, past the door, the tap and the routes.

Source: vllm/v1/engine/async_llm.py (generate), vLLM 0.32.
"""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serving.errors import ServingError

# For orders that bring none: ids that every vocabulary has, in two lengths.
DEFAULT = tuple({"prompt": list(range(16, 16 + length)), "max_tokens": 8} for length in (8, 24))


class ProbesLate(ServingError):
    """The probe prompts were not answered in time: the engine is stuck, or has much to do."""


@dataclass(frozen=True)
class Probed:
    """What the probe prompts got."""

    token_ids: tuple[tuple[int, ...], ...]
    num_steps: int | None
    """Verification steps; None where the engine does not count them a request."""
    num_accepted_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """Counts, without the tokens."""
        return {"num_steps": self.num_steps, "num_accepted_tokens": self.num_accepted_tokens}


def probe_ids(client: Any, probes: Sequence[dict[str, Any]]) -> list[tuple[list[int], int]]:
    """Token ids and the number of tokens asked for, a probe each.

    Raises: ServingError for one that cannot be read, without its text.
    """
    found = []
    for i, one in enumerate(probes):
        try:
            found.append((_ids(client, one), int(one.get("max_tokens", 16))))
        except Exception as error:  # a chat template may raise anything
            raise ServingError(f"probe {i} cannot be made token ids ({type(error).__name__})")
    return found


async def run_probes(client: Any, probes: Sequence[tuple[list[int], int]], *, timeout_s: float) -> Probed:
    """Greedy replies, one at a time, nothing of them from the prefix cache, all in that time. Raises: ServingError."""
    try:
        async with asyncio.timeout(timeout_s):  # of all together: requests wait in front of the door meanwhile
            outputs = [await _one(client, ids, max_tokens) for ids, max_tokens in probes]
    except TimeoutError:
        raise ProbesLate(f"the probe prompts got no answers in {timeout_s:g} s")
    except Exception as error:
        raise ServingError(f"a probe prompt failed: {type(error).__name__}: {error}")
    for output, (_, asked) in zip(outputs, probes, strict=True):
        if len(output.token_ids) != asked:
            raise ServingError(f"a probe prompt got {len(output.token_ids)} tokens, asked for {asked}")
    counts = [output.spec_decode_metrics.histogram for output in outputs if output.spec_decode_metrics is not None]
    return Probed(
        token_ids=tuple(tuple(output.token_ids) for output in outputs),
        num_steps=sum(map(sum, counts)) if len(counts) == len(probes) else None,
        num_accepted_tokens=sum(length * count for histogram in counts for length, count in enumerate(histogram)),
    )


def problem_of(before: Probed, after: Probed, *, allow_changed_outputs: bool) -> tuple[str | None, int]:
    """Why the new drafter is not to serve, or None; and how many replies changed."""
    changed = sum(a != b for a, b in zip(before.token_ids, after.token_ids, strict=True))
    if after.num_steps == 0 and any(len(ids) > 1 for ids in after.token_ids):
        return "the probe prompts ran without one draft", changed
    if changed and not allow_changed_outputs:
        return f"{changed} of {len(after.token_ids)} probe prompts got other greedy tokens than before", changed
    return None, changed


async def _one(client: Any, ids: list[int], max_tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, skip_reading_prefix_cache=True
    )
    last = None
    async for output in client.generate(tokens_input(ids), params, f"slipstream-probe-{uuid.uuid4().hex}"):
        last = output.outputs[0]  # every output holds all tokens so far
    return last


def _ids(client: Any, request: dict[str, Any]) -> list[int]:
    if "messages" in request:
        tokenizer = client.get_tokenizer()
        return list(
            tokenizer.apply_chat_template(
                request["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )
    prompt = request["prompt"]
    ids = client.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    if not ids or not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
        raise ValueError("no token ids")
    return list(ids)
