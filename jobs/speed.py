"""Speed: one drafter, with and without speculation, at every concurrency → SpeedReport.

python jobs/speed.py --config slipstream.toml
ray job submit --working-dir . -- python jobs/speed.py --config slipstream.toml
"""

import argparse
import json
import logging
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs.alone import run_alone
from jobs.session import job_main
from pipeline import speed, stages
from pipeline.artifacts import DrafterCheckpoint, ResponseSet, SpeedReport
from pipeline.config import Config
from pipeline.errors import ConfigError, StageError
from pipeline.gate_prompts import from_responses
from pipeline.sittings import ROLES
from pipeline.speed_points import batch_size_schedule, pays_up_to
from pipeline.stages import Artifact
from serving import deploy
from serving.bench_serve import Load, LoadGenerator
from serving.engine.settings import flags_of
from serving.errors import DeployError, LaunchError, LoadError
from serving.launch import VllmServer
from serving.load import Reply, drive_sync

logger = logging.getLogger("slipstream")


class OwnServers:
    """vLLM servers of our own, one at a time, as configured or like a named replica; implements pipeline.speed.Servers.

    Prefix caching is off whatever the replica has: prompts come again at every point, and production would not have
    those hits. Use it as a context manager: the load generator, which starts once, ends with it.
    """

    def __init__(self, config: Config, drafter: Path, *, flags: Mapping[str, Any]):
        self._config, self._drafter, self._flags = config, Path(drafter).resolve(), dict(flags)
        self._token = secrets.token_hex(32)
        self._generator = LoadGenerator(log=config.root / "logs" / "bench_serve.log")

    def __enter__(self) -> "OwnServers":
        return self

    def __exit__(self, *error: object) -> None:
        self._generator.__exit__(*error)

    @contextmanager
    def __call__(self, num_speculative_tokens: int) -> Iterator["MeasuredServer"]:
        """A server that speculates so many tokens, or serves the target alone. Raises: StageError."""
        server = self.server(num_speculative_tokens)
        self._generator.start()  # imports for many seconds, as the server does
        try:
            server.start()
        except LaunchError as error:
            raise StageError(str(error))
        logger.info("speed: vLLM is up after %.0f s", server.start_s)
        try:
            yield MeasuredServer(server, self._generator)
        finally:
            server.stop()

    def server(self, num_speculative_tokens: int) -> VllmServer:
        """That server, not started."""
        target, serving = self._config.target, self._config.serving
        like = {name: value for name, value in self._flags.items() if name != "prefix_caching"}
        return VllmServer(
            model=target.model,
            drafter=self._drafter if num_speculative_tokens else None,
            num_speculative_tokens=num_speculative_tokens or None,
            log=self._config.root / "logs" / "speed.log",
            dtype=like.get("dtype", target.dtype),
            max_model_len=like.get("max_model_len", target.max_model_len),
            max_num_seqs=like.get("max_num_seqs", serving.max_num_seqs),
            prefix_caching=False,
            kv_cache_gib=serving.kv_cache_gib,
            token=self._token,
            extra_args=flags_of(like),
        )


class MeasuredServer:
    """A running server and what sends load to it; implements pipeline.speed.Server."""

    def __init__(self, server: VllmServer, generator: LoadGenerator):
        self._server, self._generator = server, generator

    def load(self, prompts: Sequence[Sequence[int]], *, concurrency: int, max_tokens: int) -> Load:
        """One run of vllm bench serve. Raises: StageError when a request fails."""
        try:
            return self._generator.run(self._server.base_url, prompts, concurrency=concurrency, max_tokens=max_tokens)
        except LoadError as error:
            raise StageError(str(error))

    def answer(self, requests: Sequence[Mapping[str, Any]], *, concurrency: int) -> list[Reply]:
        """The replies to these requests, in order."""
        return drive_sync(self._server.base_url, [dict(one) for one in requests], concurrency=concurrency)

    def settings(self) -> dict[str, Any]:
        """What the engine says of itself, and what sends the load. Raises: StageError when it cannot be asked."""
        try:
            engine = deploy.engine(self._server.base_url, self._server.token)
        except DeployError as error:
            raise StageError(str(error))
        return {"load_generator": "vllm bench serve", "model": self._server.served_name, **engine}


def run(
    config: Config, drafter: Artifact[DrafterCheckpoint] | None = None, responses: Artifact[ResponseSet] | None = None
) -> Artifact[SpeedReport]:
    """The speed of a drafter (by default the current challenger, else the champion) on the current gate prompts."""
    drafter = drafter or current_drafter(config)
    responses = responses or stages.current(config.root, "responses", ResponseSet)
    return run_alone("speed", _measure, config, drafter, responses)


def current_drafter(config: Config, role: str | None = None) -> Artifact[DrafterCheckpoint]:
    """The drafter of a role; without one, the challenger or, where there is none, the champion."""
    if role is None:
        role = "challenger" if "challenger" in stages.current_names(config.root) else "champion"
    return stages.current(config.root, role, DrafterCheckpoint)


def replica_flags(config: Config) -> dict[str, Any]:
    """The engine settings of ``evaluate.server_url``; none where it is not set. The replica gets no load.

    Raises: ConfigError when it cannot be asked.
    """
    if not config.evaluate.server_url:
        return {}
    try:
        token = os.environ.get(config.serving.token_env, "")
        return deploy.engine(config.evaluate.server_url.rstrip("/"), token)
    except DeployError as error:
        raise ConfigError(f"{error}; evaluate.server_url must be a vLLM server with Slipstream's control endpoint")


def summary(report: SpeedReport, drafter: Path) -> str:
    """The table for people, where speculation stops paying, and the flags that follow."""
    lines = ["speculated  concurrency  tokens/s  first token p50  p99  gap p50  p99  (ms)  acceptance length"]
    for p in report.points:
        times = [p[f"{name}_{q}_s"] for name in ("ttft", "itl") for q in ("p50", "p99")]
        ms = "".join(f"{'-' if t is None else round(1000 * t):>9}" for t in times)
        length = f"{p['acceptance_length']:.2f}" if "acceptance_length" in p else "-"
        lines.append(
            f"{p['num_speculative_tokens']:>10}{p['concurrency']:>13}{p['tokens_per_s']:>10.1f}{ms}{length:>12}"
        )
    up_to = pays_up_to(report.recommended)
    where = {None: "at every concurrency measured", 0: "at no concurrency measured"}
    lines.append(f"speculation is faster {where.get(up_to, f'up to concurrency {up_to}')}")
    if found := report.lossless:
        plain = found.get("num_different_plain")
        beside = "" if plain is None else f"; the target alone changed {plain} when batched otherwise"
        lines.append(
            f"{found['num_different']} of {found['num_prompts']} greedy replies differ with speculation"
            f" ({found['dtype']}{beside})"
        )
    return "\n".join([*lines, *_flags(report.recommended, drafter)])


def _flags(recommended: Mapping[str, int], drafter: Path) -> list[str]:
    schedule, most = batch_size_schedule(recommended), max(recommended.values())
    if not most:
        return ["recommended: serve without a drafter"]
    config = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": most}
    if len(schedule) > 1:
        config["num_speculative_tokens_per_batch_size"] = schedule
    return [f"recommended: --speculative-config '{json.dumps(config)}'"]


def _measure(
    config: Config, drafter: Artifact[DrafterCheckpoint], responses: Artifact[ResponseSet]
) -> Artifact[SpeedReport]:
    prompts, flags = from_responses(config, responses, block_size=drafter.manifest.block_size), replica_flags(config)
    with OwnServers(config, drafter.folder, flags=flags) as servers:
        return speed.run(config, drafter, prompts, servers=servers, flags=flags)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which drafter."""
    parser.add_argument("--role", choices=ROLES, help="whose drafter; by default the challenger's, else the champion's")


def main(config: Config, arguments: argparse.Namespace) -> None:
    """Run the stage, remember its result as ``speed``, and print it."""
    drafter = current_drafter(config, arguments.role)
    report = run(config, drafter)
    stages.set_current(config.root, "speed", report)
    print(summary(report.manifest, drafter.folder))


if __name__ == "__main__":
    job_main(__doc__, main, add_arguments=add_arguments)
