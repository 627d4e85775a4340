"""PromptSet → ResponseSet: the target answers every prompt again, and its exact token ids are kept.

The end-of-turn token is part of ``response_ids`` when the target ended its turn (finish reason stop) and
absent when the budget did (length). Text is never encoded again: ids come from the engine or the row is
rejected. With ``capture.in_pass`` the states of the replies are kept in the same pass (pipeline/answering.py).
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pipeline import capture, stages
from pipeline.answering import AnswerWork
from pipeline.artifacts import MANIFEST, PromptSet, ResponseSet, Shard, package_versions
from pipeline.config import Config
from pipeline.disk import make_room
from pipeline.engines import Engines
from pipeline.errors import StageError
from pipeline.fingerprint import fingerprint_id, target_fingerprint
from pipeline.follow import Limit, follow
from pipeline.plan import usable_context
from pipeline.progress import Progress
from pipeline.rows import num_rows
from pipeline.shards import PartWriter
from pipeline.stages import Artifact

STAGE, VERSION = "regenerate", 4
_EXECUTION_ARGS = {
    "enforce_eager", "gpu_memory_utilization", "max_num_batched_tokens", "enable_chunked_prefill", "compilation_config",
    "async_scheduling", "disable_custom_all_reduce", "distributed_executor_backend", "cpu_offload_gb",
}  # fmt: skip

logger = logging.getLogger("slipstream")


def run(
    config: Config, prompts: Artifact[PromptSet], *, engines: Engines, target_layer_ids: Sequence[int] = ()
) -> Artifact[ResponseSet]:
    """The target's answers to all prompts, in parts that a crash cannot take back.

    Where layers are named and ``capture.in_pass`` is on, the parts of their cache are made as well; the capture stage
    finds them. Not so for a stream, whose states have no place to stay.

    Raises: StageError when more than regenerate.max_reject_share of the prompts are rejected.
    """
    target, settings = config.target, config.regenerate
    fingerprint = target_fingerprint(target.model, dtype=target.dtype, target_layer_ids=())

    def build(folder: Path, derivation: str) -> ResponseSet:
        in_pass = target_layer_ids and config.capture.in_pass and not config.capture.stream
        place = capture.place(config, derivation, target_layer_ids) if in_pass else None
        target_id, cache = fingerprint_id(fingerprint), place.plan if place else None
        work = AnswerWork(config, prompts.folder, prompts.manifest.shards, folder, target_id, cache)
        shards, rejects, counts = _build(config, work, place, engines)
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
        # Not how many engines there are, nor whether a drafter speculates: neither changes what the target says, but
        # for the noise that any other batch shape brings too. A new champion leaves the answers as they are.
        meaning={
            "target": fingerprint.model_dump(),
            "usable_context": usable_context(config),
            **settings.model_dump(include={"max_tokens", "temperature", "seed", "rows_per_part", "reuse"}),
            **({"engine_args": telling} if (telling := _telling(settings.engine_args)) else {}),
        },
        build=build,
    )


def _telling(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """The engine arguments that may change what the target says, such as its quantization."""
    return {name: value for name, value in engine_args.items() if name not in _EXECUTION_ARGS}


def _build(
    config: Config, work: AnswerWork, place: capture.Place | None, engines: Engines
) -> tuple[tuple[Shard, ...], dict[str, int], dict[str, int]]:
    writer, total = PartWriter(work.folder), num_rows(work.shards)
    limit = Limit(STAGE, config.regenerate.max_reject_share)
    todo = [index for index in range(work.num_parts) if not writer.is_done(index)]
    with ExitStack() as stack:
        if place and todo:
            stack.enter_context(stages.exclusive(place.folder, capture.STAGE))
            _prepare_cache(place.folder)
            bound = work.max_tokens()
            size = capture.expected(config, place.plan, num_rows=total, num_tokens=bound, is_bound=True)
            make_room(config, place.derivation, size)
        progress = Progress(STAGE, total_rows=total, rows_before=total - sum(map(work.size, todo)))
        quarantine = Limit(capture.STAGE, config.capture.max_reject_share)
        retries = follow(engines, work, todo, progress=progress, rows=limit, states=quarantine)
    writer.reread()
    shards, rejects, counts = writer.finish(work.num_parts)
    limit.require(rejects, total)
    limit.require_all(counts.get("responses", 0), rejects, total)
    if not counts.get("responses"):
        raise StageError(f"regenerate: no responses from {total} prompts; collect some traffic first")
    counts["retries"] = retries
    logger.info("regenerate: %s; rejected: %s", counts, rejects or "none")
    return shards, rejects, counts


def _prepare_cache(folder: Path) -> None:
    """Room for parts of the cache. One that was complete had the states of replies that are being made anew."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    PartWriter(folder)  # removes what a killed run left
