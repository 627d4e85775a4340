"""Calls to a running engine that end, one way or another, and whose answers are their own.

``collective_rpc`` gets no timeout of vLLM's: when one rank fails or is late, the other ranks' replies stay queued, and
the next call would read them. So the wait is bounded here, the call itself goes on, and every answer has to name the
call that it answers.

Source: vllm/v1/executor/multiproc_executor.py (collective_rpc) and vllm/v1/engine/async_llm.py, vLLM 0.32.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable
from typing import Any

from serving.errors import ServingError

LOOK_S, CHECK_S = 0.5, 0.05


class EngineLost(ServingError):
    """Nobody can say what this engine serves any more; it has to be started again."""


class EngineLate(EngineLost):
    """A call did not end in time; it may still."""


class EngineDied(EngineLost):
    """The engine's process is gone; vLLM's server ends itself then."""


class WorkerFailed(ServingError):
    """A call raised on a worker: what was done is not known, and other workers' replies may lie about."""


def new_call() -> str:
    """A name that no other call has."""
    return secrets.token_hex(8)


class EngineCalls:
    """An engine client's methods that a swap needs."""

    def __init__(self, client: Any, *, timeout_s: float):
        self.client, self._timeout_s = client, timeout_s
        self._running: set[asyncio.Future[Any]] = set()

    async def status(self, *, verify: bool = False) -> list[dict[str, Any]]:
        """Every worker's. Raises: EngineLost, WorkerFailed; ServingError where no worker could know the call."""
        self._require_extension()
        return await self._on_workers("slipstream_status", (), (verify,))

    async def check(self, folder: str, sha256: str) -> list[dict[str, Any]]:
        """Every worker's finding about a drafter's files. Raises: EngineLost, WorkerFailed."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            workers = await self._on_workers("slipstream_check", (folder, sha256), ())
            if all(worker["status"] != "running" for worker in workers):
                return workers
            if time.monotonic() > deadline:
                raise EngineLate(f"{folder}: not read by the workers in {self._timeout_s:g} s")
            await asyncio.sleep(CHECK_S)

    async def swap(self, call: str, order: tuple[str, str, str, str], expected_swaps: int) -> list[dict[str, Any]]:
        """Every worker's answer to folder, version, sha256, expected version. Raises: EngineLost, WorkerFailed.

        ``call`` names this swap, from ``new_call``, for ``commit`` and ``put_back``.
        """
        return await self._on_workers("slipstream_swap", (*order, expected_swaps), (), call=call)

    async def commit(self, swap: str) -> None:
        """Have every worker let go of what the swap replaced. Raises: EngineLost."""
        await self._or_lost("slipstream_commit", swap)

    async def put_back(self, swap: str, version: str, num_swaps: int) -> list[dict[str, Any]]:
        """Every worker's answer, serving what it did before the swap. Raises: EngineLost."""
        return await self._or_lost("slipstream_put_back", swap, version, num_swaps)

    async def is_paused(self) -> bool:
        """Whether the engine generates nothing for now. Raises: EngineLate, WorkerFailed."""
        return await self._is("is_paused")

    async def is_sleeping(self) -> bool:
        """Whether the engine has given memory back, and computes nothing. Raises: EngineLate, WorkerFailed."""
        return await self._is("is_sleeping")

    async def pause(self, mode: str) -> bool:
        """Whether generation has paused in time: with mode "wait", once what runs has ended."""
        try:
            await self._within(self.client.pause_generation(mode=mode, clear_cache=False), "pausing")
        except EngineLate:
            if mode == "wait":
                return False  # long requests are no fault; the caller resumes
            raise
        return True

    async def resume(self) -> None:
        """Go on generating. Raises: EngineLost when it does not."""
        try:
            await self._within(self.client.resume_generation(), "resuming")
        except EngineLost:
            raise
        except Exception as error:
            raise EngineLost(f"the engine does not resume: {type(error).__name__}: {error}")

    def resume_when_it_can(self) -> None:
        """Ask a lost engine to go on, and wait for nothing: a pause that comes late must not be the last word."""
        task = asyncio.ensure_future(self.client.resume_generation())
        self._running.add(task)
        task.add_done_callback(self._ended)

    async def clear_prefix_cache(self) -> bool:
        """Whether it is empty now: it stays while requests hold blocks. Raises: what the engine raises."""
        return bool(await self._within(self.client.reset_prefix_cache(), "clearing the prefix cache"))

    def _require_extension(self) -> None:
        # Asked for a method that it has not, a worker raises; see above for what that leaves behind.
        if self.client.vllm_config.speculative_config is None:
            raise ServingError("this engine serves no drafter; start it with --speculative-config method dflash")
        if not self.client.vllm_config.parallel_config.worker_extension_cls:
            raise ServingError("start the workers with --worker-extension-cls serving.engine.swap.DrafterSwap")

    async def _is(self, question: str) -> bool:
        try:
            return bool(await self._within(getattr(self.client, question)(), f"asking {question}"))
        except EngineLost:
            raise
        except Exception as error:
            raise WorkerFailed(f"{question} failed ({type(error).__name__}: {error})")

    async def _or_lost(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        try:
            return await self._on_workers(method, arguments, ())
        except WorkerFailed as error:
            raise EngineLost(str(error))

    async def _on_workers(
        self, method: str, before: tuple[Any, ...], after: tuple[Any, ...], *, call: str | None = None
    ) -> list[dict[str, Any]]:
        call = call or new_call()
        try:
            replies = await self._within(
                self.client.collective_rpc(method, args=(*before, call, *after)), f"waiting for {method}"
            )
        except EngineLost:
            raise
        except Exception as error:
            raise WorkerFailed(f"{method} failed on a worker ({type(error).__name__}: {error})")
        if not replies or any(not isinstance(one, dict) or one.get("call") != call for one in replies):
            raise EngineLost(f"{method}: a worker answered an earlier call, so no answer can be trusted")
        return replies

    async def _within(self, work: Awaitable[Any], what: str) -> Any:
        task = asyncio.ensure_future(work)
        self._running.add(task)  # the loop itself keeps no task alive
        task.add_done_callback(self._ended)
        deadline = time.monotonic() + self._timeout_s
        while not task.done() and (left := deadline - time.monotonic()) > 0:
            await asyncio.wait({task}, timeout=min(left, LOOK_S))
            if not task.done() and getattr(self.client, "errored", False):
                # It never ends; and a server that ends itself waits for whoever waits here.
                raise EngineDied(f"the engine died while {what}")
        if not task.done():
            raise EngineLate(f"{what} took more than {self._timeout_s:g} s")
        return task.result()

    def _ended(self, task: "asyncio.Future[Any]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # one that came too late has nobody left to tell
