"""Replicas that come up later, with another drafter than the champion, get the champion.

`slipstream watch --reconcile` looks for them all the time, `slipstream deploy --reconcile` once. Both also go on with a
rollout whose process died. A deploy or a rollback goes first: it waits for a reconciliation that is under way, and ends
one that was left unfinished.
"""

import logging
import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from jobs import replicas
from jobs.in_charge import InChargeError, in_charge, sign_of_life
from jobs.ledger import newest_first, unfinished
from jobs.registry import Registry
from jobs.rollout import RECONCILE, begin, drafter_of, go_on
from pipeline.artifacts import Release
from pipeline.config import Config
from pipeline.errors import SlipstreamError, StageError
from serving.fleet.replicas import Drafter, Seen, look_at_all

logger = logging.getLogger("slipstream")


def reconcile(config: Config) -> Release | None:
    """The release by which replicas that came up with something else got the champion; None where none is to get it.

    A rollout that was interrupted is gone on with instead. A replica that is down is left alone until it is up, one
    that refused the champion until deploy.retry_after_s have passed.

    Raises: StageError when there is no champion, or another process is in charge; SwapError naming the replicas that
    did not take it, or went down.
    """
    left = unfinished(config.root)
    with in_charge(config.root, RECONCILE, gives_way=left is None or left.reason == RECONCILE) as term:
        if (begun := unfinished(config.root)) is not None:
            return go_on(config, term, begun)
        registry = Registry(config.promote.tracking_uri, config.root)
        champion = drafter_of(registry, config.model_name, _champion(config, registry))
        if not astray(config, champion):
            return None
        return begin(config, registry, term, champion.version, reason=RECONCILE)


def astray(config: Config, champion: Drafter) -> list[str]:
    """Names of the replicas that serve something else than the champion, and are to be asked to take it now."""
    seen = look_at_all(replicas.listed(config), replicas.token(config))
    others = {name: one for name, one in seen.items() if one.is_up and not champion.same_as(one.drafter)}
    return sorted(set(others) - set(_refused_lately(config, champion.version, others)))


def _refused_lately(config: Config, version: str, others: Mapping[str, Seen]) -> dict[str, str]:
    """Replica → why it did not take this version, or went down with it, less than deploy.retry_after_s ago."""
    oldest = datetime.now(UTC) - timedelta(seconds=config.deploy.retry_after_s)
    found: dict[str, str] = {}
    for release in newest_first(config.root):
        if release.ended is None or datetime.fromisoformat(release.ended) < oldest:
            break
        if release.version != version:
            continue
        for one in release.replicas:
            if one["name"] in others and one["state"] in ("failed", "changing"):
                found.setdefault(one["name"], one["why"])
    return found


def _champion(config: Config, registry: Registry) -> str:
    champion = registry.settled(config.model_name, "champion")
    if champion is None:
        raise StageError(f"{config.model_name}: no champion yet, so there is nothing that replicas should serve")
    return champion


class Reconciler:
    """Reconciles whenever there is something to do, for as long as its block runs; in a thread of its own."""

    def __init__(self, config: Config):
        replicas.token(config)  # what is missing is said at once
        self._config, self._stopped = config, threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="reconcile", daemon=True)
        self._registry: Registry | None = None
        self._known: Drafter | None = None
        self._life: tuple[int, int] | None = None
        self._told = ""

    def __enter__(self) -> "Reconciler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(timeout=1.0)  # a rollout that is under way ends with the process; the next one goes on

    def look(self) -> Release | None:
        """One look: the release that it led to, or None. What is wrong is told, and tried again by the next look."""
        try:
            release = reconcile(self._config) if self._is_due() else None
        except InChargeError:
            return None  # a deploy: it brings what it deploys to every replica
        except SlipstreamError as error:
            self._tell(str(error))
            return None
        if release is not None:
            logger.info("reconcile: version %s serves on every replica that answers", release.version)
            self._told = ""
        return release

    def _is_due(self) -> bool:
        """Whether a rollout was left unfinished, or a replica is astray."""
        if unfinished(self._config.root) is not None:
            before, self._life = self._life, sign_of_life(self._config.root)
            return self._life is None or self._life == before
        if self._registry is None:
            self._registry = Registry(self._config.promote.tracking_uri, self._config.root)
        version = _champion(self._config, self._registry)
        if self._known is None or self._known.version != version:  # its weights are hashed once, not at every look
            self._known = drafter_of(self._registry, self._config.model_name, version)
        names = astray(self._config, self._known)
        if names:
            logger.info("reconcile: %s: not on version %s, the champion", ", ".join(names), version)
        return bool(names)

    def _tell(self, what: str) -> None:
        if what != self._told:
            logger.warning("reconcile: %s; tried again every %g s", what, self._config.deploy.reconcile_every_s)
            self._told = what

    def _go_on(self) -> None:
        while True:
            try:
                self.look()
            except Exception:  # a registry that is away, a full disk: the watch goes on, and so does this
                logger.exception("reconcile: tried again in %g s", self._config.deploy.reconcile_every_s)
            if self._stopped.wait(self._config.deploy.reconcile_every_s):
                return
