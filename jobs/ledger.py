"""Where rollouts are written down: a release's manifest, and beside it what people have asked of it."""

import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from jobs.in_charge import Term
from jobs.registry.alias_log import actor
from pipeline.artifacts import MANIFEST, Release, artifact_dir, commit, load, write_durably
from pipeline.errors import StageError
from serving.fleet.controller import Orders
from serving.fleet.rollout import ENDED, Rollout

Order = Literal["pause", "resume", "abort"]
_TRIES = 100


@dataclass
class Ledger:
    """One release's manifest: written before each step, by whoever is in charge."""

    root: Path
    release: Release
    term: Term

    @property
    def rollout(self) -> Rollout:
        """The state in the manifest."""
        names = ("target", "base", "phase", "why", "canary", "soak", "replicas", "promise", "taken_over_at")
        return Rollout.from_dict({name: getattr(self.release, name) for name in names})

    def save(self, rollout: Rollout) -> None:
        """Write the manifest. Raises: StageError when another process has taken over."""
        self.term.require()
        ended = _now() if rollout.has_ended else None
        state = json.loads(json.dumps(rollout.as_dict()))  # what is had here is what is read there
        self.release = Release.model_validate({**self.release.model_dump(), **state, "ended": ended})
        commit(self.folder, self.release)

    def orders(self) -> Orders:
        """What was asked so far."""
        return orders(self.folder)

    @property
    def folder(self) -> Path:
        """The release's folder."""
        return artifact_dir(self.root, Release, self.release.derivation_id)


def releases(root: Path) -> list[Release]:
    """All releases under a root, oldest first."""
    return list(newest_first(root))[::-1]


def newest_first(root: Path) -> Iterator[Release]:
    """The releases under a root, each read when it is asked for."""
    for folder in reversed(_folders(root)):
        yield load(folder, Release)


def last_release(root: Path) -> Release | None:
    """The newest release under a root, ended or not; None where there is none."""
    folders = _folders(root)
    return load(folders[-1], Release) if folders else None


def unfinished(root: Path) -> Release | None:
    """The release that is under way, or was when its controller died; None where all have ended."""
    last = last_release(root)
    return None if last is None or last.phase in ENDED else last


def next_id(root: Path, version: str) -> str:
    """The derivation id of the next release: an event, so it is numbered."""
    numbers = [int(folder.name.split("-", 1)[0]) for folder in _folders(root)]
    return f"{max(numbers, default=0) + 1:06d}-v{version}"


def give_order(root: Path, order: Order) -> Release:
    """The release under way, for which an order now lies where its controller, or the next one, finds it.

    Raises: StageError where no release is under way.
    """
    release = unfinished(root)
    if release is None:
        raise StageError(f"{root}: no deploy is under way, so there is nothing to {order}")
    folder = artifact_dir(root, Release, release.derivation_id) / "orders"
    temporary = folder / f".{uuid.uuid4().hex}.tmp"
    write_durably(temporary, json.dumps({"order": order, "by": actor(), "at": _now()}).encode())
    try:
        for _ in range(_TRIES):
            try:
                # A link, so that of two orders given at once both are kept, one after the other.
                os.link(temporary, folder / f"{len(_order_files(folder)) + 1:06d}.json")
                return release
            except FileExistsError:
                continue
    finally:
        temporary.unlink(missing_ok=True)
    raise StageError(f"{folder}: the order could not be written in {_TRIES} tries; run the command again")


def orders(release_folder: Path) -> Orders:
    """What was asked of a release: an abort stands; of pause and resume, the last one."""
    found = Orders()
    for path in _order_files(release_folder / "orders"):
        order = json.loads(path.read_text())
        if order["order"] == "abort":
            found = Orders(aborted=order["by"])
        elif order["order"] == "pause":
            found = Orders(found.aborted, order["by"])
        else:
            found = Orders(found.aborted)
    return found


def _folders(root: Path) -> list[Path]:
    return sorted(path.parent for path in artifact_dir(root, Release, "").glob(f"*/{MANIFEST}"))


def _order_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json") if path.stem.isdigit())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
