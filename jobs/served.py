"""The evaluation's server: a replica that is there already, or one started for as long as it lasts."""

import json
import logging
import os
import secrets
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pipeline.artifacts import DrafterCheckpoint, sha256_file
from pipeline.config import Config
from pipeline.errors import ConfigError, StageError, SwapError
from pipeline.sittings import Candidates
from pipeline.stages import Artifact
from serving import deploy, load
from serving.engine.settings import flags_of
from serving.errors import DeployError, LaunchError
from serving.launch import VllmServer
from serving.preflight import same_served_config

logger = logging.getLogger("slipstream")

WEIGHTS = "model.safetensors"
_BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_DONE = "vllm:request_success_total"

Drafter = Artifact[DrafterCheckpoint]


class ServedDrafters:
    """One vLLM whose drafter is swapped through its control endpoint; implements pipeline.sittings.Server.

    Drafters of one shape are swapped; for one of another shape, or for none, a server of our own is started anew,
    with the flags of the replica that was named. Nothing starts before the first drafter is used, so an evaluation
    that is complete starts no engine. Use it as a context manager: a server that was started here ends with it.
    """

    def __init__(self, config: Config, *, folders: Sequence[Path]):
        self._config, self._folders = config, [Path(folder).resolve() for folder in folders]
        self._replica = config.evaluate.server_url and config.evaluate.server_url.rstrip("/")
        self._replica_token = os.environ.get(config.serving.token_env, "") if self._replica else ""
        self._own: VllmServer | None = None
        self._own_drafter: Drafter | None = None
        self._own_token = secrets.token_hex(32)
        self._restarts = False
        self._found: dict[str, Any] | None = None
        self._broken: str | None = None
        self._before: float | None = None
        self._sent = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def swaps(self, candidates: Candidates) -> bool:
        """Whether all of these are drafters whose configurations differ in nothing that an engine reads."""
        configs = [json.loads((one.folder / "config.json").read_text()) for one in candidates.values() if one]
        one_shape = all(not same_served_config(configs[0], config) for config in configs[1:])
        self._restarts = not (one_shape and len(configs) == len(candidates))
        return not self._restarts

    def planned(self) -> dict[str, Any]:
        """The named replica's flags, or those that a server of our own is started with."""
        if self._replica:
            return self._engine(self._replica, self._replica_token)
        serving = self._config.serving
        return {"max_num_seqs": serving.max_num_seqs, "kv_cache_gib": serving.kv_cache_gib}

    def use(self, role: str, drafter: Drafter | None) -> None:
        """Serve with this drafter, verified by the live weights; the prefix cache is empty afterwards.

        Raises: SwapError when the drafter was refused; StageError when there is no idle server to use.
        """
        if self._restarts:
            self._restart(drafter)
            return
        folder, sha256 = drafter.folder.resolve(), sha256_file(drafter.folder / WEIGHTS)
        version = drafter.manifest.derivation_id
        if self._replica is None and self._own is None:
            self._start(drafter)
        try:
            now = deploy.status(self._url, self._token)
            self._found = self._found or now
            if sha256 == self._found["sha256"]:
                # The drafter that a replica came with keeps its name and its folder there.
                folder, version = Path(self._found["folder"]), self._found["version"]
            if now["sha256"] == sha256:
                deploy.reset_prefix_cache(self._url, self._token)
                return
            deploy.swap_replica(
                self._url,
                self._token,
                folder=folder,
                version=version,
                sha256=sha256,
                expected_version=now["version"],
                probe=[],
                prefix_cache="clear",
            )
        except DeployError as error:
            raise SwapError(f"{role}: {error}")

    def answer(self, requests: Sequence[Mapping[str, Any]], *, concurrency: int) -> list[load.Reply]:
        """The replies to these completion requests, in order; a failed one says why.

        Raises: StageError when others use the replica meanwhile: what is measured would be theirs too.
        """
        busy, done = self._counters()
        if busy:
            raise StageError(
                f"{self._url}: {busy:g} requests of others are running; an evaluation needs an idle replica"
            )
        self._before = done if self._before is None else self._before
        replies = load.drive_sync(self._url, [dict(request) for request in requests], concurrency=concurrency)
        # Since the first sitting: the engine's count of the last replies may come a moment after them.
        self._sent += len(requests)
        if (others := self._counters()[1] - self._before - self._sent) > 0:
            raise StageError(
                f"{self._url}: {others:g} requests of others were answered meanwhile; take the replica out of the "
                "balancer, then evaluate again"
            )
        return replies

    def settings(self) -> dict[str, Any]:
        """What the engine says of itself: version, model, adapters, and its flags."""
        models = [model["id"] for model in self._get("/v1/models")["data"]]
        found = {"vllm": self._get("/version")["version"], "model": models[0], "adapters": models[1:]}
        return {**found, **self._engine(self._url, self._token)}

    @property
    def _url(self) -> str:
        return self._own.base_url if self._own is not None else self._replica

    @property
    def _token(self) -> str:
        return self._own_token if self._own is not None else self._replica_token

    def _restart(self, drafter: Drafter | None) -> None:
        if self._own is not None and self._own_drafter == drafter:
            return
        self._stop()
        self._start(drafter)

    def _stop(self) -> None:
        if self._own is not None:
            self._own.stop()
            self._own, self._before, self._sent = None, None, 0

    def _start(self, drafter: Drafter | None) -> None:
        if self._broken:
            raise StageError(self._broken)
        own = self._server(drafter)
        what = f"drafter {drafter.id}" if drafter else "the target alone"
        logger.info("evaluate: starting vLLM with %s (log: %s)", what, own.log)
        try:
            own.start()
        except LaunchError as error:
            self._broken = str(error)
            raise StageError(self._broken)
        self._own, self._own_drafter = own, drafter
        logger.info("evaluate: vLLM is up after %.0f s", own.start_s)

    def _server(self, drafter: Drafter | None) -> VllmServer:
        """A server of our own: as configured or, where a replica was named, its like."""
        target, serving = self._config.target, self._config.serving
        like = self._engine(self._replica, self._replica_token) if self._replica else {}
        flags = flags_of(like)
        if self._config.evaluate.sampling == "traffic" and not like:
            # vLLM's CPU build stops where a seeded request is cut into chunks.
            whole = str(max(target.max_model_len, 2048))
            flags = ["--no-enable-chunked-prefill", "--max-num-batched-tokens", whole]
        return VllmServer(
            model=target.model,
            drafter=drafter.folder.resolve() if drafter else None,
            version=drafter.manifest.derivation_id if drafter else "none",
            log=self._config.root / "logs" / "evaluate.log",
            dtype=like.get("dtype", target.dtype),
            max_model_len=like.get("max_model_len", target.max_model_len),
            max_num_seqs=like.get("max_num_seqs", serving.max_num_seqs),
            prefix_caching=like.get("prefix_caching", True),
            kv_cache_gib=serving.kv_cache_gib,
            drafter_roots=self._folders,
            token=self._own_token,
            extra_args=flags,
        )

    @staticmethod
    def _engine(url: str, token: str) -> dict[str, Any]:
        try:
            return deploy.engine(url, token)
        except DeployError as error:
            raise ConfigError(f"{error}; evaluate.server_url must be a vLLM server with Slipstream's control endpoint")

    def _counters(self) -> tuple[float, float]:
        """Requests that run or wait, and requests answered since the server started."""
        busy = done = 0.0
        for line in self._read("/metrics").decode().splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            if name in _BUSY:
                busy += float(line.rpartition(" ")[2])
            elif name == _DONE:
                done += float(line.rpartition(" ")[2])
        return busy, done

    def _get(self, path: str) -> dict[str, Any]:
        return json.loads(self._read(path))

    def _read(self, path: str) -> bytes:
        try:
            with urllib.request.urlopen(self._url + path, timeout=60) as answer:
                return answer.read()
        except OSError as error:
            raise ConfigError(f"{self._url}{path}: {error}; evaluate.server_url must be a vLLM server of ours")
