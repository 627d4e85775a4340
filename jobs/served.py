"""The evaluation's server: a replica that is there already, or one started for as long as it lasts."""

import json
import logging
import os
import secrets
import socket
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pipeline.artifacts import DrafterCheckpoint, sha256_file
from pipeline.config import Config
from pipeline.errors import ConfigError, StageError, SwapError
from serving import deploy, load
from serving.errors import DeployError, LaunchError
from serving.launch import VllmServer

logger = logging.getLogger("slipstream")

WEIGHTS = "model.safetensors"


class ServedDrafters:
    """One vLLM whose drafter is swapped through its control endpoint; implements pipeline.sittings.Server.

    Nothing starts before the first drafter is used, so an evaluation that is complete starts no engine. Use it
    as a context manager: a server that was started here ends with it.
    """

    def __init__(self, config: Config, *, folders: Sequence[Path]):
        self._config, self._folders = config, [Path(folder).resolve() for folder in folders]
        self._url = config.evaluate.server_url and config.evaluate.server_url.rstrip("/")
        self._token = os.environ.get(config.serving.token_env, "") if self._url else secrets.token_hex(32)
        self._own: VllmServer | None = None
        self._found: dict[str, Any] | None = None
        self._broken: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._own is not None:
            self._own.stop()

    def use(self, role: str, folder: Path, manifest: DrafterCheckpoint) -> None:
        """Serve with this drafter, verified by the live weights; the prefix cache is empty afterwards.

        Raises: SwapError when the drafter was refused; StageError when there is no server to use.
        """
        folder, sha256, version = Path(folder).resolve(), sha256_file(Path(folder) / WEIGHTS), manifest.derivation_id
        if self._url is None:
            self._start(folder, version)
        try:
            now = deploy.status(self._url, self._token)
            self._found = self._found or now
            if sha256 == self._found["sha256"]:
                # The drafter that a replica came with keeps its name and its folder there.
                folder, version = Path(self._found["folder"]), self._found["version"]
            if now["sha256"] == sha256:
                return
            deploy.swap_replica(
                self._url,
                self._token,
                folder=folder,
                version=version,
                sha256=sha256,
                expected_version=now["version"],
                probe=[],
            )
        except DeployError as error:
            raise SwapError(f"{role}: {error}")

    def answer(self, requests: Sequence[Mapping[str, Any]], *, concurrency: int) -> list[load.Reply]:
        """The replies to these completion requests, in order; a failed one says why."""
        return load.drive_sync(self._url, [dict(request) for request in requests], concurrency=concurrency)

    def settings(self) -> dict[str, Any]:
        """What the server says of itself and, where it was started here, how."""
        (model,) = self._get("/v1/models")["data"][:1]
        found = {"vllm": self._get("/version")["version"], "served_model_len": model["max_model_len"]}
        if self._own is None:
            return {**found, "model": model["id"], "server": self._url}
        settings = ("dtype", "max_num_seqs", "prefix_caching", "extra_args")
        return {**found, "model": self._own.served_name, **{name: getattr(self._own, name) for name in settings}}

    def _start(self, folder: Path, version: str) -> None:
        if self._broken:
            raise StageError(self._broken)
        target, serving = self._config.target, self._config.serving
        self._own = VllmServer(
            model=target.model,
            drafter=folder,
            version=version,
            port=_free_port(),
            log=self._config.root / "logs" / "evaluate.log",
            dtype=target.dtype,
            max_model_len=target.max_model_len,
            max_num_seqs=serving.max_num_seqs,
            kv_cache_gib=serving.kv_cache_gib,
            drafter_roots=self._folders,
            token=self._token,
        )
        logger.info("evaluate: starting vLLM with the champion (log: %s)", self._own.log)
        try:
            self._own.start()
        except LaunchError as error:
            self._broken = str(error)
            raise StageError(self._broken)
        self._url = self._own.base_url
        logger.info("evaluate: vLLM is up after %.0f s", self._own.start_s)

    def _get(self, path: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(self._url + path, timeout=60) as answer:
                return json.loads(answer.read())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._url}{path}: {error}; evaluate.server_url must be a vLLM server of ours")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
