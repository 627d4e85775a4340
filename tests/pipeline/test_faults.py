"""What keeps a row's states out of the cache."""

import numpy as np
import pytest
import torch

from pipeline.faults import find_fault


def words_of(numbers):
    """The bf16 words that torch stores for these numbers."""
    return torch.as_tensor(numbers, dtype=torch.float32).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 700])
def test_every_fault_is_named_with_its_place(n):
    numbers = torch.randn(n, 2, 4, generator=torch.Generator().manual_seed(0))
    words = words_of(numbers)
    assert find_fault(words, num_states=n, typical_norms=[1.0, 1.0]) is None
    assert find_fault(words, num_states=n + 1).reason == "wrong_length"
    assert find_fault(words[:0], num_states=0).reason == "wrong_length"
    for bad, place in ((float("nan"), 2), (float("inf"), 0), (float("-inf"), 3)):
        broken = words.copy()
        broken[n - 1, 1, place] = words_of([bad])[0]
        fault = find_fault(broken, num_states=n)
        assert (fault.reason, fault.detail) == (
            "not_finite",
            {"position": n - 1, "layer_index": 1, "element": place},
        )
    holes = words.copy()
    holes[n // 2, 0] = 0x8000  # negative zeros
    fault = find_fault(holes, num_states=n)
    assert (fault.reason, fault.detail["position"], fault.detail["layer_index"]) == ("zero_states", n // 2, 0)
    assert fault.detail["share"] == pytest.approx(1 / n, abs=1e-4)
    large = words_of(numbers * 1e6)
    assert find_fault(large, num_states=n) is None, "without norms to compare with"
    assert find_fault(large, num_states=n, typical_norms=[1.0, 1.0]).reason == "norm_out_of_range"
