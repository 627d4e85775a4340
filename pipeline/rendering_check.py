"""Before the first row: what is rendered here must be, id for id, what the fleet's own server makes of the same chats.

Another release of the tokenizer, another chat template or a server's default template arguments change every prompt a
little, and nothing later would notice.
"""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pipeline.config import Config
from pipeline.engines import Engine
from pipeline.errors import StageError
from pipeline.render import Renderer, RenderError

_TIMEOUT_S = 30.0
_EXPECTED = "regenerate.rendering_url must be the base URL of a running vLLM replica, such as http://10.0.0.5:8000"
_CITY = {"type": "object", "properties": {"unit": {"type": "string"}, "city": {"type": "string"}}, "required": ["city"]}
_CALL = {
    "id": "call1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"unit": "C", "city": "Oslo"}'},
}


@dataclass(frozen=True)
class _Probe:
    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_args: dict[str, Any] | None = None


_PROBES = (
    _Probe("plain", [{"role": "user", "content": "Grüße! What's 2 + 2?"}]),
    _Probe(
        "system and turns",
        [
            {"role": "system", "content": "Answer in one word."},
            {"role": "user", "content": "The capital of Norway?"},
            {"role": "assistant", "content": "Oslo"},
            {"role": "user", "content": " And of Peru?\n"},
        ],
    ),
    _Probe(
        "tools and template arguments",
        [
            {"role": "user", "content": "How is the weather in Oslo?"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call1", "content": '{"celsius": 4}'},
        ],
        tools=[{"type": "function", "function": {"name": "weather", "parameters": _CITY}}],
        # A template reads the one it knows, if any.
        template_args={"enable_thinking": False, "thinking": False},
    ),
)


# The ids of a probe, or in words why there are none.
_Rendering = list[int] | str


def require_same_rendering(config: Config, renderer: Renderer, engine: Engine | None) -> None:
    """Compare three probe chats with the server at regenerate.rendering_url, or with the engine where there is none.

    Raises: StageError with the probe, the first position that differs and both ids there; or when the server cannot be
    asked. A chat that both sides refuse, as templates without tools do, is no difference.
    """
    url = config.regenerate.rendering_url
    where = url or "the engine"
    refusals = []
    for probe in _PROBES:
        theirs = _served_ids(url.rstrip("/"), probe) if url else _engine_ids(engine, probe)
        ours = _own_ids(renderer, probe)
        if isinstance(theirs, str) and isinstance(ours, str):
            refusals.append(f"{probe.name}: {where} {theirs}; here {ours}")
        elif theirs != ours:
            raise StageError(
                f"rendering check: the probe chat {probe.name!r} differs: {_difference(where, theirs, ours)}. The "
                f"tokenizer, its chat template or the default template arguments of {where} are not those of "
                f"{config.target.model}: copy the tokenizer's files and the chat template that the fleet serves with "
                "into target.model, or serve with these, then run again"
            )
    if len(refusals) == len(_PROBES):
        raise StageError(
            f"rendering check: no probe chat has a rendering ({refusals[0]}); the target's chat template is missing"
        )


def _difference(where: str, theirs: _Rendering, ours: _Rendering) -> str:
    if isinstance(theirs, str) or isinstance(ours, str):
        told = [one if isinstance(one, str) else f"renders {len(one)} ids" for one in (theirs, ours)]
        return f"{where} {told[0]}, and here it {told[1]}"
    pairs = enumerate(zip_longest(theirs, ours))
    place, pair = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
    named = ["the end" if token is None else f"token {token}" for token in pair]
    return f"position {place} is {named[0]} of {len(theirs)} at {where}, and {named[1]} of {len(ours)} here"


def _own_ids(renderer: Renderer, probe: _Probe) -> _Rendering:
    try:
        return renderer.prompt_ids(probe.messages, tools=probe.tools, template_args=probe.template_args)
    except RenderError as error:
        return f"has no rendering ({error})"


def _engine_ids(engine: Engine, probe: _Probe) -> _Rendering:
    tools = json.dumps(probe.tools) if probe.tools else None
    try:
        return engine.rendered_ids(
            json.dumps(probe.messages), tools=tools, template_args=json.dumps(probe.template_args or {})
        )
    except StageError as error:
        return f"refuses it ({str(error)[:300]})"


def _served_ids(url: str, probe: _Probe) -> _Rendering:
    """The ids that vLLM's /tokenize route makes of a chat."""
    body: dict[str, Any] = {"messages": probe.messages, "add_generation_prompt": True, "add_special_tokens": False}
    body |= {"tools": probe.tools} if probe.tools else {}
    body |= {"chat_template_kwargs": probe.template_args} if probe.template_args else {}
    request = urllib.request.Request(
        url + "/tokenize", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return [int(token) for token in json.loads(answer.read())["tokens"]]
    except urllib.error.HTTPError as error:
        said = error.read()[:300].decode(errors="replace")
        if error.code in (400, 422):
            return f"refuses it (HTTP {error.code}: {said})"
        raise StageError(f"rendering check: {url}/tokenize answers HTTP {error.code}: {said}; {_EXPECTED}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StageError(f"rendering check: {url}/tokenize cannot be asked ({error}); {_EXPECTED}")
