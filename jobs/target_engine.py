"""The target on vLLM, in this process: exact ids in, exact ids and hidden states out, in one pass."""

import asyncio
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jobs.engine_calls import Asked, Finished, SharedEngine
from jobs.engine_check import Probe, check_by_head, check_by_reference, choose_check
from jobs.engine_rows import RowStates, capture_args
from jobs.engine_sampling import reply_params
from pipeline.engines import Captured, CaptureRequest, EngineInfo, GenerateRequest, Reply, StatesSink
from pipeline.errors import StageError

logger = logging.getLogger("slipstream")

MIN_BATCHED_TOKENS = 4096


def set_engine_environment(*, num_threads: int) -> None:
    """What vLLM, and the OpenMP below it, read from the environment when they are first imported."""
    os.environ.update(
        {
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: seconds instead of a minute
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # capture has been run on the V1 runner alone
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
    """A vLLM engine of the target that can capture the outputs of some decoder layers. Implements pipeline Engine.

    ``drafter``: a drafter's folder, which then drafts for replies here. ``check``: what the capture check compares
    with (CaptureConfig.check).
    """

    def __init__(
        self,
        model: Path,
        *,
        dtype: str,
        max_model_len: int,
        target_layer_ids: Sequence[int] = (),
        drafter: Path | None = None,
        check: Literal["auto", "reference", "head"] = "auto",
        tensor_parallel_size: int = 1,
        kv_cache_gib: float = 1.0,
        max_num_seqs: int = 64,
        num_threads: int = 2,
        **engine_args: Any,
    ):
        set_engine_environment(num_threads=num_threads)
        started = time.monotonic()
        from vllm import LLM
        from vllm.platforms import current_platform

        from serving.engine.capture import LAST_LAYER_KEY, LAYERS_KEY, WORKER_CLASS

        self._model = Path(model)
        self._layer_ids = tuple(target_layer_ids)
        self._check = choose_check(check, self._model)
        defaults = _cpu_args(max_model_len, kv_cache_gib) if current_platform.is_cpu() else {}
        engine_args = {"enforce_eager": True} | defaults | engine_args
        # A compiled engine's layers are fixed when it loads; an eager one gives one more for as long as it is asked to.
        give_last = self._check == "head" and not engine_args["enforce_eager"]
        self._llm = LLM(
            model=str(model),
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            tensor_parallel_size=tensor_parallel_size,
            disable_log_stats=True,
            worker_cls=WORKER_CLASS,
            additional_config={LAYERS_KEY: list(self._layer_ids), LAST_LAYER_KEY: give_last},
            **_speculation(drafter),
            **engine_args,
        )
        self._shared = SharedEngine(self._llm)
        self._load_seconds = time.monotonic() - started

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

    def generate(
        self, requests: Sequence[GenerateRequest], *, states: StatesSink | None = None
    ) -> tuple[list[Reply], list[Captured]]:
        """A reply for every request; one that cannot be answered says why, and troubles no other.

        With ``states``, what became of the states of every row that has a reply, in the requests' order.
        """
        replies: dict[str, Reply] = {}
        with self._shared.call() as call:
            rows = RowStates(call, states) if states is not None else None
            asked: dict[str, GenerateRequest] = {}
            adding = []
            for request in requests:
                key = call.new_key()
                try:
                    params = self._params(request, capture_args(key) if rows else None)
                except ValueError as error:
                    replies[request.row_id] = Reply(request.row_id, error=str(error)[:300])
                    continue
                asked[key] = request
                adding.append(Asked(key, request.prompt_ids, params, captured=rows is not None))
            for key, error in call.add(adding).items():
                request = asked.pop(key)
                replies[request.row_id] = Reply(request.row_id, error=error)
            for done in call.results():
                if rows and rows.was_read(done.key, done.taken):
                    continue
                request = asked.pop(done.key)
                reply = replies[request.row_id] = _reply(request.row_id, done)
                if rows and reply.error is None:
                    rows.take(request.row_id, (*request.prompt_ids, *reply.ids), done.taken)
        captured = rows.captured if rows else {}
        return (
            [replies[request.row_id] for request in requests],
            [captured[request.row_id] for request in requests if request.row_id in captured],
        )

    def prefill(self, requests: Sequence[CaptureRequest], *, states: StatesSink) -> list[Captured]:
        """The states of rows whose ids are known; one that cannot be run says why, and troubles no other."""
        with self._shared.call() as call:
            rows = RowStates(call, states)
            rows.read((request.row_id, request.ids) for request in requests)
            for done in call.results():
                rows.was_read(done.key, done.taken)
        return [rows.captured[request.row_id] for request in requests]

    def check_capture(self, ids: Sequence[int], others: Sequence[Sequence[int]]) -> dict[str, float]:
        """One prompt's captured states, at the engine's own precision, against what they must be.

        Relative errors: ``layer_L_error`` is the largest of a position against the reference. See
        pipeline/capture_check.py. Raises: StageError when the prompt cannot be run, or this check cannot.
        """
        probe = Probe(self._shared, self._layer_ids)
        if self._check == "head":
            return check_by_head(probe, self._shared, self._layer_ids, ids, others)
        return check_by_reference(probe, self._model, self._layer_ids, ids, others)

    def rendered_ids(self, messages: str, *, tools: str | None, template_args: str) -> list[int]:
        """The prompt ids that vLLM's own chat route makes of a conversation, with this engine's tokenizer and template.

        Raises: StageError when the route refuses it.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.exceptions import VLLMClientError
        from vllm.renderers.online_renderer import OnlineRenderer

        renderer = OnlineRenderer(
            model_config=self._llm.llm_engine.vllm_config.model_config,
            renderer=self._llm.llm_engine.renderer,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
            enable_auto_tools=True,
        )
        try:
            request = ChatCompletionRequest(
                messages=json.loads(messages),
                tools=json.loads(tools) if tools else None,
                chat_template_kwargs=json.loads(template_args or "{}"),
            )
            rendered = asyncio.run(renderer.render_chat(request))
        except (VLLMClientError, ValueError) as error:
            raise StageError(f"vLLM's chat route refuses a conversation: {error}")
        if not isinstance(rendered, tuple):  # an ErrorResponse, which is what its client would get
            raise StageError(f"vLLM's chat route refuses a conversation: {rendered}")
        _, (prompt,) = rendered
        return [int(token) for token in prompt["prompt_token_ids"]]

    def close(self) -> None:
        """Give the engine's memory back. vLLM takes down what all engines of a process share: close the others too."""
        self._llm.llm_engine.engine_core.shutdown()

    def _params(self, request: GenerateRequest, capture: dict[str, Any] | None) -> Any:
        return reply_params(request, self._llm.get_default_sampling_params(), capture=capture)


def _cpu_args(max_model_len: int, kv_cache_gib: float) -> dict[str, Any]:
    return {
        "kv_cache_memory_bytes": int(kv_cache_gib * 2**30),
        # A seeded request whose prompt is cut into chunks stops vLLM's CPU runner: it sets its generator's offset
        # back, which only CUDA generators have.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_model_len, MIN_BATCHED_TOKENS),
    }


def _speculation(drafter: Path | None) -> dict[str, Any]:
    if drafter is None:
        return {}
    block_size = json.loads((Path(drafter) / "config.json").read_text())["block_size"]
    return {
        "speculative_config": {"method": "dflash", "model": str(drafter), "num_speculative_tokens": block_size - 1},
        "per_request_spec_decode_metrics": "detailed",
    }


def _reply(row_id: str, done: Finished) -> Reply:
    completion = done.completion
    ids, reason = tuple(completion.token_ids), completion.finish_reason
    if reason not in ("stop", "length") or not ids:
        return Reply(row_id, error=f"finish reason {reason!r} with {len(ids)} token ids")
    metrics = completion.spec_decode_metrics
    return Reply(row_id, ids, reason, accepted_per_step=tuple(metrics.per_step_accepted) if metrics else None)
