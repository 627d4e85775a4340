"""Taking rows out of complete artifacts: tables are written anew without them, and a new manifest names those.

The derivation id stays, since the same work would now give just that: erased subjects are never collected again. The
content id changes, and so whatever was made of the old content is told apart from what is made of the new.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.artifacts import Manifest, Shard, commit, find, publish, write_durably
from pipeline.artifacts import describe_file as described
from pipeline.shards import REJECTS, fsync_file, write_table
from pipeline.stages import exclusive

M = TypeVar("M", bound=Manifest)


@dataclass(frozen=True)
class Superseded:
    """What was taken out of one artifact."""

    derivation: str
    rows: frozenset[str]
    """Ids of rows that are gone."""
    changed: int
    """Rows that stayed, with other values."""


def supersede(
    folder: Path,
    kind: type[M],
    rewrite: Callable[[pa.Table], pa.Table],
    *,
    note: str,
    keeps_reject: Callable[[dict[str, Any]], bool] = lambda reject: True,
) -> Superseded | None:
    """The artifact without what ``rewrite`` leaves out of its tables; None where nothing changed.

    ``note`` names the count that its manifest keeps of the rows that went; ``keeps_reject`` says of a line of its
    rejects whether it stays. Killed at any line, the same call goes on.

    Raises: StageError when another process is building the artifact; SchemaError on a manifest that cannot be read.
    """
    with exclusive(folder, note):
        manifest = find(folder, kind)
        if manifest is None:
            return None
        shards, gone, changed = [], set(), 0
        for shard in manifest.shards:
            if not shard.path.endswith(".parquet"):
                shards.append(_without(folder, shard, keeps_reject) if shard.path == REJECTS else shard)
                continue
            before = pq.read_table(folder / shard.path)
            after = rewrite(before)
            ids = set(before.column("row_id").to_pylist()) - set(after.column("row_id").to_pylist())
            if not ids and after.equals(before):
                shards.append(shard)
                continue
            shards.append(_write(folder, shard, after))
            gone |= ids
            changed += 1 if not ids else 0
        if tuple(shards) != manifest.shards:
            counts = {**manifest.counts, note: manifest.counts.get(note, 0) + len(gone)}
            commit(folder, manifest.model_copy(update={"shards": tuple(shards), "counts": counts}))
        _remove_others(folder, {shard.path for shard in shards})
    return Superseded(folder.name, frozenset(gone), changed) if gone or changed else None


def _without(folder: Path, shard: Shard, keeps: Callable[[dict[str, Any]], bool]) -> Shard:
    """The rejects that stay, under the same name: nobody reads them but people."""
    lines = (folder / shard.path).read_text().splitlines(keepends=True)
    kept = [line for line in lines if keeps(json.loads(line))]
    if len(kept) == len(lines):
        return described(folder / shard.path, rows=len(lines))
    write_durably(folder / shard.path, "".join(kept).encode())
    return described(folder / shard.path, rows=len(kept))


def _write(folder: Path, shard: Shard, table: pa.Table) -> Shard:
    """The table under a new name: readers of the old manifest find the old file until it goes."""
    stem, _, number = shard.path.removesuffix(".parquet").partition(".")
    path = folder / f"{stem}.{int(number or 0) + 1}.parquet"
    temporary = path.with_name(f".{path.name}.tmp")
    write_table(table)(temporary)
    fsync_file(temporary)
    publish(temporary, path)
    return described(path, rows=len(table))


def _remove_others(folder: Path, named: set[str]) -> None:
    """Remove tables that the manifest does not name and, with them, the records of parts, whose rejects name rows."""
    if left := [path for path in folder.glob("*.parquet") if path.name not in named]:
        for path in (*folder.glob("part-*.json"), *left):  # a kill in between leaves a table, so all is done again
            path.unlink()
