"""Worker side of the swap: ``--worker-extension-cls serving.engine.swap.DrafterSwap``.

vLLM 0.32 cannot reload a drafter, and its in-place weight update breaks DFlash (rope caches stay on the
meta device, fused buffers keep the old weights, CPU linears have no weights left to write to). So a new
drafter module is loaded beside the old one, takes over the old ``Attention`` objects, which own the KV
cache, and is served only once its live weights have been compared with the file. Otherwise the old module,
which was never touched, is put back.

Nothing here raises: when one rank of a ``collective_rpc`` fails, the other ranks' replies stay queued and
the next call reads them. Every method returns a dict with a ``status``.
"""

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from serving.engine.cpu_context_norm import repair_cpu_context_norm
from serving.engine.cpu_sampling import repair_cpu_sampling
from serving.engine.live_weights import live_fingerprint, mismatches, rope_problem
from serving.engine.versions import require_supported_vllm
from serving.errors import PreflightError, ServingError
from serving.preflight import WEIGHTS, check_drafter, read_config, sha256_file

logger = logging.getLogger("vllm.slipstream")

VERSION_ENV = "SLIPSTREAM_DRAFTER_VERSION"
UNVERSIONED = "unversioned"
_STATE = "_slipstream_serving"
_one_at_a_time = threading.Lock()

repair_cpu_sampling()  # vLLM imports this module in the worker, before it drafts and samples
repair_cpu_context_norm()


class DrafterSwap:
    """Methods that vLLM adds to its worker and that ``collective_rpc`` calls."""

    def slipstream_status(self) -> dict[str, Any]:
        """What this worker serves: version, folder, sha256 and the fingerprint of the live weights."""
        try:
            _proposer(self)
            _serving(self)
            return _reply(self, "ok", None)
        except Exception as error:
            return _reply(self, "refused", f"{type(error).__name__}: {error}")

    def slipstream_swap(self, folder: str, version: str, sha256: str, expected_version: str) -> dict[str, Any]:
        """Serve the drafter in ``folder`` as ``version`` if ``expected_version`` serves now.

        Status is "ok", "refused" (nothing was touched) or "failed" (the old drafter was put back).
        """
        if not _one_at_a_time.acquire(blocking=False):
            return _reply(self, "refused", "another swap is running on this worker; ask again when it has ended")
        try:
            return _swap(self, Path(folder), version, sha256, expected_version)
        except Exception as error:
            logger.exception("swap to %s ended in an error", version)
            return _reply(self, "failed", f"{type(error).__name__}: {error}")
        finally:
            _one_at_a_time.release()


class _Refused(ServingError):
    """The swap cannot start."""


def _swap(worker: Any, folder: Path, version: str, sha256: str, expected_version: str) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        proposer = _proposer(worker)
        serving = _serving(worker)
        if serving["version"] != expected_version:
            raise _Refused(f"version {serving['version']} serves, the caller expected {expected_version}; look again")
        _check(worker, proposer, folder, sha256)
    except (_Refused, PreflightError, ServingError) as error:
        return _reply(worker, "refused", str(error))
    checked = time.perf_counter()
    old = _Snapshot(worker, proposer)
    try:
        _load(worker, proposer, folder, old)
        if wrong := mismatches(proposer.model, folder / WEIGHTS):
            raise ServingError(f"the live weights are not the file's: {'; '.join(wrong[:4])}")
        if problem := rope_problem(proposer.model):
            raise ServingError(problem)
        fingerprint = live_fingerprint(proposer.model)
    except BaseException as error:
        old.put_back()
        logger.exception("swap to %s failed, version %s serves", version, serving["version"])
        return _reply(worker, "failed", f"{type(error).__name__}: {error}; version {serving['version']} is back")
    _set_serving(worker, version, folder, sha256, fingerprint)
    loaded = time.perf_counter()
    logger.info("drafter %s serves (was %s), live weights %s", version, serving["version"], fingerprint)
    seconds = {"check_s": round(checked - started, 4), "load_s": round(loaded - checked, 4)}
    return {**_reply(worker, "ok", None), "previous": serving["version"], **seconds}


def _check(worker: Any, proposer: Any, folder: Path, sha256: str) -> None:
    config = worker.vllm_config
    info = check_drafter(
        folder,
        target_config=config.model_config.hf_config.to_dict(),
        num_speculative_tokens=config.speculative_config.num_speculative_tokens,
        serving_config=_serving(worker)["config"],
    )
    if info.sha256 != sha256:
        raise _Refused(f"{folder / WEIGHTS}: sha256 {info.sha256}, the caller says {sha256}; not the version meant")


def _proposer(worker: Any) -> Any:
    """The drafter side of the model runner. Raises: ServingError where this engine cannot swap."""
    require_supported_vllm()
    config = worker.vllm_config
    if config.speculative_config is None or config.speculative_config.method != "dflash":
        raise ServingError("this engine serves no DFlash drafter; start it with --speculative-config method dflash")
    if not config.model_config.enforce_eager:
        raise ServingError(
            "this engine compiles or captures CUDA graphs, whose addresses a replaced drafter would leave: "
            "restart it with the new drafter instead, or run it with --enforce-eager"
        )
    parallel = config.parallel_config
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        raise ServingError("this engine shards its model; a swap there is not verified yet, restart it instead")
    proposer = getattr(worker.model_runner, "drafter", None)
    if proposer is None or not hasattr(proposer, "_draft_attn_layer_names"):
        raise ServingError("the V2 model runner serves this drafter; restart with VLLM_USE_V2_MODEL_RUNNER=0")
    return proposer


class _Snapshot:
    """Everything a swap changes in the engine, as it was."""

    def __init__(self, worker: Any, proposer: Any):
        config = worker.vllm_config
        self.proposer = proposer
        self.draft_config = config.speculative_config.draft_model_config
        self.context = config.compilation_config.static_forward_context
        self.model = proposer.model
        self.names = set(proposer._draft_attn_layer_names)
        self.supports_mm_inputs = proposer.supports_mm_inputs
        self.model_path = self.draft_config.model
        self.attention = {layer.self_attn.attn.layer_name: layer.self_attn.attn for layer in self.model.model.layers}
        self.registered = dict(self.context)

    def put_back(self) -> None:
        self.proposer.model = self.model
        self.proposer._draft_attn_layer_names = self.names
        self.proposer.supports_mm_inputs = self.supports_mm_inputs
        self.draft_config.model = self.model_path
        self.context.clear()
        self.context.update(self.registered)


def _load(worker: Any, proposer: Any, folder: Path, old: _Snapshot) -> None:
    """Make ``proposer.model`` the drafter of ``folder`` on the old attention objects and their KV cache."""
    from vllm.config import set_current_vllm_config

    for name in old.attention:
        del old.context[name]  # a layer cannot register under a name that is taken
    old.draft_config.model = str(folder)
    with set_current_vllm_config(worker.vllm_config):
        proposer.load_model(worker.model_runner.get_model())
    layers = proposer.model.model.layers
    names = [layer.self_attn.attn.layer_name for layer in layers]
    if proposer.model is old.model or set(names) != set(old.attention):
        raise ServingError(f"the new drafter has attention layers {names}, the old one {sorted(old.attention)}")
    for layer, name in zip(layers, names, strict=True):
        layer.self_attn.attn = old.attention[name]
        old.context[name] = old.attention[name]
    proposer.model.model._attn_layers = [layer.self_attn.attn for layer in layers]
    proposer._draft_attn_layer_names = old.names


def _serving(worker: Any) -> dict[str, Any]:
    if not hasattr(worker, _STATE):
        folder = Path(worker.vllm_config.speculative_config.draft_model_config.model)
        version = os.environ.get(VERSION_ENV) or UNVERSIONED
        fingerprint = live_fingerprint(_proposer(worker).model)
        _set_serving(worker, version, folder, sha256_file(folder / WEIGHTS), fingerprint)
    return getattr(worker, _STATE)


def _set_serving(worker: Any, version: str, folder: Path, sha256: str, fingerprint: str) -> None:
    state = {"version": version, "folder": str(folder), "sha256": sha256, "live_fingerprint": fingerprint}
    config = getattr(worker, _STATE, {}).get("config") or read_config(folder)
    setattr(worker, _STATE, {**state, "config": config})


def _reply(worker: Any, status: str, reason: str | None) -> dict[str, Any]:
    serving = getattr(worker, _STATE, None) or {}
    known = {key: serving.get(key) for key in ("version", "folder", "sha256", "live_fingerprint")}
    return {"status": status, "reason": reason, **known, "rank": getattr(worker, "rank", 0)}
