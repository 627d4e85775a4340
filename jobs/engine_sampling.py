"""A request's sampling as vLLM takes it.

Ids are what counts here, so nothing is turned into text, with one exception: a stop *string* is found in text. vLLM
then ends the reply at the token that completes the string, and keeps that token's id: the ids hold the stop string,
though a server's text would not. An end-of-turn token or a stop token id is part of the ids as well.
"""

import json
from collections.abc import Mapping
from typing import Any

from pipeline.engines import GenerateRequest

# Keys of GenerateRequest.sampling (pipeline/sampling.py) that SamplingParams has under the same name.
PLAIN = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
)


def reply_params(request: GenerateRequest, defaults: Any, *, capture: Mapping[str, Any] | None = None) -> Any:
    """SamplingParams for a reply; what the request leaves open is the target's own (``defaults``, which is used up).

    ``capture``: what tells the worker to keep the request's states (serving/engine/capture.py).

    Raises: ValueError on a setting that is unknown, or that vLLM does not take.
    """
    from vllm.exceptions import VLLMClientError

    try:
        return _finished(defaults, _changes(request), capture)
    except (VLLMClientError, TypeError) as error:
        raise ValueError(f"sampling: {error}")


def read_params(capture: Mapping[str, Any]) -> Any:
    """SamplingParams that only read a prompt: one token is sampled, and dropped."""
    from vllm import SamplingParams

    return _finished(SamplingParams(temperature=0.0), {"max_tokens": 1}, capture)


def _changes(request: GenerateRequest) -> dict[str, Any]:
    settings = json.loads(request.sampling)
    if not isinstance(settings, dict):
        raise ValueError(f"sampling {request.sampling[:80]!r}: expected a JSON object")
    changes = {name: settings.pop(name) for name in PLAIN if name in settings}
    for name in ("temperature", "top_p"):
        if getattr(request, name) is not None:
            changes[name] = getattr(request, name)
    if (structure := settings.pop("structured_outputs", None)) is not None:
        from vllm.sampling_params import StructuredOutputsParams

        changes["structured_outputs"] = StructuredOutputsParams(**structure)
    if settings:
        raise ValueError(f"sampling settings {sorted(settings)} are not supported")
    return changes | {"max_tokens": request.max_tokens, "seed": request.seed}


def _finished(params: Any, changes: dict[str, Any], capture: Mapping[str, Any] | None) -> Any:
    from vllm.sampling_params import RequestOutputKind

    if capture:
        changes["extra_args"] = {**(params.extra_args or {}), **capture}
        changes["skip_reading_prefix_cache"] = True  # a cached prefix is not computed, so its states would be missing
    for name, value in changes.items():
        setattr(params, name, value)
    params.detokenize = bool(params.stop)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.__post_init__()
    return params
