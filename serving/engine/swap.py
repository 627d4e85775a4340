"""Worker side of the swap: ``--worker-extension-cls serving.engine.swap.DrafterSwap``.

vLLM 0.32 cannot reload a drafter, and its in-place weight update breaks DFlash (rope caches stay on the meta device,
fused buffers keep the old weights, CPU linears have no weights left to write to). So a new drafter module is loaded
beside the old one and served only once its live weights have been compared with the file: in the old one's place, or,
where CUDA graphs hold addresses, copied into the old one's storage. Otherwise the old one is put back.

Nothing here raises: when one rank of a ``collective_rpc`` fails, the other ranks' replies stay queued and the next
call reads them. Every method returns a dict with a ``status``, and with the ``call`` that it answers, by which the
caller knows an answer of an earlier call.
"""

import logging
import os
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from serving.engine.capability import COPY, capability, drafter_of
from serving.engine.captured_storage import CapturedStorage
from serving.engine.cpu_context_norm import repair_cpu_context_norm
from serving.engine.cpu_sampling import repair_cpu_sampling
from serving.engine.live_weights import live_fingerprint, mismatches, rope_problem
from serving.engine.replaced_module import ReplacedModule
from serving.errors import ServingError
from serving.kept_drafter import VERSION_ENV
from serving.preflight import WEIGHTS, check_drafter, read_config, sha256_file

logger = logging.getLogger("vllm.slipstream")

UNVERSIONED = "unversioned"
_STATE = "_slipstream_serving"
_one_at_a_time = threading.Lock()

repair_cpu_sampling()  # vLLM imports this module in the worker, before it drafts and samples
repair_cpu_context_norm()


class DrafterSwap:
    """Methods that vLLM adds to its worker and that ``collective_rpc`` calls."""

    def slipstream_status(self, call: str = "", verify: bool = False) -> dict[str, Any]:
        """What this worker serves, since when, and how its drafter can be swapped.

        ``verify`` reads the live weights again: waking from a sleep, or an update of the target, may lose them.
        """
        try:
            serving = _serving(self)
            if verify and (found := live_fingerprint(drafter_of(self).model)) != serving["live_fingerprint"]:
                why = f"the live weights are {found}, no longer version {serving['version']}'s; swap it in again"
                return _reply(self, call, "failed", why)
            return _reply(self, call, "ok", None)
        except Exception as error:
            return _reply(self, call, "refused", f"{type(error).__name__}: {error}")

    def slipstream_swap(
        self,
        folder: str,
        version: str,
        sha256: str,
        expected_version: str,
        expected_swaps: int | None = None,
        call: str = "",
    ) -> dict[str, Any]:
        """Serve the drafter in ``folder`` as ``version`` if ``expected_version`` serves, ``expected_swaps`` swaps on.

        Status is "ok", "refused" (nothing was touched) or "failed" (the old drafter was put back).
        """
        if not _one_at_a_time.acquire(blocking=False):
            return _reply(self, call, "refused", "another swap is running on this worker; ask again when it has ended")
        try:
            expected = (expected_version, expected_swaps)
            return {**_swap(self, Path(folder), version, sha256, expected), "call": call}
        except Exception as error:
            logger.exception("swap to %s ended in an error", version)
            return _reply(self, call, "failed", f"{type(error).__name__}: {error}")
        finally:
            _one_at_a_time.release()


class _Refused(ServingError):
    """The swap cannot start."""


def _swap(worker: Any, folder: Path, version: str, sha256: str, expected: tuple[str, int | None]) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        can = capability(worker)
        serving = _serving(worker)
        if can.how is None:
            raise _Refused(can.reason)
        _require_expected(serving, *expected)
        before = _stamp(folder)
        _check(worker, folder, sha256, serving["config"])
    except ServingError as error:
        return _reply(worker, "", "refused", str(error))
    checked = time.perf_counter()
    try:
        fingerprint = _serve(worker, folder, how=can.how)
        if _stamp(folder) != before:
            raise ServingError(f"{folder / WEIGHTS} was written while it was loaded; a version's folder never changes")
    except BaseException as error:
        logger.exception("swap to %s failed, version %s serves", version, serving["version"])
        why = f"{type(error).__name__}: {error}; version {serving['version']} is back"
        return _reply(worker, "", "failed", why)
    _set_serving(worker, version, folder, sha256, fingerprint)
    loaded = time.perf_counter()
    logger.info("drafter %s serves (was %s), live weights %s", version, serving["version"], fingerprint)
    seconds = {"check_s": round(checked - started, 4), "load_s": round(loaded - checked, 4)}
    return {**_reply(worker, "", "ok", None), "previous": serving["version"], **seconds}


def _require_expected(serving: dict[str, Any], version: str, num_swaps: int | None) -> None:
    if serving["version"] != version:
        raise _Refused(f"version {serving['version']} serves, the caller expected {version}; look again")
    if num_swaps is not None and serving["num_swaps"] != num_swaps:
        raise _Refused(f"{serving['num_swaps']} swaps so far, the caller knew of {num_swaps}; look again")


def _check(worker: Any, folder: Path, sha256: str, serving_config: dict[str, Any]) -> None:
    config = worker.vllm_config
    info = check_drafter(
        folder,
        target_config=config.model_config.hf_config.to_dict(),
        num_speculative_tokens=config.speculative_config.num_speculative_tokens,
        serving_config=serving_config,
    )
    if info.sha256 != sha256:
        raise _Refused(f"{folder / WEIGHTS}: sha256 {info.sha256}, the caller says {sha256}; not the version meant")


def _serve(worker: Any, folder: Path, *, how: str) -> str:
    """The live fingerprint of the drafter of ``folder``, which serves now; whatever fails, the old one is back."""
    holder = drafter_of(worker)
    old = ReplacedModule(worker, holder)
    storage = CapturedStorage(old.model) if how == COPY else None
    try:
        old.load(folder)
        _verify(holder.model, folder)
        if storage is not None:
            storage.write(holder.model)
            old.keep_module(folder)
            _verify(holder.model, folder)
        return live_fingerprint(holder.model)
    except BaseException:
        if storage is not None:
            storage.put_back()
        old.put_back()
        raise


def _verify(model: Any, folder: Path) -> None:
    if wrong := mismatches(model, folder / WEIGHTS):
        raise ServingError(f"the live weights are not the file's: {'; '.join(wrong[:4])}")
    if problem := rope_problem(model):
        raise ServingError(problem)


def _stamp(folder: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(folder / WEIGHTS)
    except OSError:
        return None  # the check says what is missing
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _serving(worker: Any) -> dict[str, Any]:
    if not hasattr(worker, _STATE):
        model = drafter_of(worker).model
        folder = Path(worker.vllm_config.speculative_config.draft_model_config.model)
        swappable = capability(worker).how is not None
        if swappable and (wrong := mismatches(model, folder / WEIGHTS)):
            raise ServingError(f"{folder}: not what was loaded at the start ({wrong[0]}); restart with a whole folder")
        version = os.environ.get(VERSION_ENV) or UNVERSIONED
        fingerprint = live_fingerprint(model)
        _set_serving(worker, version, folder, sha256_file(folder / WEIGHTS), fingerprint)
    return getattr(worker, _STATE)


def _set_serving(worker: Any, version: str, folder: Path, sha256: str, fingerprint: str) -> None:
    before = getattr(worker, _STATE, None)
    state = {"version": version, "folder": str(folder), "sha256": sha256, "live_fingerprint": fingerprint}
    state["num_swaps"] = before["num_swaps"] + 1 if before else 0
    state["started"] = before["started"] if before else os.urandom(4).hex()
    state["since"] = round(time.time(), 3)
    setattr(worker, _STATE, {**state, "config": before["config"] if before else read_config(folder)})


_SHOWN = ("version", "folder", "sha256", "live_fingerprint", "num_swaps", "started", "since")


def _reply(worker: Any, call: str, status: str, reason: str | None) -> dict[str, Any]:
    serving = getattr(worker, _STATE, None) or {}
    known = {key: serving.get(key) for key in _SHOWN}
    try:
        can = asdict(capability(worker))
    except ServingError as error:
        can = {"how": None, "reason": str(error)}
    return {"status": status, "reason": reason, **known, "swap": can, "rank": getattr(worker, "rank", 0), "call": call}
