"""What the gate measured of the versions that serve: their acceptance by slice, and their speed."""

import logging
import math
import time
from collections.abc import Iterable, Sequence

from jobs.registry import Registry
from pipeline.artifacts import MANIFEST, AcceptanceReport, DrafterCheckpoint, SpeedReport, artifact_dir, find
from pipeline.config import Config
from pipeline.schemas import ACCEPTANCE
from pipeline.shards import read_tables
from pipeline.watch.pays import Point, points_of
from pipeline.watch.promise import Promise, promise_of
from pipeline.watch.served import UNKNOWN_VERSION

logger = logging.getLogger("slipstream")

_PAUSE_S = 600.0


class Promises:
    """Asks MLflow and the run root, and every few minutes again: a speed is measured later, a champion moves."""

    def __init__(self, config: Config):
        self._config = config
        self._made: dict[str, Promise] = {}
        self._points: dict[str, list[Point]] = {}
        self._ask_again: dict[str, float] = {}

    def of(self, versions: Iterable[str]) -> dict[str, Promise]:
        """Version → its promise, of those that were measured here."""
        made = {}
        for version in versions:
            self._look_up(version)
            if version in self._made:
                made[version] = self._made[version]
        self._made = made
        return made

    def points(self, version: str | None) -> Sequence[Point]:
        """Where the version's speculation pays, as far as `slipstream speed` measured it."""
        if version is not None:
            self._look_up(version)
        return self._points.get(version or "", [])

    def _look_up(self, version: str) -> None:
        now = time.monotonic()
        if now < self._ask_again.get(version, -math.inf):
            return
        self._ask_again[version] = now + _PAUSE_S
        try:
            if (derivation := self._derivation(version)) is None:
                return
            if made := _promise(self._config, version, derivation):
                self._made[version] = made
            self._points[version] = _points(self._config, derivation)
        except Exception as error:  # whatever MLflow raises: the watch goes on, what is expected it learns from traffic
            logger.warning("watch: nothing is known of drafter version %s (%s)", version, error)

    def _derivation(self, version: str) -> str | None:
        """The derivation id of a version by its label, a number or that id; the champion's where records have none."""
        config = self._config
        if config.promote.tracking_uri is None and not (config.root / "mlflow.db").exists():
            return None
        registry = Registry(config.promote.tracking_uri, config.root)
        if version == UNKNOWN_VERSION:
            champion = registry.alias(config.model_name, "champion")
            return champion and registry.derivation(config.model_name, champion)
        made = registry.versions(config.model_name)
        known = {label: one.derivation for one in made for label in (one.derivation, one.number)}
        return known.get(version)


def _promise(config: Config, version: str, derivation: str) -> Promise | None:
    """Of the newest report that measured this drafter, as challenger or as champion."""
    reports = (config.root / AcceptanceReport.kind).glob(f"*/{MANIFEST}")
    for path in sorted(reports, key=lambda path: path.stat().st_mtime, reverse=True):
        report = find(path.parent, AcceptanceReport)
        roles = [role for role in ("challenger", "champion") if report.parents.get(role) == derivation]
        if roles and report.shards:
            rows = read_tables(path.parent, report.shards, ACCEPTANCE).to_pylist()
            return promise_of(version, report.derivation_id, rows, roles[0], settings=report.settings)
    return None


def _points(config: Config, derivation: str) -> list[Point]:
    drafter = find(artifact_dir(config.root, DrafterCheckpoint, derivation), DrafterCheckpoint)
    speeds = (config.root / SpeedReport.kind).glob(f"*/{MANIFEST}")
    for path in sorted(speeds, key=lambda path: path.stat().st_mtime, reverse=True):
        speed = find(path.parent, SpeedReport)
        if drafter is not None and speed.parents.get("drafter") == derivation:
            return points_of(speed.points, drafter.block_size - 1)
    return []
