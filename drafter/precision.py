"""What matrices are multiplied in."""

from typing import Literal

import torch


def compute_dtype(compute: Literal["auto", "float32", "bfloat16"], device: torch.device) -> torch.dtype:
    """The dtype of states, of frozen tensors and of what flows through the drafter; its parameters stay float32.

    auto: bfloat16 where the hardware multiplies it faster than float32, which on a CPU takes its matrix tiles (AMX).
    """
    if compute != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[compute]
    if device.type == "cuda":
        has_fast_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_fast_bfloat16 = torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_fast_bfloat16 else torch.float32
