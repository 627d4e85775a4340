"""Taking a subject, or what is too old, out of everything under a root.

What goes: the rows that stand for the subject's requests (in prompts and in the responses made of them), states, since
they can be made again, and whatever is half done. What stays: counts, verdicts and drafters; which versions learned
from the rows is for the registry to say (jobs/erase.py). Rows that stand for requests of others too count less.
"""

import logging
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.artifacts import AcceptanceReport, HiddenStateCache, Manifest, PromptSet, ResponseSet, find
from pipeline.collect import WORK
from pipeline.disk import QUEUE, remove_cache
from pipeline.errors import StageError
from pipeline.rows import tables as tables_of
from pipeline.schemas import PROMPTS
from pipeline.stages import exclusive
from pipeline.supersede import supersede

logger = logging.getLogger("slipstream")

ERASED, EXPIRED = "erased_rows", "expired_rows"


@dataclass
class Removed:
    """What was done under one root."""

    rows: set[str] = field(default_factory=set)
    """Ids of rows that are gone."""
    artifacts: list[str] = field(default_factory=list)
    """Derivation ids of prompts, responses and states that were rewritten or removed: who has one of them behind it may
    have learned from what is gone."""
    unfinished: list[str] = field(default_factory=list)
    """Folders of half-done work that were removed."""


def affected(root: Path, keep: Callable[[pa.Table], pa.Table]) -> set[str]:
    """Derivation ids of the prompts that lose or change rows by ``keep``, and of all that was made of them here.

    To be asked before anything is removed: afterwards nobody can tell.
    """
    root = Path(root)
    found: set[str] = set()
    for folder in _folders(root, PromptSet.kind):
        if (manifest := find(folder, PromptSet)) is not None:
            tables = (pq.read_table(folder / shard.path) for shard in tables_of(manifest.shards))
            if any(not keep(table).equals(table) for table in tables):
                found.add(folder.name)
    for kind, parent in ((ResponseSet, "prompts"), (HiddenStateCache, "responses")):
        for folder in _folders(root, kind.kind):
            if (made := find(folder, kind)) is not None and made.parents.get(parent) in found:
                found.add(folder.name)
    return found


def without_subjects(subjects: Collection[str]) -> Callable[[pa.Table], pa.Table]:
    """Takes the rows that stand for these subjects out of a table of prompts, and the subjects out of other rows."""
    gone = pa.array(sorted(subjects), pa.string())
    return lambda table: _without_subjects(table, gone)


def newer_than(before: float) -> Callable[[pa.Table], pa.Table]:
    """Leaves the rows of requests since then (seconds since 1970), and those whose records have no time."""
    return lambda table: table.filter(pc.fill_null(pc.greater_equal(table["last_seen"], before), True))


def erase(root: Path, subjects: Collection[str]) -> Removed:
    """Everything of these subjects (keyed hashes, see pipeline/tombstones.py) under a root is removed.

    Raises: StageError when another process is building or reading what has to change; the same call goes on.
    """
    gone = pa.array(sorted(subjects), pa.string())
    return _remove_rows(Path(root), without_subjects(subjects), gone, note=ERASED)


def expire(root: Path, before: float) -> Removed:
    """Every row whose newest request was served before this time (seconds since 1970) is removed.

    Raises: StageError as ``erase``.
    """
    nobody = pa.array([], pa.string())
    return _remove_rows(Path(root), newer_than(before), nobody, note=EXPIRED)


def _remove_rows(root: Path, rewrite: Callable[[pa.Table], pa.Table], subjects: pa.Array, *, note: str) -> Removed:
    """Each step looks at what is there, not at what the step before has done: a killed run is simply run again."""
    removed = Removed()
    for folder in _folders(root, PromptSet.kind):
        _take_out(folder, PromptSet, rewrite, subjects, removed, note=note)
    for folder in _folders(root, ResponseSet.kind):
        _take_out(folder, ResponseSet, _in_prompts(root, folder, subjects), subjects, removed, note=note)
    for folder in _folders(root, HiddenStateCache.kind):
        if _is_stale(root, folder, subjects):
            if not remove_cache(folder, "some of its rows are gone"):
                raise StageError(f"{folder}: in use, or it could not be removed; end what reads it, and run this again")
            removed.artifacts.append(folder.name)
    for folder in _folders(root, AcceptanceReport.kind):
        if find(folder, AcceptanceReport) is None:  # kept sittings hold the ids of replies
            _remove_unfinished(folder, removed)
    for folder in _folders(root, QUEUE):
        _remove_unfinished(folder, removed)
    return removed


def _take_out(
    folder: Path,
    kind: type[Manifest],
    rewrite: Callable[[pa.Table], pa.Table],
    subjects: pa.Array,
    removed: Removed,
    *,
    note: str,
) -> None:
    erased = set(subjects.to_pylist())
    keeps = lambda reject: reject.get("subject") not in erased  # noqa: E731
    if find(folder, kind) is None:
        _remove_unfinished(folder, removed)
        return
    shutil.rmtree(folder / WORK, ignore_errors=True)  # of a run that was killed when all but this was done
    if (done := supersede(folder, kind, rewrite, note=note, keeps_reject=keeps)) is not None:
        removed.rows |= done.rows
        removed.artifacts.append(folder.name)


def _in_prompts(root: Path, responses: Path, subjects: pa.Array) -> Callable[[pa.Table], pa.Table]:
    """Leaves the rows that the responses' prompts (still) have; where those are not here, all but the subjects' own."""
    manifest = find(responses, ResponseSet)
    prompts = root / PromptSet.kind / (manifest.parents.get("prompts", "") if manifest else "")
    if manifest is None or find(prompts, PromptSet) is None:
        return lambda table: table.filter(pc.invert(pc.is_in(table["conversation"], subjects)))
    kept = {path: pq.read_table(path, columns=["row_id"])["row_id"] for path in prompts.glob("*.parquet")}
    ids = pa.chunked_array([chunk for column in kept.values() for chunk in column.chunks], pa.string())
    return lambda table: table.filter(pc.is_in(table["row_id"], ids.combine_chunks()))


def _is_stale(root: Path, cache: Path, subjects: pa.Array) -> bool:
    """Whether states must go: half done, of replies that are others now, or with rows of these subjects."""
    manifest = find(cache, HiddenStateCache)
    if manifest is None:
        return True
    responses = find(root / ResponseSet.kind / manifest.parents.get("responses", ""), ResponseSet)
    if responses is not None:
        return manifest.responses != responses.content_id
    tables = [pq.read_table(path, columns=["conversation"]) for path in cache.glob("*.parquet")]
    return any(pc.any(pc.is_in(table["conversation"], subjects)).as_py() for table in tables)


def _remove_unfinished(folder: Path, removed: Removed) -> None:
    with exclusive(folder, "erase"):
        shutil.rmtree(folder)
    logger.info("erase: %s was not finished, and is removed", folder)
    removed.unfinished.append(str(folder))


def _without_subjects(table: pa.Table, gone: pa.Array) -> pa.Table:
    """A table of prompts without the rows that stand for these subjects, who are taken out of the others."""
    table = table.filter(pc.invert(pc.is_in(table["conversation"], gone)))
    erased, rows = set(gone.to_pylist()), table.select(["subjects", "subject_weights", "weight"]).to_pylist()
    if not any(erased.intersection(row["subjects"]) for row in rows):
        return table
    for row in rows:
        left = [pair for pair in zip(row["subjects"], row["subject_weights"], strict=True) if pair[0] not in erased]
        row["subjects"], row["subject_weights"] = [one for one, _ in left], [n for _, n in left]
        row["weight"] = sum(row["subject_weights"])
    for name in ("subjects", "subject_weights", "weight"):
        column = pa.array([row[name] for row in rows], PROMPTS.field(name).type)
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def _folders(root: Path, kind: str) -> list[Path]:
    return sorted(path for path in (root / kind).glob("*") if path.is_dir() and path.name[0] != ".")
