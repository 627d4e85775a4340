"""One swap on one replica, from the check to the open door; whatever goes wrong, the old drafter serves afterwards.

1. check: version and epoch, hashes, shapes, the configuration, with the engine untouched
2. the probe prompts, with the old drafter
3. close the door: new requests wait in front of the engine
4. pause (keep) or drain, swap on every worker, resume
5. the probe prompts again, behind the closed door
6. keep the new drafter for the next start, open the door

What fails before 4 is refused. What fails later is put back. Where even that fails, or the engine hangs, nobody can say
what serves: the door is shut, the health check fails, and the supervisor starts the replica again with the old one.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.control_access import Access, Refusal
from serving.door import Door
from serving.engine import version_salt
from serving.engine.calls import EngineCalls, EngineLate, EngineLost, WorkerFailed
from serving.engine.probes import DEFAULT, Probed, probe_ids, problem_of, run_probes
from serving.errors import PreflightError, ServingError
from serving.kept_drafter import KeptDrafter
from serving.preflight import check_drafter, read_config
from serving.replica_restart import ReplicaRestart
from serving.swap_order import SwapOrder
from serving.worker_answers import disagreement, epoch_of, status_of


@dataclass(frozen=True)
class _Swapped:
    """What step 4 did."""

    pause_s: float
    workers: list[dict[str, Any]]
    problem: str | None
    cache_cleared: bool = False


class ReplicaSwap:
    """Swaps the drafter of the engine behind ``state.engine_client``; one at a time."""

    def __init__(self, state: Any, access: Access, door: Door, restart: ReplicaRestart, *, timeout_s: float):
        self._state, self._access, self._door, self._restart = state, access, door, restart
        self._calls, self._timeout_s = EngineCalls(state.engine_client, timeout_s=timeout_s), timeout_s
        self._serving_config: dict[str, Any] | None = None

    async def status(self, *, verify: bool = False) -> dict[str, Any]:
        """What every worker serves, and how it can be changed. Raises: Refusal when the workers cannot be asked."""
        try:
            workers = await self._calls.status(verify=verify)
        except ServingError as error:
            if isinstance(error, EngineLost) and not isinstance(error, EngineLate):
                self._restart.lose(None, str(error))
            raise Refusal(503, str(error))
        if workers[0]["status"] == "ok":
            self._state.slipstream_drafter_version = workers[0]["version"]
        found = status_of(workers, restart=self._restart.is_possible)
        return {**found, "paused": await self._state.engine_client.is_paused(), "door": self._door.state}

    async def run(self, order: SwapOrder) -> dict[str, Any]:
        """What the caller is told of a swap that took. Raises: Refusal."""
        before = await self.status()
        if before["status"] != "ok":
            raise Refusal(503, f"this server cannot swap: {before['reason']}")
        _require_expected(order, before)
        folder = self._access.folder(order.folder)
        how = _how(order, before["swap"])
        await self._preflight(folder, order, before)
        if how == "restart":
            return self._restart.order(KeptDrafter(str(folder), order.version, order.sha256), before)
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

    async def _behind_closed_door(
        self,
        order: SwapOrder,
        folder: Path,
        before: dict[str, Any],
        probes: list[tuple[list[int], int]],
        earlier: Probed,
    ) -> dict[str, Any]:
        """Steps 4 to 6. Raises: Refusal once the old drafter is back; EngineLost when it is not."""
        swapped = await self._exchange(order, folder, before)
        if swapped.problem is not None:
            raise await self._refusal(swapped, swapped.problem)
        later, changed, problem = await self._prove(order, probes, earlier)
        if problem is None:
            problem = self._restart.keep(KeptDrafter(str(folder), order.version, order.sha256))
        if problem is not None:
            await self._put_back(before, order.version)
            raise await self._refusal(swapped, f"{problem}; version {before['version']} serves again on every worker")
        self._state.slipstream_drafter_version = order.version
        salted = order.prefix_cache == "salt" and version_salt.use(self._state.engine_client, order.version)
        return {
            "status": "ok",
            "reason": None,
            "how": "in_place",
            "version": order.version,
            "previous": before["version"],
            "epoch": epoch_of(swapped.workers[0]),
            "pause_s": swapped.pause_s,
            "live_fingerprint": [w["live_fingerprint"] for w in swapped.workers],
            "previous_live_fingerprint": before["live_fingerprint"],
            "prefix_cache_reset": swapped.cache_cleared,
            "prefix_cache_salted": salted,
            "probe": {"before": earlier.as_dict(), "after": later.as_dict(), "changed_outputs": changed},
            "workers": swapped.workers,
        }

    async def _exchange(self, order: SwapOrder, folder: Path, before: dict[str, Any]) -> _Swapped:
        """Pause, swap, resume; ``problem`` where the old drafter serves, everywhere. Raises: EngineLost."""
        started, workers, cleared = time.perf_counter(), [], False
        try:
            problem = await self._pause(order)
            if problem is None:
                new = (str(folder), order.version, order.sha256, before["version"])
                workers, problem = await self._swap(new, int(before["epoch"].rpartition(".")[2]))
                if problem is None and order.prefix_cache == "clear":
                    cleared, problem = await self._clear()
                if problem is not None and any(w["status"] == "ok" for w in workers):
                    await self._swap_back(before, order.version)
                    problem = f"{problem}; version {before['version']} serves again on every worker"
        except EngineLost:
            self._calls.resume_when_it_can()
            raise
        except BaseException:
            await asyncio.shield(self._calls.resume())
            raise
        await self._calls.resume()
        return _Swapped(round(time.perf_counter() - started, 4), workers, problem, cleared)

    async def _swap(
        self, new: tuple[str, str, str, str], expected_swaps: int
    ) -> tuple[list[dict[str, Any]], str | None]:
        """The workers' answers, and why not all of them serve the new drafter. Raises: EngineLost."""
        try:
            workers = await self._calls.swap(new, expected_swaps)
        except WorkerFailed as error:
            # Not known what it did; the workers' own word is, unless answers were left behind by the others.
            try:
                return [
                    w | {"status": "ok" if w["version"] == new[1] else "failed"} for w in await self._calls.status()
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

    async def _clear(self) -> tuple[bool, str | None]:
        try:
            # False, and no harm but some acceptance, while requests in flight hold blocks.
            return await self._calls.clear_prefix_cache(), None
        except EngineLost:
            raise
        except Exception as error:
            return False, f"the prefix cache could not be reset: {type(error).__name__}: {error}"

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

    async def _put_back(self, before: dict[str, Any], version: str) -> None:
        """Pause, give every worker the old drafter, resume. Raises: EngineLost."""
        try:
            with contextlib.suppress(Exception):  # one call to the workers is atomic against engine steps anyway
                await self._calls.pause("keep")
            await self._swap_back(before, version)
        except EngineLost:
            self._calls.resume_when_it_can()
            raise
        await self._calls.resume()

    async def _swap_back(self, before: dict[str, Any], version: str) -> None:
        old = (before["folder"], before["version"], before["sha256"], version)
        try:
            await self._calls.swap(old, None)  # a worker that kept the old one refuses this
            workers = await self._calls.status()
        except WorkerFailed as error:
            raise EngineLost(f"the old version could not be put back: {error}")
        if any(w["version"] != before["version"] or w["sha256"] != before["sha256"] for w in workers):
            raise EngineLost("the old version could not be put back on every worker")

    async def _refusal(self, swapped: _Swapped, problem: str) -> Refusal:
        version = (await self._calls.status())[0]["version"]
        untouched = bool(swapped.workers) and all(w["status"] == "refused" for w in swapped.workers)
        return Refusal(
            409 if untouched else 500, problem, pause_s=swapped.pause_s, workers=swapped.workers, version=version
        )

    async def _preflight(self, folder: Path, order: SwapOrder, before: dict[str, Any]) -> None:
        if Path(order.folder).is_symlink():
            raise Refusal(422, "the folder is a symbolic link; name the real one", code="folder")
        config = self._state.engine_client.vllm_config
        try:
            if self._serving_config is None:
                self._serving_config = read_config(Path(before["folder"]))
            info = await asyncio.to_thread(
                check_drafter,
                folder,
                target_config=config.model_config.hf_config.to_dict(),
                num_speculative_tokens=config.speculative_config.num_speculative_tokens,
                serving_config=self._serving_config,
            )
        except PreflightError as error:
            raise Refusal(422, str(error), code=error.code, version=before["version"])
        if info.sha256 != order.sha256:
            raise Refusal(409, f"{folder}: sha256 {info.sha256}, the caller says {order.sha256}", code="sha256")


def _how(order: SwapOrder, can: dict[str, Any]) -> str:
    how = order.how if order.how != "auto" else "in_place" if can["in_place"] else "restart"
    if how == "in_place" and not can["in_place"]:
        raise Refusal(409, f"not in place: {can['reason']}", code="in_place")
    if how == "restart" and not can["restart"]:
        why = "" if can["in_place"] else f"{can['reason']}; and "
        raise Refusal(
            409, f"{why}no supervisor of ours started this server: serving/supervise.py --keep FILE", code="restart"
        )
    return how


def _require_expected(order: SwapOrder, before: dict[str, Any]) -> None:
    version = before["version"]
    if version != order.expected_version:
        reason = f"version {version} serves, the caller expected {order.expected_version}; look again"
        raise Refusal(409, reason, version=version, code="version")
    if order.expected_epoch and order.expected_epoch != before["epoch"]:
        reason = f"epoch {before['epoch']}, the caller knew of {order.expected_epoch}: swaps or a start in between"
        raise Refusal(409, f"{reason}; look again", version=version, code="epoch")
