"""Start one stock vLLM server with our middleware and worker extension, and stop it again."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from serving.engine.versions import is_cpu_build
from serving.errors import LaunchError

CHECKOUT = Path(__file__).resolve().parents[1]
SUPERVISOR = CHECKOUT / "serving" / "supervise.py"
EXTENSION = "serving.engine.swap.DrafterSwap"
MIDDLEWARE = ("serving.control.ControlEndpoint", "serving.tap.TrafficTap")
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # its own server, on this machine


class VllmServer:
    """One server process group. ``with VllmServer(...) as server:`` starts it and ends it; port 0: a free one."""

    def __init__(
        self,
        *,
        model: Path,
        drafter: Path | None,
        log: Path,
        port: int = 0,
        version: str = "1",
        host: str = "127.0.0.1",
        dtype: str = "bfloat16",
        max_model_len: int = 2048,
        max_num_seqs: int = 16,
        kv_cache_gib: float = 1.0,
        tap_dir: Path | None = None,
        tap_consent: str = "",
        tap_subject_header: str = "",
        tap_slice_header: str = "",
        drafter_roots: Sequence[Path] = (),
        token: str = "",
        served_name: str | None = None,
        prefix_caching: bool = True,
        num_speculative_tokens: int | None = None,
        enforce_eager: bool = True,
        keep: Path | None = None,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ):
        self.model, self.drafter, self.version = Path(model), drafter and Path(drafter), version
        self.host, self.port, self.log = host, port or _free_port(host), Path(log)
        self.dtype, self.max_model_len, self.max_num_seqs = dtype, max_model_len, max_num_seqs
        self.kv_cache_gib, self.prefix_caching = kv_cache_gib, prefix_caching
        self.num_speculative_tokens, self.enforce_eager = num_speculative_tokens, enforce_eager
        self.tap = {
            "SLIPSTREAM_TAP_DIR": str(tap_dir or ""),
            "SLIPSTREAM_TAP_CONSENT": tap_consent,
            "SLIPSTREAM_TAP_SUBJECT_HEADER": tap_subject_header,
            "SLIPSTREAM_TAP_SLICE_HEADER": tap_slice_header,
        }
        self.drafter_roots, self.token = [Path(root) for root in drafter_roots], token
        self.served_name = served_name or self.model.name
        self.keep = keep and Path(keep)  # with it the supervisor starts the server again (serving/supervise.py)
        self.extra_args, self.extra_env = tuple(extra_args), dict(env or {})
        # The CPU build puts its one worker in a process of its own, which imports everything a third time,
        # unless both the "uni" executor and no multiprocessing are asked for; the engine core stays apart.
        self.on_cpu = is_cpu_build()
        self.process: subprocess.Popen[bytes] | None = None
        self.start_s: float | None = None

    def __enter__(self) -> "VllmServer":
        return self.start()

    def __exit__(self, *_: Any) -> None:
        self.stop()

    @property
    def base_url(self) -> str:
        """http://host:port, without a trailing slash."""
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the running server, None when it is not running."""
        return self.process.pid if self.process is not None and self.process.poll() is None else None

    def start(self, timeout_s: float = 600.0) -> "VllmServer":
        """Start and wait until it is healthy.

        Raises: LaunchError with the end of the log when the process dies or is not healthy in time.
        """
        if self.pid is not None:
            raise LaunchError(f"the server on port {self.port} is running already (pid {self.pid})")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-S", str(SUPERVISOR), *self._kept(), *self.command()],
                env=self.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.PIPE,  # closes when this process ends, however it ends
                start_new_session=True,
            )
        try:
            self._wait_healthy(started + timeout_s)
        except BaseException:
            self.stop()
            raise
        self.start_s = round(time.monotonic() - started, 2)
        return self

    def stop(self, timeout_s: float = 20.0) -> None:
        """End the server and everything it started; waits until it is gone."""
        process, self.process = self.process, None
        if process is None:
            return
        process.stdin.close()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout_s)

    def command(self) -> list[str]:
        """The command line: stock vLLM and its official options."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        options: dict[str, Any] = {
            "--model": self.model,
            "--served-model-name": self.served_name,
            "--host": self.host,
            "--port": self.port,
            "--dtype": self.dtype,
            "--max-model-len": self.max_model_len,
            "--max-num-seqs": self.max_num_seqs,
        }
        if self.on_cpu:
            options["--distributed-executor-backend"] = "uni"
        if self.drafter is not None:
            options |= {
                "--speculative-config": json.dumps(self._speculative_config()),
                "--worker-extension-cls": EXTENSION,
                "--per-request-spec-decode-metrics": "detailed",
            }
        command += [str(part) for option in options.items() for part in option]
        command += ["--disable-uvicorn-access-log", *(["--enforce-eager"] if self.enforce_eager else [])]
        command += ["--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching"]
        command += [part for name in MIDDLEWARE for part in ("--middleware", name)]
        return command + list(self.extra_args)

    def _kept(self) -> list[str]:
        return [] if self.keep is None else ["--keep", str(self.keep)]

    def _speculative_config(self) -> dict[str, Any]:
        """The drafter and how many tokens it drafts a step: a whole block, unless fewer were asked for.

        Raises: LaunchError for more than a block, which vLLM would draft without a word: slots never trained.
        """
        num_draft_tokens = json.loads((self.drafter / "config.json").read_text())["block_size"] - 1
        wanted = num_draft_tokens if self.num_speculative_tokens is None else self.num_speculative_tokens
        if not 1 <= wanted <= num_draft_tokens:
            raise LaunchError(
                f"num_speculative_tokens = {wanted} with {self.drafter}: its blocks hold 1 to {num_draft_tokens} draft "
                "tokens; serve without a drafter to speculate none"
            )
        return {"method": "dflash", "model": str(self.drafter), "num_speculative_tokens": wanted}

    def environment(self) -> dict[str, str]:
        """The server's environment; the token is handed over here, not on the command line."""
        ours = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")])),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": f"{self.kv_cache_gib:g}",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if self.on_cpu else {}),
            # Spinning threads stall an engine that shares its cores with anything else.
            **({"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")} if self.on_cpu else {}),
            "SLIPSTREAM_CONTROL_TOKEN": self.token,
            "SLIPSTREAM_DRAFTER_ROOTS": ":".join(str(root) for root in self.drafter_roots),
            "SLIPSTREAM_DRAFTER_VERSION": self.version,
            **self.tap,
        }
        return {**os.environ, **ours, **self.extra_env}

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the log."""
        text = self.log.read_bytes()[-20_000:].decode(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def _wait_healthy(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise LaunchError(
                    f"the server on port {self.port} ended with status {self.process.returncode} before it was "
                    f"healthy; the end of {self.log}:\n{self.log_tail()}"
                )
            if self._is_healthy():
                return
            time.sleep(0.1)
        raise LaunchError(f"{self.base_url} was not healthy in time; the end of {self.log}:\n{self.log_tail()}")

    def _is_healthy(self) -> bool:
        try:
            with _NO_PROXY.open(f"{self.base_url}/health", timeout=5) as answer:
                return answer.status == 200
        except (OSError, HTTPException):
            return False


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
