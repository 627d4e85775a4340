"""A peer's trained weights as a drafter of ours, and whether anything was lost on the way."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench.oracles.trainers import TrainerProcess
from drafter.checkpoint import save_drafter
from drafter.dataset import CachedRow
from drafter.deal import Deal
from drafter.frozen import FrozenTarget
from drafter.model import Drafter
from drafter.packing import pack
from drafter.shape import DrafterShape
from drafter.step import hidden_of


def converted(weights: Path, shape: DrafterShape, folder: Path | None = None) -> Drafter:
    """The drafter with these weights, whose names are the z-lab layout's own; written into a folder, if one is named.

    Raises: RuntimeError where a tensor is missing, left over or misshapen.
    """
    drafter = Drafter(shape)
    drafter.load_state_dict({name: tensor.float() for name, tensor in load_file(weights).items()})
    if folder is not None:
        save_drafter(folder, drafter)
    return drafter


@torch.no_grad()
def same_drafts(
    process: TrainerProcess, drafter: Drafter, frozen: FrozenTarget, rows: list[CachedRow]
) -> dict[str, Any]:
    """Slots of these rows (the first of the exported) that the peer's own forward pass and ours draft alike."""
    same = total = 0
    for index, row in enumerate(rows):
        anchors = torch.arange(row.num_prompt_tokens, row.num_tokens)
        packed = pack([Deal(row, anchors, 1.0)], drafter.shape.block_size, frozen.head.dtype)
        ours = (hidden_of(drafter, frozen, packed) @ frozen.head.T).argmax(-1)
        theirs = torch.tensor(process.ask(do="drafts", row=index)["ids"])
        same, total = same + int((ours == theirs).sum()), total + ours.numel()
    return {"same": same, "slots": total, "share": same / total}
