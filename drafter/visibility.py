"""Which positions a slot sees: the one rule that every form of attention follows."""

from torch import Tensor

from drafter.shape import LayerAttention


def sees(layer: LayerAttention, position: Tensor, anchor: Tensor, key: Tensor, *, is_context: bool) -> Tensor:
    """Where the slot at ``position`` of the block at ``anchor`` sees ``key``, a position of its context or its block.

    All positions are those of one row; shapes broadcast. Source: DFlash, arXiv 2602.06036, section 3; windows as in
    vLLM's drafter, to both sides where a layer is not causal.
    """
    last = anchor - 1 if is_context else position  # of what may be seen
    seen = key <= last if is_context or layer.is_causal else key == key
    return seen if layer.window is None else seen & ((position - key).abs() < layer.window)
