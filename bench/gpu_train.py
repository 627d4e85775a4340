"""How much of a GPU does training use? Real shapes of drafters, made-up states, one step as the trainer takes it.

python bench/gpu_train.py              torch 2.11 or newer, transformers, pyarrow, pydantic and this checkout will do
python bench/gpu_train.py --small      the same code on tiny shapes, on any processor

Model FLOPs utilisation is what the model asks for (bench/oracles/training_costs.py) over what the chip can do in bf16,
over a whole step: packing, forward, loss, backward, clipping and Muon.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from bench.figures import Figure, at_least, at_most, finish, unknown  # noqa: E402
from bench.oracles.training_costs import Saved, Work, fitted, peak_bytes, saved_bytes, step_flops  # noqa: E402
from drafter.dataset import CachedRow  # noqa: E402
from drafter.deal import Deal  # noqa: E402
from drafter.frozen import FrozenTarget  # noqa: E402
from drafter.loss import dpace_weights  # noqa: E402
from drafter.model import Drafter  # noqa: E402
from drafter.optim import Optimizer  # noqa: E402
from drafter.packing import pack  # noqa: E402
from drafter.processes import clip, prepare  # noqa: E402
from drafter.rope import Rope  # noqa: E402
from drafter.shape import DrafterShape, LayerAttention  # noqa: E402
from drafter.step import backward, hidden_of  # noqa: E402
from pipeline.config import TrainConfig  # noqa: E402

# bf16 without sparsity, TFLOP/s. Source: the vendor's data sheets.
PEAKS = {"H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "B200": 2250.0, "L40S": 362.0, "A10": 125.0}
# Slots and tokens of the vocabulary that the loss takes at a time on a GPU (drafter/loss.py), and the float32 rows as
# wide as the drafter that it has beside each slot's logits.
LOSS_SLOTS, LOSS_TOKENS, LOSS_ROWS = 8192, 16384, 3


@dataclass(frozen=True)
class Load:
    """What one step is over."""

    rows: int
    prompt: int
    reply: int
    anchors: int
    """Of each row."""


def qwen3_8b() -> DrafterShape:
    """Source: z-lab/Qwen3-8B-DFlash-b16, config.json."""
    return _shape(4096, 12288, 151936, (1, 9, 17, 25, 33), 36, mask_token_id=151669, theta=1e6, max_positions=40960)


def qwen35_27b() -> DrafterShape:
    """Source: z-lab/Qwen3.5-27B-DFlash, config.json."""
    layers = (1, 16, 31, 46, 61)
    return _shape(5120, 17408, 248320, layers, 64, mask_token_id=248070, theta=1e7, max_positions=262144)


def tiny(shape: DrafterShape) -> DrafterShape:
    """The same drafter, a hundred times narrower."""
    rope = shape.rope.model_copy(update={"rotary_dim": 16})
    narrow = {"hidden_size": 64, "target_hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "mask_token_id": 511}
    return shape.model_copy(update={**narrow, **heads, "layers": shape.layers[:2], "rope": rope})


def _shape(
    hidden: int, wide: int, vocabulary: int, layer_ids: tuple[int, ...], num_target_layers: int, *, mask_token_id: int,
    theta: float, max_positions: int,
) -> DrafterShape:  # fmt: skip
    return DrafterShape(
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=vocabulary,
        rms_norm_eps=1e-6,
        max_position_embeddings=max_positions,
        block_size=16,
        mask_token_id=mask_token_id,
        target_layer_ids=layer_ids,
        num_target_layers=num_target_layers,
        target_hidden_size=hidden,
        rope=Rope(theta=theta, rotary_dim=128),
        layers=(LayerAttention(),) * 5,
    )


class Stepper:
    """The trainer's step on one device, over states that are made up."""

    def __init__(self, shape: DrafterShape, load: Load, device: torch.device, config: TrainConfig):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.shape, self.load, self.config = shape, load, config
        generator = torch.Generator(device).manual_seed(0)
        size = (shape.vocab_size, shape.hidden_size)
        embedding, head = (torch.empty(size, device=device, dtype=dtype).normal_(0, 0.02, generator=generator)
                           for _ in range(2))  # fmt: skip
        self.frozen = FrozenTarget(embedding, head, torch.ones(shape.hidden_size, device=device, dtype=dtype))
        with torch.device(device):
            drafter = Drafter(shape)
        self.drafter = prepare(drafter, config)
        self.parameters = list(self.drafter.parameters())
        named = self.drafter.named_parameters()
        self._optimizer = Optimizer(named, kind="muon", learning_rate=1e-4, compute=dtype)
        self.deals = deals_of(shape, load)
        self._slot_weights = dpace_weights(config.dpace_alpha)

    def step(self) -> float:
        """A whole step; its loss."""
        result = backward(
            self.drafter,
            self.frozen,
            self.deals,
            self._slot_weights,
            normalizer=sum(deal.total_weight for deal in self.deals),
            tokens_per_pass=self.config.tokens_per_pass,
        )
        clip(self.parameters, self.config.grad_clip)
        self._optimizer.step(1.0, 0)
        return result.loss

    def saved(self, positions: int, blocks: int) -> tuple[Work, int]:
        """What one pass saves that is over so many times as few positions and blocks as this saves at 1 and 1."""
        load = replace(self.load, rows=1, prompt=64 * positions, reply=64, anchors=4 * blocks)
        deals = deals_of(self.shape, load, ends_at=load.prompt + 48)
        device, dtype = self.frozen.head.device, self.frozen.head.dtype
        packed = pack(deals, self.shape.block_size, dtype).to(device)
        held = [*self.parameters, self.frozen.embedding, self.frozen.head]
        found = saved_bytes(lambda: hidden_of(self.drafter, self.frozen, packed), held)
        return work_of(deals), found


def deals_of(shape: DrafterShape, load: Load, *, ends_at: int | None = None) -> list[Deal]:
    """Rows of random ids with anchors all over the reply; all rows share their states, which are large."""
    generator = torch.Generator().manual_seed(1)
    n = load.prompt + load.reply
    states = torch.randn(n - 1, shape.context_size, generator=generator).bfloat16()
    deals = []
    for i in range(load.rows):
        ids = torch.randint(0, shape.vocab_size - 1, (n,), generator=generator)
        last = ends_at or n - shape.block_size
        legal = torch.arange(load.prompt, last)
        drawn = torch.randperm(len(legal) - 1, generator=generator)[: load.anchors - 1]
        anchors = torch.cat([legal[drawn], legal[-1:]]).sort().values
        deals.append(Deal(CachedRow(f"row-{i}", "made-up", ids, load.prompt, states), anchors, 1.0))
    return deals


def work_of(deals: Sequence[Deal]) -> Work:
    """What these deals are over: a context ends at its row's last anchor."""
    return Work(
        sum(int(deal.anchors[-1]) for deal in deals),
        sum(len(deal.anchors) for deal in deals),
        sum(int(deal.anchors.sum()) for deal in deals),
    )


def measured(name: str, shape: DrafterShape, load: Load, *, steps: int, config: TrainConfig) -> dict[str, Figure]:
    """Utilisation and peak memory of one shape. Without a GPU the code runs and nothing is claimed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stepper = Stepper(shape, load, device, config)
    work, saved = work_of(stepper.deals), predicted_saved(stepper)
    size = stepper.frozen.head.element_size()
    slots = min(LOSS_SLOTS, work.num_blocks * shape.num_draft_tokens)
    piece = slots * (min(LOSS_TOKENS, shape.vocab_size) * size + LOSS_ROWS * shape.hidden_size * 4)
    parts = peak_bytes(
        stepper.parameters, (stepper.frozen.embedding, stepper.frozen.head), saved.of(work), compute_bytes=size,
        loss_bytes=piece,
    )  # fmt: skip
    print(f"{name}: {work}, predicted peak {parts['peak'] / 1e9:.2f} GB of {_gb(parts)}", file=sys.stderr, flush=True)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [_timed(stepper, device) for _ in range(steps + 2)][2:]
    tflops = step_flops(shape, work) / median(seconds) / 1e12
    note = {"on": name, "tflop_per_s": tflops, "step_s": median(seconds), "blocks_per_s": work.num_blocks
            / median(seconds), "predicted_gb": parts["peak"] / 1e9, "parts_gb": _gb(parts)}  # fmt: skip
    print(f"{name}: {note}", file=sys.stderr, flush=True)
    if device.type != "cuda":
        why = unknown("no GPU") | note
        return {f"gpu_train.{name}.utilisation": why, f"gpu_train.{name}.memory_error": why}
    chip = torch.cuda.get_device_name()
    peak = next((peak for chip_name, peak in PEAKS.items() if chip_name in chip), None)
    error = abs(torch.cuda.max_memory_allocated() / parts["peak"] - 1)
    note |= {"chip": chip, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}
    utilisation = at_least(tflops / peak, 0.45, **note) if peak else unknown(f"no peak is known of {chip}") | note
    return {
        f"gpu_train.{name}.utilisation": utilisation,
        f"gpu_train.{name}.memory_error": at_most(error, 0.1, **note),
    }


def predicted_saved(stepper: Stepper) -> Saved:
    """Bytes that a pass saves, fitted to three small ones."""
    return fitted(stepper.saved, (1, 3))


def _gb(parts: dict[str, float]) -> dict[str, float]:
    return {name: round(value / 1e9, 3) for name, value in parts.items()}


def _timed(stepper: Stepper, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    stepper.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--only", choices=("qwen3_8b", "qwen35_27b"), help="one shape")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--rows", type=int, default=16, help="replies a step")
    parser.add_argument("--anchors", type=int, default=128, help="anchors of a reply")
    parser.add_argument("--compile", action="store_true", help="torch.compile the layers")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again in the backward pass")
    arguments = parser.parse_args(argv)
    load = Load(2, 40, 60, 8) if arguments.small else Load(arguments.rows, 512, 512, arguments.anchors)
    config = TrainConfig(
        compile=arguments.compile, activation_checkpointing=arguments.checkpointing, tokens_per_pass=1 << 20
    )
    figures: dict[str, Figure] = {}
    if not (torch.cuda.is_available() or arguments.small):
        for name in ("qwen3_8b", "qwen35_27b"):
            figures |= {f"gpu_train.{name}.{what}": unknown("no GPU") for what in ("utilisation", "memory_error")}
        finish("gpu_train", figures)
        return figures
    for shape_of in (qwen3_8b, qwen35_27b):
        if arguments.only in (None, shape_of.__name__):
            shape = tiny(shape_of()) if arguments.small else shape_of()
            steps = 2 if arguments.small else arguments.steps
            figures |= measured(shape_of.__name__, shape, load, steps=steps, config=config)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    finish("gpu_train", figures)
    return figures


if __name__ == "__main__":
    main()
