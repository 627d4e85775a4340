"""Swap the drafter of a running server: ``--middleware serving.control.ControlEndpoint``.

    GET  /slipstream/status   what every worker serves
    GET  /slipstream/engine   the engine's settings, with or without a drafter
    POST /slipstream/reset    empty the prefix cache
    POST /slipstream/swap     {"folder", "version", "sha256", "expected_version"}

Settings come from the environment: ``SLIPSTREAM_CONTROL_TOKEN`` (without it both routes answer 503; vLLM's
own ``--api-key`` does not guard middleware), ``SLIPSTREAM_DRAFTER_ROOTS`` (folders, colon-separated, under
which drafters may lie) and ``SLIPSTREAM_DRAFTER_VERSION`` (the version that the server started with).
Start the workers with ``--worker-extension-cls serving.engine.swap.DrafterSwap``.
"""

import asyncio
import hmac
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from serving.engine.settings import engine_settings
from serving.engine.versions import require_supported_vllm
from serving.errors import PreflightError
from serving.preflight import check_drafter, read_config

logger = logging.getLogger("vllm.slipstream")

TOKEN_ENV = "SLIPSTREAM_CONTROL_TOKEN"
ROOTS_ENV = "SLIPSTREAM_DRAFTER_ROOTS"
PREFIX = "/slipstream/"
TAP = "/slipstream/tap/"  # the tap's own, whichever middleware is the outer one
MAX_BODY_BYTES = 16 * 1024
SWAP_KEYS = ("folder", "version", "sha256", "expected_version")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Refusal(Exception):
    """An answer other than success: HTTP status, and what the caller is told."""

    def __init__(self, http_status: int, reason: str, **details: Any):
        super().__init__(reason)
        self.http_status = http_status
        self.body = {"status": "refused" if http_status < 500 else "failed", "reason": reason, **details}


class ControlEndpoint:
    """ASGI middleware that answers the two routes and passes everything else on."""

    def __init__(self, app: Any):
        require_supported_vllm()
        self.app = app
        self.token = os.environ.get(TOKEN_ENV, "")
        self.roots = [Path(root).resolve() for root in os.environ.get(ROOTS_ENV, "").split(":") if root]
        self.one_swap = asyncio.Lock()
        self.serving_config: dict[str, Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX) or scope["path"].startswith(TAP):
            await self.app(scope, receive, send)
            return
        try:
            self._authorize(scope)
            body = await self._answer(scope, receive)
            await _send_json(send, 200, body)
        except Refusal as refusal:
            await _send_json(send, refusal.http_status, refusal.body)
        except Exception as error:
            logger.exception("control endpoint")
            await _send_json(send, 500, {"status": "failed", "reason": f"{type(error).__name__}: {error}"})

    async def _answer(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        route = (scope["method"], scope["path"].removeprefix(PREFIX))
        state = scope["app"].state
        if route == ("GET", "status"):
            return await self._status(state)
        if route == ("GET", "engine"):
            return {"status": "ok", "engine": engine_settings(state.engine_client.vllm_config)}
        if route == ("POST", "reset"):
            await _read_body(receive)
            return {"status": "ok", "prefix_cache_reset": bool(await state.engine_client.reset_prefix_cache())}
        if route == ("POST", "swap"):
            order = _parse_swap(await _read_body(receive))
            # Once begun a swap runs to its end, also when the caller hangs up: a paused engine must resume.
            return await asyncio.shield(asyncio.create_task(self._swap(state, order)))
        raise Refusal(
            404, f"{scope['method']} {scope['path']}: expected GET status, GET engine, POST reset or POST swap"
        )

    def _authorize(self, scope: Scope) -> None:
        if not self.token:
            raise Refusal(503, f"not configured: start the server with {TOKEN_ENV} set")
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise Refusal(401, "the bearer token is missing or wrong")

    async def _status(self, state: Any) -> dict[str, Any]:
        workers = await state.engine_client.collective_rpc("slipstream_status")
        first = workers[0]
        if first["status"] == "ok":
            state.slipstream_drafter_version = first["version"]
        agreed = all(w["status"] == "ok" and _identity(w) == _identity(first) for w in workers)
        tap = getattr(state, "slipstream_tap_counts", None)
        return {
            "status": "ok" if agreed else "failed",
            "reason": None if agreed else "; ".join(str(w["reason"] or _identity(w)) for w in workers),
            **{key: first[key] for key in ("version", "folder", "sha256")},
            "live_fingerprint": [w["live_fingerprint"] for w in workers],
            "paused": await state.engine_client.is_paused(),
            "tap": dict(tap) if tap is not None else None,
        }

    async def _swap(self, state: Any, order: dict[str, str]) -> dict[str, Any]:
        if self.one_swap.locked():
            raise Refusal(409, "another swap is running on this server; ask again when it has ended")
        async with self.one_swap:
            before = await self._status(state)
            if before["status"] != "ok":
                raise Refusal(503, f"this server cannot swap: {before['reason']}")
            if before["version"] != order["expected_version"]:
                raise Refusal(
                    409,
                    f"version {before['version']} serves, the caller expected {order['expected_version']}; look again",
                    version=before["version"],
                )
            await self._preflight(state, order, before)
            return await self._swap_paused(state, order, before)

    async def _preflight(self, state: Any, order: dict[str, str], before: dict[str, Any]) -> None:
        folder = Path(order["folder"])
        if not folder.is_absolute() or not any(folder.resolve().is_relative_to(root) for root in self.roots):
            raise Refusal(403, f"{folder}: not under an allowed folder; {ROOTS_ENV} lists them")
        config = state.engine_client.vllm_config
        if self.serving_config is None:
            self.serving_config = read_config(Path(before["folder"]))
        try:
            info = await asyncio.to_thread(
                check_drafter,
                folder,
                target_config=config.model_config.hf_config.to_dict(),
                num_speculative_tokens=config.speculative_config.num_speculative_tokens,
                serving_config=self.serving_config,
            )
        except PreflightError as error:
            raise Refusal(422, str(error), code=error.code, version=before["version"])
        if info.sha256 != order["sha256"]:
            raise Refusal(409, f"{folder}: sha256 {info.sha256}, the caller says {order['sha256']}", code="sha256")

    async def _swap_paused(self, state: Any, order: dict[str, str], before: dict[str, Any]) -> dict[str, Any]:
        engine = state.engine_client
        paused = time.perf_counter()
        try:
            await engine.pause_generation(mode="keep", clear_cache=False)
            workers = await engine.collective_rpc("slipstream_swap", args=tuple(order[key] for key in SWAP_KEYS))
            problem = _disagreement(workers)
            cache_reset = False
            if problem is None:
                try:
                    # False, and no harm but some acceptance, while requests in flight hold blocks.
                    cache_reset = bool(await engine.reset_prefix_cache())
                except Exception as error:
                    problem = f"the prefix cache could not be reset: {type(error).__name__}: {error}"
            if problem is not None:
                problem = await self._swap_back(engine, order, before, problem)
        finally:
            await engine.resume_generation()
            pause_s = round(time.perf_counter() - paused, 4)
        if problem is not None:
            raise Refusal(
                500, problem, pause_s=pause_s, workers=workers, version=(await self._status(state))["version"]
            )
        state.slipstream_drafter_version = order["version"]
        return {
            "status": "ok",
            "reason": None,
            "version": order["version"],
            "previous": before["version"],
            "pause_s": pause_s,
            "live_fingerprint": [w["live_fingerprint"] for w in workers],
            "previous_live_fingerprint": before["live_fingerprint"],
            "prefix_cache_reset": cache_reset,
            "workers": workers,
        }

    async def _swap_back(self, engine: Any, order: dict[str, str], before: dict[str, Any], problem: str) -> str:
        """What the caller is told after every worker that took the new drafter was given the old one."""
        old = (before["folder"], before["version"], before["sha256"], order["version"])
        await engine.collective_rpc("slipstream_swap", args=old)  # a worker that kept the old one refuses this
        workers = await engine.collective_rpc("slipstream_status")
        if all(w["version"] == before["version"] for w in workers):
            return f"{problem}; version {before['version']} serves again on every worker"
        return f"{problem}; and the old version could not be put back everywhere: take this replica out and restart it"


def _identity(worker: dict[str, Any]) -> tuple[Any, ...]:
    return (worker["version"], worker["sha256"], worker["live_fingerprint"])


def _disagreement(workers: list[dict[str, Any]]) -> str | None:
    if bad := [w for w in workers if w["status"] != "ok"]:
        return "; ".join(f"worker {w['rank']}: {w['reason']}" for w in bad)
    if len({_identity(w) for w in workers}) > 1:
        return f"workers disagree after the swap: {[_identity(w) for w in workers]}"
    return None


def _parse_swap(body: bytes) -> dict[str, str]:
    try:
        order = json.loads(body)
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}")
    if not isinstance(order, dict) or set(order) != set(SWAP_KEYS):
        raise Refusal(400, f"expected a JSON object with exactly {', '.join(SWAP_KEYS)}")
    if not all(isinstance(value, str) and value for value in order.values()):
        raise Refusal(400, "every value must be a text that is not empty")
    return order


async def _read_body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "the caller hung up")
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise Refusal(413, f"the body is over {MAX_BODY_BYTES} bytes")
        if not message.get("more_body"):
            return body


async def _send_json(send: Send, http_status: int, body: dict[str, Any]) -> None:
    payload = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())]
    await send({"type": "http.response.start", "status": http_status, "headers": headers})
    await send({"type": "http.response.body", "body": payload})
