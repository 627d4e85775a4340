"""Step 4 of a swap, and the way back: pause the engine, exchange every worker's drafter or none's, resume."""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.engine import version_salt
from serving.engine.calls import EngineCalls, EngineLost, WorkerFailed, new_call
from serving.swap_order import SwapOrder
from serving.worker_answers import disagreement


@dataclass(frozen=True)
class Swapped:
    """What an exchange did: ``problem`` says why the old drafter serves, everywhere."""

    call: str
    pause_s: float
    workers: list[dict[str, Any]]
    problem: str | None
    cache_cleared: bool = False


class Exchange:
    """Exchanges of drafters through the calls of one engine."""

    def __init__(self, calls: EngineCalls, *, timeout_s: float):
        self._calls, self._timeout_s = calls, timeout_s

    async def there(self, order: SwapOrder, folder: Path, before: dict[str, Any]) -> Swapped:
        """Pause, swap, resume. Raises: EngineLost."""
        started, call, workers, cleared = time.perf_counter(), new_call(), [], False
        try:
            problem = await self._pause(order)
            if problem is None:
                new = (str(folder), order.version, order.sha256, before["version"])
                workers, problem = await self._swap(call, new, _num_swaps(before))
                if problem is None and order.prefix_cache != "keep":
                    cleared, problem = await self._apart(order)
                if problem is not None and any(w["status"] == "ok" for w in workers):
                    await self._swap_back(call, before)
                    problem = f"{problem}; version {before['version']} serves again on every worker"
        except EngineLost:
            self._calls.resume_when_it_can()
            raise
        except BaseException:
            await asyncio.shield(self.back(call, before))
            raise
        await self._calls.resume()
        return Swapped(call, round(time.perf_counter() - started, 4), workers, problem, cleared)

    async def back(self, call: str, before: dict[str, Any]) -> None:
        """Pause, give every worker back what the swap of this call replaced, resume. Raises: EngineLost."""
        try:
            with contextlib.suppress(Exception):  # one call to the workers is atomic against engine steps anyway
                await self._calls.pause("keep")
            await self._swap_back(call, before)
        except EngineLost:
            self._calls.resume_when_it_can()
            raise
        await self._calls.resume()

    async def _swap(
        self, call: str, new: tuple[str, str, str, str], num_swaps: int
    ) -> tuple[list[dict[str, Any]], str | None]:
        """The workers' answers, and why not all of them serve the new drafter. Raises: EngineLost."""
        try:
            workers = await self._calls.swap(call, new, num_swaps)
        except WorkerFailed as error:
            # Not known what it did; the workers' own word is, unless answers were left behind by the others.
            try:
                return [
                    w | {"status": "ok" if w["num_swaps"] != num_swaps else "failed"}
                    for w in await self._calls.status()
                ], str(error)
            except WorkerFailed as again:
                raise EngineLost(f"{error}; {again}")
        return workers, disagreement(workers)

    async def _pause(self, order: SwapOrder) -> str | None:
        try:
            if await self._calls.pause("wait" if order.pause == "drain" else "keep"):
                return None
        except EngineLost:
            raise
        except Exception as error:
            return f"the engine did not pause: {type(error).__name__}: {error}"
        return f"requests in flight did not end in {self._timeout_s:g} s; order pause keep, or ask at a quieter time"

    async def _apart(self, order: SwapOrder) -> tuple[bool, str | None]:
        """Whether the prefix cache is empty, and why later requests could not be kept from it otherwise."""
        try:
            if order.prefix_cache == "clear" and await self._calls.clear_prefix_cache():
                return True, None
        except EngineLost:
            raise
        except Exception as error:
            return False, f"the prefix cache could not be reset: {type(error).__name__}: {error}"
        possible = version_salt.is_possible(self._calls.client)
        return False, None if possible else "the prefix cache can neither be emptied nor told apart here"

    async def _swap_back(self, call: str, before: dict[str, Any]) -> None:
        # Two swaps further on for every worker: an order from before this one stays an old order.
        workers = await self._calls.put_back(call, before["version"], _num_swaps(before) + 2)
        if any(w["status"] != "ok" or w["sha256"] != before["sha256"] for w in workers):
            why = disagreement(workers) or "other weights"
            raise EngineLost(f"the old version could not be put back on every worker: {why}")


def _num_swaps(status: dict[str, Any]) -> int:
    return int(status["epoch"].rpartition(".")[2])
