"""A server that answers as a vLLM replica with the control endpoint does, without an engine: what it is told, and the
failures that are asked for. ``python bench/oracles/scripted_replica.py PORT FOLDER VERSION`` runs one on its own."""

import argparse
import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "s3cret"
TOKENS = [7, 8, 9]
_COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


@dataclass
class Script:
    """What a replica does otherwise than well."""

    refuses: str | None = None
    """A version that it doesn't take."""
    refuses_file: Path | None = None
    """The same, for as long as the file is there."""
    keeps_weights: bool = False
    """It says that it swapped, and its live weights stay."""
    tokens_after_swap: list[int] = field(default_factory=lambda: list(TOKENS))
    swap_s: float = 0.0
    """How long a swap takes, while requests wait."""
    reply_s: float = 0.0
    swap: dict[str, Any] | None = None
    """What its status says of how it can be swapped."""
    accepted_per_draft: dict[str, int] = field(default_factory=dict)
    """Version → accepted tokens of each verification step; 2 where it isn't named."""
    has_counters: bool = True
    status_code: int = 200
    """Of the status route: 503 for a replica whose engine is gone."""
    breaks_off: bool = False
    """Its next swap takes, and the answer to it breaks off."""


class ScriptedReplica:
    """One server on a port of its own, in a thread of this process."""

    def __init__(self, folder: Path, version: str, script: Script | None = None, *, port: int = 0):
        self.folder, self.version, self.script = Path(folder), version, script or Script()
        self.swaps: list[tuple[str, str]] = []
        self.paused = False
        self._started, self.since = time.time(), time.time()
        self.counts = dict.fromkeys(_COUNTERS, 0)
        self._first = version
        self._engine = threading.Condition()
        self._one_swap = threading.Lock()
        self.server = _Server(("127.0.0.1", port), _handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def sha256(self) -> str:
        """Of the weights that it serves."""
        return hashlib.sha256((self.folder / "model.safetensors").read_bytes()).hexdigest()

    @property
    def epoch(self) -> str:
        """Of this start, and the swaps since."""
        return f"{self._started}.{len(self.swaps)}"

    def close(self) -> None:
        """Stop answering; connections are refused from now on."""
        self.server.shutdown()
        self.server.server_close()

    def serve(self, folder: Path, version: str) -> None:
        """Serve this drafter, as after a restart with it: counters begin at zero."""
        self._started = self.since = time.time()
        self.folder, self.version, self.counts = Path(folder), version, dict.fromkeys(_COUNTERS, 0)

    def answer(self, path: str, headers: Any, body: Any) -> tuple[int, Any]:
        """HTTP status and body of one request."""
        if path == "/metrics":
            return 200, self._metrics()
        if path.startswith("/v1/"):
            return 200, self._completion()
        if headers.get("authorization") != f"Bearer {TOKEN}":
            return 401, {"status": "refused", "reason": "the bearer token is missing or wrong"}
        if path == "/slipstream/status":
            return self._status()
        if not self._one_swap.acquire(blocking=False):
            reason = "another swap is running on this server; ask again"
            return 409, {"status": "refused", "reason": reason, "code": "busy"}
        try:
            return self._swap(body)
        finally:
            self._one_swap.release()

    def _status(self) -> tuple[int, Any]:
        if self.script.status_code != 200:
            return self.script.status_code, {"status": "failed", "reason": "the engine is gone"}
        swap = {"swap": self.script.swap} if self.script.swap is not None else {}
        live = "stale" if self.script.keeps_weights else self.sha256[:8]
        return 200, {
            "status": "ok",
            "reason": None,
            "version": self.version,
            "folder": str(self.folder),
            "sha256": self.sha256,
            "live_fingerprint": [f"live-{live}"],
            "epoch": self.epoch,
            "since": self.since,
            "paused": self.paused,
            "swapping": self._one_swap.locked(),
            **swap,
        }

    def _swap(self, order: dict[str, str]) -> tuple[int, Any]:
        if order["version"] in (self.script.refuses, _text(self.script.refuses_file)):
            reason = "the worker ran out of memory; the old drafter serves again"
            return 500, {"status": "failed", "reason": reason}
        if order["expected_version"] != self.version:
            return 409, {"status": "refused", "reason": f"version {self.version} serves", "code": "version"}
        if order.get("expected_epoch", self.epoch) != self.epoch:
            return 409, {"status": "refused", "reason": f"epoch {self.epoch}", "code": "epoch"}
        with self._engine:
            self.paused = True
            time.sleep(self.script.swap_s)
            self.swaps.append((self.version, order["version"]))
            previous, self.version, self.folder = self.version, order["version"], Path(order["folder"])
            self.paused, self.since = False, time.time()
        if self.sha256 != order["sha256"]:
            raise AssertionError(f"{self.folder}: not the bytes that were ordered")
        if self.script.breaks_off:
            self.script.breaks_off = False
            raise ConnectionResetError("as if killed amid its answer")
        live = f"live-{self.sha256[:8]}"
        return 200, {
            "status": "ok",
            "reason": None,
            "version": self.version,
            "previous": previous,
            "pause_s": self.script.swap_s or 0.25,
            "live_fingerprint": [live],
            "prefix_cache_reset": True,
        }

    def _completion(self) -> dict[str, Any]:
        with self._engine:  # a paused engine keeps its requests
            version = self.version
        time.sleep(self.script.reply_s)
        accepted = self.script.accepted_per_draft.get(version, 2)
        for name, grown in zip(_COUNTERS, (4, 28, 4 * accepted), strict=True):
            self.counts[name] += grown
        tokens = self.script.tokens_after_swap if version != self._first else TOKENS
        counts = {"num_spec_steps": 4, "num_accepted_draft_tokens": 4 * accepted}
        message = {"role": "assistant", "content": "so"}
        return {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "toy",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message, "token_ids": tokens}],
            "metrics": {"speculative_decoding": counts},
        }

    def _metrics(self) -> str:
        if not self.script.has_counters:
            return "# nothing is counted\n"
        return "".join(
            f"# TYPE vllm:spec_decode_{name}_total counter\n"
            f'vllm:spec_decode_{name}_total{{engine="0",model_name="toy"}} {float(count)}\n'
            for name, count in self.counts.items()
        )


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is none of ours."""


def _handler(replica: ScriptedReplica) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(*replica.answer(self.path, self.headers, None))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._send(*replica.answer(self.path, self.headers, body))

        def _send(self, code: int, body: Any) -> None:
            payload = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(code)
            self.send_header("content-type", "text/plain" if isinstance(body, str) else "application/json")
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def _text(path: Path | None) -> str | None:
    return path.read_text() if path is not None and path.exists() else None


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("version")
    parser.add_argument("--refuses-file", type=Path)
    parser.add_argument("--swap-s", type=float, default=0.0)
    parser.add_argument("--reply-s", type=float, default=0.0)
    a = parser.parse_args()
    script = Script(refuses_file=a.refuses_file, swap_s=a.swap_s, reply_s=a.reply_s)
    ScriptedReplica(a.folder, a.version, script, port=a.port)
    threading.Event().wait()


if __name__ == "__main__":
    main()
