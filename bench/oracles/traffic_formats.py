"""Made-up requests as logs of several formats hold them, and the files of such logs."""

import gzip
import io
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

SPANS_A_LINE = 8
_TOOL = {
    "type": "function",
    "function": {"name": "track", "parameters": {"type": "object", "properties": {"order": {"type": "string"}}}},
}


@dataclass(frozen=True)
class Served:
    """One request, before it is written in a format."""

    number: int
    prompt: int
    """The number of the first request with this prompt."""
    ts: float
    tenant: str
    subject: str
    text: str
    turns: tuple[tuple[str, str], ...]
    """Role and content of what was said before."""
    temperature: float
    tools: bool
    unusable: str | None
    """Why a collector cannot use it."""


class LogFile:
    """One file of a format."""

    def __init__(self, folder: Path, log_format: str, number: int, stack: ExitStack):
        folder.mkdir(parents=True, exist_ok=True)
        self.format = log_format
        self._waiting: list[dict[str, Any]] = []
        suffix, opened = _FILES[log_format]
        self._file = stack.enter_context(opened(folder / f"part-{number}.jsonl{suffix}"))
        stack.callback(self._flush)

    def write(self, served: Served, *, has_consent: bool) -> None:
        """Write a request, or keep it for the batch that its line will hold."""
        record = _RECORDS[self.format](served)
        if self.format == "tap" and has_consent:
            record |= {"consent": "recorded", "consent_source": "header:x-consent"}
        if self.format != "otel":
            self.write_line(_json(record))
            return
        self._waiting.append(record)
        if len(self._waiting) == SPANS_A_LINE:
            self._flush()

    def write_line(self, raw: bytes) -> None:
        """Write a line as it is."""
        self._file.write(raw + b"\n")

    def _flush(self) -> None:
        if self._waiting:
            self.write_line(_json({"resourceSpans": self._waiting}))
            self._waiting = []


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _messages(served: Served) -> list[dict[str, Any]]:
    content: Any = served.text
    if served.unusable == "unsupported_image":
        content = [
            {"type": "text", "text": served.text},
            {"type": "image_url", "image_url": {"url": "data:image/png;"}},
        ]
    return [{"role": role, "content": said} for role, said in served.turns] + [{"role": "user", "content": content}]


def _params(served: Served) -> dict[str, Any]:
    several = {"n": 2} if served.unusable == "unsupported_n" else {}
    return {"temperature": served.temperature, "max_tokens": 200, **several}


def _tap(served: Served) -> dict[str, Any]:
    return {
        "id": f"r-{served.number}",
        "ts": served.ts,
        "model": "m",
        "route": "chat",
        "tenant": served.tenant,
        "subject": served.subject,
        "messages": _messages(served),
        **({"tools": [_TOOL]} if served.tools else {}),
        "params": _params(served),
        "inclusion_probability": 1.0,
    }


def _litellm(served: Served) -> dict[str, Any]:
    return {
        "id": f"r-{served.number}",
        "call_type": "acompletion",
        "status": "success",
        "startTime": served.ts,
        "endTime": served.ts + 1,
        "model": "m",
        "cache_hit": None,
        "end_user": served.subject,
        "metadata": {"user_api_key_hash": "88dc28", "user_api_key_team_id": served.tenant},
        "messages": _messages(served),
        "model_parameters": {**_params(served), **({"tools": [_TOOL]} if served.tools else {}), "stream": True},
    }


def _otel(served: Served) -> dict[str, Any]:
    messages = []
    for message in _messages(served):
        parts = [{"type": "text", "content": message["content"]}]
        if not isinstance(message["content"], str):
            parts = [{"type": "text", "content": served.text}, {"type": "blob", "modality": "image", "content": "aGk="}]
        messages.append({"role": message["role"], "parts": parts})
    told = {
        "gen_ai.operation.name": {"stringValue": "chat"},
        "gen_ai.request.model": {"stringValue": "m"},
        "gen_ai.request.temperature": {"doubleValue": served.temperature},
        "gen_ai.request.max_tokens": {"intValue": "200"},
        "gen_ai.input.messages": {"stringValue": json.dumps(messages, ensure_ascii=False)},
        "enduser.id": {"stringValue": served.subject},
    }
    if served.tools:
        told["gen_ai.tool.definitions"] = {"stringValue": json.dumps([{"type": "function", **_TOOL["function"]}])}
    if served.unusable == "unsupported_n":
        told["gen_ai.request.choice.count"] = {"intValue": "2"}
    span = {
        "traceId": f"{served.number:032x}",
        "spanId": f"{served.number:016x}",
        "name": "chat m",
        "startTimeUnixNano": str(int(served.ts * 1e9)),
        "attributes": [{"key": key, "value": value} for key, value in told.items()],
    }
    resource = {"attributes": [{"key": "tenant.id", "value": {"stringValue": served.tenant}}]}
    return {"resource": resource, "scopeSpans": [{"spans": [span]}]}


def _openai(served: Served) -> dict[str, Any]:
    request = {"model": "m", "messages": _messages(served), **_params(served)}
    request |= {"tools": [_TOOL]} if served.tools else {}
    said = {"id": f"r-{served.number}", "ts": served.ts, "tenant": served.tenant, "subject": served.subject}
    return {**said, "request": request, "response": {"choices": []}}


def _plain(path: Path) -> BinaryIO:
    return open(path, "wb")


def _gzipped(path: Path) -> BinaryIO:
    return gzip.GzipFile(path, "wb", compresslevel=1, mtime=0)


def _packed(path: Path) -> BinaryIO:
    return io.BufferedWriter(_Zstd(path), buffer_size=1 << 20)


class _Zstd(io.RawIOBase):
    """A file that is packed as it is written."""

    def __init__(self, path: Path):
        self._sink = pa.OSFile(str(path), "wb")
        self._stream = pa.CompressedOutputStream(self._sink, "zstd")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._stream.write(bytes(data))
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._stream.close()
            self._sink.close()


_RECORDS: dict[str, Callable[[Served], dict[str, Any]]] = {
    "tap": _tap,
    "litellm": _litellm,
    "otel": _otel,
    "openai": _openai,
}
_FILES: dict[str, tuple[str, Callable[[Path], BinaryIO]]] = {
    "tap": ("", _plain),
    "litellm": (".gz", _gzipped),
    "otel": (".zst", _packed),
    "openai": ("", _plain),
}
