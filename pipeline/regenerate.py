"""PromptSet → ResponseSet: the target answers every prompt again, and its exact token ids are kept.

The end-of-turn token is part of ``response_ids`` when the target ended its turn (finish reason stop) and
absent when the budget did (length). Text is never encoded again: ids come from the engine or the row is
rejected.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline import stages
from pipeline.artifacts import PromptSet, ResponseSet, Shard, package_versions
from pipeline.config import Config
from pipeline.engines import Engines, GenerateRequest, Reply
from pipeline.errors import StageError
from pipeline.fingerprint import target_fingerprint
from pipeline.plan import Planned, plan, usable_context
from pipeline.progress import Progress
from pipeline.render import Renderer, RenderError
from pipeline.schemas import PROMPTS, RESPONSES
from pipeline.shards import PartWriter, read_tables, write_table
from pipeline.stages import Artifact

STAGE, VERSION = "regenerate", 2

logger = logging.getLogger("slipstream")


def run(config: Config, prompts: Artifact[PromptSet], *, engines: Engines) -> Artifact[ResponseSet]:
    """The target's answers to all prompts, in parts that a crash cannot take back.

    Raises: StageError when more than regenerate.max_reject_share of the prompts are rejected.
    """
    target, settings = config.target, config.regenerate
    fingerprint = target_fingerprint(target.model, dtype=target.dtype, target_layer_ids=())

    def build(folder: Path, derivation: str) -> ResponseSet:
        table = read_tables(prompts.folder, prompts.manifest.shards, PROMPTS)
        shards, rejects, counts = _build(config, table, PartWriter(folder), engines)
        return ResponseSet(
            derivation_id=derivation,
            parents={"prompts": prompts.id},
            fingerprint=fingerprint,
            shards=shards,
            config={"target": target.model_dump(mode="json"), **settings.model_dump(mode="json")},
            versions=package_versions(),
            counts=counts,
            rejects=rejects,
        )

    return stages.complete(
        config.root,
        ResponseSet,
        stage=STAGE,
        version=VERSION,
        parents={"prompts": prompts.id},
        meaning={
            "target": fingerprint.model_dump(),
            "usable_context": usable_context(config),
            **settings.model_dump(include={"max_tokens", "temperature", "seed", "rows_per_part"}),
        },
        build=build,
    )


def _build(
    config: Config, table: pa.Table, writer: PartWriter, engines: Engines
) -> tuple[tuple[Shard, ...], dict[str, int], dict[str, int]]:
    settings = config.regenerate
    parts = split_table(table, settings.rows_per_part)
    todo = [index for index in range(len(parts)) if not writer.is_done(index)]
    if todo:
        _answer_parts(config, parts, todo, writer, engines)
    shards, rejects, counts = writer.finish(len(parts))
    require_few_rejects(STAGE, sum(rejects.values()), len(table), settings.max_reject_share, rejects)
    if not counts.get("responses"):
        raise StageError(f"regenerate: no responses from {len(table)} prompts; collect some traffic first")
    logger.info("regenerate: %s; rejected: %s", counts, rejects or "none")
    return shards, rejects, counts


def _answer_parts(
    config: Config, parts: Sequence[pa.Table], todo: list[int], writer: PartWriter, engines: Engines
) -> None:
    renderer = Renderer(config.target.model)
    planned: dict[int, tuple[list[Planned], list[dict[str, Any]]]] = {}

    def batches() -> Iterator[tuple[int, list[GenerateRequest]]]:
        for index in todo:
            planned[index] = _plan_part(config, renderer, parts[index].to_pylist())
            yield index, [item.request for item in planned[index][0]]

    total = sum(map(len, parts))
    progress = Progress(STAGE, total_rows=total, rows_before=total - sum(len(parts[i]) for i in todo))
    num_rejects = 0
    for index, replies in engines.generate(batches()):
        items, rejects = planned.pop(index)
        table, counts, refused = _responses(items, replies)
        rejects += refused
        files = {f"responses-{index:05d}.parquet": (len(table), write_table(table))}
        writer.commit(index, files, rejects=rejects, counts=counts)
        progress.add(rows=len(parts[index]), tokens=counts["response_tokens"])
        num_rejects += len(rejects)
        reasons = dict(Counter(reject["reason"] for reject in rejects))
        require_few_rejects(STAGE, num_rejects, total, config.regenerate.max_reject_share, reasons)


def _plan_part(
    config: Config, renderer: Renderer, rows: Sequence[Mapping[str, Any]]
) -> tuple[list[Planned], list[dict[str, Any]]]:
    items, rejects = [], []
    for row in rows:
        try:
            found = plan(config, row, renderer.row_ids(row), target_id="")
        except RenderError as error:
            found = {"reason": error.reason, "detail": error.detail}
        if isinstance(found, Planned):
            items.append(found)
        else:
            rejects.append({"row_id": row["row_id"], "source": row["source"], **found})
    return items, rejects


def _responses(
    items: Sequence[Planned], replies: Sequence[Reply]
) -> tuple[pa.Table, dict[str, int], list[dict[str, Any]]]:
    """The part's table, its counts and its rejects. Replies are found by id, never by their order."""
    by_id = {reply.row_id: reply for reply in replies}
    rows, rejects = [], []
    for item in items:
        reply = by_id.get(item.request.row_id) or Reply(item.request.row_id, error="the engine returned no reply")
        if reply.error or not reply.ids:
            detail = reply.error or "the engine returned no token ids, and text is not encoded again"
            rejects.append({"row_id": reply.row_id, "reason": "no_reply", "detail": detail})
        else:
            rows.append(_response_row(item, reply))
    counts = Counter({"responses": len(rows), "clamped": sum(row["clamped"] for row in rows)})
    counts.update(f"finish_{row['finish_reason']}" for row in rows)
    counts["response_tokens"] = sum(len(row["response_ids"]) for row in rows)
    counts["prompt_tokens"] = sum(len(row["prompt_ids"]) for row in rows)
    return pa.Table.from_pylist(rows, schema=RESPONSES), dict(counts), rejects


def _response_row(item: Planned, reply: Reply) -> dict[str, Any]:
    kept = {name: item.row[name] for name in ("row_id", "conversation", "split", "slice", "slices", "weight")}
    return {
        **kept,
        "prompt_ids": list(item.request.prompt_ids),
        "response_ids": list(reply.ids),
        "finish_reason": reply.finish_reason,
        "temperature": item.request.temperature,
        "top_p": item.request.top_p,
        "max_tokens": item.request.max_tokens,
        "clamped": item.clamped,
    }


def split_table(table: pa.Table, rows_per_part: int) -> list[pa.Table]:
    """The table in parts, without a copy."""
    return [table.slice(start, rows_per_part) for start in range(0, len(table), rows_per_part)]


def require_few_rejects(stage: str, rejected: int, total: int, max_share: float, reasons: Mapping[str, int]) -> None:
    """Raises: StageError when a larger share of a stage's rows is rejected than its config allows."""
    if rejected > max_share * total:
        raise StageError(
            f"{stage}: {rejected} of {total} rows rejected ({dict(reasons)}), more than {stage}.max_reject_share = "
            f"{max_share}. The committed parts list them with reasons; repair the cause, or raise the limit"
        )
