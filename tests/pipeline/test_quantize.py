"""The 8-bit form: every number within half a step of its group, whatever the group holds."""

import math

import numpy as np
import pytest
import torch

from pipeline.errors import SchemaError
from pipeline.quantize import dequantize, num_groups, quantize
from pipeline.schemas import bytes_per_state


def words_of(numbers):
    return torch.as_tensor(numbers, dtype=torch.float32).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def numbers_of(words):
    return torch.from_numpy(words.view(np.int16).copy()).view(torch.bfloat16).double().numpy()


@pytest.mark.parametrize(("hidden", "group"), [(64, 64), (128, 64), (100, 64), (30, 64), (576, 64), (7, 3), (1, 64)])
def test_every_number_is_within_half_a_step_and_every_group_has_its_own(hidden, group):
    generator = torch.Generator().manual_seed(hidden)
    scale = 10.0 ** torch.randint(-6, 7, (5, 3, hidden), generator=generator)
    words = words_of(torch.randn(5, 3, hidden, generator=generator) * scale)
    codes, scales = quantize(words, group)
    groups = math.ceil(hidden / group)
    assert codes.shape == words.shape and codes.dtype == np.int8
    assert scales.shape == (5, 3, groups) and scales.dtype == np.uint16 and num_groups(hidden, group) == groups
    numbers, back, steps = numbers_of(words), dequantize(codes, scales, group), numbers_of(scales)
    assert back.dtype == np.float32
    for position in range(5):
        for layer in range(3):
            for g in range(groups):
                mine = slice(g * group, min(hidden, (g + 1) * group))
                true, step = numbers[position, layer, mine], steps[position, layer, g]
                peak = max(abs(x) for x in true)
                assert peak / 127 * (1 - 1e-6) <= step <= peak / 127 * (1 + 2**-7), "rounded up, by one word at most"
                assert max(abs(back[position, layer, mine] - true)) <= step / 2 * (1 + 1e-6)
                assert codes[position, layer, mine].min() >= -127


def test_one_layers_outlier_costs_no_other_layer_position_or_group_anything():
    numbers = torch.randn(3, 2, 128, generator=torch.Generator().manual_seed(0))
    calm = dequantize(*quantize(words_of(numbers)))
    numbers[1, 1, 70] = 30_000.0
    found = dequantize(*quantize(words_of(numbers)))
    same = np.ones(found.shape, bool)
    same[1, 1, 64:] = False
    assert np.array_equal(found[same], calm[same]) and found[1, 1, 70] == pytest.approx(30_000, rel=0.005)


@pytest.mark.parametrize("value", [3.0e38, 1.0, 1e-39, 1e-40, -2.5])
def test_the_largest_and_the_smallest_numbers_of_bf16_have_a_scale(value):
    words = words_of([[[value, 0.0, -value / 2, -0.0]]])
    (true,) = numbers_of(words).reshape(1, 4)
    back = dequantize(*quantize(words)).reshape(4)
    assert np.isfinite(back).all() and back[1] == back[3] == 0
    assert (
        abs(back.astype(np.float64) - true).max() <= max(abs(true)) / 127 * 0.51 + 2.0**-134
    )  # half of bf16's last word


def test_a_group_of_zeros_stays_zero_beside_others():
    numbers = torch.randn(2, 1, 128)
    numbers[0, 0, :64] = 0
    with np.errstate(all="raise"):
        codes, scales = quantize(words_of(numbers))
    assert scales[0, 0, 0] == 0 and not codes[0, 0, :64].any()
    back = dequantize(codes, scales)
    assert not back[0, 0, :64].any() and back[0, 0, 64:].any() and np.isfinite(back).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none_have_no_code(bad):
    words = words_of([[[1.0, bad]]])
    with pytest.raises(SchemaError, match="no 8-bit form"):
        quantize(words)


@pytest.mark.parametrize(("layers", "hidden"), [(5, 576), (5, 4096), (3, 5120)])
def test_the_8_bit_form_takes_a_little_over_half_the_bytes(layers, hidden):
    assert bytes_per_state(layers, hidden, "bf16") == 2 * layers * hidden
    assert bytes_per_state(layers, hidden, "int8") == layers * hidden + 2 * layers * hidden // 64
    assert bytes_per_state(layers, hidden, "int8") <= 0.53 * bytes_per_state(layers, hidden, "bf16")


def test_an_unknown_form_is_refused_with_the_known_ones():
    with pytest.raises(SchemaError, match=r"'fp4'.*bf16, int8"):
        bytes_per_state(5, 576, "fp4")
