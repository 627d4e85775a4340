"""Swap the drafter of a running server: ``--middleware serving.control.ControlEndpoint``.

    GET  /slipstream/status   what every worker serves, since when, and how to change it; ?verify=1 reads its weights
    GET  /slipstream/engine   the engine's settings, with or without a drafter
    POST /slipstream/reset    empty the prefix cache
    POST /slipstream/swap     serving/swap_order.py: in place where this engine can, else by a restart

Who may call is in serving/control_access.py; without a token the endpoint is off. The middleware is also the door that
every other request passes: while a drafter proves itself new requests wait, and where the engine is lost they and the
health check are answered 503. Start the workers with ``--worker-extension-cls serving.engine.swap.DrafterSwap``;
``SLIPSTREAM_DRAFTER_VERSION`` names the version that the server started with, ``SLIPSTREAM_SWAP_TIMEOUT_S`` (120)
how long one step of a swap may take.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from serving.control_access import Access, Refusal
from serving.door import Door
from serving.engine.settings import engine_settings
from serving.engine.versions import require_supported_vllm
from serving.kept_drafter import Supervised
from serving.replica_restart import ReplicaRestart
from serving.replica_swap import ReplicaSwap
from serving.swap_order import SwapOrder, parse_order

logger = logging.getLogger("vllm.slipstream")

TIMEOUT_ENV, TIMEOUT_S = "SLIPSTREAM_SWAP_TIMEOUT_S", 120.0
PREFIX = "/slipstream/"
TAP = "/slipstream/tap/"  # the tap's own, whichever middleware is the outer one
MAX_BODY_BYTES, BODY_S = 64 * 1024, 10.0

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ControlEndpoint:
    """ASGI middleware that answers our routes and lets everything else through its door."""

    def __init__(self, app: Any):
        require_supported_vllm()
        self.app = app
        self.access = Access(os.environ)
        self.door = Door()
        self.timeout_s = float(os.environ.get(TIMEOUT_ENV) or TIMEOUT_S)
        supervised = Supervised.from_environment(os.environ)
        self.restart = ReplicaRestart(self.door, supervised, drain_s=self.timeout_s)
        self.one_swap = asyncio.Lock()
        self._replica: ReplicaSwap | None = None
        self._swaps: set[asyncio.Task[dict[str, Any]]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, self._showing_capability(scope, send))
        elif scope["type"] != "http" or not scope["path"].startswith(PREFIX) or scope["path"].startswith(TAP):
            await self._through_the_door(scope, receive, send)
        else:
            await self._control(scope, receive, send)

    async def _through_the_door(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks = scope["type"] != "http" or scope["method"] not in ("GET", "HEAD", "OPTIONS")
        if asks:
            await self.door.pass_through()
        if self.door.shut and scope["type"] == "http" and (asks or scope["path"] == "/health"):
            # To be retried, on another replica or on this one once it is up again.
            await _send_json(send, 503, {"error": {"message": self.door.shut, "code": 503}}, retry_after_s=5)
            return
        self.door.inside += asks
        try:
            await self.app(scope, receive, send)
        finally:
            self.door.inside -= asks

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            peer = self.access.admit(scope)
            body = await self._answer(scope, receive, peer)
            await _send_json(send, 202 if body["status"] == "restarting" else 200, body)
        except Refusal as refusal:
            await _send_json(send, refusal.http_status, refusal.body)
        except Exception as error:
            logger.exception("control endpoint")
            await _send_json(send, 500, {"status": "failed", "reason": f"{type(error).__name__}: {error}"})

    async def _answer(self, scope: Scope, receive: Receive, peer: str) -> dict[str, Any]:
        route = (scope["method"], scope["path"].removeprefix(PREFIX))
        state = scope["app"].state
        if route == ("GET", "status"):
            return await self._status(scope)
        if route == ("GET", "engine"):
            return {"status": "ok", "engine": engine_settings(state.engine_client.vllm_config)}
        if route == ("POST", "reset"):
            await _read_body(scope, receive)
            cleared = bool(await state.engine_client.reset_prefix_cache())
            self.access.audit(peer, action="reset", outcome="ok", http_status=200)
            return {"status": "ok", "prefix_cache_reset": cleared}
        if route == ("POST", "swap"):
            order = parse_order(await _read_body(scope, receive))
            # Once begun a swap runs to its end, also when the caller hangs up: a paused engine must resume.
            task = asyncio.create_task(self._swap(state, order, peer))
            self._swaps.add(task)  # the loop itself keeps no task alive
            task.add_done_callback(self._swap_ended)
            return await asyncio.shield(task)
        raise Refusal(
            404, f"{scope['method']} {scope['path']}: expected GET status, GET engine, POST reset or POST swap"
        )

    async def _status(self, scope: Scope) -> dict[str, Any]:
        verify = scope.get("query_string", b"") == b"verify=1"
        status = await self._replica_of(scope["app"].state).status(verify=verify)
        tap = getattr(scope["app"].state, "slipstream_tap_counts", None)
        return {**status, "swapping": self.one_swap.locked(), "tap": dict(tap) if tap is not None else None}

    async def _swap(self, state: Any, order: SwapOrder, peer: str) -> dict[str, Any]:
        started, outcome = time.perf_counter(), {"outcome": "failed", "http_status": 500}
        try:
            if self.one_swap.locked():
                raise Refusal(409, "another swap is running on this server; ask again when it has ended", code="busy")
            async with self.one_swap:
                body = await self._replica_of(state).run(order)
            outcome = {"outcome": body["status"], "http_status": 200}
            return body
        except Refusal as refusal:
            known = {key: refusal.body.get(key) for key in ("reason", "code")}
            outcome = {"outcome": refusal.body["status"], "http_status": refusal.http_status, **known}
            raise
        finally:
            asked = {key: getattr(order, key) for key in ("version", "expected_version", "sha256", "how")}
            seconds = round(time.perf_counter() - started, 3)
            self.access.audit(peer, action="swap", **asked, seconds=seconds, **outcome)

    def _replica_of(self, state: Any) -> ReplicaSwap:
        if self._replica is None:
            self._replica = ReplicaSwap(state, self.access, self.door, self.restart, timeout_s=self.timeout_s)
        return self._replica

    def _swap_ended(self, task: "asyncio.Task[dict[str, Any]]") -> None:
        self._swaps.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may have hung up; the audit log has it

    def _showing_capability(self, scope: Scope, send: Send) -> Send:
        """The same ``send``, which says in the log, once the server is up, how its drafter can be changed."""

        async def sending(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "lifespan.startup.complete":
                try:
                    status = await self._replica_of(scope["app"].state).status()
                    how = status["swap"]["how"] or f"not in place: {status['swap']['reason']}"
                    logger.info("drafter %s serves; it can be swapped: %s", status["version"], how)
                except Exception as error:  # without a drafter there is nothing to swap; the server serves
                    logger.info("no drafter can be swapped here: %s", error)
            await send(message)

        return sending


async def _read_body(scope: Scope, receive: Receive) -> bytes:
    too_large = Refusal(413, f"the body is over {MAX_BODY_BYTES} bytes")
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if not length.isdigit() or int(length) > MAX_BODY_BYTES:
        raise too_large
    body = b""
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refusal(400, "the caller hung up")
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
                if not message.get("more_body"):
                    return body
    except TimeoutError:
        raise Refusal(408, f"the body did not come in {BODY_S:g} s")


async def _send_json(send: Send, http_status: int, body: dict[str, Any], *, retry_after_s: int = 0) -> None:
    payload = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())]
    if retry_after_s:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    await send({"type": "http.response.start", "status": http_status, "headers": headers})
    await send({"type": "http.response.body", "body": payload})
