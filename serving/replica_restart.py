"""The other way to another drafter: the supervisor starts the replica again; and the way out when an engine is lost."""

import asyncio
import contextlib
import logging
from typing import Any

from serving.control_access import Refusal
from serving.door import Door
from serving.kept_drafter import Kept, KeptDrafter, Supervised, read_kept, write_kept

logger = logging.getLogger("vllm.slipstream")

RESTART_AFTER_S = 0.5  # for the answer to leave


class ReplicaRestart:
    """Restarts of this server, where a supervisor of ours started it (serving/supervise.py --keep FILE)."""

    def __init__(self, door: Door, supervised: Supervised | None, *, drain_s: float):
        self._door, self._supervised, self._drain_s = door, supervised, drain_s
        self._leaving: asyncio.Task[None] | None = None

    @property
    def is_possible(self) -> bool:
        """Whether there is a supervisor to ask."""
        return self._supervised is not None

    def keep(self, drafter: KeptDrafter, previous: KeptDrafter | None = None) -> str | None:
        """Why the next start would not serve this drafter, or None."""
        if self._supervised is None:
            return None
        path = self._supervised.path
        before = read_kept(path)
        try:
            write_kept(path, Kept(drafter, previous))
        except OSError as error:
            # The file may have been replaced, and only not be safe from a power cut.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True) if before is None else write_kept(path, before)
            return f"the drafter cannot be kept for the next start ({error})"
        return None

    def order(self, new: KeptDrafter, before: dict[str, Any]) -> dict[str, Any]:
        """The answer to a caller who asked for it; once what is inside has ended, the replica starts with ``new``.

        Should that not come up, the supervisor starts it with the old one. Raises: Refusal.
        """
        if problem := self.keep(new, served(before)):
            raise Refusal(500, problem, version=before["version"])
        self._door.shut_down(f"starting again with drafter {new.version}")
        self._leaving = asyncio.create_task(self._leave())
        answer = {"status": "restarting", "reason": None, "how": "restart"}
        return {**answer, "version": new.version, "previous": before["version"]}

    def lose(self, before: dict[str, Any] | None, why: str) -> None:
        """Shut the door, and have the replica started again with what it served before."""
        if self._door.shut:
            return
        logger.critical("control: %s; nobody can say what serves here: start this replica again", why)
        self._door.shut_down(f"{why}; this replica has to be started again")
        if self._supervised is not None:
            if before is not None:
                self.keep(served(before))
            asyncio.get_running_loop().call_later(RESTART_AFTER_S, self._supervised.restart)

    async def _leave(self) -> None:
        await asyncio.sleep(RESTART_AFTER_S)
        if not await self._door.drained(self._drain_s):
            logger.warning("control: %d requests are cut off by the restart", self._door.inside)
        self._supervised.restart()


def served(status: dict[str, Any]) -> KeptDrafter:
    """What a replica with this status is to be started with again."""
    return KeptDrafter(status["folder"], status["version"], status["sha256"])
