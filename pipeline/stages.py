"""How a stage runs once: its derivation id names a folder, a manifest there means it is done."""

import fcntl
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from pipeline import lease
from pipeline.artifacts import (
    Manifest,
    artifact_dir,
    commit,
    derivation_id,
    find,
    load,
    write_durably,
)
from pipeline.errors import StageError

logger = logging.getLogger("slipstream")

M = TypeVar("M", bound=Manifest)


@dataclass(frozen=True)
class Artifact(Generic[M]):
    """A complete artifact: its folder and its manifest."""

    folder: Path
    manifest: M

    @property
    def id(self) -> str:
        """The derivation id."""
        return self.manifest.derivation_id


def complete(
    root: Path,
    kind: type[M],
    *,
    stage: str,
    version: int,
    parents: Mapping[str, str],
    meaning: Mapping[str, Any],
    build: Callable[[Path, str], M],
) -> Artifact[M]:
    """The artifact of this work: what is there already, or what ``build(folder, derivation_id)`` makes.

    ``build`` writes its files into the folder, where an earlier, interrupted try may have left parts,
    and returns the manifest, which is committed here, last.

    Raises: StageError when another process is building the same artifact.
    """
    derivation = derivation_id(stage, version, parents, meaning)
    folder = artifact_dir(root, kind, derivation)
    if (found := find(folder, kind)) is not None:
        logger.info("%s: complete (%s), skipped", stage, derivation)
        return Artifact(folder, found)
    with exclusive(folder, stage):
        if (found := find(folder, kind)) is not None:
            return Artifact(folder, found)
        started = time.monotonic()
        logger.info("%s: building %s", stage, folder)
        manifest = build(folder, derivation)
        manifest = manifest.model_copy(update={"seconds": round(time.monotonic() - started, 3)})
        commit(folder, manifest)
    logger.info("%s: done in %.1f s (%s)", stage, manifest.seconds, derivation)
    return Artifact(folder, manifest)


def open_artifact(root: Path, kind: type[M], derivation: str) -> Artifact[M]:
    """A complete artifact by its derivation id. Raises: SchemaError where there is none."""
    folder = artifact_dir(root, kind, derivation)
    return Artifact(folder, load(folder, kind))


def set_current(root: Path, name: str, artifact: Artifact[Any]) -> None:
    """Remember an artifact under a name, for the stage that is run next by hand.

    Raises: StageError when it is another run's turn (pipeline/lease.py). The champion is what the fleet serves, and a
    rollback waits for no run.
    """
    if name != "champion":
        lease.require_turn(root)
    with exclusive(Path(root) / "current", "current.json", wait=True):
        names = current_names(root)
        names[name] = artifact.id
        write_durably(Path(root) / "current.json", (json.dumps(names, indent=1, sort_keys=True) + "\n").encode())


def forget_current(root: Path, forgotten: Iterable[str]) -> None:
    """Name nothing under these names any more."""
    with exclusive(Path(root) / "current", "current.json", wait=True):
        names = {name: derivation for name, derivation in current_names(root).items() if name not in set(forgotten)}
        write_durably(Path(root) / "current.json", (json.dumps(names, indent=1, sort_keys=True) + "\n").encode())


def current(root: Path, name: str, kind: type[M]) -> Artifact[M]:
    """The artifact last remembered under a name. Raises: StageError naming the names that exist."""
    names = current_names(root)
    if name not in names:
        raise StageError(
            f"{root}: no {name} yet (there are: {', '.join(sorted(names)) or 'none'}); run the stage that makes it"
        )
    return open_artifact(root, kind, names[name])


def current_names(root: Path) -> dict[str, str]:
    """Name → derivation id of what is remembered under a root."""
    path = Path(root) / "current.json"
    return json.loads(path.read_text()) if path.exists() else {}


@contextmanager
def exclusive(folder: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder (a file beside it). Raises: StageError when it is taken and ``wait`` is off."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(_lock_path(folder), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise StageError(f"{what}: another process is building {folder}; wait for it, or stop it first")
        yield


def hold_for_reading(folder: Path) -> IO[str] | None:
    """What keeps a folder from being removed, or built anew, until it is closed or forgotten; others may hold it too.

    It waits for whoever has the folder to himself. None where no lock can be written, as on a read-only disk.
    """
    try:
        file = open(_lock_path(folder), "a")  # noqa: SIM115
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("%s: another process is building it; waiting until it is through", folder)
        fcntl.flock(file, fcntl.LOCK_SH)
    return file


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")
