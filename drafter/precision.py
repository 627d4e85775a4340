"""What matrices are multiplied in."""

import logging
from functools import lru_cache
from pathlib import Path
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
    return torch.bfloat16 if device.type == "cuda" or has_fast_bfloat16() else torch.float32


def has_fast_bfloat16() -> bool:
    """Whether this machine's CPU multiplies bfloat16 faster than float32: with matrix tiles (AMX) or, as AMD's do since
    Zen 4 (2.1 to 2.4 times), by instructions alone. Others that have those were slower by half.

    By what the CPU is and not by a clock: what a run computes in is part of what it is.
    """
    if torch.cpu._is_amx_tile_supported():
        return True
    return torch.cpu._is_avx512_bf16_supported() and _vendor() == "AuthenticAMD"


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What large products of such tensors are computed in where their results need not have their dtype: float32
    instead of bfloat16 on a CPU that is slower at those.
    """
    is_slow = dtype == torch.bfloat16 and device.type == "cpu" and not has_fast_bfloat16()
    return torch.float32 if is_slow else dtype


def require_multiplied(dtype: torch.dtype, device: torch.device) -> None:
    """Warns where this device multiplies so slowly. Raises: ConfigError where a GPU has no bfloat16 at all."""
    if device.type == "cuda":
        if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ConfigError(
                f"{torch.cuda.get_device_name(device)} does not multiply bfloat16, which train.compute asks of a GPU "
                'unless it is set; set train.compute = "float32"'
            )
    elif dtype == torch.bfloat16 and not has_fast_bfloat16():
        logger.warning(
            "train: computing in bfloat16 on a CPU where float32 is faster, some of them many times; "
            'set train.compute = "float32", or train on machines of one kind'
        )


@lru_cache(maxsize=1)
def _vendor() -> str:
    """Who made this CPU, as it says itself; empty where nobody says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def flush_denormals() -> None:
    """Take numbers below 1e-38 for 0, in this thread and in those that it has compute with it.

    A CPU multiplies them a hundred times as slowly as others, and the softmax of a sharp drafter is full of them.
    Threads take the setting over when they are started: call it before anything is computed.
    """
    torch.set_flush_denormal(True)
