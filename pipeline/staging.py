"""Local copies of states files that are on object storage, within a byte budget, for those who read them."""

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pipeline.artifacts import Shard
from pipeline.errors import ConfigError, SchemaError, StageError
from pipeline.shards import is_states
from pipeline.states import StatesFile
from pipeline.storage import Storage, tried

logger = logging.getLogger("slipstream")

STAGED = "staged"
"""The folder for it under a run root."""
STALL_S, SAY_EVERY_S = 1.0, 10.0


class Staging:
    """Local copies of stored states files within a byte budget, the longest unused removed first.

    Any number of processes may share a folder. A file appears there whole, by rename, after its hash was checked.
    A file that a process has open as it is removed keeps its bytes until it is closed.
    """

    def __init__(self, uri: str, shards: Iterable[Shard], folder: Path, *, max_bytes: int):
        self._storage, self._folder, self.max_bytes = Storage(uri), Path(folder), max_bytes
        self._prefix = _prefix(self._storage.uri)
        self._shards = {shard.path: shard for shard in shards if is_states(shard)}
        largest = max((shard.bytes for shard in self._shards.values()), default=0)
        if largest > max_bytes:
            raise ConfigError(
                f"capture.staging_bytes = {max_bytes}: less than the largest states file of {self._storage.uri} "
                f"({largest} bytes); raise it, or capture with a smaller capture.shard_bytes"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="staging")
        self._awaited: set[str] = set()
        self.num_stalls = 0
        self.stalled_s = 0.0

    def open(self, name: str) -> StatesFile:
        """A states file, staged first where it is not there: that wait is counted as a stall.

        Raises: StageError when storage fails; SchemaError when what it holds is not what the manifest says.
        """
        if name not in self._shards:
            raise SchemaError(f"{self._storage.uri}/{name}: not among the files that the manifest lists")
        while True:
            if not self._path(name).exists():
                self._wait_for(name)
            with self._admission():
                if self._path(name).exists():  # else it was removed in between, for another file
                    os.utime(self._path(name))
                    return StatesFile(self._path(name))

    def ahead(self, names: Iterable[str]) -> None:
        """Stage files in the background, in this order; as many as fit into the budget are of use."""
        for name in names:
            if name in self._shards and name not in self._awaited and not self._path(name).exists():
                self._awaited.add(name)
                self._background.submit(self._fetch_quietly, name)

    def _wait_for(self, name: str) -> None:
        started = time.monotonic()
        self._fetch(name)
        seconds = time.monotonic() - started
        self.num_stalls += 1
        self.stalled_s += seconds
        if seconds >= STALL_S:
            logger.warning(
                "staging: reading waited %.1f s for %s (%d waits so far, %.1f s in all); more capture.staging_bytes, "
                "or storage that is nearer, would help",
                seconds,
                name,
                self.num_stalls,
                self.stalled_s,
            )

    def _fetch_quietly(self, name: str) -> None:
        try:
            self._fetch(name)
        except (OSError, StageError, SchemaError) as error:  # whoever opens it tries again, and says so
            logger.warning("staging: %s could not be staged ahead (%s)", name, error)
        finally:
            self._awaited.discard(name)

    def _fetch(self, name: str) -> None:
        """Have the file in the folder: by this process, or by another one that is at it already."""
        shard, said = self._shards[name], time.monotonic()
        while not self._path(name).exists():
            with self._reserved(shard) as file:
                if file is None:
                    if time.monotonic() - said > SAY_EVERY_S:
                        said = time.monotonic()
                        logger.warning("staging: waiting for room in %s for %s", self._folder, name)
                    continue
                tried(f"{self._storage.uri}/{name}: download", lambda file=file: self._download(shard, file))
                with self._admission():
                    os.replace(self._temporary(name), self._path(name))

    def _download(self, shard: Shard, file: BinaryIO) -> None:
        file.seek(0)
        sha256 = self._storage.download(shard, file.write)
        if sha256 != shard.sha256 or file.tell() != shard.bytes:
            raise SchemaError(
                f"{self._storage.uri}/{shard.path}: {file.tell()} bytes with sha256 {sha256}, the manifest says "
                f"{shard.bytes} with {shard.sha256}; capture again"
            )
        file.flush()
        os.fsync(file.fileno())

    @contextmanager
    def _reserved(self, shard: Shard) -> Iterator[BinaryIO | None]:
        """A locked temporary file of the final size; None, after a wait, where that must be tried once more.

        The lock dies with its process, so that what a dead one left behind is told from what is being written.
        """
        path = self._temporary(shard.path)
        with self._admission():
            if self._path(shard.path).exists():
                file = None
            else:
                file = open(path, "ab+")  # noqa: SIM115
                is_mine = _lock(file)
                if is_mine:
                    file.truncate(0)  # of what a dead process left
                is_reserved = is_mine and self._make_room(shard.bytes)
                if is_reserved:
                    os.truncate(path, shard.bytes)
        if file is None:
            yield None
            return
        try:
            if is_reserved:
                with open(path, "rb+") as writable:
                    yield writable
                return
            if is_mine:  # everything else is being written right now
                time.sleep(0.05)
            else:
                fcntl.flock(file, fcntl.LOCK_SH)
            yield None
        finally:
            if is_mine:
                path.unlink(missing_ok=True)  # a finished one has its final name by now
            file.close()

    def _make_room(self, num_bytes: int) -> bool:
        """Whether so many bytes fit, once dead writers' leftovers and the longest unused files are gone."""
        for path in self._folder.glob(".*.tmp"):
            with open(path, "rb") as file:
                if _lock(file):
                    path.unlink()
        used = sum(path.stat().st_size for path in self._folder.iterdir())
        for path in sorted(self._folder.glob("*.arrow"), key=lambda path: path.stat().st_mtime_ns):
            if used + num_bytes <= self.max_bytes:
                break
            used -= path.stat().st_size
            path.unlink()
        return used + num_bytes <= self.max_bytes

    @contextmanager
    def _admission(self) -> Iterator[None]:
        """One process at a time decides what is in the folder."""
        with open(self._folder / ".lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _path(self, name: str) -> Path:
        """By its content: a cache that is made again has files of the same names, and other states in them."""
        return self._folder / f"{self._prefix}-{self._shards[name].sha256[:16]}-{name}"

    def _temporary(self, name: str) -> Path:
        return self._folder / f".{self._path(name).name}.tmp"


def forget(uri: str, folder: Path) -> None:
    """Remove the local copies of what was stored there. One that is open keeps its bytes until it is closed."""
    for path in folder.glob(f"{_prefix(uri)}-*"):
        path.unlink(missing_ok=True)


def _prefix(uri: str) -> str:
    """What tells the files of caches apart that share a staging folder."""
    return hashlib.sha256(uri.encode()).hexdigest()[:16]


def _lock(file: BinaryIO) -> bool:
    """Whether nobody else holds this file's lock; it is then held until the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
