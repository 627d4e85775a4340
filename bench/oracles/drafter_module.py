"""vLLM's own drafter module without an engine: built from a checkpoint's folder, its KV cache bound by hand.

What the engine does around it is done here in the plainest way: one request, its context written into KV blocks one
after another, one forward pass over the block. The CPU attention kernel is the engine's.

Legend: n context positions, F = layers x H_target, B block size, V vocabulary.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

KV_BLOCK_SIZE = 32


@contextmanager
def one_process() -> Iterator[None]:
    """What vLLM's layers need to be built in this process: a group of one."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    from serving.engine.cpu_context_norm import repair_cpu_context_norm

    _set_torch_accelerator_to_noop()
    repair_cpu_context_norm()
    store = Path(os.environ.get("TMPDIR", "/tmp")) / f"slipstream-drafter-module-{os.getpid()}"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
    try:
        yield
    finally:
        cleanup_dist_env_and_memory()
        store.unlink(missing_ok=True)


class DrafterModule:
    """A live ``DFlashQwen3ForCausalLM`` of a checkpoint, with the target's embedding and head."""

    def __init__(self, target: Path, drafter: Path, workdir: Path):
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model

        block_size = json.loads((drafter / "config.json").read_text())["block_size"]
        whole = _with_the_targets(target, drafter, workdir / "whole")
        speculation = {"method": "dflash", "model": str(whole), "num_speculative_tokens": block_size - 1}
        arguments = EngineArgs(
            model=str(target),
            dtype="float32",
            max_model_len=512,
            enforce_eager=True,
            skip_tokenizer_init=True,
            block_size=KV_BLOCK_SIZE,
            kv_cache_memory_bytes=1 << 20,
            speculative_config=speculation,
        )
        # Mixed layers are for the V2 runner alone; what that one does beside the module is done in logits().
        with patch.object(VllmConfig, "_dflash_needs_multi_kv_group", lambda config: False):
            self.config = arguments.create_engine_config()
        draft = self.config.speculative_config.draft_model_config
        as_under_v2 = patch.object(VllmConfig, "use_v2_model_runner", True)
        with as_under_v2, set_current_vllm_config(self.config), torch.inference_mode():
            self.model = get_model(vllm_config=self.config, model_config=draft)
        self._layers = dict(
            zip(self.model.get_draft_kv_cache_layer_names(), self.model.get_draft_attn_causal(), strict=True)
        )
        self._blocks = torch.arange(1, 1 + 512 // KV_BLOCK_SIZE, dtype=torch.int32)[None]  # block 0 is nobody's
        self._builders = {name: self._bind(name) for name in self._layers}
        self._num_draft_tokens = block_size - 1
        self._mask_token_id = draft.hf_config.dflash_config["mask_token_id"]

    @torch.inference_mode()
    def logits(self, states: Tensor, anchor_id: int) -> Tensor:  # [n, F] -> [K, V]
        """What the head says of a block whose anchor stands right behind these positions."""
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        n, B = len(states), self._num_draft_tokens + 1
        ids = torch.tensor([anchor_id] + [self._mask_token_id] * self._num_draft_tokens, dtype=torch.int32)
        slots = KV_BLOCK_SIZE + torch.arange(n + B)
        metadata = {name: self._metadata(name, n, slots[n:]) for name in self._layers}
        with set_current_vllm_config(self.config):
            context = self.model.combine_hidden_states(states)
            self.model.precompute_and_store_context_kv(context, torch.arange(n), slots[:n])
            mapping = dict.fromkeys(self._layers, slots[n:])
            with set_forward_context(metadata, self.config, num_tokens=B, slot_mapping=mapping):
                hidden = self.model(ids, torch.arange(n, n + B))
            return self.model.compute_logits(hidden[1:])

    def _bind(self, name: str) -> Any:
        """Memory for one layer's keys and values; returns what builds its attention metadata."""
        layer = self.config.compilation_config.static_forward_context[name]
        spec = layer.get_kv_cache_spec(self.config)
        layer.kv_cache = torch.zeros(1 + self._blocks.numel(), spec.num_kv_heads, KV_BLOCK_SIZE, 2 * spec.head_size)
        return layer.get_attn_backend().get_builder_cls()(spec, [name], self.config, torch.device("cpu"))

    def _metadata(self, name: str, n: int, slots: Tensor) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        B = len(slots)
        start = torch.tensor([0, B], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=start,
            query_start_loc_cpu=start,
            seq_lens=torch.tensor([n + B], dtype=torch.int32),
            num_reqs=1,
            num_actual_tokens=B,
            max_query_len=B,
            max_seq_len=n + B,
            block_table_tensor=self._blocks,
            slot_mapping=slots,
            causal=self._layers[name],
        )
        return self._builders[name].build(0, common)


def _with_the_targets(target: Path, drafter: Path, folder: Path) -> Path:
    """The drafter with the target's embedding and head in its file, which is where vLLM looks before it shares them."""
    shutil.copytree(drafter, folder)
    borrowed = load_file(target / "model.safetensors")
    tensors = load_file(drafter / "model.safetensors")
    tensors |= {
        "embed_tokens.weight": borrowed["model.embed_tokens.weight"],
        "lm_head.weight": borrowed["lm_head.weight"],
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
