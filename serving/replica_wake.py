"""After an engine slept: the drafter that it woke with is whole, is loaded again, or the replica is started again."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from serving.control_access import Refusal
from serving.engine.calls import EngineCalls, EngineLost, WorkerFailed, new_call
from serving.replica_restart import ReplicaRestart
from serving.worker_answers import disagreement

logger = logging.getLogger("vllm.slipstream")

Status = Callable[[], Awaitable[dict[str, Any]]]


async def after_sleep(verified: Status, calls: EngineCalls, restart: ReplicaRestart) -> None:
    """Return once what serves has been read from the live weights. ``verified``: the replica's status, so read."""
    try:
        if await calls.is_sleeping():  # a part of it woke
            return
        found = await verified()
    except (Refusal, WorkerFailed) as error:
        logger.error("control: after a sleep nobody knows what serves: %s", error)
        return
    if found["status"] == "ok" or found["version"] is None:
        return
    logger.warning("control: after a sleep: %s", found["reason"])
    try:
        problem = await _loaded_again(found, calls)
    except (EngineLost, WorkerFailed) as error:
        problem = str(error)
    if problem is not None:
        restart.lose(found, f"after a sleep version {found['version']} cannot be loaded again: {problem}")


async def _loaded_again(found: dict[str, Any], calls: EngineCalls) -> str | None:
    """Why the version is not served whole again, or None. Raises: EngineLost, WorkerFailed."""
    if not found["swap"]["in_place"]:
        return found["swap"]["reason"]
    call, version = new_call(), found["version"]
    order = (found["folder"], version, found["sha256"], version)
    workers = await calls.swap(call, order, int(found["epoch"].rpartition(".")[2]))
    if problem := disagreement(workers):
        return problem
    await calls.commit(call)
    logger.warning("control: version %s was loaded again after a sleep", version)
    return None
