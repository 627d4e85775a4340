"""What matrices are multiplied in."""

import logging
from typing import Literal

import torch

from pipeline.errors import ConfigError

logger = logging.getLogger("slipstream")


def compute_dtype(compute: Literal["auto", "float32", "bfloat16"], device: torch.device) -> torch.dtype:
    """The dtype of states, of frozen tensors and of what flows through the drafter; its parameters stay float32.

    auto: bfloat16 on any GPU, seen from here or not, and on a CPU that multiplies it faster than float32.
    """
    if compute != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[compute]
    return torch.bfloat16 if device.type == "cuda" or has_matrix_tiles() else torch.float32


def has_matrix_tiles() -> bool:
    """Whether this machine's CPU multiplies bfloat16 faster than float32, which takes its matrix tiles (AMX)."""
    return torch.cpu._is_amx_tile_supported()


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What large products of such tensors are computed in where their results need not have their dtype: float32
    instead of bfloat16 on a CPU without matrix tiles. Even one with bfloat16 instructions takes twice as long for them.
    """
    is_slow = dtype == torch.bfloat16 and device.type == "cpu" and not has_matrix_tiles()
    return torch.float32 if is_slow else dtype


def require_multiplied(dtype: torch.dtype, device: torch.device) -> None:
    """Warns where this device multiplies so slowly. Raises: ConfigError where a GPU has no bfloat16 at all."""
    if device.type == "cuda":
        if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ConfigError(
                f"{torch.cuda.get_device_name(device)} does not multiply bfloat16, which train.compute asks of a GPU "
                'unless it is set; set train.compute = "float32"'
            )
    elif dtype == torch.bfloat16 and not has_matrix_tiles():
        logger.warning(
            "train: computing in bfloat16 on a CPU without matrix tiles (AMX), where float32 is many times as fast; "
            'set train.compute = "float32", or train on machines of one kind'
        )


def flush_denormals() -> None:
    """Take numbers below 1e-38 for 0, in this thread and in those that it has compute with it.

    A CPU multiplies them a hundred times as slowly as others, and the softmax of a sharp drafter is full of them.
    Threads take the setting over when they are started: call it before anything is computed.
    """
    torch.set_flush_denormal(True)
