"""A vLLM worker that keeps the hidden states of chosen requests, where the engine already has them.

Start vLLM with ``worker_cls="serving.engine.capture.CaptureWorker"`` and
``additional_config={"slipstream_capture_layers": [L, ...]}``. A request that carries
``extra_args={"slipstream_capture": ID}`` has the outputs of those decoder layers kept by position, and
``collective_rpc("take_states", args=(ID, num_states))`` hands them over. Chunked prefill, preemption and
rejected drafts need nothing special: the last write of a position stands.
"""

from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform

from serving.engine.cpu_context_norm import repair_cpu_context_norm
from serving.engine.cpu_sampling import repair_cpu_sampling
from serving.engine.kept_states import KeptStates
from serving.engine.runners import known_runner
from serving.engine.versions import require_supported_vllm

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

LAYERS_KEY = "slipstream_capture_layers"
LAST_LAYER_KEY = "slipstream_capture_last_layer"
"""In additional_config: the last decoder layer as well, for exact requests (a compiled engine's layers are fixed)."""
REQUEST_KEY = "slipstream_capture"
EXACT_KEY = "slipstream_capture_exact"
"""In a request's extra_args: its states in float32, with every layer that the engine gives."""
WORKER_CLASS = "serving.engine.capture.CaptureWorker"


class CaptureWorker(PlatformWorker):
    """The platform's own worker, with a tap on the auxiliary hidden states."""

    def load_model(self, **kwargs: Any) -> None:
        """Load as usual, then ask the model for the configured layers' outputs.

        Raises: RuntimeError when this engine cannot capture: another vLLM, an unknown model runner, a model
        without auxiliary states, several pipeline stages, or a drafter that reads other layers.
        """
        require_supported_vllm()
        repair_cpu_sampling()
        repair_cpu_context_norm()
        super().load_model(**kwargs)
        self._layers = tuple(int(layer) for layer in self.vllm_config.additional_config.get(LAYERS_KEY, ()))
        self._kept: KeptStates | None = None
        self._reader = None
        if self._layers:
            self._ask_for_layers()

    def _ask_for_layers(self) -> None:
        num_layers = self._num_decoder_layers()
        if list(self._layers) != sorted(set(self._layers)) or not 0 <= self._layers[0] <= self._layers[-1] < num_layers:
            raise RuntimeError(
                f"{LAYERS_KEY} = {list(self._layers)}: expected different 0-based decoder layers in rising order, "
                f"below {num_layers}; vLLM would sort them, and the states would be in another order than asked for"
            )
        stages = self.vllm_config.parallel_config.pipeline_parallel_size
        if stages > 1:
            raise RuntimeError(f"capture needs one pipeline stage, found {stages}; use tensor_parallel_size instead")
        model = self.model_runner.get_model()
        if not hasattr(model, "set_aux_hidden_state_layers"):
            raise RuntimeError(f"{type(model).__name__} gives no auxiliary hidden states (vLLM's EAGLE-3 interface)")
        self._reader = known_runner(self.model_runner)
        served = self._reader.drafter_layers()
        if served is not None and tuple(sorted(set(served))) != self._layers:
            raise RuntimeError(
                f"the drafter reads layers {list(served)}, {LAYERS_KEY} asks for {list(self._layers)}; "
                "ask for the drafter's own, or start without a drafter"
            )
        self._set_layers(last=bool(self.vllm_config.additional_config.get(LAST_LAYER_KEY)))
        self.model_runner.use_aux_hidden_state_outputs = True
        if self._is_writer():
            self._kept = KeptStates(len(self._layers))

    def _set_layers(self, *, last: bool) -> None:
        layers = {*self._layers, self._num_decoder_layers() - 1} if last else set(self._layers)
        # vLLM counts the embedding as layer 0.
        self.model_runner.get_model().set_aux_hidden_state_layers(tuple(sorted(layer + 1 for layer in layers)))

    def _num_decoder_layers(self) -> int:
        return self.model_config.hf_text_config.num_hidden_layers

    @staticmethod
    def _is_writer() -> bool:
        """Every tensor rank has the same states; one keeps them."""
        from vllm.distributed.parallel_state import get_tp_group

        return get_tp_group().rank_in_group == 0

    def execute_model(self, scheduler_output: Any) -> Any:
        """Note which requests want their states kept, then compute as usual."""
        if self._kept is not None:
            for request_id in scheduler_output.finished_req_ids:
                self._kept.finish(request_id)
            for request in scheduler_output.scheduled_new_reqs:
                params = request.sampling_params
                extra = (params and params.extra_args) or {}
                if (capture_id := extra.get(REQUEST_KEY)) is not None:
                    capacity = len(request.prompt_token_ids) + (params.max_tokens or 0)
                    exact = bool(extra.get(EXACT_KEY))
                    self._kept.want(request.req_id, capture_id, capacity=capacity, exact=exact)
        return super().execute_model(scheduler_output)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: Any) -> Any:
        """Keep what the last forward pass computed, then sample as usual."""
        if self._reader is not None:
            if self._kept is not None and (found := self._reader.forward_pass()) is not None:
                self._kept.keep(found)
            self._reader.leave(len(self._layers))
        return super().sample_tokens(grammar_output)

    def take_states(self, capture_id: str, num_states: int) -> dict[str, Any] | None:
        """The raw bf16 words of positions 0 … num_states-1, uint16 [num_states, L, H], and forget the request.

        ``holes`` lists positions that were never computed (a prefix cache hit, for one); then there are no
        states. None on ranks that do not capture. Never raises: that would leave other ranks' replies queued.
        """
        if self._kept is None:
            return None
        states, holes = self._kept.take(capture_id, num_states)
        error = f"{len(holes)} of {num_states} positions never computed" if holes else None
        return {"states": states, "holes": holes, "error": error}

    def drop_states(self) -> int:
        """Forget every request that was captured and not taken; the count of them."""
        return 0 if self._kept is None else self._kept.drop()

    def give_last_layer(self, wanted: bool) -> str | None:
        """Give exact requests the last decoder layer as well, or no longer. What stands against it, or None."""
        if self._reader is None:
            return "this engine captures nothing"
        if self.vllm_config.additional_config.get(LAST_LAYER_KEY):
            return None
        if not self.model_config.enforce_eager:
            return f"a compiled engine's layers are fixed: start it with additional_config {LAST_LAYER_KEY}"
        self._set_layers(last=wanted)
        return None

    @torch.inference_mode()
    def rebuilt_logprobs(self, states: np.ndarray, tokens: list[int]) -> dict[str, Any] | None:  # float32 [n, H], [n]
        """What the model's own final norm and head make of last-layer states: each token's log probability
        (``tokens``) and the best one's (``best``). None on ranks without logits; never raises.
        """
        try:
            model = self.model_runner.get_model()
            decoder = (model.get_language_model() if hasattr(model, "get_language_model") else model).model
            hidden = torch.from_numpy(states).to(device=self.device, dtype=self.model_config.dtype)
            logits = model.compute_logits(decoder.norm(hidden))
            if logits is None:
                return None
            scores = torch.log_softmax(logits.float(), dim=-1)
            found = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])[:, 0]
            return {"tokens": found.tolist(), "best": scores.max(dim=-1).values.tolist(), "error": None}
        except Exception as error:  # an exception in one rank leaves the other ranks' replies queued
            return {"error": f"{type(error).__name__}: {error}"[:300]}
