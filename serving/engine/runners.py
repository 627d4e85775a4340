"""What a forward pass leaves behind in vLLM's two model runners, in one form: which rows are whose, and where.

Nothing here reads the scheduler's counts: under asynchronous scheduling they run ahead of the device, which sets
positions back where drafts were rejected.

Source: vllm/v1/worker/gpu_model_runner.py (V1) and vllm/v1/worker/gpu/model_runner.py (V2), vLLM 0.32.
Shapes: T rows of a forward pass, R requests, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

RUNNER_V2 = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
"""By name, since its module cannot be imported without Triton."""


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass whose tokens are not sampled yet."""

    request_ids: Sequence[str]
    starts: np.ndarray  # [R + 1]: the first row of each request, then the end of the last
    positions: torch.Tensor  # [>= T], on the device
    states: Sequence[torch.Tensor]  # a layer each, [>= T, H], on the device: the next pass may overwrite them


class RunnerV1:
    """vLLM's V1 model runner, on a GPU or a CPU."""

    def __init__(self, runner: Any):
        self._runner = runner

    def drafter_layers(self) -> tuple[int, ...] | None:
        """The decoder layers that a drafter reads, 0-based; None without one."""
        if getattr(self._runner, "drafter", None) is None:
            return None
        return tuple(layer - 1 for layer in self._runner._get_eagle3_aux_layers_from_config() or ())

    def forward_pass(self) -> ForwardPass | None:
        """The last one; None where there was none, or none with states."""
        state = self._runner.execute_model_state
        if state is None or not state.aux_hidden_states:
            return None
        request_ids = self._runner.input_batch.req_ids
        starts = self._runner.query_start_loc.np[: len(request_ids) + 1]
        return ForwardPass(request_ids, starts, self._runner.positions, state.aux_hidden_states)

    def leave(self, num_layers: int) -> None:
        """Leave the first ``num_layers`` layers' states to whoever reads them next, a drafter."""
        _leave(self._runner, num_layers)


class RunnerV2:
    """vLLM's V2 model runner. Not yet run: it needs Triton, so a GPU."""

    def __init__(self, runner: Any):
        if runner.vllm_config.parallel_config.prefill_context_parallel_size > 1:
            raise RuntimeError("capture cannot read batches that prefill context parallelism splits; turn it off")
        if getattr(runner.speculator, "enable_adaptive_verification", False):
            raise RuntimeError("capture cannot read batches that adaptive verification trims; turn it off")
        self._runner = runner

    def drafter_layers(self) -> tuple[int, ...] | None:
        """The decoder layers that a drafter reads, 0-based; None without one."""
        from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

        if self._runner.speculator is None:
            return None
        return tuple(layer - 1 for layer in get_eagle3_aux_layers_from_config(self._runner.speculative_config) or ())

    def forward_pass(self) -> ForwardPass | None:
        """The last one; None where there was none, or none with states."""
        state = self._runner.execute_model_state
        if state is None or not state.aux_hidden_states:
            return None
        batch = state.input_batch
        return ForwardPass(
            batch.req_ids, batch.query_start_loc_np[: batch.num_reqs + 1], batch.positions, state.aux_hidden_states
        )

    def leave(self, num_layers: int) -> None:
        """Leave the first ``num_layers`` layers' states to whoever reads them next, a drafter."""
        _leave(self._runner, num_layers)


def known_runner(runner: Any) -> RunnerV1 | RunnerV2:
    """The reader for this model runner. Raises: RuntimeError naming one that is not known."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if isinstance(runner, GPUModelRunner):  # the CPU's runner is one as well
        return RunnerV1(runner)
    found = f"{type(runner).__module__}.{type(runner).__name__}"
    if any(f"{cls.__module__}.{cls.__name__}" == RUNNER_V2 for cls in type(runner).__mro__):
        return RunnerV2(runner)
    raise RuntimeError(f"capture cannot read what {found} computes; expected vLLM's V1 or V2 model runner")


def _leave(runner: Any, num_layers: int) -> None:
    state = runner.execute_model_state
    if state is not None and state.aux_hidden_states and len(state.aux_hidden_states) > num_layers:
        runner.execute_model_state = state._replace(aux_hidden_states=state.aux_hidden_states[:num_layers])
