"""ResponseSet → HiddenStateCache: the target's hidden states of every prompt and reply, beside their ids.

A row's states are those of every token but its last, which is never an input: ``num_states = len(ids) - 1``. Most are
taken while the target answers (pipeline/answering.py), and this stage finds their parts done; the others are read by
one prefill more. No engine begins before one prompt's states agree with what they must be; no row enters the cache
whose states have holes, numbers that are none, zeros, norms of another scale, or another row's content.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import stages, twins
from pipeline.artifacts import (
    MANIFEST,
    HiddenStateCache,
    ResponseSet,
    Shard,
    TargetFingerprint,
    artifact_dir,
    derivation_id,
    find,
    package_versions,
)
from pipeline.cache_parts import CachePlan
from pipeline.config import Config
from pipeline.disk import Estimate, estimate, make_room
from pipeline.engines import Engines
from pipeline.errors import ConfigError
from pipeline.fingerprint import target_fingerprint
from pipeline.follow import Limit, follow
from pipeline.progress import Progress
from pipeline.reading import CaptureWork
from pipeline.rows import ids_of_rows
from pipeline.schemas import CACHE, SPLITS
from pipeline.shards import PartWriter, commit_part, drop_part, part_path, read_part, write_table
from pipeline.stages import Artifact
from pipeline.storage import move_part, storage_of

STAGE, VERSION = "capture", 2

logger = logging.getLogger("slipstream")


@dataclass(frozen=True)
class Place:
    """Where the states of some responses are, or will be: it is known before there are any."""

    folder: Path
    derivation: str
    plan: CachePlan


def place(config: Config, responses: str, target_layer_ids: Sequence[int], *, splits: Sequence[str] = SPLITS) -> Place:
    """The cache of the responses of this derivation id. Raises: ConfigError on layers that are not in rising order."""
    layer_ids = _rising(target_layer_ids)
    target = target_fingerprint(config.target.model, dtype=config.target.dtype, target_layer_ids=layer_ids)
    derivation = derivation_id(STAGE, VERSION, {"responses": responses}, _meaning(config, target, splits))
    folder = artifact_dir(config.root, HiddenStateCache, derivation)
    return Place(folder, derivation, _plan(config, folder, derivation, layer_ids))


def run(
    config: Config,
    responses: Artifact[ResponseSet],
    *,
    engines: Engines,
    target_layer_ids: Sequence[int],
    splits: Sequence[str] = SPLITS,
) -> Artifact[HiddenStateCache]:
    """The hidden states of the responses of these splits at the outputs of ``target_layer_ids``, beside their ids.

    Raises: ConfigError on layers that are not in rising order; FingerprintError when the responses are
    another target's; StageError when the capture check fails or too many rows are quarantined.
    """
    layer_ids = _rising(target_layer_ids)
    fingerprint = target_fingerprint(config.target.model, dtype=config.target.dtype, target_layer_ids=layer_ids)
    if responses.manifest.fingerprint is not None:
        made_with = responses.manifest.fingerprint.model_copy(update={"target_layer_ids": layer_ids})
        made_with.require_same(fingerprint, where=str(responses.folder))

    parents, meaning = {"responses": responses.id}, _meaning(config, fingerprint, splits)
    derivation = derivation_id(STAGE, VERSION, parents, meaning)
    _forget_other_replies(artifact_dir(config.root, HiddenStateCache, derivation), responses)

    def build(folder: Path, derivation: str) -> HiddenStateCache:
        plan = _plan(config, folder, derivation, layer_ids)
        work = CaptureWork(plan, responses.folder, responses.manifest.shards, tuple(splits))
        shards, rejects, counts = _build(config, work, derivation, engines)
        parts = [read_part(part_path(folder, index)) for index in range(work.num_parts)]
        return HiddenStateCache(
            derivation_id=derivation,
            parents=parents,
            fingerprint=fingerprint,
            shards=shards,
            config=config.capture.model_dump(mode="json"),
            versions=package_versions(),
            counts=counts,
            rejects=rejects,
            hidden_size=hidden_size(config.target.model),
            num_states=counts.get("states", 0),
            states_format=config.capture.states_format,
            splits=tuple(splits),
            responses=responses.manifest.content_id,
            storage=plan.storage,
            capture_check=worst([part.check for part in parts]),
        )

    return stages.complete(
        config.root,
        HiddenStateCache,
        stage=STAGE,
        version=VERSION,
        parents=parents,
        meaning=meaning,
        build=build,
    )


def _forget_other_replies(folder: Path, responses: Artifact[ResponseSet]) -> None:
    """A cache is complete no more when its responses were removed and made anew: its parts are looked at again."""
    found = find(folder, HiddenStateCache)
    if found is not None and found.responses not in ("", responses.manifest.content_id):
        with stages.exclusive(folder, STAGE):
            (folder / MANIFEST).unlink(missing_ok=True)


def expected(config: Config, plan: CachePlan, *, num_rows: int, num_tokens: int, is_bound: bool = False) -> Estimate:
    """What a cache of so many rows and tokens will take."""
    return estimate(
        config,
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_layers=len(plan.layer_ids),
        hidden_size=hidden_size(config.target.model),
        is_bound=is_bound,
    )


def _build(
    config: Config, work: CaptureWork, derivation: str, engines: Engines
) -> tuple[tuple[Shard, ...], dict[str, int], dict[str, int]]:
    folder, limit = work.plan.folder, Limit(STAGE, config.capture.max_reject_share)
    folder.mkdir(parents=True, exist_ok=True)
    extents = [work.extent(index) for index in range(work.num_parts)]
    sizes = [num_rows for num_rows, _ in extents]
    _drop_parts_of_other_replies(work)
    _drop_parts_on_other_storage(work)
    writer = PartWriter(folder)
    todo = [index for index in range(work.num_parts) if not writer.is_done(index)]
    for index in todo:
        if not sizes[index]:
            _commit_empty(folder, index)
    todo = [index for index in todo if sizes[index]]
    if todo:
        num_tokens = sum(num_tokens for _, num_tokens in extents)
        make_room(config, derivation, expected(config, work.plan, num_rows=sum(sizes), num_tokens=num_tokens))
    progress = Progress(STAGE, total_rows=sum(sizes), rows_before=sum(sizes) - sum(sizes[index] for index in todo))
    retries = follow(engines, work, todo, progress=progress, rows=limit)
    twins.quarantine_twins(folder, work.num_parts)
    if work.plan.storage:
        for index in range(work.num_parts):
            move_part(folder, index, work.plan.storage)  # what a kill has left here
    writer.reread()
    shards, rejects, counts = writer.finish(work.num_parts)
    counts = {"rows": 0, "states": 0, **counts, "retries": retries}
    limit.require(rejects, sum(sizes))
    limit.require_all(counts["rows"], rejects, sum(sizes))
    logger.info("capture: %s; quarantined: %s", counts, rejects or "none")
    return shards, rejects, counts


def _commit_empty(folder: Path, index: int) -> None:
    """A part of the responses without a row that is captured: no engine is started for it."""
    table = CACHE.empty_table()
    commit_part(folder, index, {f"rows-{index:05d}.parquet": (0, write_table(table))}, counts={"rows": 0, "states": 0})


def _drop_parts_of_other_replies(work: CaptureWork) -> None:
    """Forget parts whose rows are not those of the responses: they belong to ones that were removed and made anew."""
    for index in filter(work.plan.is_done, range(work.num_parts)):
        part = read_part(part_path(work.plan.folder, index))
        table = pq.read_table(work.plan.folder / twins.table_of(part).path, columns=["row_id", "ids"])
        cached, asked = _by_id(table, "ids"), _by_id(work.table(index), "prompt_ids", "response_ids")
        rejected = {reject["row_id"] for reject in part.rejects}
        if set(cached) | rejected != set(asked) or any(cached[row_id] != asked[row_id] for row_id in cached):
            logger.warning("capture: part %d holds the states of other replies; it is made again", index)
            drop_part(work.plan.folder, index)


def _drop_parts_on_other_storage(work: CaptureWork) -> None:
    """Forget parts that were moved to another storage than capture.storage is now: a cache is in one place."""
    for index in filter(work.plan.is_done, range(work.num_parts)):
        place = read_part(part_path(work.plan.folder, index)).storage
        if place not in (None, work.plan.storage):
            logger.warning(
                "capture: the states of part %d are on %s, which is capture.storage no more; it is made again, and "
                "what is there can be removed",
                index,
                place,
            )
            drop_part(work.plan.folder, index)


def _by_id(table: pa.Table, *columns: str) -> dict[str, bytes]:
    ids = (ids.tobytes() for ids in ids_of_rows(table, *columns))
    return dict(zip(table.column("row_id").to_pylist(), ids, strict=True))


def worst(checks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The worst of every figure of many capture checks: the largest, but for the share of tokens given back."""
    names = sorted({name for check in checks for name in check})
    found = {name: [check[name] for check in checks if name in check] for name in names}
    return {name: min(values) if name == "head_top1" else max(values) for name, values in found.items()}


def hidden_size(model: Path) -> int:
    """Numbers of a state of one layer. Raises: ConfigError when the target's config.json has none."""
    config = json.loads((model / "config.json").read_text())
    config = config.get("text_config", config)
    if not isinstance(config.get("hidden_size"), int):
        raise ConfigError(f"{model / 'config.json'}: no hidden_size; target.model must be a text model's folder")
    return config["hidden_size"]


def _plan(config: Config, folder: Path, derivation: str, layer_ids: tuple[int, ...]) -> CachePlan:
    storage = storage_of(config.capture.storage, derivation) if config.capture.storage else None
    return CachePlan(folder, layer_ids, config.capture, storage)


def _meaning(config: Config, target: TargetFingerprint, splits: Sequence[str]) -> dict[str, Any]:
    return {
        "target": target.model_dump(),
        "states_format": config.capture.states_format,
        "splits": [split for split in SPLITS if split in splits],
    }


def _rising(target_layer_ids: Sequence[int]) -> tuple[int, ...]:
    layer_ids = tuple(target_layer_ids)
    if not layer_ids or list(layer_ids) != sorted(set(layer_ids)):
        raise ConfigError(f"target_layer_ids {list(layer_ids)}: expected different decoder layers in rising order")
    return layer_ids
