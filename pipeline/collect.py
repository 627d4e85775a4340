"""Traffic log → PromptSet: consent, one canonical form, exact duplicates counted, split for good, sampled."""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline import stages
from pipeline.artifacts import PromptSet, package_versions
from pipeline.canonical import CanonicalRequest, canonical_request
from pipeline.config import CollectConfig, Config
from pipeline.errors import ConfigError, Rejected, StageError
from pipeline.on_record import ServedReply, served_reply
from pipeline.schemas import PROMPTS, SPLITS
from pipeline.shards import PartWriter, write_table
from pipeline.sources import Record, Source, Unreadable, find_sources, read_records
from pipeline.split import SplitKey, load_key, split_of

STAGE, VERSION = "collect", 3

# Policy at work, not damage: these records don't count towards max_reject_share.
_BY_POLICY = ("no_consent", "unsupported_adapter")

logger = logging.getLogger("slipstream")


@dataclass
class _Prompt:
    """A distinct prompt and the occurrence that stands for all: the smallest, so that no order matters.

    Its sampling and its served reply are that occurrence's; what others drew with differently only adds to the weight.
    """

    weight: int
    first: tuple[str, str, int]  # conversation, file, line
    request: CanonicalRequest
    served: ServedReply | None


@dataclass
class _Collected:
    prompts: dict[str, _Prompt] = field(default_factory=dict)
    rejects: list[dict[str, Any]] = field(default_factory=list)
    num_records: int = 0


def run(config: Config, *, key: SplitKey | None = None) -> stages.Artifact[PromptSet]:
    """The prompts of the configured sources. The same records give the same rows, in whatever order they lie.

    Raises: ConfigError without a typed-out redaction policy; StageError when too many records are rejected.
    """
    settings = config.collect
    if settings.redaction != "none":
        raise ConfigError(
            'collect.redaction = "required", but no redactor ships yet. Whoever may decide that these requests need '
            "none types it out: --set collect.redaction=none"
        )
    key = key or load_key(config)
    split_of(key, "", gate_share=settings.gate_share, validation_share=settings.validation_share)
    sources = find_sources(settings.sources)

    def build(folder: Path, derivation: str) -> PromptSet:
        return _build(config, key, sources, folder=folder, derivation=derivation)

    return stages.complete(
        config.root,
        PromptSet,
        stage=STAGE,
        version=VERSION,
        parents={},
        meaning={
            "sources": [[source.name, source.sha256] for source in sources],
            "split_key": key.check,
            **settings.model_dump(mode="json", exclude={"sources", "max_reject_share"}),
        },
        build=build,
    )


def _build(config: Config, key: SplitKey, sources: list[Source], *, folder: Path, derivation: str) -> PromptSet:
    settings = config.collect
    collected = _read(sources, key, settings)
    _require_few_rejects(collected, settings.max_reject_share)
    rows = _rows(collected.prompts, key, settings)
    counts = {
        "records": collected.num_records,
        "kept_records": sum(prompt.weight for prompt in collected.prompts.values()),
        "distinct_prompts": len(collected.prompts),
        "prompts": len(rows),
        **{split: sum(row["split"] == split for row in rows) for split in SPLITS},
        "with_served_ids": sum(row["served_ids"] is not None for row in rows),
    }
    writer = PartWriter(folder)
    if not writer.is_done(0):
        table = pa.Table.from_pylist(rows, schema=PROMPTS)
        files = {"prompts-00000.parquet": (len(rows), write_table(table))}
        writer.commit(0, files, rejects=collected.rejects, counts=counts)
    shards, rejects, counts = writer.finish(1)
    logger.info("collect: %s; rejected: %s", _listed(counts), _listed(rejects) or "none")
    return PromptSet(
        derivation_id=derivation,
        parents={},
        shards=shards,
        config=settings.model_dump(mode="json"),
        versions=package_versions(),
        counts=counts,
        rejects=rejects,
    )


def _read(sources: Iterable[Source], key: SplitKey, settings: CollectConfig) -> _Collected:
    collected = _Collected()
    for source in sources:
        for record in read_records(source):
            collected.num_records += 1
            if isinstance(record, Unreadable):
                collected.rejects.append(_reject(record, record.reason, offset=record.offset, error=record.error))
                continue
            try:
                if settings.consent == "recorded" and record.body.get("consent") != "recorded":
                    raise Rejected("no_consent")
                if settings.served_models and record.body.get("model") not in settings.served_models:
                    raise Rejected("unsupported_adapter")
                _add(collected.prompts, key, record, canonical_request(record.body))
            except Rejected as error:
                collected.rejects.append(_reject(record, str(error), id=_own_id(record)))
    return collected


def _add(prompts: dict[str, _Prompt], key: SplitKey, record: Record, request: CanonicalRequest) -> None:
    row_id = key.hash("row", request.prompt)
    first = (key.hash("conversation", request.subject), record.file, record.line)
    known = prompts.get(row_id)
    if known is None:
        prompts[row_id] = _Prompt(1, first, request, served_reply(record.body))
        return
    known.weight += 1
    if first < known.first:
        known.first, known.request, known.served = first, request, served_reply(record.body)


def _rows(prompts: dict[str, _Prompt], key: SplitKey, settings: CollectConfig) -> list[dict[str, Any]]:
    """One row a prompt, in the order of a keyed hash, of which max_prompts keeps the beginning."""
    ranked = sorted(prompts, key=lambda row_id: key.hash("sample", row_id))[: settings.max_prompts]
    rows = []
    for row_id in ranked:
        prompt, request = prompts[row_id], prompts[row_id].request
        conversation, file, line = prompt.first
        # A reply to a prompt that redaction changed is none to the prompt that is kept.
        served = prompt.served if settings.redaction == "none" else None
        shares = {"gate_share": settings.gate_share, "validation_share": settings.validation_share}
        rows.append(
            {
                "row_id": row_id,
                "conversation": conversation,
                "split": split_of(key, conversation, **shares),
                "slice": request.slice,
                "slices": request.slices,
                "weight": prompt.weight,
                "messages": request.messages,
                "tools": request.tools,
                "template_args": request.template_args,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "max_tokens": request.max_tokens,
                "sampling": request.sampling,
                "served_prompt_ids": served and served.prompt_ids,
                "served_ids": served and served.ids,
                "served_finish_reason": served and served.finish_reason,
                "served_by": served and served.target,
                "source": f"{file}:{line}",
            }
        )
    return rows


def _require_few_rejects(collected: _Collected, max_share: float) -> None:
    reasons = Counter(reject["reason"] for reject in collected.rejects)
    damaged = sum(count for reason, count in reasons.items() if reason not in _BY_POLICY)
    if damaged > max_share * collected.num_records:
        worst = max((r for r in collected.rejects if r["reason"] not in _BY_POLICY), key=lambda r: reasons[r["reason"]])
        raise StageError(
            f"collect: {damaged} of {collected.num_records} records rejected ({_listed(reasons)}), more than "
            f"collect.max_reject_share = {max_share}; the first {worst['reason']} is {worst['file']}:{worst['line']}. "
            "Repair the log, or raise the limit"
        )
    if not collected.prompts:
        raise StageError(
            f"collect: none of {collected.num_records} records can be used ({_listed(reasons) or 'no records'}); "
            'records need consent = "recorded", or collect.consent = "allow_all" typed out'
        )


def _reject(record: Record | Unreadable, reason: str, **details: Any) -> dict[str, Any]:
    return {"file": record.file, "line": record.line, "reason": reason, **details}


def _own_id(record: Record) -> str | None:
    own_id = record.body.get("id")
    return own_id.encode(errors="backslashreplace").decode() if isinstance(own_id, str) else None


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
