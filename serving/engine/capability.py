"""What a running engine can do when its drafter has to change, found out from the engine itself."""

import os
from dataclasses import dataclass
from typing import Any

from serving.engine.versions import require_supported_vllm
from serving.errors import ServingError

REPLACE, COPY = "replace", "copy"
UNPROVEN_ENV = "SLIPSTREAM_SWAP_UNPROVEN"
"""Set to 1, engines that no run has proved may be swapped in place: on a replica that takes no traffic."""


@dataclass(frozen=True)
class Capability:
    """``how`` a drafter is swapped in place: its module is replaced, or its storage is written; None: it is not."""

    how: str | None
    reason: str | None
    """Why not, and what to do instead."""


def drafter_of(worker: Any) -> Any:
    """Whatever holds the drafter's ``model`` in this worker. Raises: ServingError where none serves."""
    require_supported_vllm()
    speculative = worker.vllm_config.speculative_config
    if speculative is None or speculative.method != "dflash":
        raise ServingError("this engine serves no DFlash drafter; start it with --speculative-config method dflash")
    for name in ("drafter", "speculator"):  # the V1 and the V2 model runner
        holder = getattr(worker.model_runner, name, None)
        if holder is not None and hasattr(holder, "model"):
            return holder
    raise ServingError("this engine's model runner holds its drafter where vLLM 0.32's do not; restart to change it")


def capability(worker: Any) -> Capability:
    """How this worker's drafter can be swapped. Raises: ServingError where no drafter serves."""
    holder = drafter_of(worker)
    config, parallel = worker.vllm_config, worker.vllm_config.parallel_config
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        return _restart("this engine shards its model, and a swap of shards is not verified yet")
    if parallel.data_parallel_size > 1:
        return _restart("this engine is data parallel: only the first engine's answer to a swap comes back")
    if (servers := getattr(parallel, "_api_process_count", 1)) > 1:
        return _restart(f"{servers} API servers each have a door of their own, and a swap closes one")
    if not hasattr(holder, "_draft_attn_layer_names"):
        return _restart("the V2 model runner serves this drafter, and no run has proved a swap there yet")
    if config.model_config.enforce_eager:
        return Capability(REPLACE, None)
    if str(config.device_config.device_type) == "cpu":
        return _restart("this engine compiles its drafter and repacks its weights: a new one would compile in a step")
    if os.environ.get(UNPROVEN_ENV) == "1":
        return Capability(COPY, None)
    return _restart("this engine captures CUDA graphs; writing into their storage is not proved on a GPU yet")


def _restart(reason: str) -> Capability:
    return Capability(None, f"{reason}; restart it with the new drafter")
