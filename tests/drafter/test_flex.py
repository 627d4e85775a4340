import pytest
import torch
import toys

from drafter.attention import attend, view
from drafter.deal import Deal
from drafter.flex import attend_by_mask, block_mask
from drafter.packing import pack


@pytest.mark.parametrize(
    "variant", ["full", "full, causal", "window", "window, causal", "window of one position", "sinks", "mixed layers"]
)
def test_one_mask_over_all_rows_is_attention_group_by_group(variant):
    shape = toys.shape(**toys.VARIANTS[variant])
    several = [(30, [4, 5, 11, 20]), (14, []), (25, [2, 21])]
    deals = [Deal(toys.row(n, 2, seed=n), torch.tensor(some, dtype=torch.int64), 1.0) for n, some in several]
    packed = pack(deals, 4, torch.float32)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(6, 4, 4, 16, generator=generator)
    k, v = torch.randn(2, 6, 4, 2, 16, generator=generator)
    context_k, context_v = torch.randn(2, len(packed.states), 2, 16, generator=generator)
    sinks = torch.randn(4, generator=generator) if shape.has_attention_sinks else None
    for layer in set(shape.layers):
        by_group = attend(q, k, v, context_k, context_v, view(layer, packed, 4), sinks)
        by_mask = attend_by_mask(q, k, v, context_k, context_v, block_mask(layer, packed, 4), sinks)
        assert (by_group - by_mask).abs().max() < 1e-5
