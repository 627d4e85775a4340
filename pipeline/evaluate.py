"""Champion, challenger and control → AcceptanceReport: the same gate prompts, one engine, drafters swapped in turn.

Token ids go in exactly as they were; nothing is rendered again. The champion is always measured here, never
taken from an old file. What is stored are counts and row ids, never text.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline import acceptance
from pipeline.acceptance import RequestAcceptance, count_reply
from pipeline.artifacts import AcceptanceReport, HiddenStateCache, ResponseSet, package_versions
from pipeline.config import Config
from pipeline.errors import StageError
from pipeline.fingerprint import require_same_settings
from pipeline.schemas import ACCEPTANCE, RESPONSES
from pipeline.shards import PartWriter, read_tables, write_table
from pipeline.sittings import ROLES, Candidates, Server, Sitting, alternate
from pipeline.stages import Artifact, complete

STAGE_VERSION = 1
_WARM_UP_ROWS, _WARM_UP_TOKENS = 4, 8
_MAX_FAILED_SHARE = 0.05


def run(
    config: Config,
    candidates: Candidates,
    responses: Artifact[ResponseSet],
    *,
    server: Server,
    walk: Callable[[], Mapping[str, Mapping[str, Any]]] = dict,
    states: Artifact[HiddenStateCache] | None = None,
    recorded: float | None = None,
) -> Artifact[AcceptanceReport]:
    """The served acceptance and speed of every candidate on the gate prompts of ``responses``.

    ``walk()`` gives, by role, the counts of the offline walk over the rows of ``gate_rows`` in ``states``;
    ``recorded`` is the champion's acceptance length as it was last measured. Both are kept for the gate.
    Whatever happens, the server is left with the champion.

    Raises: FingerprintError when candidates or settings cannot be compared; StageError when there are no
    gate prompts or too many requests fail.
    """
    _require_comparable(candidates, responses)
    prompts = gate_rows(config, responses, block_size=candidates["champion"].manifest.block_size)
    parents = {role: candidate.id for role, candidate in candidates.items()} | {"responses": responses.id}
    parents |= {"states": states.id} if states else {}

    def build(folder: Path, derivation: str) -> AcceptanceReport:
        walks = {role: dict(counts) for role, counts in walk().items()}
        sittings = alternate(
            candidates,
            prompts,
            num_blocks=min(config.evaluate.blocks, len(prompts)),
            concurrency=config.evaluate.concurrency,
            warm_up=_warm_up_rows(config, responses),
            server=server,
        )
        return _report(
            folder,
            derivation,
            prompts=prompts,
            sittings=sittings,
            settings=_common_settings(config, candidates, responses, prompts, sittings),
            walks=walks,
            recorded=recorded,
            parents=parents,
            config=config,
        )

    return complete(
        config.root,
        AcceptanceReport,
        stage="evaluate",
        version=STAGE_VERSION,
        parents=parents,
        meaning={
            **config.evaluate.model_dump(mode="json", exclude={"server_url"}),
            "dtype": config.target.dtype,
            "max_model_len": config.target.max_model_len,
        },
        build=build,
    )


def gate_rows(config: Config, responses: Artifact[ResponseSet], *, block_size: int) -> list[dict[str, Any]]:
    """The gate prompts that are served, and their token budgets (``num_tokens``): also what a walk has to cover.

    Left out are rows whose recorded reply is a loop, and rows with no room: within a block of the context's
    end the engine stops drafting for the whole batch.

    Raises: StageError when none is left.
    """
    table = read_tables(responses.folder, responses.manifest.shards, RESPONSES)
    rows = []
    for row in sorted(table.to_pylist(), key=lambda row: row["row_id"]):
        room = config.target.max_model_len - len(row["prompt_ids"]) - block_size
        budget = min(config.evaluate.max_tokens, row["max_tokens"], room)
        loop = acceptance.is_loop(row["response_ids"], max_repeat_share=config.evaluate.max_repeat_share)
        if row["split"] == "gate" and budget > 1 and not loop:
            rows.append({**row, "num_tokens": budget})
    if not rows:
        raise StageError(
            f"{responses.folder}: no usable gate rows among {table.num_rows}; collect more traffic, or raise "
            "collect.gate_share"
        )
    return rows[: config.evaluate.max_prompts]


def _require_comparable(candidates: Candidates, responses: Artifact[ResponseSet]) -> None:
    if missing := {"champion", "challenger"} - set(candidates):
        raise StageError(f"evaluate: no {' and no '.join(sorted(missing))}; the champion is measured again every time")
    if unknown := set(candidates) - set(ROLES):
        raise StageError(f"evaluate: unknown roles {sorted(unknown)}, expected some of {list(ROLES)}")
    champion = candidates["champion"].manifest
    for role, artifact in candidates.items():
        drafter = artifact.manifest
        require_same_settings(
            {"block_size": champion.block_size, "mask_token_id": champion.mask_token_id},
            {"block_size": drafter.block_size, "mask_token_id": drafter.mask_token_id},
            where=f"champion and {role}",
        )
        if drafter.fingerprint and responses.manifest.fingerprint:
            # Responses depend on the target alone; which of its layers a drafter reads says nothing about them.
            layers = {"target_layer_ids": drafter.fingerprint.target_layer_ids}
            drafter.fingerprint.require_same(
                responses.manifest.fingerprint.model_copy(update=layers), where=f"{role} and the gate's responses"
            )


def _warm_up_rows(config: Config, responses: Artifact[ResponseSet]) -> list[dict[str, Any]]:
    """Rows outside the gate set, so that warming up leaves nothing of it in a cache."""
    rows = read_tables(responses.folder, responses.manifest.shards, RESPONSES).to_pylist()
    short = [r for r in rows if r["split"] != "gate" and len(r["prompt_ids"]) + 64 < config.target.max_model_len]
    return [{**row, "num_tokens": _WARM_UP_TOKENS} for row in short[:_WARM_UP_ROWS]]


def _common_settings(
    config: Config,
    candidates: Candidates,
    responses: Artifact[ResponseSet],
    prompts: Sequence[Mapping[str, Any]],
    sittings: Mapping[tuple[int, str], Sitting],
) -> dict[str, Any]:
    """The fingerprint of the measurement. Raises: FingerprintError when the engine's settings moved in between."""
    (first_key, first), *others = sittings.items()
    for key, sitting in others:
        require_same_settings(first.settings, sitting.settings, where=f"sittings {first_key} and {key}")
    target = responses.manifest.fingerprint
    return {
        **first.settings,
        "target": target.model_dump(mode="json", exclude={"target_layer_ids"}) if target else None,
        "prompts": _prompts_hash(prompts),
        "sampling": {"temperature": 0.0},
        "max_tokens": config.evaluate.max_tokens,
        "max_model_len": config.target.max_model_len,
        "dtype": config.target.dtype,
        "concurrency": config.evaluate.concurrency,
        "block_size": candidates["champion"].manifest.block_size,
    }


def _prompts_hash(prompts: Sequence[Mapping[str, Any]]) -> str:
    """Names the exact ids, and so the template, its arguments and the system prompts that were rendered into them."""
    exact = json.dumps([(row["prompt_ids"], row["num_tokens"]) for row in prompts])
    return hashlib.sha256(exact.encode()).hexdigest()[:16]


def _report(
    folder: Path,
    derivation: str,
    *,
    prompts: Sequence[Mapping[str, Any]],
    sittings: Mapping[tuple[int, str], Sitting],
    settings: dict[str, Any],
    walks: Mapping[str, Any],
    recorded: float | None,
    parents: dict[str, str],
    config: Config,
) -> AcceptanceReport:
    """The manifest, its table written: counts and ids of rows, never text or tokens."""
    rows, ids = _rows(prompts, sittings, max_repeat_share=config.evaluate.max_repeat_share)
    failed = sum(row["flag"] == acceptance.FAILED for row in rows)
    if failed > _MAX_FAILED_SHARE * len(rows):
        errors = sorted({r.error for s in sittings.values() for r in s.replies if r.error})
        raise StageError(f"evaluate: {failed} of {len(rows)} requests failed ({errors[:3]}); see the server's log")
    measured = _measured(rows, sittings, walks=walks, settings=settings)
    for role, replies in ids.items():
        shared = replies.keys() & ids["champion"].keys()
        measured[role]["num_replies_different"] = sum(replies[r] != ids["champion"][r] for r in shared)
    if recorded is not None:
        measured["champion"]["recorded_acceptance_length"] = recorded
    writer = PartWriter(folder)
    table = pa.Table.from_pylist(rows, schema=ACCEPTANCE)
    writer.commit(0, {"acceptance.parquet": (table.num_rows, write_table(table))})
    shards, rejects, _ = writer.finish(1)
    return AcceptanceReport(
        derivation_id=derivation,
        parents=parents,
        shards=shards,
        config=config.evaluate.model_dump(mode="json"),
        versions=package_versions(),
        counts={"prompts": len(prompts), "requests": len(rows), "failed": failed},
        rejects=rejects,
        measured=measured,
        settings=settings,
    )


def _rows(
    prompts: Sequence[Mapping[str, Any]], sittings: Mapping[tuple[int, str], Sitting], *, max_repeat_share: float
) -> tuple[list[dict[str, Any]], dict[str, dict[str, tuple[int, ...]]]]:
    """Rows of schemas.ACCEPTANCE, and by role and row the emitted ids, which are only compared here."""
    num_blocks = 1 + max(block for block, _ in sittings)
    rows, ids = [], {}
    for (block, role), sitting in sittings.items():
        for prompt, reply in zip(prompts[block::num_blocks], sitting.replies, strict=True):
            if reply.error:
                counted = RequestAcceptance(0, 0, 0, (), acceptance.FAILED)
            else:
                counted = count_reply(reply.spec, reply.token_ids, max_repeat_share=max_repeat_share)
                ids.setdefault(role, {})[prompt["row_id"]] = tuple(reply.token_ids)
            rows.append(
                {
                    "role": role,
                    **{name: prompt[name] for name in ("row_id", "conversation", "slice")},
                    "block": block,
                    **counted.__dict__,
                    "latency_s": reply.latency_s,
                    "finish_reason": reply.finish_reason,
                }
            )
    return rows, ids


def _measured(
    rows: Sequence[Mapping[str, Any]],
    sittings: Mapping[tuple[int, str], Sitting],
    *,
    walks: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """Role → totals, speed and slices over the requests that no role was flagged for."""
    usable = acceptance.unflagged_everywhere(rows)
    measured = {}
    for role in dict.fromkeys(row["role"] for row in rows):
        own = [row for row in usable if row["role"] == role]
        everything = [row for row in rows if row["role"] == role]
        wall_s = sum(sitting.wall_s for (_, r), sitting in sittings.items() if r == role)
        measured[role] = {
            **acceptance.total(own).as_dict(),
            "tokens_per_s": acceptance.total(everything).num_tokens / wall_s,
            "wall_s": round(wall_s, 3),
            "walk": walks.get(role),
            "flagged": acceptance.flagged(everything),
            "slices": {name: part.as_dict() for name, part in acceptance.by_slice(own).items()},
            "settings": dict(settings),
        }
    return measured
