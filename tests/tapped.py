"""A tap before a small application: what goes in, what comes out, what is on record."""

import asyncio
import json
from pathlib import Path

import httpx

from pipeline.sources.sealed import unsealed
from pipeline.sources.stores import is_open

CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "Grüße, where is my parcel?"}],
    "temperature": 0.2,
    "max_tokens": 7,
    "chat_template_kwargs": {"enable_thinking": False},
    "api_secret": "never written",
}
ANSWER = {
    "id": "x",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "On its way"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 4, "completion_tokens": 3},
}
EVENTS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "On its "}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "wäy"}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"completion_tokens": 3}},
]
SSE = b"text/event-stream; charset=utf-8"


def stream_of(events):
    lines = [b"data: " + json.dumps(event, ensure_ascii=False).encode() for event in events]
    return b"\n\n".join([*lines, b"data: [DONE]\n\n"])


STREAM = stream_of(EVENTS)


def app_that_answers(body, *, status=200, content_type=b"application/json", pieces=1, die=False, headers=()):
    """An ASGI application with one answer, whatever it is asked; ``die`` raises after the first piece."""
    body = json.dumps(body).encode() if isinstance(body, dict) else body

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        head = [(b"content-type", content_type), *headers]
        await send({"type": "http.response.start", "status": status, "headers": head})
        size = -(-len(body) // pieces)
        for start in range(0, len(body), size):
            await send({"type": "http.response.body", "body": body[start : start + size], "more_body": True})
            if die:
                raise RuntimeError("the engine died")
        await send({"type": "http.response.body", "body": b""})

    return app


def send(tap, body=CHAT, *, headers=(), path="/v1/chat/completions", method="POST", times=1):
    """The last answer to so many requests."""

    async def scenario():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(tap), base_url="http://x") as client:
            how = {"content": body} if isinstance(body, bytes) else {"json": body}
            for _ in range(times):
                answer = await client.request(method, path, headers=headers, **how)
            return answer

    return asyncio.run(scenario())


def committed(folder, pattern="*.jsonl"):
    """The committed files of a log; there must be no open one."""
    assert not list(Path(folder).glob("*.open.*"))
    return sorted(Path(folder).glob(pattern))


def records(tap):
    """Every record that a tap wrote, after it was closed."""
    tap.feeder.close(30)
    folder = tap.settings.log.folder
    lines = [line for path in committed(folder) for line in path.read_bytes().splitlines(keepends=True)]
    assert all(line.endswith(b"\n") for line in lines)
    return [json.loads(line) for line in lines]


def outcomes(tap):
    """Outcome → count of a tap, without its events."""
    from serving.tap.metrics import OUTCOMES

    return {name: count for name, count in tap.metrics.counts.items() if name in OUTCOMES and count}


def sealed_lines(path, keys):
    """The whole lines of a sealed log, one by one."""
    with open(path, "rb") as file:
        for chunk in unsealed(file, path.name, keys, is_open=is_open(str(path))):
            yield from chunk.splitlines(keepends=True)
