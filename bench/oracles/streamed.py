"""A corpus that is several times larger than its budget of disk, streamed to the end, with the disk watched."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from drafter.stream_plan import plan_stream
from jobs import regenerate, stream
from jobs.engines import EnginePool
from jobs.session import ray_session
from pipeline.config import Config


def streamed(config: Config, prompts: Any, layers: Sequence[int], *, times: float) -> dict[str, float]:
    """What a streamed run over a corpus ``times`` its budget did: rows, steps, and the most bytes of states on disk.

    The budget is set by what the states of all answers would take together, the held-out ones among them.
    """
    with ray_session():
        config = with_budget(config, 1 << 50)
        engines = EnginePool(config, target_layer_ids=layers)
        responses = regenerate.run(config, prompts, target_layer_ids=layers, engines=engines)
        states = stream.held_out(config, responses, target_layer_ids=layers, engines=engines)
        whole = plan_stream(config, responses, states, block_size=config.drafter.block_size)
        held_out, corpus = (1 << 50) - whole.queue_bytes, sum(whole.expected.values())
        config = with_budget(config, int((held_out + corpus) / times))
        ended = threading.Event()
        with ThreadPoolExecutor(1) as watching:
            most = watching.submit(most_bytes, config.root, ended)
            started = time.monotonic()
            try:
                trained = stream.train_on(config, responses, states, start=None, role="champion", engines=engines)
            finally:
                ended.set()
    plan = plan_stream(config, responses, states, block_size=config.drafter.block_size)
    return {
        "times": (held_out + corpus) / config.capture.max_bytes,
        "budget_mb": config.capture.max_bytes / 1e6,
        "queue_mb": plan.queue_bytes / 1e6,
        "most_mb": most.result() / 1e6,
        "shard_mb": min(config.capture.shard_bytes, max(plan.expected.values())) / 1e6,
        "planned_rows": whole.num_rows,
        "trained_rows": trained.manifest.counts["train_rows"],
        "rejected_rows": sum(trained.manifest.rejects.values()),
        "steps": trained.manifest.counts["steps"],
        "seconds": time.monotonic() - started,
    }


def with_budget(config: Config, max_bytes: int) -> Config:
    """The configuration of a streamed run with this budget."""
    settings = config.capture.model_copy(update={"stream": True, "max_bytes": max_bytes})
    return config.model_copy(update={"capture": settings})


def most_bytes(root: Path, ended: threading.Event) -> int:
    """The most bytes that states, cached and queued, ever take under a root."""
    most = 0
    while not ended.wait(0.005):
        total = 0
        for path in (*(root / "states").rglob("*"), *(root / "queue").rglob("*")):
            try:
                total += path.stat().st_size if path.is_file() else 0
            except FileNotFoundError:  # renamed or removed in this moment
                continue
        most = max(most, total)
    return most
