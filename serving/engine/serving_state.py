"""What a worker serves, kept on the worker itself, and the answers that tell it.

| key | what |
|---|---|
| ``version``, ``folder``, ``sha256`` | as they were ordered, or as the server was started |
| ``live_fingerprint`` | of the weights that the engine computes with, read when they were loaded |
| ``num_swaps``, ``started`` | swaps so far, in this start of the engine |
| ``since`` | Unix seconds |
| ``config`` | the config.json that the engine was started with, and keeps |
"""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serving.engine.capability import capability, drafter_of
from serving.engine.captured_storage import CapturedStorage
from serving.engine.live_weights import live_fingerprint, mismatches
from serving.engine.replaced_module import ReplacedModule
from serving.errors import ServingError
from serving.kept_drafter import VERSION_ENV
from serving.preflight import WEIGHTS, read_config, sha256_file

UNVERSIONED = "unversioned"
_STATE, _HELD = "_slipstream_serving", "_slipstream_held"
_SHOWN = ("version", "folder", "sha256", "live_fingerprint", "num_swaps", "started", "since")


@dataclass(frozen=True)
class Held:
    """A drafter that was replaced, whole, for as long as the new one has not proved itself."""

    swap: str
    """The call that replaced it."""
    serving: dict[str, Any]
    module: ReplacedModule
    storage: CapturedStorage | None

    def put_back(self) -> None:
        """Serve it again."""
        if self.storage is not None:
            self.storage.put_back()
        self.module.put_back()


def held(worker: Any) -> Held | None:
    """The drafter that the last swap replaced, until that swap is ended."""
    return getattr(worker, _HELD, None)


def hold(worker: Any, one: Held | None) -> None:
    """Keep it in memory; None lets go."""
    setattr(worker, _HELD, one)


def serving(worker: Any) -> dict[str, Any]:
    """What serves. Raises: ServingError where that is no drafter of which a version can be told."""
    if not hasattr(worker, _STATE):
        model = drafter_of(worker).model
        folder = Path(worker.vllm_config.speculative_config.draft_model_config.model).resolve()
        if not (folder / WEIGHTS).is_file():
            raise ServingError(f"{folder}: no {WEIGHTS}; start the server with a drafter's folder, not a hub's name")
        swappable = capability(worker).how is not None
        if swappable and (wrong := mismatches(model, folder / WEIGHTS)):
            raise ServingError(f"{folder}: not what was loaded at the start ({wrong[0]}); restart with a whole folder")
        version = os.environ.get(VERSION_ENV) or UNVERSIONED
        fingerprint = live_fingerprint(model)
        set_serving(worker, version, folder, sha256_file(folder / WEIGHTS), fingerprint)
    return getattr(worker, _STATE)


def set_serving(worker: Any, version: str, folder: Path, sha256: str, fingerprint: str) -> None:
    """Another drafter serves from now on."""
    before = getattr(worker, _STATE, None)
    state = {"version": version, "folder": str(folder), "sha256": sha256, "live_fingerprint": fingerprint}
    state["num_swaps"] = before["num_swaps"] + 1 if before else 0
    state["started"] = before["started"] if before else os.urandom(4).hex()
    state["since"] = round(time.time(), 3)
    setattr(worker, _STATE, {**state, "config": before["config"] if before else read_config(folder)})


def serve_again(worker: Any, before: dict[str, Any], *, num_swaps: int) -> None:
    """What served before serves again, after so many swaps."""
    setattr(worker, _STATE, {**before, "num_swaps": num_swaps})


def reply(worker: Any, call: str, status: str, reason: str | None) -> dict[str, Any]:
    """A worker's answer to a call."""
    known = {key: (getattr(worker, _STATE, None) or {}).get(key) for key in _SHOWN}
    try:
        can = asdict(capability(worker))
    except ServingError as error:
        can = {"how": None, "reason": str(error)}
    return {"status": status, "reason": reason, **known, "swap": can, "rank": getattr(worker, "rank", 0), "call": call}
