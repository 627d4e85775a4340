"""SpecForge's own DFlash training step over states that Slipstream captured; runs in its environment, without sglang.

python specforge_trainer.py SETTINGS.json

Its command line asks for a GPU and for sglang, which captures; its model, strategy, backend and optimiser don't. They
are driven here as its controller drives them on one device: forward_loss, backward, step. It has AdamW alone.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
from specforge.modeling.draft.dflash import DFlashDraftModel
from specforge.optimizer import BF16Optimizer
from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
from specforge.training.strategies.base import DFlashTrainStrategy
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config
from turns import Rows, Turns, answer, begin, resident


def model_of(settings: dict[str, Any]) -> OnlineDFlashModel:
    """Their training model: a new drafter under the target's embedding and head, in the dtype that is measured."""
    target = Path(settings["target"])
    told, layers = json.loads((target / "config.json").read_text()), settings["num_layers"]
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
        "max_position_embeddings",
    )  # fmt: skip
    config = Qwen3Config(
        **{name: told[name] for name in names},
        head_dim=told.get("head_dim") or told["hidden_size"] // told["num_attention_heads"],
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
        rope_parameters=told.get("rope_parameters") or {"rope_type": "default", "rope_theta": told["rope_theta"]},
        tie_word_embeddings=False,
        block_size=settings["block_size"],
        num_target_layers=told["num_hidden_layers"],
        dflash_config={"mask_token_id": settings["mask_token_id"], "target_layer_ids": settings["target_layer_ids"]},
        attn_implementation=settings["attention"],
    )
    dtype = getattr(torch, settings["dtype"])
    embedding, head = frozen(target, dtype)
    return OnlineDFlashModel(
        DFlashDraftModel(config).to(dtype),
        head,
        embedding,
        settings["mask_token_id"],
        block_size=settings["block_size"],
        attention_backend=settings["attention"],
        num_anchors=settings["blocks_per_step"] // settings["rows_per_step"],
        loss_type="dpace",
    )


def frozen(target: Path, dtype: torch.dtype) -> tuple[nn.Embedding, nn.Linear]:
    """The target's embedding and head."""
    with safe_open(target / "model.safetensors", framework="pt") as tensors:
        weights = tensors.get_tensor("model.embed_tokens.weight").to(dtype)
        untied = "lm_head.weight" in tensors.keys()  # noqa: SIM118 - not a dict
        head_weights = tensors.get_tensor("lm_head.weight").to(dtype) if untied else weights
    embedding, head = nn.Embedding.from_pretrained(weights), nn.Linear(1, 1, bias=False)
    head.weight = nn.Parameter(head_weights, requires_grad=False)
    return embedding, head


def batch_of(settings: dict[str, Any], rows: Rows, dealt: Sequence[int]) -> tuple[dict[str, Tensor], int]:
    """Rows side by side, padded to the longest, and the blocks that they will be trained on."""
    dtype = getattr(torch, settings["dtype"])
    padded = {
        "input_ids": [rows.ids(index) for index in dealt],
        "hidden_states": [rows.states(index).to(dtype) for index in dealt],
        "loss_mask": [rows.supervised(index) for index in dealt],
    }
    batch = {name: nn.utils.rnn.pad_sequence(values, batch_first=True) for name, values in padded.items()}
    limit = settings["blocks_per_step"] // settings["rows_per_step"]
    return batch, sum(min(limit, int(mask.sum()) - 1) for mask in padded["loss_mask"])


def main() -> None:
    """Make the trainer, say so, and train as commands come."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    memory = begin(settings)
    model, rows = model_of(settings), Rows(Path(settings["rows"]))
    strategy, backend = DFlashTrainStrategy(model), FSDPTrainingBackend(ParallelConfig())
    backend.prepare_model(model, wrap=False)
    backend.set_optimizer(BF16Optimizer(model.draft_model, lr=settings["learning_rate"], total_steps=settings["steps"]))
    turns = Turns(settings, rows, lambda dealt: batch_of(settings, rows, dealt), memory, {})
    memory["loaded"] = resident("VmRSS")
    answer({"ready": True, "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad)})
    for batch in turns:
        found = strategy.forward_loss(SimpleNamespace(tensors=batch, strategy=strategy.name, metadata={}))
        backend.backward(found.loss)
        backend.step()


if __name__ == "__main__":
    main()
