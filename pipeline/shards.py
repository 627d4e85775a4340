"""Resumable writing: a stage's rows in fixed parts, each committed whole and exactly once.

A part is a few files and, written last, ``part-00003.json``, which lists them with their hashes and the
rows that were rejected. After a crash the parts that have it stand untouched; whatever else lies in the
folder is removed. The manifest gathers the parts, so readers never see a part that was not finished.
"""

import fcntl
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.artifacts import MANIFEST, Frozen, Shard, describe_file, publish, sha256_file, write_durably
from pipeline.errors import SchemaError, StageError

REJECTS = "rejects.jsonl"
# A file system that nodes share may take so long to show one what another has written.
VISIBLE_WITHIN_S = 10.0

Files = dict[str, tuple[int, Callable[[Path], Any]]]
"""Final name → rows, and a function that writes the file to a path; a string that it returns is its SHA-256."""


class Part(Frozen):
    """One committed part: its files, and one record per rejected row."""

    shards: tuple[Shard, ...]
    rejects: tuple[dict[str, Any], ...] = ()
    counts: dict[str, int] = {}
    check: dict[str, float] = {}
    """Capture checks behind this part: the worst of each figure."""
    storage: str | None = None
    """Where its states files are (an object storage URI), once they are no longer beside this record."""

    @property
    def local(self) -> tuple[Shard, ...]:
        """The files that are beside this record."""
        return tuple(shard for shard in self.shards if self.storage is None or not is_states(shard))


class PartWriter:
    """The parts of one stage in one folder."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        with _commits(self.folder):  # engines of a killed run may still be at it: what they commit now is no leftover
            self.reread()
            self._remove_leftovers()

    def is_done(self, index: int) -> bool:
        """Whether this part is committed."""
        return index in self._committed

    def commit(
        self,
        index: int,
        files: Files,
        *,
        rejects: Sequence[dict[str, Any]] = (),
        counts: dict[str, int] | None = None,
    ) -> None:
        """Commit a part from here; see ``commit_part``."""
        self._committed[index] = commit_part(self.folder, index, files, rejects=rejects, counts=counts)

    def reread(self) -> None:
        """Look again for parts that other processes have committed."""
        self._committed = {int(p.stem.split("-")[1]): read_part(p) for p in self.folder.glob("part-*.json")}

    def finish(self, num_parts: int) -> tuple[tuple[Shard, ...], dict[str, int], dict[str, int]]:
        """All shards in order, rejects by reason, and summed counts; writes rejects.jsonl.

        Raises: StageError when a part of the plan is missing.
        """
        missing = sorted(set(range(num_parts)) - set(self._committed))
        if missing:
            raise StageError(f"{self.folder}: parts {missing} are not committed; run the stage again to finish them")
        parts = [self._committed[i] for i in range(num_parts)]
        rejects = [reject for part in parts for reject in part.rejects]
        counts: Counter[str] = Counter()
        for part in parts:
            counts.update(part.counts)
        lines = "".join(json.dumps(reject, sort_keys=True) + "\n" for reject in rejects)
        write_durably(self.folder / REJECTS, lines.encode())
        shards = tuple(shard for part in parts for shard in part.shards)
        reasons = dict(Counter(str(reject["reason"]) for reject in rejects))
        return (*shards, describe_file(self.folder / REJECTS, rows=len(rejects))), reasons, dict(counts)

    def _remove_leftovers(self) -> None:
        keep = {shard.path for part in self._committed.values() for shard in part.local} | {MANIFEST, REJECTS}
        for path in self.folder.iterdir():
            if path.is_file() and path.name not in keep and not path.name.startswith("part-"):
                path.unlink()


def commit_part(
    folder: Path,
    index: int,
    files: Files,
    *,
    rejects: Sequence[dict[str, Any]] = (),
    counts: dict[str, int] | None = None,
    check: dict[str, float] | None = None,
) -> Part:
    """Write a part's files, then commit it; from any process.

    Of two that commit one part (one of them was taken for dead), the first counts and the other's work is dropped.
    """
    shards, temporaries = [], {}
    for name, (rows, write) in files.items():
        temporary = folder / f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        known = write(temporary)
        sha256 = known if isinstance(known, str) else sha256_file(temporary)
        fsync_file(temporary)
        temporaries[name] = temporary
        shards.append(Shard(path=name, rows=rows, bytes=temporary.stat().st_size, sha256=sha256))
    part = Part(shards=tuple(shards), rejects=tuple(rejects), counts=counts or {}, check=check or {})
    with _commits(folder):
        if part_path(folder, index).exists():
            for temporary in temporaries.values():
                temporary.unlink()
            return read_part(part_path(folder, index))
        for name, temporary in temporaries.items():
            publish(temporary, folder / name)
        record(folder, index, part)
    return part


def record(folder: Path, index: int, part: Part) -> None:
    """Write a part's record: from here on it is committed, as this."""
    write_durably(part_path(folder, index), part.model_dump_json(indent=1).encode())


def is_states(shard: Shard) -> bool:
    """Whether this is a file of states, which may be kept elsewhere than its part's other files."""
    return shard.path.endswith(".arrow")


@contextmanager
def _commits(folder: Path) -> Iterator[None]:
    """One commit at a time in a folder, while files get their final names."""
    with open(folder / "part-commits.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def part_path(folder: Path, index: int) -> Path:
    """Where a part's record is: it is there exactly when the part is committed."""
    return Path(folder) / f"part-{index:05d}.json"


def write_table(table: pa.Table) -> Callable[[Path], None]:
    """A function that writes this table as Parquet to a path."""
    return lambda path: pq.write_table(table, path, compression="zstd")


def read_tables(folder: Path, shards: Sequence[Shard], schema: pa.Schema) -> pa.Table:
    """All rows of an artifact's Parquet shards, in order.

    Raises: SchemaError when a shard is not a whole Parquet file or has other columns.
    """
    tables = []
    for shard in shards:
        if not shard.path.endswith(".parquet"):
            continue
        path = Path(folder) / shard.path
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise SchemaError(f"{path}: not a whole Parquet file ({error}); remove {folder} and run the stage again")
        if table.schema.names != schema.names:
            raise SchemaError(
                f"{path}: columns {table.schema.names}, expected {schema.names}; another Slipstream made it: run "
                "the stage again"
            )
        tables.append(table.cast(schema))
    return pa.concat_tables(tables) if tables else schema.empty_table()


def fsync_file(path: Path) -> None:
    """Make a written file durable."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def drop_part(folder: Path, index: int) -> None:
    """Take a commit back: the part is not there, and its files are leftovers."""
    if part_path(folder, index).exists():
        part_path(folder, index).unlink()
        fsync_folder(folder)


def fsync_folder(folder: Path) -> None:
    """Make names that were given or taken in a folder durable."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_part(path: Path) -> Part:
    """A committed part by its record. Raises: SchemaError when one of its files is missing or of another size."""
    part = Part.model_validate_json(path.read_text())
    for shard in part.local:
        file = path.parent / shard.path
        if not file.exists() or file.stat().st_size != shard.bytes:
            raise SchemaError(f"{file}: damaged after it was committed; remove {path}, and run the stage again")
    return part
