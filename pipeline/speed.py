"""One drafter → SpeedReport: tokens/s and latencies against concurrency, by speculated tokens; and losslessness.

A server is started for every number of speculated tokens, 0 being the target alone, one after the other, since a
machine may have one accelerator. Each visit measures every concurrency; the servers take turns in opposite order
(0 3 7, 7 3 0), so that a slow change of the machine meets all alike. A visit that is measured is kept, so a crash
costs one. What is stored are times, counts and digests of replies, never text or tokens.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol

from pipeline.artifacts import DrafterCheckpoint, SpeedReport, package_versions
from pipeline.config import Config
from pipeline.errors import StageError
from pipeline.fingerprint import require_same_settings
from pipeline.gate_prompts import GatePrompts
from pipeline.shards import PartWriter
from pipeline.sittings import Reply
from pipeline.speed_plan import Plan, plan_of
from pipeline.speed_points import lossless, points_of, recommend
from pipeline.stages import Artifact, complete

logger = logging.getLogger("slipstream")

STAGE_VERSION = 1
_WARM_UP_TOKENS = 8


class Load(Protocol):
    """What a load generator measured at one concurrency."""

    num_requests: int
    num_tokens: int
    wall_s: float
    ttft_s: Sequence[float]
    itl_s: Sequence[float]
    num_drafts: int
    num_accepted_tokens: int


class Server(Protocol):
    """One engine with a fixed number of speculated tokens, its prefix cache off."""

    def load(self, prompts: Sequence[Sequence[int]], *, concurrency: int, max_tokens: int) -> Load:
        """How fast the greedy replies to these prompts come, ``concurrency`` at a time."""

    def answer(self, requests: Sequence[Mapping[str, Any]], *, concurrency: int) -> Sequence[Reply]:
        """The replies to these completion requests, in order."""

    def settings(self) -> Mapping[str, Any]:
        """What must be equal for two visits to be compared; the speculation stands apart, under ``speculation``."""


Servers = Callable[[int], AbstractContextManager[Server]]
"""Number of speculated tokens → a server that lives as long as the block; 0: without a drafter."""


def run(
    config: Config,
    drafter: Artifact[DrafterCheckpoint],
    prompts: GatePrompts,
    *,
    servers: Servers,
    flags: Mapping[str, Any] | None = None,
) -> Artifact[SpeedReport]:
    """The speed of ``drafter`` and of its target alone on the gate prompts, greedy, at every concurrency.

    ``flags`` are the engine settings that the servers reproduce, where a replica was named.

    Raises: ConfigError for numbers that the drafter cannot speculate; FingerprintError when the drafter is another
    target's or the servers' settings differ; StageError when no prompt fits or a request fails.
    """
    if drafter.manifest.fingerprint and prompts.fingerprint:
        layers = {"target_layer_ids": drafter.manifest.fingerprint.target_layer_ids}
        drafter.manifest.fingerprint.require_same(
            prompts.fingerprint.model_copy(update=layers), where="the drafter and the gate's prompts"
        )
    plan = plan_of(config, prompts, block_size=drafter.manifest.block_size)

    def build(folder: Path, derivation: str) -> SpeedReport:
        visits = _visit_all(plan, folder, servers)
        return _report(config, plan, prompts, visits, derivation, folder=folder, drafter=drafter)

    return complete(
        config.root,
        SpeedReport,
        stage="speed",
        version=STAGE_VERSION,
        parents={"drafter": drafter.id, **prompts.parents},
        meaning={
            **config.speed.model_dump(mode="json"),
            "concurrency": config.evaluate.concurrency,
            "max_tokens": plan.max_tokens,
            "prompts": prompts.settings()["prompts"],
            "dtype": config.target.dtype,
            "max_model_len": config.target.max_model_len,
            "max_num_seqs": config.serving.max_num_seqs,
            "flags": dict(flags or {}),
        },
        build=build,
    )


def _visit_all(plan: Plan, folder: Path, servers: Servers) -> list[dict[str, Any]]:
    """What every visit found, those of an interrupted run included."""
    writer = PartWriter(folder)
    before = sum(writer.is_done(index) for index in range(len(plan.visits)))
    if before:
        logger.info("speed: %d of %d visits were there already", before, len(plan.visits))
    progress = _Progress(len(plan.concurrencies) * (len(plan.visits) - before))
    for index, number in enumerate(plan.visits):
        if writer.is_done(index):
            continue
        logger.info("speed: visit %d/%d, %s: starting a server", index + 1, len(plan.visits), _name(number))
        with servers(number) as server:
            found = _visit(plan, server, number, repeat=index // len(plan.numbers), progress=progress)
        body = json.dumps(found, indent=None).encode()
        writer.commit(index, {_file(index): (len(found["points"]), lambda path, body=body: path.write_bytes(body))})
    return [json.loads((folder / _file(index)).read_text()) for index in range(len(plan.visits))]


def _visit(plan: Plan, server: Server, number: int, *, repeat: int, progress: "_Progress") -> dict[str, Any]:
    """One server at every concurrency, warmed up, and in its first visit the replies that losslessness compares."""
    most = max(plan.concurrencies)
    _answer(server, list(islice(cycle(plan.warm_up), most)), max_tokens=_WARM_UP_TOKENS, concurrency=most)
    points = []
    for concurrency in plan.concurrencies:
        prompts = plan.prompts(concurrency, repeat)
        load = server.load(prompts, concurrency=concurrency, max_tokens=plan.max_tokens)
        points.append({"concurrency": concurrency, **{name: getattr(load, name) for name in Load.__annotations__}})
        progress.add(load, number, concurrency)
    replies = {}
    if repeat == 0 and plan.lossless:
        # A verification has the shape of several requests at a time. In half precision that alone moves near-ties, so
        # the target alone answers in that shape too: what differs there is no fault of speculation.
        shapes = {"alone": 1, "together": max(plan.numbers) + 1} if number == 0 else {"alone": 1}
        for name, concurrency in shapes.items():
            answers = _answer(server, plan.lossless, max_tokens=plan.max_tokens, concurrency=concurrency)
            replies[name] = [_digest(reply.token_ids) for reply in answers]
    settings = dict(server.settings())
    return {"num_speculative_tokens": number, "settings": settings, "points": points, "replies": replies}


def _answer(server: Server, rows: Sequence[Mapping[str, Any]], *, max_tokens: int, concurrency: int) -> Sequence[Reply]:
    """Greedy replies. Raises: StageError when a request fails."""
    shared = {"max_tokens": max_tokens, "temperature": 0.0, "return_token_ids": True}
    replies = server.answer([{"prompt": list(row["prompt_ids"]), **shared} for row in rows], concurrency=concurrency)
    if errors := sorted({reply.error for reply in replies if reply.error}):
        raise StageError(f"speed: {len(errors)} kinds of failed requests ({errors[:3]}); see the server's log")
    return replies


def _report(
    config: Config,
    plan: Plan,
    prompts: GatePrompts,
    visits: Sequence[Mapping[str, Any]],
    derivation: str,
    *,
    folder: Path,
    drafter: Artifact[DrafterCheckpoint],
) -> SpeedReport:
    """Raises: FingerprintError when two visits' servers had other settings in anything but the speculation."""
    common = [{k: v for k, v in visit["settings"].items() if k != "speculation"} for visit in visits]
    for visit, settings in zip(visits[1:], common[1:], strict=True):
        require_same_settings(
            common[0], settings, where=f"the target alone and {_name(visit['num_speculative_tokens'])}"
        )
    shards, rejects, _ = PartWriter(folder).finish(len(visits))
    points = points_of(visits)
    return SpeedReport(
        derivation_id=derivation,
        parents={"drafter": drafter.id, **prompts.parents},
        fingerprint=prompts.fingerprint,
        shards=shards,
        config=config.speed.model_dump(mode="json"),
        versions=package_versions(),
        counts={"visits": len(visits), "requests": len(visits) * plan.requests_per_visit},
        rejects=rejects,
        points=points,
        recommended=recommend(points),
        lossless=lossless(visits, dtype=common[0].get("dtype", config.target.dtype)),
        settings={
            **common[0],
            "prompts": prompts.settings()["prompts"],
            "sampling": {"temperature": 0.0},
            "max_tokens": plan.max_tokens,
            "block_size": drafter.manifest.block_size,
        },
    )


class _Progress:
    """A line a point, with an estimate of the time left from this run alone.

    By points, not requests: more requests at a time are served in hardly more time, up to the machine's limit.
    """

    def __init__(self, total: int):
        self._total, self._done, self._started = total, 0, time.monotonic()

    def add(self, load: Load, number: int, concurrency: int) -> None:
        self._done += 1
        elapsed = time.monotonic() - self._started
        left = elapsed / self._done * (self._total - self._done)
        speed, what = load.num_tokens / load.wall_s, _name(number)
        logger.info("speed: %s, concurrency %d: %.1f tokens/s; about %.0f s left", what, concurrency, speed, left)


def _name(number: int) -> str:
    return f"{number} speculated" if number else "the target alone"


def _file(index: int) -> str:
    return f"visit-{index:05d}.json"


def _digest(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest()[:16]
