"""What a rollout tells while it is under way: a line for each thing that happens, and for a wait one now and then."""

import logging
import time

from serving.fleet.replicas import Drafter
from serving.fleet.rollout import BACK, Record, Rollout

logger = logging.getLogger("slipstream")

AGAIN_S = 30.0
"""A wait that goes on is told again after so long."""


class Progress:
    """Tells it to the log, which a terminal shows."""

    def __init__(self) -> None:
        self._waited_for, self._told_at = "", 0.0

    def phase(self, rollout: Rollout) -> None:
        """A phase was entered."""
        self._waited_for = ""
        goal = rollout.base if rollout.phase in BACK else rollout.target
        what = f"version {goal.version}" if goal else "what they served before"
        serving = sum(record.state == "serving" for record in rollout.replicas)
        logger.info("deploy: %s, %d of %d replicas serve %s", rollout.phase, serving, len(rollout.replicas), what)

    def begins(self, record: Record, goal: Drafter | None) -> None:
        """A replica is asked to serve something else."""
        if goal is not None:
            logger.info("deploy: %s is changed to version %s", record.name, goal.version)

    def changed(self, record: Record, goal: Drafter | None) -> None:
        """What became of it."""
        if record.state == "serving" and goal is not None:
            paused = record.change.get("pause_s", 0.0)
            logger.info("deploy: %s serves version %s, paused %.2f s", record.name, goal.version, paused)
        else:
            logger.warning("deploy: %s is %s: %s", record.name, record.state, record.why)

    def waits(self, why: str, more: str = "") -> None:
        """Nothing can be done now. ``more`` changes all the time, so it makes no new line by itself."""
        now = time.monotonic()
        if why == self._waited_for and now - self._told_at < AGAIN_S:
            return
        self._waited_for, self._told_at = why, now
        logger.info("deploy: %s%s", why, f" ({more})" if more else "")
