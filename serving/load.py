"""Drive OpenAI-style requests at a server and keep what each one got."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp


@dataclass(frozen=True)
class Reply:
    """What one request got; counts and ids are the engine's own."""

    index: int
    ok: bool
    error: str | None
    status: int
    text: str
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None
    finish_reason: str | None
    usage: dict[str, Any] | None
    spec: dict[str, Any] | None
    """metrics.speculative_decoding, null for aborted requests and several choices."""
    started_s: float
    latency_s: float
    ttft_s: float | None
    """Time to the first tokens; None for answers that come whole."""
    itl_s: list[float]
    """Gaps between the arrivals after it; with speculation a step's tokens arrive together."""


async def drive(
    base_url: str,
    requests: Sequence[dict[str, Any]],
    *,
    concurrency: int,
    headers: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
    timeout_s: float = 600.0,
    on_reply: Callable[[Reply], None] | None = None,
) -> list[Reply]:
    """One Reply a request, in the order of the requests; failures are replies too and never raise.

    A request with "messages" goes to chat completions, one with "prompt" to completions. ``headers`` are
    for all requests, or one mapping for each.
    """
    replies: list[Reply | None] = [None] * len(requests)
    queue = iter(enumerate(requests))
    origin = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def client(session: aiohttp.ClientSession) -> None:
        for index, request in queue:
            own = headers[index] if headers is not None and not isinstance(headers, Mapping) else headers
            replies[index] = await _one(session, base_url, index, request, own, origin)
            if on_reply is not None:
                on_reply(replies[index])

    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session) for _ in range(max(1, min(concurrency, len(requests))))))
    return [reply for reply in replies if reply is not None]


def drive_sync(base_url: str, requests: Sequence[dict[str, Any]], **settings: Any) -> list[Reply]:
    """``drive`` for callers without an event loop."""
    return asyncio.run(drive(base_url, requests, **settings))


class Driver:
    """Load in the background: repeats a list of requests until it is stopped. ``with Driver(...) as driver:``"""

    def __init__(
        self,
        base_url: str,
        requests: Sequence[dict[str, Any]],
        *,
        concurrency: int,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ):
        self.base_url, self.requests = base_url, list(requests)
        self.settings = {"concurrency": concurrency, "headers": headers, "timeout_s": timeout_s}
        self.replies: list[Reply] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slipstream-driver", daemon=True)

    def __enter__(self) -> "Driver":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def stop(self) -> list[Reply]:
        """Every reply so far, once the requests in flight have ended; ``Reply.index`` is the request's index."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        return self.replies

    def wait_for(self, count: int, timeout_s: float = 300.0) -> None:
        """Return when this many replies have come. Raises: TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while len(self.replies) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self.replies)} replies after {timeout_s} s, expected {count}")
            time.sleep(0.02)

    def _run(self) -> None:
        asyncio.run(self._repeat())

    async def _repeat(self) -> None:
        origin = time.perf_counter()
        position = 0

        async def client(session: aiohttp.ClientSession) -> None:
            nonlocal position
            while not self._stop.is_set():
                index, position = position % len(self.requests), position + 1
                headers = self.settings["headers"]
                reply = await _one(session, self.base_url, index, self.requests[index], headers, origin)
                self.replies.append(reply)

        timeout = aiohttp.ClientTimeout(total=self.settings["timeout_s"])
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(client(session) for _ in range(self.settings["concurrency"])))


async def _one(
    session: aiohttp.ClientSession,
    base_url: str,
    index: int,
    request: dict[str, Any],
    headers: Mapping[str, str] | None,
    origin: float,
) -> Reply:
    route = "/v1/chat/completions" if "messages" in request else "/v1/completions"
    started = time.perf_counter()
    status, parts, arrivals, error = 0, [], [], None
    try:
        async with session.post(base_url + route, json=request, headers=headers) as answer:
            status = answer.status
            async for chunk in answer.content.iter_any():
                arrivals.append(time.perf_counter() - started)
                parts.append(chunk)
    except (aiohttp.ClientError, TimeoutError, OSError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    latency_s = time.perf_counter() - started
    body = b"".join(parts)
    fields: dict[str, Any] = {}
    if error is None and status != 200:
        error = f"HTTP {status}: {body[:500].decode(errors='replace')}"
    if error is None:
        try:
            fields = _from_events(parts, arrivals) if request.get("stream") else _from_whole(json.loads(body))
        except (ValueError, KeyError, IndexError, TypeError) as problem:
            error = f"the answer cannot be read ({type(problem).__name__}: {problem})"
    empty = dict.fromkeys(("prompt_token_ids", "token_ids", "finish_reason", "usage", "spec", "ttft_s"))
    return Reply(
        index=index,
        ok=error is None,
        error=error,
        status=status,
        **{"text": "", "itl_s": [], **empty, **fields},
        started_s=started - origin,
        latency_s=latency_s,
    )


def _from_whole(data: dict[str, Any]) -> dict[str, Any]:
    choice = data["choices"][0]
    text = (choice.get("message") or {}).get("content") if "message" in choice else choice.get("text")
    return {
        "text": text or "",
        "prompt_token_ids": data.get("prompt_token_ids") or choice.get("prompt_token_ids"),
        "token_ids": choice.get("token_ids"),
        "finish_reason": choice.get("finish_reason"),
        "usage": data.get("usage"),
        "spec": (data.get("metrics") or {}).get("speculative_decoding"),
    }


def _from_events(parts: Sequence[bytes], arrivals: Sequence[float]) -> dict[str, Any]:
    """The reply that a stream's events add up to; ``arrivals`` are the times of the pieces that carried them."""
    whole: dict[str, Any] = {"text": "", "token_ids": None, "prompt_token_ids": None, "finish_reason": None}
    whole |= {"usage": None, "spec": None}
    times: list[float] = []
    for payload, arrival in _payloads(parts, arrivals):
        event = json.loads(payload)
        if "error" in event:
            raise ValueError(f"the stream ends in an error: {event['error']}")
        whole["usage"] = event.get("usage") or whole["usage"]
        whole["spec"] = (event.get("metrics") or {}).get("speculative_decoding") or whole["spec"]
        whole["prompt_token_ids"] = event.get("prompt_token_ids") or whole["prompt_token_ids"]
        for choice in (event.get("choices") or [])[:1]:
            text = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
            whole["text"] += text
            whole["prompt_token_ids"] = choice.get("prompt_token_ids") or whole["prompt_token_ids"]
            if choice.get("token_ids"):
                whole["token_ids"] = (whole["token_ids"] or []) + choice["token_ids"]
            if choice.get("token_ids") or text:
                times.append(arrival)
            whole["finish_reason"] = choice.get("finish_reason") or whole["finish_reason"]
    if b"[DONE]" not in b"".join(parts[-2:])[-200:]:
        raise ValueError("the stream was cut short")
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return {**whole, "ttft_s": times[0] if times else None, "itl_s": gaps}


def _payloads(parts: Sequence[bytes], arrivals: Sequence[float]) -> Iterator[tuple[bytes, float]]:
    """Each event's data, with the time when its last byte had come."""
    rest = b""
    for part, arrival in zip([*parts, b"\n"], [*arrivals, arrivals[-1] if arrivals else 0.0], strict=True):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (payload := line[5:].strip()) != b"[DONE]":
                yield payload, arrival
