"""The ASGI middleware: passes everything through, and hands what may be written to the feeder."""

import asyncio
import logging
import os
import random
from typing import Any

from serving.engine.exact_replies import watch, watched
from serving.tap.exchange import Budget, Exchange
from serving.tap.feeder import Feeder
from serving.tap.metrics import PATH, Metrics, exposition
from serving.tap.settings import TapSettings

logger = logging.getLogger("vllm.slipstream")

ROUTES = {"/v1/chat/completions": "chat", "/v1/completions": "completions", "/v1/responses": "responses"}
FLUSH_S = 5.0


class TrafficTap:
    """See the package's own words. Raises: TapError at start where a setting cannot be used."""

    def __init__(self, app: Any):
        self.app = app
        self.settings = TapSettings.from_environment()
        self.metrics = Metrics()
        self.budget = Budget(self.settings.memory_bytes)
        self.draw = random.Random().random
        self.watches: bool | None = None
        """Whether the engine's own ids are noted; None before the first request."""
        policy, log = self.settings.policy, self.settings.log
        # Also where nothing is written any more, so that what lies there is still deleted in time.
        self.feeder = (
            Feeder(self.settings, self.metrics, self.budget) if log and (policy or log.folder.exists()) else None
        )
        logger.info("tap: %s", self.settings.summary)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" and self.feeder:
            receive = self._flushing(receive)
        elif scope["type"] == "http":
            path, method = scope["path"].removeprefix(scope.get("root_path", "")), scope.get("method")
            if (path, method) == (PATH, "GET"):
                await _send_metrics(send)
                return
            if self.settings.policy and method == "POST" and path in ROUTES:
                exchange = self._begin(ROUTES[path], scope)
                if exchange:
                    await self._tapped(exchange, scope, receive, send)
                    return
        await self.app(scope, receive, send)

    def _begin(self, route: str, scope: Any) -> Exchange | None:
        """The exchange to follow; None where policy or chance leave it out."""
        try:
            verdict = self.settings.policy.decide(route, scope["headers"])
            if verdict.reason:
                self.metrics.outcome(verdict.reason)
                return None
            probability = self.settings.sampling.of_request(verdict.tenant)
            if self.draw() >= probability:
                self.metrics.outcome("not_sampled")
                return None
            return Exchange(route, verdict, probability, self._drafter_version(scope), self.budget)
        except Exception as error:
            self._failed(error)
            return None

    async def _tapped(self, exchange: Exchange, scope: Any, receive: Any, send: Any) -> None:
        token = watched.set(exchange.generations)
        try:
            await self.app(scope, _listening(receive, exchange), _copying(send, exchange))
        finally:
            watched.reset(token)
            try:
                self._end(exchange, scope)
            except Exception as error:
                self._failed(error)

    def _end(self, exchange: Exchange, scope: Any) -> None:
        if exchange.drafter_version != self._drafter_version(scope):
            exchange.drafter_version = None  # a swap came between: no one version drafted it
        if why := exchange.outcome:
            exchange.forget(why)
            self.metrics.outcome(why)
            return
        exchange.count_ids()
        if not self.feeder.put(exchange):
            exchange.forget("dropped_queue_full")
            self.metrics.outcome("dropped_queue_full")

    def _drafter_version(self, scope: Any) -> str | None:
        state = getattr(scope.get("app"), "state", None)
        if self.watches is None and state is not None:
            state.slipstream_tap_counts = self.metrics.counts
            client = getattr(state, "engine_client", None)
            self.watches = client is not None and watch(client)
        return getattr(state, "slipstream_drafter_version", os.environ.get("SLIPSTREAM_DRAFTER_VERSION"))

    def _failed(self, error: Exception) -> None:
        self.metrics.outcome("failed")
        if self.metrics.counts["failed"] == 1:
            logger.warning("tap: %s while following a request; it was served all the same", type(error).__name__)

    def _flushing(self, receive: Any) -> Any:
        async def listen() -> Any:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await asyncio.to_thread(self.feeder.close, FLUSH_S)
            return message

        return listen


def _listening(receive: Any, exchange: Exchange) -> Any:
    async def listen() -> Any:
        message = await receive()
        if message["type"] == "http.request":
            exchange.keep(exchange.request, message.get("body", b""))
        elif message["type"] == "http.disconnect":
            exchange.hung_up = True
        return message

    return listen


def _copying(send: Any, exchange: Exchange) -> Any:
    async def copy(message: Any) -> None:
        await send(message)
        if message["type"] == "http.response.body":
            exchange.keep(exchange.response, message.get("body", b""))
            exchange.finished = not message.get("more_body", False)
        elif message["type"] == "http.response.start":
            headers = dict(message.get("headers", ()))
            exchange.status = message["status"]
            exchange.content_type = headers.get(b"content-type", b"").decode("latin-1")
            exchange.content_encoding = headers.get(b"content-encoding", b"").decode("latin-1")

    return copy


async def _send_metrics(send: Any) -> None:
    body, content_type = await asyncio.to_thread(exposition)
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
