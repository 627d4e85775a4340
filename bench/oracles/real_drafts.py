"""What vLLM's own DFlash drafter really drafts, block by block, and what ours says of the same states.

The engine runs in this process. Two methods of its proposer are wrapped, never replaced: ``propose`` shows
the target's states as the engine hands them over, ``_greedy_sample`` the hidden states that the real drafter's
head reads. One request runs at a time, so that a state's position names it.

Shapes: n positions, F layers x H_target, K draft tokens, V vocabulary.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter.dataset import CachedRow
from drafter.deal import Deal
from drafter.frozen import FrozenTarget
from drafter.model import Drafter
from drafter.packing import pack
from drafter.step import hidden_of


@dataclass(frozen=True)
class Draft:
    """One block as the engine drafted it."""

    anchor: int
    anchor_id: int
    logits: Tensor  # [K, V]


@dataclass
class Recorder:
    """The drafts of one request, and the target's states by position."""

    states: dict[int, Tensor] = field(default_factory=dict)  # position → [F]
    drafts: list[Draft] = field(default_factory=list)

    def install(self, worker: Any) -> None:
        """Wrap the worker's proposer (vLLM 0.32, V1 runner)."""
        proposer = worker.model_runner.drafter
        propose, sample = proposer.propose, proposer._greedy_sample
        signature = inspect.signature(propose)

        def recording_propose(*args: Any, **kwargs: Any) -> Tensor:
            given = signature.bind(*args, **kwargs).arguments
            rows = given["target_hidden_states"].detach().clone()
            for position, row in zip(given["target_positions"].tolist(), rows, strict=True):
                self.states[position] = row  # of a rejected draft: overwritten before any block may see it
            return propose(*args, **kwargs)

        def recording_sample(hidden: Tensor) -> Tensor:
            logits = proposer.model.compute_logits(hidden)
            self.drafts.append(Draft(int(proposer.positions[0]), int(proposer.input_ids[0]), logits.detach().clone()))
            return sample(hidden)

        proposer.propose, proposer._greedy_sample = recording_propose, recording_sample

    def clear(self) -> None:
        """Forget the last request."""
        self.states.clear()
        self.drafts.clear()


@dataclass
class Comparison:
    """Slots compared, slots whose argmax agrees, and the largest difference of two logits."""

    num_slots: int = 0
    num_same: int = 0
    max_abs_difference: float = 0.0
    largest_logit: float = 0.0

    @torch.inference_mode()
    def add(self, recorder: Recorder, drafter: Drafter, frozen: FrozenTarget) -> None:
        """Every draft of one request against ours."""
        for draft in recorder.drafts:
            states = torch.stack([recorder.states[position] for position in range(draft.anchor)])
            ids = torch.zeros(draft.anchor + drafter.shape.block_size, dtype=torch.int64)
            ids[draft.anchor] = draft.anchor_id
            row = CachedRow("", "", ids, 1, states)
            packed = pack([Deal(row, torch.tensor([draft.anchor]), 1.0)], drafter.shape.block_size, frozen.head.dtype)
            ours = hidden_of(drafter, frozen, packed)[0] @ frozen.head.T * drafter.shape.logit_scale
            self.num_slots += len(ours)
            self.num_same += int((ours.argmax(-1) == draft.logits.argmax(-1)).sum())
            self.max_abs_difference = max(self.max_abs_difference, float((ours - draft.logits).abs().max()))
            self.largest_logit = max(self.largest_logit, float(draft.logits.abs().max()))


def open_engine(
    target: Path,
    drafter: Path | None,
    *,
    num_draft_tokens: int = 0,
    max_model_len: int = 512,
    request_metrics: str = "none",
) -> Any:
    """A float32 vLLM engine in this process, one request at a time, with or without speculation."""
    from vllm import LLM

    from serving.engine.cpu_context_norm import repair_cpu_context_norm

    repair_cpu_context_norm()  # as the worker extension of our servers does
    speculation = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": num_draft_tokens}
    return LLM(
        str(target),
        dtype="float32",
        max_model_len=max_model_len,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        per_request_spec_decode_metrics=request_metrics,
        kv_cache_memory_bytes=1 << 29,
        speculative_config=speculation if drafter else None,
    )


def close_engine() -> None:
    """Give the memory of an engine back; drop every reference to it first."""
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def greedy(llm: Any, prompt_ids: Sequence[int], *, max_tokens: int, stop_ids: Sequence[int] = ()) -> list[int]:
    """The engine's greedy reply to one prompt, as token ids."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, stop_token_ids=list(stop_ids)
    )
    (output,) = llm.generate([{"prompt_token_ids": list(prompt_ids)}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def accepted_per_step(llm: Any) -> float:
    """Drafts accepted a step since the engine started, by its own count."""
    metrics = {m.name: m.value for m in llm.get_metrics() if m.name.startswith("vllm:spec") and hasattr(m, "value")}
    return metrics["vllm:spec_decode_num_accepted_tokens"] / max(1, metrics["vllm:spec_decode_num_drafts"])
