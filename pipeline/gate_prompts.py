"""The prompts that a comparison serves: held-out rows of the traffic, or a file's; and the general ones beside them.

Token ids go in exactly as they are. Rows of a ResponseSet were rendered when the target answered them; a file's are
rendered here, by the target's own template.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline import acceptance
from pipeline.artifacts import PromptSet, ResponseSet, TargetFingerprint, find
from pipeline.canonical import CanonicalRequest, canonical_request
from pipeline.config import Config
from pipeline.errors import Rejected, StageError
from pipeline.plan import row_seed
from pipeline.rows import tables as tables_of
from pipeline.sampling import measured
from pipeline.schemas import PROMPTS, RESPONSES
from pipeline.shards import read_tables
from pipeline.slices import served_slices
from pipeline.sources import Unreadable, find_sources, read_records
from pipeline.stages import Artifact, open_artifact

_WARM_UP_ROWS, _WARM_UP_TOKENS = 4, 8
_GENERAL_SEED = 1  # a cold start trains on those of seed 0

logger = logging.getLogger("slipstream")


@dataclass(frozen=True)
class GatePrompts:
    """What is served, and what it came from."""

    gate: list[dict[str, Any]]
    general: list[dict[str, Any]]
    warm_up: list[dict[str, Any]]
    parents: dict[str, str]
    fingerprint: TargetFingerprint | None
    rejects: dict[str, int] = field(default_factory=dict)
    """Reason → lines of prompt files that cannot be served, and gate rows that judge nothing."""

    def settings(self) -> dict[str, Any]:
        """What of the prompts must be equal for two measurements to be compared."""
        thinking = Counter(json.loads(row["slices"]).get("thinking", "default") for row in self.gate)
        return {
            "prompts": _hash(self.gate),
            "general_prompts": _hash(self.general) if self.general else None,
            "thinking": dict(sorted(thinking.items())),
        }

    def identity(self) -> dict[str, Any]:
        """What else a report rests on: whom the prompts stand for, and the target that they were rendered for."""
        told = [[row[name] for name in ("row_id", "conversation", "slices", "weight")] for row in self.gate]
        target = self.fingerprint.model_dump(mode="json") if self.fingerprint else None
        return {"rows": _digest(json.dumps(told)), "target": target}


def from_responses(config: Config, responses: Artifact[ResponseSet], *, block_size: int) -> GatePrompts:
    """The gate rows of a ResponseSet, and the configured general prompts.

    Raises: StageError when no gate row can be served; ConfigError when a file of general prompts is missing.
    """
    rows = read_tables(responses.folder, responses.manifest.shards, RESPONSES).to_pylist()
    learned = trained_before(config.root, [row["row_id"] for row in rows if row["split"] == "gate"])
    if learned:
        logger.info("evaluate: %d gate rows were train rows of earlier prompts, and judge nothing", len(learned))
    rows = [row for row in rows if row["row_id"] not in learned]
    if config.evaluate.sampling == "traffic":
        rows = _as_asked(config, responses, rows)
    # Warming up must leave nothing of the gate set in a cache.
    others = [row for row in rows if row["split"] != "gate"]
    general, rejects = general_rows(config, block_size=block_size)
    return GatePrompts(
        gate=_gate_rows(config, rows, block_size=block_size, where=responses.folder),
        general=general,
        warm_up=_warm_up(config, others),
        parents={"responses": responses.id},
        fingerprint=responses.manifest.fingerprint,
        rejects=rejects | ({"trained_before": len(learned)} if learned else {}),
    )


def trained_before(root: Path, row_ids: Sequence[str]) -> set[str]:
    """Those of these rows that any prompts under the root have in their train set.

    A prompt that is shared judges as soon as a subject of the gate set asks it too: a drafter may have learned it
    before.
    """
    wanted, found = pa.array(row_ids, pa.string()), set()
    for folder in sorted((Path(root) / PromptSet.kind).glob("*/")):
        if (manifest := find(folder, PromptSet)) is not None:
            for shard in tables_of(manifest.shards):
                table = pq.read_table(folder / shard.path, columns=["row_id", "split"])
                trained = pc.and_(pc.equal(table["split"], "train"), pc.is_in(table["row_id"], wanted))
                found.update(table.filter(trained)["row_id"].to_pylist())
    return found


def from_files(
    config: Config, files: Sequence[Path], *, fingerprint: TargetFingerprint, block_size: int
) -> GatePrompts:
    """The prompts of JSON lines files, rendered: what `slipstream compare` serves.

    Raises: ConfigError when a file is missing; StageError when none of its lines can be served.
    """
    rows, rejects = _file_rows(config, files, limit=config.evaluate.max_prompts, block_size=block_size)
    if not rows:
        raise StageError(
            f"{', '.join(map(str, files))}: no line can be served ({rejects or 'no lines'}); expected JSON lines with "
            '"messages" or "prompt", as chat requests have them'
        )
    general, more = general_rows(config, block_size=block_size)
    warm_up = [{**row, "prompt_ids": row["prompt_ids"][:8]} for row in rows]  # an opening alone, nothing to cache
    return GatePrompts(
        rows, general, _warm_up(config, warm_up), {}, fingerprint, dict(Counter(rejects) + Counter(more))
    )


def _as_asked(
    config: Config, responses: Artifact[ResponseSet], rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The rows with their requests' own sampling in place of how the target answered them, which was greedily."""
    prompts = open_artifact(config.root, PromptSet, responses.manifest.parents["prompts"])
    asked = read_tables(prompts.folder, prompts.manifest.shards, PROMPTS)
    names = ["row_id", "temperature", "top_p", "sampling"]
    own = {row["row_id"]: row for row in asked.select(names).to_pylist()}
    return [{**row, **own[row["row_id"]]} for row in rows]


def _gate_rows(
    config: Config, responses: Sequence[Mapping[str, Any]], *, block_size: int, where: Path
) -> list[dict[str, Any]]:
    """The gate prompts that are served, and their token budgets (``num_tokens``): also what a walk has to cover.

    A row weighs as many served requests as it stands for, those that sampling left out included. Left out are rows
    whose recorded reply is a loop, and rows with no room: within a block of the context's end the engine stops
    drafting for the whole batch.

    Raises: StageError when none is left.
    """
    rows = []
    for row in sorted(responses, key=lambda row: row["row_id"]):
        loop = acceptance.is_loop(row["response_ids"], max_repeat_share=config.evaluate.max_repeat_share)
        if row["split"] == "gate" and not loop and (served := _served(config, row, block_size)):
            rows.append({**row, **served, "weight": row["weight"] / row["inclusion_probability"]})
    if not rows:
        raise StageError(
            f"{where}: no usable gate rows among {len(responses)}; collect more traffic, or raise collect.gate_share"
        )
    return rows[: config.evaluate.max_prompts]


def general_rows(config: Config, *, block_size: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """``evaluate.general_prompts`` rows of the configured files, or of the prompts that ship; and rejected lines."""
    limit = config.evaluate.general_prompts
    if not limit:
        return [], {}
    if config.evaluate.general_sources:
        return _file_rows(config, config.evaluate.general_sources, limit=limit, block_size=block_size)
    from pipeline.workloads import general

    requests = [canonical_request(dict(body)) for body in islice(general.prompts(limit, seed=_GENERAL_SEED), limit)]
    return _rendered(config, requests, block_size=block_size)


def _file_rows(
    config: Config, files: Sequence[Path], *, limit: int | None, block_size: int
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    rejects: Counter[str] = Counter()
    requests = []
    for source in find_sources(files, setting="evaluate.general_sources"):
        for record in read_records(source):
            try:
                if isinstance(record, Unreadable):
                    raise Rejected(record.reason)
                requests.append(canonical_request(record.body))
            except Rejected as reason:
                rejects[str(reason)] += 1
    # By hash: a limit takes no beginning of a sorted file.
    requests.sort(key=lambda request: _digest(request.prompt))
    rows, more = _rendered(config, requests, block_size=block_size)
    return rows[:limit], dict(rejects + Counter(more))


def _rendered(
    config: Config, requests: Sequence[CanonicalRequest], *, block_size: int
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """One row a distinct request (prompt, slices and sampling), its weight the number of times it was made."""
    from pipeline.render import Renderer, RenderError

    renderer, rejects = Renderer(config.target.model), Counter()
    rows: dict[str, dict[str, Any]] = {}
    for request in requests:
        drawn = [request.prompt, request.slices, request.temperature, request.top_p]
        row_id = _digest(json.dumps(drawn if request.sampling == "{}" else [*drawn, request.sampling]))
        if row_id in rows:
            rows[row_id]["weight"] += 1
            continue
        try:
            ids = renderer.prompt_ids(
                json.loads(request.messages),
                tools=json.loads(request.tools) if request.tools else None,
                template_args=json.loads(request.template_args),
            )
        except RenderError as error:
            rejects[error.reason] += 1
            continue
        row = {
            "row_id": row_id,
            "conversation": _digest(request.subject),
            "slice": request.slice,
            "slices": request.slices,
            "weight": 1,
            "prompt_ids": ids,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "sampling": request.sampling,
            "max_tokens": request.max_tokens or config.evaluate.max_tokens,
        }
        if served := _served(config, row, block_size):
            rows[row_id] = {**row, **served}
        else:
            rejects["prompt_too_long"] += 1
    return list(rows.values()), dict(rejects)


def _served(config: Config, row: Mapping[str, Any], block_size: int) -> dict[str, Any] | None:
    """How a row is served: budget, sampling, slices; None where the context has no room for it."""
    settings = config.evaluate
    room = config.target.max_model_len - len(row["prompt_ids"]) - block_size
    budget = min(settings.max_tokens, row["max_tokens"], room)
    if budget <= 1:
        return None
    temperature = row["temperature"] if settings.sampling == "traffic" else 0.0
    own = json.loads(measured(row["sampling"], temperature=temperature, max_tokens=budget))
    sampling: dict[str, Any] = {"temperature": 0.0, **own}
    if temperature != 0.0:
        named = {name: row[name] for name in ("temperature", "top_p") if row[name] is not None}
        sampling = {**named, **own, "seed": row_seed(settings.seed, row["row_id"])}
    slices = served_slices(row["slices"], num_prompt_tokens=len(row["prompt_ids"]), temperature=temperature)
    return {"num_tokens": budget, "sampling": sampling, "slices": slices}


def _warm_up(config: Config, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    short = [row for row in rows if len(row["prompt_ids"]) + 64 < config.target.max_model_len]
    return [{**row, "num_tokens": _WARM_UP_TOKENS, "sampling": {"temperature": 0.0}} for row in short[:_WARM_UP_ROWS]]


def _hash(rows: Sequence[Mapping[str, Any]]) -> str:
    """Names the exact ids, and so the template, its arguments and the system prompts that were rendered into them."""
    return _digest(json.dumps([(row["prompt_ids"], row["num_tokens"], row["sampling"]) for row in rows]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
