"""One swap on one replica, from the check to the open door; whatever goes wrong, the old drafter serves afterwards.

1. check: version and epoch, hashes, shapes, the configuration, here and on every worker, while the engine goes on
2. the probe prompts, with the old drafter
3. close the door: new requests wait in front of the engine
4. pause (keep) or drain, swap on every worker, resume
5. the probe prompts again, behind the closed door
6. keep the new drafter for the next start, open the door

What fails before 4 is refused. What fails later is put back: the workers hold the old drafter in memory until 6. Where
even that fails, or the engine hangs, nobody can say what serves: the door is shut, the health check fails, and the
supervisor starts the replica again with the old one.
"""

import asyncio
from pathlib import Path
from typing import Any

from serving.control_access import Access, Refusal
from serving.door import Door
from serving.engine import version_salt
from serving.engine.calls import EngineCalls, EngineDied, EngineLate, EngineLost
from serving.engine.probes import DEFAULT, Probed, ProbesLate, probe_ids, problem_of, run_probes
from serving.errors import ServingError
from serving.exchange import Exchange, Swapped
from serving.kept_drafter import KeptDrafter
from serving.replica_restart import ReplicaRestart
from serving.replica_wake import after_sleep
from serving.swap_check import FolderCheck, way_of
from serving.swap_order import SwapOrder
from serving.worker_answers import epoch_of, status_of


class ReplicaSwap:
    """Swaps the drafter of the engine behind ``state.engine_client``; one at a time."""

    def __init__(self, state: Any, access: Access, door: Door, restart: ReplicaRestart, *, timeout_s: float):
        self._state, self._door, self._restart = state, door, restart
        self._calls, self._timeout_s = EngineCalls(state.engine_client, timeout_s=timeout_s), timeout_s
        self._exchange = Exchange(self._calls, timeout_s=timeout_s)
        self._check = FolderCheck(access, state.engine_client.vllm_config, timeout_s=timeout_s)

    async def status(self, *, verify: bool = False) -> dict[str, Any]:
        """What every worker serves, and how it can be changed. Raises: Refusal when the workers cannot be asked."""
        try:
            workers, paused = await self._calls.status(verify=verify), await self._calls.is_paused()
        except ServingError as error:
            if isinstance(error, EngineLost) and not isinstance(error, EngineLate | EngineDied):
                self._restart.lose(None, str(error))
            raise Refusal(503, str(error))
        found = status_of(workers, restart=self._restart.is_possible)
        if found["status"] == "ok" and self._door.state != "closed":  # behind a closed door nothing has proved itself
            self._state.slipstream_drafter_version = found["version"]
            await self._check.remember(found)
        return {**found, "paused": paused, "door": self._door.state}

    async def reset(self) -> bool:
        """Whether the prefix cache is empty now. Raises: Refusal when the engine cannot be asked."""
        try:
            return await self._calls.clear_prefix_cache()
        except ServingError as error:
            raise Refusal(503, str(error))

    async def prove(self) -> None:
        """Return once the drafter that this server was started with has drafted. Raises: Refusal, ServingError."""
        now = await self.status()
        if now["status"] != "ok":
            raise ServingError(now["reason"])
        probes = probe_ids(self._state.engine_client, DEFAULT)
        found = await run_probes(self._state.engine_client, probes, timeout_s=self._timeout_s)
        problem, _ = problem_of(found, found, allow_changed_outputs=True)
        if problem is not None:
            raise ServingError(problem)

    async def woke(self) -> None:
        """Return once the drafter of an engine that slept is whole, or this replica is lost."""
        await after_sleep(lambda: self.status(verify=True), self._calls, self._restart)

    async def run(self, order: SwapOrder) -> dict[str, Any]:
        """What the caller is told of a swap that took. Raises: Refusal."""
        if self._door.shut:
            raise Refusal(503, self._door.shut, code="shut")
        before = await self.status()
        how = way_of(order, before)
        folder = await self._check.folder(order, before["version"])
        if how == "restart":
            return self._restart.order(KeptDrafter(str(folder), order.version, order.sha256), before)
        await self._require_checked(folder, order, before)
        try:
            probes = probe_ids(self._state.engine_client, DEFAULT if order.probe is None else order.probe)
            earlier = await run_probes(self._state.engine_client, probes, timeout_s=self._timeout_s)
        except ServingError as error:
            raise Refusal(409, f"with the old drafter already: {error}", version=before["version"])
        self._door.close()
        try:
            found = await self._behind_closed_door(order, folder, before, probes, earlier)
        except EngineLost as error:
            self._restart.lose(before, str(error))
            raise Refusal(503, f"{error}; this replica is started again with version {before['version']}")
        finally:
            closed_s = self._door.open()
        return {**found, "closed_s": round(closed_s, 4)}

    async def _require_checked(self, folder: Path, order: SwapOrder, before: dict[str, Any]) -> None:
        """The workers read the files too, while they serve: the pause is for loading them alone. Raises: Refusal."""
        try:
            workers = await self._calls.check(str(folder), order.sha256)
        except ServingError as error:
            if isinstance(error, EngineLost) and not isinstance(error, EngineLate):
                self._restart.lose(before, str(error))
            raise Refusal(503, str(error), version=before["version"])
        if problem := "; ".join(f"worker {w['rank']}: {w['reason']}" for w in workers if w["status"] != "ok"):
            raise Refusal(409, problem, version=before["version"], workers=workers)

    async def _behind_closed_door(
        self,
        order: SwapOrder,
        folder: Path,
        before: dict[str, Any],
        probes: list[tuple[list[int], int]],
        earlier: Probed,
    ) -> dict[str, Any]:
        """Steps 4 to 6. Raises: Refusal once the old drafter is back; EngineLost when it is not."""
        swapped = await self._exchange.there(order, folder, before)
        if swapped.problem is not None:
            raise await self._refusal(swapped, swapped.problem, probes)
        try:
            later, changed, problem = await self._prove(order, probes, earlier)
            if problem is None:
                problem = await self._keep(KeptDrafter(str(folder), order.version, order.sha256))
            if problem is None:
                await self._calls.commit(swapped.call)
        except EngineLost:
            raise
        except BaseException:  # whatever it was: what has not proved itself is not to meet an open door
            await asyncio.shield(self._exchange.back(swapped.call, before))
            raise
        if problem is not None:
            await self._exchange.back(swapped.call, before)
            problem = f"{problem}; version {before['version']} serves again on every worker"
            raise await self._refusal(swapped, problem, probes)
        self._state.slipstream_drafter_version = order.version
        await self._check.remember({"folder": str(folder), "sha256": order.sha256})
        epoch = epoch_of(swapped.workers[0])
        # What cannot be emptied, since requests in flight hold blocks, is left behind: nobody reads it any more.
        if salted := order.prefix_cache != "keep" and not swapped.cache_cleared:
            version_salt.use(self._state.engine_client, epoch)
        return {
            "status": "ok",
            "reason": None,
            "how": "in_place",
            "version": order.version,
            "previous": before["version"],
            "epoch": epoch,
            "pause_s": swapped.pause_s,
            "live_fingerprint": [w["live_fingerprint"] for w in swapped.workers],
            "previous_live_fingerprint": before["live_fingerprint"],
            "prefix_cache_reset": swapped.cache_cleared,
            "prefix_cache_salted": salted,
            "probe": {"before": earlier.as_dict(), "after": later.as_dict(), "changed_outputs": changed},
            "workers": swapped.workers,
        }

    async def _prove(
        self, order: SwapOrder, probes: list[tuple[list[int], int]], earlier: Probed
    ) -> tuple[Probed, int, str | None]:
        half = "float32" not in str(self._state.engine_client.vllm_config.model_config.dtype)
        allow = half if order.allow_changed_outputs is None else order.allow_changed_outputs
        try:
            later = await run_probes(self._state.engine_client, probes, timeout_s=self._timeout_s)
        except ServingError as error:
            return earlier, 0, str(error)
        problem, changed = problem_of(earlier, later, allow_changed_outputs=allow)
        return later, changed, problem

    async def _keep(self, drafter: KeptDrafter) -> str | None:
        """Why the next start would not serve this drafter, or None."""
        try:
            return await asyncio.wait_for(asyncio.to_thread(self._restart.keep, drafter), self._timeout_s)
        except TimeoutError:
            return f"the drafter could not be kept for the next start in {self._timeout_s:g} s"

    async def _refusal(self, swapped: Swapped, problem: str, probes: list[tuple[list[int], int]]) -> Refusal:
        """What the caller is told once the old drafter serves, which an answer shows. Raises: EngineLost."""
        untouched = bool(swapped.workers) and all(w["status"] == "refused" for w in swapped.workers)
        try:
            await self._require_generating(probes[:1])
            version = (await self._calls.status())[0]["version"]
        except EngineLost:
            raise
        except ServingError as error:
            raise EngineLost(f"{problem}; then {error}")
        return Refusal(
            409 if untouched else 500, problem, pause_s=swapped.pause_s, workers=swapped.workers, version=version
        )

    async def _require_generating(self, probes: list[tuple[list[int], int]]) -> None:
        """Raises: ServingError unless the engine answers, or has others to answer first."""
        try:
            await run_probes(self._state.engine_client, probes, timeout_s=self._timeout_s)
        except ProbesLate:
            if not self._door.inside or await self._calls.is_paused():
                raise
