"""Write served chats that policy allows to a traffic log: ``--middleware serving.tap.TrafficTap``.

Default deny: nothing is written unless the environment says what counts as consent.

    SLIPSTREAM_TAP_DIR             folder of the log
    SLIPSTREAM_TAP_CONSENT         "header:NAME=VALUE", a header that only the gateway can set, or "allow_all"
    SLIPSTREAM_TAP_SUBJECT_HEADER  trusted header that names the subject (optional)
    SLIPSTREAM_TAP_SLICE_HEADER    trusted header that names the slice (optional)
    SLIPSTREAM_TAP_TENANT_HEADER   trusted header that names the tenant (optional)
    SLIPSTREAM_TAP_TARGET          fingerprint id of the target that this server serves (optional)

`slipstream status` prints the target's fingerprint id. A record that carries it and the exact ids of prompt and reply,
for which a client asks with "return_token_ids": true (and for usage in a stream), can be used without a second answer.

Clients get byte for byte what they would have got. Bodies are only referenced on the event loop; a thread
parses and writes. Its queue is bounded: what does not fit is dropped and counted, never waited for.
"""

import atexit
import json
import os
import queue
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.errors import TapError
from serving.replies import read_reply

ROUTES = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
MAX_CAPTURED_BYTES = 8 * 1024 * 1024
QUEUE_SIZE = 1024
PARAMS = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "seed", "n", "stop",
    "stop_token_ids", "ignore_eos", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "bad_words", "allowed_token_ids", "best_of", "use_beam_search", "repetition_detection",
    "thinking_token_budget", "response_format", "structured_outputs", "tool_choice", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "chat_template", "documents", "reasoning_effort", "echo",
    "truncate_prompt_tokens", "vllm_xargs",
)  # fmt: skip


@dataclass(frozen=True)
class ConsentPolicy:
    """Which requests may be written."""

    header: bytes | None
    value: str | None

    @classmethod
    def parse(cls, text: str) -> "ConsentPolicy | None":
        """The policy that a setting spells out, None for an empty one. Raises: TapError on anything else."""
        if not text:
            return None
        if text == "allow_all":
            return cls(None, None)
        name, equals, value = text.removeprefix("header:").partition("=")
        if not text.startswith("header:") or not equals or not name.strip() or not value.strip():
            raise TapError(f"SLIPSTREAM_TAP_CONSENT is {text!r}; expected header:NAME=VALUE or allow_all")
        return cls(name.strip().lower().encode(), value.strip())

    @property
    def source(self) -> str:
        """How consent was given, as records carry it."""
        return "allow_all" if self.header is None else f"header:{self.header.decode()}"

    def allows(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a request with these headers may be written."""
        return self.header is None or headers.get(self.header, b"").decode("latin-1") == self.value


@dataclass
class Exchange:
    """One request and its answer, as raw bytes."""

    route: str
    headers: dict[bytes, bytes]
    drafter_version: str | None
    started: float = field(default_factory=time.time)
    request: list[bytes] = field(default_factory=list)
    response: list[bytes] = field(default_factory=list)
    captured_bytes: int = 0
    status: int = 0
    content_type: str = ""
    finished: bool = False

    def keep(self, part: list[bytes], body: bytes) -> None:
        """Remember a piece of a body, up to the limit."""
        self.captured_bytes += len(body)
        if self.captured_bytes <= MAX_CAPTURED_BYTES:
            part.append(body)


class TrafficTap:
    """ASGI middleware; passes everything through, and hands what may be written to a thread."""

    def __init__(self, app: Any):
        self.app = app
        folder = os.environ.get("SLIPSTREAM_TAP_DIR", "")
        self.policy = ConsentPolicy.parse(os.environ.get("SLIPSTREAM_TAP_CONSENT", ""))
        self.counts: Counter[str] = Counter()
        self.log = None
        if folder and self.policy is not None:
            self.log = TrafficLog(
                Path(folder),
                counts=self.counts,
                consent_source=self.policy.source,
                subject_header=_header_name("SLIPSTREAM_TAP_SUBJECT_HEADER"),
                slice_header=_header_name("SLIPSTREAM_TAP_SLICE_HEADER"),
                tenant_header=_header_name("SLIPSTREAM_TAP_TENANT_HEADER"),
                target=os.environ.get("SLIPSTREAM_TAP_TARGET", "").strip() or None,
            )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        route = ROUTES.get(scope["path"]) if scope["type"] == "http" and scope.get("method") == "POST" else None
        if route is None or self.log is None:
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not self.policy.allows(headers):
            self.counts["without_consent"] += 1
            await self.app(scope, receive, send)
            return
        exchange = Exchange(route, headers, self._drafter_version(scope))
        try:
            await self.app(scope, _listening(receive, exchange), _copying(send, exchange))
        finally:
            self._hand_over(exchange)

    def _drafter_version(self, scope: Any) -> str | None:
        state = getattr(scope.get("app"), "state", None)
        if state is not None:
            state.slipstream_tap_counts = self.counts
        return getattr(state, "slipstream_drafter_version", os.environ.get("SLIPSTREAM_DRAFTER_VERSION"))

    def _hand_over(self, exchange: Exchange) -> None:
        if not 200 <= exchange.status < 300:
            self.counts["not_2xx"] += 1
        elif not exchange.finished:
            self.counts["cut_short"] += 1
        elif exchange.captured_bytes > MAX_CAPTURED_BYTES:
            self.counts["too_large"] += 1
        else:
            self.log.put(exchange)


class TrafficLog:
    """A thread that turns exchanges into lines of one file per process."""

    def __init__(
        self,
        folder: Path,
        *,
        counts: Counter[str],
        consent_source: str,
        subject_header: bytes | None,
        slice_header: bytes | None,
        tenant_header: bytes | None,
        target: str | None,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"traffic-{os.getpid()}-{time.time_ns() // 1_000_000}.jsonl"
        self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self.counts = counts
        self.consent_source, self.target = consent_source, target
        self.subject_header, self.slice_header, self.tenant_header = subject_header, slice_header, tenant_header
        self.queue: queue.Queue[Exchange | None] = queue.Queue(maxsize=QUEUE_SIZE)
        self.thread = threading.Thread(target=self._write_all, name="slipstream-tap", daemon=True)
        self.thread.start()
        atexit.register(self.close)

    def put(self, exchange: Exchange) -> None:
        """Queue an exchange; dropped and counted when the queue is full."""
        try:
            self.queue.put_nowait(exchange)
        except queue.Full:
            self.counts["dropped"] += 1

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued and end the thread."""
        if self.thread.is_alive():
            self.queue.put(None)
            self.thread.join(timeout_s)

    def _write_all(self) -> None:
        while (exchange := self.queue.get()) is not None:
            try:
                line = json.dumps(self._record(exchange), ensure_ascii=False).encode() + b"\n"
                while line:  # O_APPEND: a whole line in one call but for a full disk or a signal
                    line = line[os.write(self.file, line) :]
                self.counts["written"] += 1
            except Exception as error:  # one odd body must not end the log
                self.counts[f"unreadable_{type(error).__name__}"] += 1
        os.close(self.file)

    def _record(self, exchange: Exchange) -> dict[str, Any]:
        request = json.loads(b"".join(exchange.request))
        stream = bool(request.get("stream"))
        asked = {key: request[key] for key in ("messages", "prompt", "tools") if request.get(key) is not None}
        return {
            "id": uuid.uuid4().hex,
            "ts": exchange.started,
            "model": request.get("model"),
            "target": self.target,
            "route": exchange.route,
            "slice": self._trusted(exchange, self.slice_header),
            "tenant": self._trusted(exchange, self.tenant_header),
            "subject": self._trusted(exchange, self.subject_header),
            "consent": "recorded",
            "consent_source": self.consent_source,
            **asked,
            "params": {key: request[key] for key in PARAMS if request.get(key) is not None},
            "stream": stream,
            "response": read_reply(b"".join(exchange.response), stream="text/event-stream" in exchange.content_type),
            "drafter_version": exchange.drafter_version,
        }

    @staticmethod
    def _trusted(exchange: Exchange, header: bytes | None) -> str | None:
        value = exchange.headers.get(header) if header else None
        return value.decode("latin-1") if value else None


def _listening(receive: Any, exchange: Exchange) -> Any:
    async def listen() -> Any:
        message = await receive()
        if message["type"] == "http.request":
            exchange.keep(exchange.request, message.get("body", b""))
        return message

    return listen


def _copying(send: Any, exchange: Exchange) -> Any:
    async def copy(message: Any) -> None:
        await send(message)
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
            exchange.content_type = dict(message["headers"]).get(b"content-type", b"").decode("latin-1")
        elif message["type"] == "http.response.body":
            exchange.keep(exchange.response, message.get("body", b""))
            exchange.finished = not message.get("more_body", False)

    return copy


def _header_name(variable: str) -> bytes | None:
    return os.environ.get(variable, "").strip().lower().encode() or None
