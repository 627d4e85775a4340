"""ResponseSet → HiddenStateCache: the target reads every prompt and reply once more, and its states are kept.

A row's states are those of every token but its last, which is never an input: ``num_states = len(ids) - 1``.
No run begins before one prompt's states agree with a reference forward pass; no row enters the cache whose
states have holes, numbers that are none, zeros, norms of another scale, or another row's content.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import stages
from pipeline.artifacts import HiddenStateCache, ResponseSet, Shard, package_versions
from pipeline.capture_check import judge, typical_norms
from pipeline.config import Config
from pipeline.engines import Captured, CaptureRequest, Engines
from pipeline.errors import ConfigError, StageError
from pipeline.fingerprint import target_fingerprint
from pipeline.progress import Progress
from pipeline.regenerate import require_few_rejects, split_table
from pipeline.schemas import CACHE, RESPONSES
from pipeline.shards import PartWriter, read_tables, write_table
from pipeline.stages import Artifact
from pipeline.states import StatesFile, last_state_digest

STAGE, VERSION = "capture", 1
CHECK_TOKENS = 48
CHECK_OTHERS = 3

logger = logging.getLogger("slipstream")


def run(
    config: Config, responses: Artifact[ResponseSet], *, engines: Engines, target_layer_ids: Sequence[int]
) -> Artifact[HiddenStateCache]:
    """The hidden states of all responses at the outputs of ``target_layer_ids``, beside their ids.

    Raises: ConfigError on layers that are not in rising order; FingerprintError when the responses are
    another target's; StageError when the capture check fails or too many rows are quarantined.
    """
    layer_ids = tuple(target_layer_ids)
    if not layer_ids or list(layer_ids) != sorted(set(layer_ids)):
        raise ConfigError(f"target_layer_ids {list(layer_ids)}: expected different decoder layers in rising order")
    fingerprint = target_fingerprint(config.target.model, dtype=config.target.dtype, target_layer_ids=layer_ids)
    if responses.manifest.fingerprint is not None:
        made_with = responses.manifest.fingerprint.model_copy(update={"target_layer_ids": layer_ids})
        made_with.require_same(fingerprint, where=str(responses.folder))

    def build(folder: Path, derivation: str) -> HiddenStateCache:
        table = read_tables(responses.folder, responses.manifest.shards, RESPONSES)
        check = _check(config, table.slice(0, 1 + CHECK_OTHERS).to_pylist(), engines, layer_ids)
        shards, rejects, counts = _build(config, table, PartWriter(folder), engines, typical_norms(check, layer_ids))
        return HiddenStateCache(
            derivation_id=derivation,
            parents={"responses": responses.id},
            fingerprint=fingerprint,
            shards=shards,
            config=config.capture.model_dump(mode="json"),
            versions=package_versions(),
            counts=counts,
            rejects=rejects,
            hidden_size=engines.info().hidden_size,
            num_states=counts["states"],
            capture_check=check,
        )

    return stages.complete(
        config.root,
        HiddenStateCache,
        stage=STAGE,
        version=VERSION,
        parents={"responses": responses.id},
        meaning={"target": fingerprint.model_dump(), "rows_per_part": config.capture.rows_per_part},
        build=build,
    )


def _check(
    config: Config, rows: Sequence[Mapping[str, Any]], engines: Engines, layer_ids: Sequence[int]
) -> dict[str, float]:
    if not rows:
        raise StageError("capture: no responses to capture; run regenerate on some prompts first")
    first, *others = [_ids(row) for row in rows]
    check = engines.check_capture(first[:CHECK_TOKENS], others)
    judge(check, layer_ids=layer_ids, max_error=config.capture.max_check_error)
    worst = max(check[f"layer_{layer}_error"] for layer in layer_ids)
    logger.info("capture: check passed, largest relative error %.4f (bf16 noise is about 0.03)", worst)
    return check


def _build(
    config: Config, table: pa.Table, writer: PartWriter, engines: Engines, norms: Sequence[float]
) -> tuple[tuple[Shard, ...], dict[str, int], dict[str, int]]:
    parts = split_table(table, config.capture.rows_per_part)
    todo = [index for index in range(len(parts)) if not writer.is_done(index)]
    if todo:
        _capture_parts(parts, todo, writer, engines, norms)
    shards, rejects, counts = writer.finish(len(parts))
    require_few_rejects(STAGE, sum(rejects.values()), len(table), config.capture.max_reject_share, rejects)
    logger.info("capture: %s; quarantined: %s", counts, rejects or "none")
    return shards, rejects, counts


def _capture_parts(
    parts: Sequence[pa.Table], todo: Sequence[int], writer: PartWriter, engines: Engines, norms: Sequence[float]
) -> None:
    seen, total = Digests(), sum(map(len, parts))
    for index in set(range(len(parts))) - set(todo):
        _remember(writer.folder, index, seen)
    progress = Progress(STAGE, total_rows=total, rows_before=total - sum(len(parts[i]) for i in todo))

    def batches() -> Iterator[tuple[int, list[CaptureRequest], Path]]:
        for index in todo:
            requests = [CaptureRequest(row["row_id"], tuple(_ids(row))) for row in parts[index].to_pylist()]
            yield index, requests, _captured_path(writer.folder, index)

    for index, captured in engines.capture(batches(), norms):
        rows, rejects = _cache_rows(index, parts[index].to_pylist(), captured, seen)
        num_states = sum(rows["num_states"].to_pylist())
        files = _files(writer.folder, index, rows)
        writer.commit(index, files, rejects=rejects, counts={"rows": len(rows), "states": num_states})
        progress.add(rows=len(parts[index]), tokens=num_states)


def _files(folder: Path, index: int, table: pa.Table) -> dict[str, tuple[int, Any]]:
    captured = _captured_path(folder, index)
    return {
        _states_name(index): (len(table), lambda path: os.replace(captured, path)),
        f"rows-{index:05d}.parquet": (len(table), write_table(table)),
    }


def _cache_rows(
    index: int, rows: Sequence[Mapping[str, Any]], captured: Sequence[Captured], seen: "Digests"
) -> tuple[pa.Table, list[dict[str, Any]]]:
    """The part's table and its quarantined rows. Results are found by id, never by their order."""
    by_id = {result.row_id: result for result in captured}
    for row in rows:
        if (result := by_id.get(row["row_id"])) and not result.reason:
            seen.add(result.digest, row["row_id"], _ids(row))
    kept, rejects = [], []
    for row in rows:
        row_id = row["row_id"]
        result = by_id.get(row_id) or Captured(row_id, reason="no_result", detail={})
        if result.reason:
            rejects.append({"row_id": row_id, "reason": result.reason, **result.detail})
        elif twins := seen.twins(result.digest, _ids(row)):
            rejects.append({"row_id": row_id, "reason": "duplicate_states", "same_as": twins})
        else:
            kept.append(_cache_row(index, row, result))
    return pa.Table.from_pylist(kept, schema=CACHE), rejects


def _cache_row(index: int, row: Mapping[str, Any], result: Captured) -> dict[str, Any]:
    ids = _ids(row)
    return {
        **{name: row[name] for name in ("row_id", "conversation", "split", "slice", "weight")},
        "ids": ids,
        "num_prompt_tokens": len(row["prompt_ids"]),
        "num_states": len(ids) - 1,
        "states_file": _states_name(index),
        "states_batch": result.states_batch,
    }


class Digests:
    """Which inputs have which last state. Two inputs with one and the same: at least one is not its own."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, str]] = {}

    def add(self, digest: str, row_id: str, ids: Sequence[int]) -> None:
        """Remember a row's last state."""
        self._rows.setdefault(digest, {}).setdefault(hash(tuple(ids[:-1])), row_id)

    def twins(self, digest: str, ids: Sequence[int]) -> list[str]:
        """Rows that have this digest although their input was another."""
        own = hash(tuple(ids[:-1]))
        return [row_id for inputs, row_id in self._rows.get(digest, {}).items() if inputs != own]


def _remember(folder: Path, index: int, seen: Digests) -> None:
    """Take the digests of a part that an earlier run committed."""
    states = StatesFile(folder / _states_name(index))
    for row in pq.read_table(folder / f"rows-{index:05d}.parquet").to_pylist():
        seen.add(last_state_digest(states.words(row["states_batch"])), row["row_id"], row["ids"])


def _captured_path(folder: Path, index: int) -> Path:
    """Where the engine writes; the part's commit takes it from there, and a new run removes what is left."""
    return folder / f".capturing-{index:05d}.arrow"


def _states_name(index: int) -> str:
    return f"states-{index:05d}.arrow"


def _ids(row: Mapping[str, Any]) -> list[int]:
    return row["prompt_ids"] + row["response_ids"]
