"""Step 1 of a swap, with the engine untouched: is the order for what serves here, and is the drafter one to serve?"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from serving.control_access import Access, Refusal
from serving.errors import PreflightError
from serving.preflight import check_drafter, read_config
from serving.swap_order import SwapOrder


def way_of(order: SwapOrder, before: dict[str, Any]) -> str:
    """in_place or restart. Raises: Refusal where this order is none for a replica with this status."""
    if before["status"] != "ok":
        raise Refusal(503, f"this server cannot swap: {before['reason']}")
    _require_expected(order, before)
    can = before["swap"]
    how = order.how if order.how != "auto" else "in_place" if can["in_place"] else "restart"
    if how == "in_place" and not can["in_place"]:
        raise Refusal(409, f"not in place: {can['reason']}", code="in_place")
    if how == "restart" and not can["restart"]:
        why = "" if can["in_place"] else f"{can['reason']}; and "
        raise Refusal(
            409, f"{why}no supervisor of ours started this server: serving/supervise.py --keep FILE", code="restart"
        )
    if how == "in_place" and before["paused"]:
        reason = "the engine is paused, for another swap or by somebody who has to resume it; ask again then"
        raise Refusal(409, reason, version=before["version"], code="paused")
    return how


def _require_expected(order: SwapOrder, before: dict[str, Any]) -> None:
    version = before["version"]
    if version != order.expected_version:
        reason = f"version {version} serves, the caller expected {order.expected_version}; look again"
        raise Refusal(409, reason, version=version, code="version")
    if order.expected_epoch and order.expected_epoch != before["epoch"]:
        reason = f"epoch {before['epoch']}, the caller knew of {order.expected_epoch}: swaps or a start in between"
        raise Refusal(409, f"{reason}; look again", version=version, code="epoch")
    same_name, same_folder = order.version == version, order.folder == before["folder"]
    if order.sha256 != before["sha256"] and (same_name or same_folder):
        what = f"version {version} serves with" if same_name else f"version {version} was loaded from this folder with"
        reason = f"{what} sha256 {before['sha256']}; other weights are another version, in a folder of their own"
        raise Refusal(409, reason, version=version, code="immutable")


class FolderCheck:
    """Checks drafters' folders against the engine; every file is read in a thread, so that none stops the server."""

    def __init__(self, access: Access, vllm_config: Any, *, timeout_s: float):
        self._access, self._config, self._timeout_s = access, vllm_config, timeout_s
        self._serving_config: dict[str, Any] | None = None
        self._served: dict[str, str] = {}
        """Folder to hash of what has served here: it may come back, also from where no other may be loaded."""

    async def remember(self, status: dict[str, Any]) -> None:
        """A drafter serves, and has proved itself."""
        self._served[status["folder"]] = status["sha256"]
        if self._serving_config is None:  # the first one's: the engine keeps it
            with contextlib.suppress(PreflightError, TimeoutError):
                reading = asyncio.to_thread(read_config, Path(status["folder"]))
                self._serving_config = await asyncio.wait_for(reading, self._timeout_s)

    async def folder(self, order: SwapOrder, version: str) -> Path:
        """The drafter's folder. Raises: Refusal for one that is not to be opened, or must not serve here."""
        try:
            return await asyncio.wait_for(asyncio.to_thread(self._folder, order), self._timeout_s)
        except TimeoutError:
            raise Refusal(503, f"{order.folder}: not read in {self._timeout_s:g} s", version=version, code="slow")
        except PreflightError as error:
            raise Refusal(422, str(error), code=error.code, version=version)

    def _folder(self, order: SwapOrder) -> Path:
        is_known = self._served.get(order.folder) == order.sha256
        folder = Path(order.folder) if is_known else self._access.folder(order.folder)
        if Path(order.folder).is_symlink():
            raise Refusal(422, "the folder is a symbolic link; name the real one", code="folder")
        if self._serving_config is None:
            raise Refusal(503, "the config.json that this engine was started with could not be read; restart it")
        info = check_drafter(
            folder,
            target_config=self._config.model_config.hf_config.to_dict(),
            num_speculative_tokens=self._config.speculative_config.num_speculative_tokens,
            serving_config=self._serving_config,
        )
        if info.sha256 != order.sha256:
            raise Refusal(409, f"{folder}: sha256 {info.sha256}, the caller says {order.sha256}", code="sha256")
        return folder
