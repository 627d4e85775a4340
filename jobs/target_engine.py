"""The target on vLLM, in this process: exact ids in, exact ids and hidden states out."""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.capture_check import compare
from pipeline.engines import Captured, CaptureRequest, EngineInfo, GenerateRequest, Reply
from pipeline.errors import StageError
from pipeline.states import RowFault, StatesWriter, find_fault, last_state_digest

logger = logging.getLogger("slipstream")

# A row whose states have holes is run once more before it is given up.
CAPTURE_TRIES = 2
# States of rows that this engine answers are kept for a capture that follows, up to this many bytes.
KEEP_BYTES = 2 << 30
_KEPT = "answered:"
MIN_BATCHED_TOKENS = 4096


def set_engine_environment(*, num_threads: int) -> None:
    """What vLLM, and the OpenMP below it, read from the environment when they are first imported."""
    os.environ.update(
        {
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: seconds instead of a minute
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # capture reads the V1 runner's state
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(num_threads),  # Ray sets one
        }
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Threads that wait by spinning steal the cores from whoever they wait for: on two shared cores a factor of 20.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB only; the engine is given bytes


class TargetEngine:
    """A vLLM engine of the target that can capture the outputs of some decoder layers."""

    def __init__(
        self,
        model: Path,
        *,
        dtype: str,
        max_model_len: int,
        target_layer_ids: Sequence[int] = (),
        kv_cache_gib: float = 1.0,
        max_num_seqs: int = 64,
        num_threads: int = 2,
        **engine_args: Any,
    ):
        set_engine_environment(num_threads=num_threads)
        started = time.monotonic()
        from vllm import LLM
        from vllm.platforms import current_platform

        from serving.engine.capture import LAYERS_KEY, WORKER_CLASS

        if current_platform.is_cpu():
            # A seeded request whose prompt is cut into chunks stops vLLM's CPU runner: it sets its generator's
            # offset back, which only CUDA generators have.
            engine_args = {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(max_model_len, MIN_BATCHED_TOKENS),
            } | engine_args
        self._model = Path(model)
        self._layer_ids = tuple(target_layer_ids)
        self._llm = LLM(
            model=str(model),
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            enforce_eager=True,
            disable_log_stats=True,
            worker_cls=WORKER_CLASS,
            additional_config={LAYERS_KEY: list(self._layer_ids)},
            kv_cache_memory_bytes=int(kv_cache_gib * 2**30) if current_platform.is_cpu() else None,
            **engine_args,
        )
        self._load_seconds = time.monotonic() - started
        self._kept: dict[str, tuple[int, ...]] = {}  # row id → the ids whose states the worker keeps

    def info(self) -> EngineInfo:
        """What this engine is."""
        import torch
        import vllm

        config = self._llm.llm_engine.vllm_config.model_config
        return EngineInfo(
            max_model_len=config.max_model_len,
            vocab_size=config.get_vocab_size(),
            hidden_size=config.get_hidden_size(),
            dtype=str(config.dtype).removeprefix("torch."),
            num_threads=torch.get_num_threads(),
            load_seconds=round(self._load_seconds, 2),
            vllm_version=vllm.__version__,
        )

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Reply]:
        """A reply for every request; one that cannot be answered says why, and troubles no other."""
        replies, running = {}, {}
        for number, request in enumerate(requests):
            if error := self._add(str(number), request.prompt_ids, self._sampling(request)):
                self._kept.pop(request.row_id, None)
                replies[request.row_id] = Reply(request.row_id, error=error)
            else:
                running[str(number)] = request
        for request_id, completion in self._run():
            row_id = running.pop(request_id).row_id
            ids, reason = tuple(completion.token_ids), completion.finish_reason
            if reason not in ("stop", "length") or not ids:
                replies[row_id] = Reply(row_id, error=f"finish reason {reason!r} with {len(ids)} token ids")
            else:
                replies[row_id] = Reply(row_id, ids, reason)
                if row_id in self._kept:
                    self._kept[row_id] = (*self._kept[row_id], *ids)
        return [replies[request.row_id] for request in requests]

    def capture(self, requests: Sequence[CaptureRequest], path: Path, typical_norms: Sequence[float]) -> list[Captured]:
        """Write every sound row's states to an Arrow file at ``path``; say where they are, or what was wrong."""
        results: dict[str, Captured] = {}
        hidden_size = self.info().hidden_size
        with StatesWriter(path, num_layers=len(self._layer_ids), hidden_size=hidden_size) as writer:
            for request, words, fault in self._states(requests):
                fault = fault or find_fault(words, num_states=len(request.ids) - 1, typical_norms=typical_norms)
                if fault:
                    results[request.row_id] = Captured(request.row_id, reason=fault.reason, detail=fault.detail)
                else:
                    batch = writer.append(words)
                    results[request.row_id] = Captured(request.row_id, batch, last_state_digest(words))
        return [results[request.row_id] for request in requests]

    def check_capture(self, ids: Sequence[int], others: Sequence[Sequence[int]]) -> dict[str, float]:
        """This prompt's states, alone and among others, against a plain forward pass of the same weights."""
        from serving.engine.reference import reference_states

        probe = CaptureRequest("probe", tuple(ids))
        crowd = [CaptureRequest(f"other-{n}", tuple(other)) for n, other in enumerate(others)]
        alone = self._words_of("probe", [probe])
        batched = self._words_of("probe", [*crowd, probe])
        layers = self._llm.llm_engine.vllm_config.model_config.hf_text_config.num_hidden_layers
        reference = reference_states(self._model, ids[:-1], num_layers=min(max(self._layer_ids) + 2, layers))
        return compare(alone, batched, reference, self._layer_ids)

    def _words_of(self, row_id: str, requests: Sequence[CaptureRequest]) -> np.ndarray:
        found = {request.row_id: (words, fault) for request, words, fault in self._states(requests)}
        words, fault = found[row_id]
        if fault or words is None:
            raise StageError(f"capture check: the prompt's states could not be taken ({fault})")
        return words

    def _states(
        self, requests: Sequence[CaptureRequest]
    ) -> Iterator[tuple[CaptureRequest, np.ndarray | None, RowFault | None]]:
        """Each request with its states or its fault, as it finishes, so that few are held at a time."""
        left = list(requests)
        for last_try in (False,) * (CAPTURE_TRIES - 1) + (True,):
            again = []
            for request, words, fault in self._prefill(left):
                if fault and fault.reason == "holes" and not last_try:
                    again.append(request)
                else:
                    yield request, words, fault
            left = again

    def _prefill(
        self, requests: Sequence[CaptureRequest]
    ) -> Iterator[tuple[CaptureRequest, np.ndarray | None, RowFault | None]]:
        running = {}
        for number, request in enumerate(requests):
            if (kept := self._take_kept(request)) is not None:
                yield request, kept, None
                continue
            # The last token is never an input, so the others are the prompt; the one sampled token is dropped.
            if len(request.ids) < 2:
                yield request, None, RowFault("too_short", {"ids": len(request.ids)})
            elif error := self._add(str(number), request.ids[:-1], self._capture_sampling(str(number))):
                yield request, None, RowFault("refused", {"error": error})
            else:
                running[str(number)] = request
        for request_id, _ in self._run():
            request = running.pop(request_id)
            taken = self._take(request_id, len(request.ids) - 1)
            if taken["states"] is None:
                detail = {"error": taken["error"], "holes": len(taken["holes"]), "positions": taken["holes"][:8]}
                yield request, None, RowFault("holes", detail)
            else:
                yield request, taken["states"], None

    def _take_kept(self, request: CaptureRequest) -> np.ndarray | None:
        """The states of a row that this engine emitted itself, so that no token goes through the target again."""
        ids = self._kept.pop(request.row_id, None)
        if ids is None:
            return None
        taken = self._take(_KEPT + request.row_id, len(ids) - 1)
        return taken["states"] if ids == request.ids else None

    def _take(self, request_id: str, num_states: int) -> dict[str, Any]:
        answers = self._llm.collective_rpc("take_states", args=(request_id, num_states))
        return next(answer for answer in answers if answer is not None)

    def _sampling(self, request: GenerateRequest) -> Any:
        params = self._llm.get_default_sampling_params()  # the model's own, as its server takes them
        if request.temperature is not None:
            params.temperature = request.temperature
        if request.top_p is not None:
            params.top_p = request.top_p
        return self._plain(
            params, max_tokens=request.max_tokens, seed=request.seed, **self._keeping(request, params.extra_args)
        )

    def _keeping(self, request: GenerateRequest, extra_args: dict[str, Any] | None) -> dict[str, Any]:
        """What makes the worker keep a request's states while it is answered, as far as memory is set aside for it."""
        if not self._layer_ids or request.row_id in self._kept:
            return {}
        row_bytes = len(self._layer_ids) * self.info().hidden_size * 2
        if (sum(map(len, self._kept.values())) + len(request.prompt_ids) + request.max_tokens) * row_bytes > KEEP_BYTES:
            return {}
        from serving.engine.capture import REQUEST_KEY

        self._kept[request.row_id] = tuple(request.prompt_ids)
        keep = {REQUEST_KEY: _KEPT + request.row_id}
        return {"extra_args": {**(extra_args or {}), **keep}, "skip_reading_prefix_cache": True}

    def _capture_sampling(self, request_id: str) -> Any:
        from vllm import SamplingParams

        from serving.engine.capture import REQUEST_KEY

        return self._plain(
            SamplingParams(temperature=0.0),
            max_tokens=1,
            skip_reading_prefix_cache=True,  # a cached prefix is not computed, so its states would be missing
            extra_args={REQUEST_KEY: request_id},
        )

    @staticmethod
    def _plain(params: Any, **changes: Any) -> Any:
        from vllm.sampling_params import RequestOutputKind

        for name, value in {**changes, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}.items():
            setattr(params, name, value)
        params.__post_init__()
        return params

    def _add(self, request_id: str, ids: Sequence[int], params: Any) -> str | None:
        """Hand a request to the engine; what is wrong with it, if anything is."""
        from vllm.exceptions import VLLMClientError

        try:
            self._llm.llm_engine.add_request(request_id, {"prompt_token_ids": list(ids)}, params)
        except (VLLMClientError, ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"[:300]
        return None

    def _run(self) -> Iterator[tuple[str, Any]]:
        engine = self._llm.llm_engine
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    yield output.request_id, output.outputs[0]
