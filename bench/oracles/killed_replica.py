"""Two replicas of the target answer and keep states; one is killed in the middle."""

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from jobs import capture, regenerate
from jobs.engines import EnginePool
from jobs.session import ray_session
from pipeline.artifacts import verify
from pipeline.config import Config
from pipeline.engines import Engine, PartDone, Work
from pipeline.schemas import CACHE, PROMPTS, RESPONSES
from pipeline.shards import read_tables


class KillsOne:
    """Engines one of which gets signal 9 as it begins the last part, in the middle of what else it has begun."""

    def __init__(self, pool: EnginePool):
        self._pool = pool
        self.killed = False

    def run(self, work: Work, parts: Sequence[int]) -> Iterator[PartDone]:
        """The parts, as the pool does them."""
        with tempfile.TemporaryDirectory() as folder:
            marker = Path(folder) / "killed"
            yield from self._pool.run(_KilledOnce(work, parts[-1], marker), parts)
            self.killed = marker.exists()


@dataclass(frozen=True)
class _KilledOnce:
    """Work whose engine is killed the first time that a part is begun."""

    work: Work
    fatal: int
    marker: Path

    def begin(self, engine: Engine) -> Any:
        """As the work does."""
        return self.work.begin(engine)

    def part(self, engine: Engine, index: int, begun: Any) -> PartDone:
        """As the work does, on any but the first engine that begins the fatal part."""
        if index == self.fatal and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.work.part(engine, index, begun)


def killed_replica(config: Config, prompts: Any, layers: Sequence[int]) -> dict[str, int]:
    """Rows of the prompts that have no response, or no states, or two; and how many parts were begun again."""
    config = config.model_copy(update={"regenerate": config.regenerate.model_copy(update={"num_engines": 2})})
    with ray_session():
        pool = KillsOne(EnginePool(config, target_layer_ids=layers))
        responses = regenerate.run(config, prompts, target_layer_ids=layers, engines=pool)
        states = capture.run(
            config, responses, target_layer_ids=layers, engines=EnginePool(config, target_layer_ids=layers)
        )
    asked = _ids(prompts, PROMPTS)
    found = {"killed": int(pool.killed), "retries": responses.manifest.counts["retries"], "rows": len(asked)}
    for name, artifact, schema in (("responses", responses, RESPONSES), ("states", states, CACHE)):
        verify(artifact.folder, artifact.manifest)
        ids = _ids(artifact, schema)
        found[f"{name}_missing"] = len(set(asked) - set(ids)) - sum(artifact.manifest.rejects.values())
        found[f"{name}_twice"] = len(ids) - len(set(ids))
    return found


def engine_processes() -> list[int]:
    """The engines among the processes that this one has started, oldest first."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("ray::" in word and "EngineActor" in word for word in process.cmdline()):
                found.append(process.pid)
    return sorted(found)


def _ids(artifact: Any, schema: Any) -> list[str]:
    return read_tables(artifact.folder, artifact.manifest.shards, schema).column("row_id").to_pylist()
