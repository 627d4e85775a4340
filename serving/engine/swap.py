"""Worker side of the swap: ``--worker-extension-cls serving.engine.swap.DrafterSwap``.

vLLM 0.32 cannot reload a drafter, and its in-place weight update breaks DFlash (rope caches stay on the meta device,
fused buffers keep the old weights, CPU linears have no weights left to write to). So a new drafter module is loaded
beside the old one and served only once its live weights have been compared with the file: in the old one's place, or,
where CUDA graphs hold addresses, copied into the old one's storage. Otherwise the old one is put back. It stays in
memory, whole, until the caller says that the new one has proved itself: the way back needs no disk.

Nothing here raises: when one rank of a ``collective_rpc`` fails, the other ranks' replies stay queued and the next
call reads them. Every method returns a dict with a ``status``, and with the ``call`` that it answers, by which the
caller knows an answer of an earlier call.
"""

import contextlib
import ctypes
import logging
import threading
import time
from pathlib import Path
from typing import Any

from serving.engine.capability import COPY, capability, drafter_of
from serving.engine.captured_storage import CapturedStorage
from serving.engine.checked_file import FileCheck, check_of, forget_check, stamp
from serving.engine.cpu_context_norm import repair_cpu_context_norm
from serving.engine.cpu_sampling import repair_cpu_sampling
from serving.engine.live_weights import live_fingerprint, mismatches, rope_problem
from serving.engine.replaced_module import ReplacedModule
from serving.engine.serving_state import Held, held, hold, reply, serve_again, serving, set_serving
from serving.errors import ServingError
from serving.preflight import WEIGHTS

logger = logging.getLogger("vllm.slipstream")

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
            now = serving(self)
            if verify and (found := live_fingerprint(drafter_of(self).model)) != now["live_fingerprint"]:
                why = f"the live weights are {found}, no longer version {now['version']}'s; swap it in again"
                return reply(self, call, "failed", why)
            return reply(self, call, "ok", None)
        except Exception as error:
            return reply(self, call, "refused", f"{type(error).__name__}: {error}")

    def slipstream_check(self, folder: str, sha256: str, call: str = "") -> dict[str, Any]:
        """Whether the drafter in ``folder`` may be swapped in: "running", "ok" or "refused"; the engine goes on.

        The swap that follows does not read the files again, unless they have changed.
        """
        try:
            check = check_of(self, Path(folder), sha256, serving(self)["config"])
            check.begin()
            if not check.has_ended:
                return reply(self, call, "running", None)
            if check.problem is not None:
                forget_check(self)
            return reply(self, call, "ok" if check.problem is None else "refused", check.problem)
        except Exception as error:
            return reply(self, call, "refused", f"{type(error).__name__}: {error}")

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

        Status is "ok", "refused" (nothing was touched) or "failed" (the old drafter was put back). After "ok" the old
        one is held, until ``slipstream_commit`` or ``slipstream_put_back`` names this ``call``, or the next swap.
        """
        if not _one_at_a_time.acquire(blocking=False):
            return reply(self, call, "refused", "another swap is running on this worker; ask again when it has ended")
        try:
            expected = (expected_version, expected_swaps)
            return {**_swap(self, Path(folder), version, sha256, expected, call), "call": call}
        except Exception as error:
            logger.exception("swap to %s ended in an error", version)
            return reply(self, call, "failed", f"{type(error).__name__}: {error}")
        finally:
            _one_at_a_time.release()

    def slipstream_commit(self, swap: str, call: str = "") -> dict[str, Any]:
        """Let go of the drafter that the swap of this call replaced."""
        if (old := held(self)) is not None and old.swap == swap:
            del old
            hold(self, None)
            _give_memory_back()
        return reply(self, call, "ok", None)

    def slipstream_put_back(self, swap: str, version: str, num_swaps: int, call: str = "") -> dict[str, Any]:
        """Serve what served before the swap of this call, ``version``; every worker counts ``num_swaps`` from there.

        A worker that did not swap then has nothing to put back, and counts like the others.
        """
        if not _one_at_a_time.acquire(blocking=False):
            return reply(self, call, "refused", "another swap is running on this worker; ask again when it has ended")
        try:
            return _put_back(self, swap, version, num_swaps, call)
        except Exception as error:
            logger.exception("version %s could not be put back", version)
            return reply(self, call, "failed", f"{type(error).__name__}: {error}")
        finally:
            _one_at_a_time.release()


def _give_memory_back() -> None:
    """Have glibc return what was freed: small tensors lie in its heap, between what stays, and swaps would add up."""
    with contextlib.suppress(AttributeError, OSError):  # other libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


class _Refused(ServingError):
    """The swap cannot start."""


def _swap(
    worker: Any, folder: Path, version: str, sha256: str, expected: tuple[str, int | None], call: str
) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        can = capability(worker)
        before = serving(worker)
        if can.how is None:
            raise _Refused(can.reason)
        _require_expected(before, *expected)
        check = check_of(worker, folder, sha256, before["config"])
        forget_check(worker)
        _require_checked(check)
    except ServingError as error:
        return reply(worker, "", "refused", str(error))
    checked = time.perf_counter()
    hold(worker, None)  # of a swap that nobody ended: two drafters are enough
    try:
        old, storage, fingerprint = _serve(worker, folder, how=can.how, checked=check.of[2])
    except BaseException as error:
        logger.exception("swap to %s failed, version %s serves", version, before["version"])
        why = f"{type(error).__name__}: {error}; version {before['version']} is back"
        return reply(worker, "", "failed", why)
    hold(worker, Held(call, before, old, storage))
    set_serving(worker, version, folder, sha256, fingerprint)
    loaded = time.perf_counter()
    logger.info("drafter %s serves (was %s), live weights %s", version, before["version"], fingerprint)
    seconds = {"check_s": round(checked - started, 4), "load_s": round(loaded - checked, 4)}
    return {**reply(worker, "", "ok", None), "previous": before["version"], **seconds}


def _require_expected(now: dict[str, Any], version: str, num_swaps: int | None) -> None:
    if now["version"] != version:
        raise _Refused(f"version {now['version']} serves, the caller expected {version}; look again")
    if num_swaps is not None and now["num_swaps"] != num_swaps:
        raise _Refused(f"{now['num_swaps']} swaps so far, the caller knew of {num_swaps}; look again")


def _require_checked(check: FileCheck) -> None:
    if not check.has_ended:  # nobody asked for it before, or the files changed since, or are being read still
        check.run()
    if check.problem is not None:
        raise _Refused(check.problem)


def _serve(
    worker: Any, folder: Path, *, how: str, checked: tuple[tuple[int, ...], ...] | None
) -> tuple[ReplacedModule, CapturedStorage | None, str]:
    """What the drafter of ``folder`` replaced, and its live fingerprint; whatever fails, the old one is back."""
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
        if stamp(folder) != checked:
            raise ServingError(f"{folder / WEIGHTS} was written while it was loaded; a version's folder never changes")
        return old, storage, live_fingerprint(holder.model)
    except BaseException:
        if storage is not None:
            storage.put_back()
        old.put_back()
        raise


def _put_back(worker: Any, swap: str, version: str, num_swaps: int, call: str) -> dict[str, Any]:
    old = held(worker)
    if old is not None and old.swap == swap and old.serving["version"] == version:
        old.put_back()
        hold(worker, None)
        serve_again(worker, old.serving, num_swaps=num_swaps)
        if (found := live_fingerprint(drafter_of(worker).model)) != old.serving["live_fingerprint"]:
            return reply(worker, call, "failed", f"the live weights are {found}, not version {version}'s")
        logger.info("drafter %s serves again", version)
    now = serving(worker)
    if now["version"] != version:
        return reply(worker, call, "refused", f"version {now['version']} serves, and {version} is not held")
    serve_again(worker, now, num_swaps=num_swaps)
    return reply(worker, call, "ok", None)


def _verify(model: Any, folder: Path) -> None:
    if wrong := mismatches(model, folder / WEIGHTS):
        raise ServingError(f"the live weights are not the file's: {'; '.join(wrong[:4])}")
    if problem := rope_problem(model):
        raise ServingError(problem)
