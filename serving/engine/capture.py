"""A vLLM worker that keeps the hidden states of chosen requests, where the engine already has them.

Start vLLM with ``worker_cls="serving.engine.capture.CaptureWorker"`` and
``additional_config={"slipstream_capture_layers": [L, ...]}``. A request that carries
``extra_args={"slipstream_capture": ID}`` has the outputs of those decoder layers kept by position, and
``collective_rpc("take_states", args=(ID, num_states))`` hands them over. Chunked prefill, preemption and
rejected drafts need nothing special: the last write of a position stands.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from serving.engine.versions import require_supported_vllm

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

LAYERS_KEY = "slipstream_capture_layers"
REQUEST_KEY = "slipstream_capture"
WORKER_CLASS = "serving.engine.capture.CaptureWorker"


@dataclass
class _Kept:
    """One request's states so far, by position."""

    words: torch.Tensor  # [capacity, L, H] bf16, on the host
    written: np.ndarray  # [capacity] bool


class CaptureWorker(PlatformWorker):
    """The platform's own worker, with a tap on the auxiliary hidden states."""

    def load_model(self, **kwargs: Any) -> None:
        """Load as usual, then ask the model for the configured layers' outputs.

        Raises: RuntimeError when this engine cannot capture: another vLLM, the V2 runner, a model without
        auxiliary states, or a drafter that reads other layers.
        """
        require_supported_vllm()
        super().load_model(**kwargs)
        self._kept: dict[str, _Kept] = {}
        self._layers = tuple(int(layer) for layer in self.vllm_config.additional_config.get(LAYERS_KEY, ()))
        if self._layers:
            self._ask_for_layers()

    def _ask_for_layers(self) -> None:
        runner, model = self.model_runner, self.model_runner.get_model()
        num_layers = self.model_config.hf_text_config.num_hidden_layers
        if list(self._layers) != sorted(set(self._layers)) or not 0 <= self._layers[0] <= self._layers[-1] < num_layers:
            raise RuntimeError(
                f"{LAYERS_KEY} = {list(self._layers)}: expected different 0-based decoder layers in rising order, "
                f"below {num_layers}; vLLM would sort them, and the states would be in another order than asked for"
            )
        if not isinstance(runner, GPUModelRunner):  # the CPU's runner is one as well
            raise RuntimeError(
                f"{type(runner).__module__}.{type(runner).__name__} has no V1 execution state to read; "
                "capture needs vLLM's V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0"
            )
        if not hasattr(model, "set_aux_hidden_state_layers"):
            raise RuntimeError(f"{type(model).__name__} gives no auxiliary hidden states (vLLM's EAGLE-3 interface)")
        wanted = tuple(layer + 1 for layer in self._layers)  # vLLM counts the embedding as layer 0
        if getattr(runner, "drafter", None) is None:
            model.set_aux_hidden_state_layers(wanted)
            runner.use_aux_hidden_state_outputs = True
            return
        served = tuple(runner._get_eagle3_aux_layers_from_config() or ())
        if tuple(sorted(set(served))) != wanted:
            raise RuntimeError(
                f"the drafter reads layers {[n - 1 for n in served]}, {LAYERS_KEY} asks for {list(self._layers)}; "
                "ask for the drafter's own, or start without a drafter"
            )

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Keep what the last forward pass computed, then sample as usual."""
        state = getattr(self.model_runner, "execute_model_state", None)
        if state is not None and state.aux_hidden_states is not None:
            self._keep(state.aux_hidden_states)
        return super().sample_tokens(grammar_output)

    def _keep(self, aux: list[torch.Tensor]) -> None:  # L tensors of [padded tokens, H]
        runner = self.model_runner
        starts = runner.query_start_loc.np
        for index, request_id in enumerate(runner.input_batch.req_ids):
            request = runner.requests[request_id]
            capture_id = ((request.sampling_params and request.sampling_params.extra_args) or {}).get(REQUEST_KEY)
            start, end = int(starts[index]), int(starts[index + 1])
            if capture_id is None or start == end:
                continue
            rows = torch.stack([layer[start:end] for layer in aux], dim=1).to(torch.bfloat16).cpu()
            # The device's positions, not the scheduler's count: the two differ while drafts are verified.
            positions = runner.positions[start:end].cpu()
            kept = self._kept.get(capture_id)
            if kept is None:
                kept = self._kept[capture_id] = _empty(request, rows)
            fits = positions < len(kept.words)  # drafts past the request's own limit are never emitted
            kept.words[positions[fits]] = rows[fits]
            kept.written[positions[fits].numpy()] = True

    def take_states(self, capture_id: str, num_states: int) -> dict[str, Any] | None:
        """The raw bf16 words of positions 0 … num_states-1, uint16 [num_states, L, H], and forget the request.

        ``holes`` lists positions that were never computed (a prefix cache hit, for one); then there are no
        states. None on ranks that do not capture. Never raises: that would leave other ranks' replies queued.
        """
        if not self._captures_here():
            self._kept.pop(capture_id, None)
            return None
        kept = self._kept.pop(capture_id, None)
        if kept is None:
            return {"states": None, "holes": list(range(num_states)), "error": f"nothing was captured as {capture_id}"}
        holes = np.flatnonzero(~kept.written[:num_states]).tolist()
        holes += range(len(kept.written), num_states)
        if holes:
            return {"states": None, "holes": holes, "error": f"{len(holes)} of {num_states} positions never computed"}
        return {"states": kept.words[:num_states].view(torch.int16).numpy().view(np.uint16), "holes": [], "error": None}

    def drop_states(self) -> int:
        """Forget every request that was captured and not taken; the count of them."""
        dropped = len(self._kept)
        self._kept.clear()
        return dropped

    def _captures_here(self) -> bool:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        return bool(self._layers) and get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0


def _empty(request: Any, rows: torch.Tensor) -> _Kept:
    capacity = len(request.prompt_token_ids) + (request.sampling_params.max_tokens or 0)
    words = torch.empty((capacity, *rows.shape[1:]), dtype=torch.bfloat16)
    return _Kept(words, np.zeros(capacity, dtype=bool))
