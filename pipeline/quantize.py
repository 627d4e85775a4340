"""The 8-bit form of hidden states: whole numbers from -127 to 127, and one bf16 scale for each group of channels.

A group is 64 neighbouring channels of one layer at one position; the last group of a layer is smaller where the hidden
size is no multiple of 64. A scale is the group's largest magnitude over 127, rounded up to bf16, so that no code is
clipped and a group of bf16's smallest numbers still has a scale. A group of zeros has the scale zero.

Shapes: n positions, L layers, H hidden size, G groups a layer.
"""

from collections.abc import Iterator

import numpy as np

from pipeline.errors import SchemaError

GROUP_SIZE = 64
MAX_CODE = 127


def num_groups(hidden_size: int, group_size: int = GROUP_SIZE) -> int:
    """Groups of channels a layer."""
    return -(-hidden_size // group_size)


def quantize(words: np.ndarray, group_size: int = GROUP_SIZE) -> tuple[np.ndarray, np.ndarray]:  # uint16 [n, L, H]
    """The codes, int8 [n, L, H], and the scales as bf16 words, uint16 [n, L, G], of states as bf16 words.

    Raises: SchemaError on numbers that are infinite or none: they have no code.
    """
    starts = np.arange(0, words.shape[2], group_size)
    peaks = np.maximum.reduceat(words & 0x7FFF, starts, axis=2)  # magnitudes: their words have the same order
    if (peaks >= 0x7F80).any():
        raise SchemaError("states that are infinite, or no numbers, have no 8-bit form; quarantine the row first")
    scales = _next_words(as_float32(peaks) / MAX_CODE)
    steps = as_float32(scales)
    steps[steps == 0] = 1  # a group of zeros: its codes are zeros
    codes = np.empty(words.shape, np.int8)
    for values, step, into in _by_group(as_float32(words), steps, codes, group_size):
        into[...] = np.rint(values / step)
    return codes, scales


def dequantize(codes: np.ndarray, scales: np.ndarray, group_size: int = GROUP_SIZE) -> np.ndarray:
    """The numbers, float32 [n, L, H], that codes, int8 [n, L, H], and scales, uint16 [n, L, G], stand for."""
    numbers = np.empty(codes.shape, np.float32)
    for code, step, into in _by_group(codes, as_float32(scales), numbers, group_size):
        np.multiply(code, step, out=into)
    return numbers


def as_float32(words: np.ndarray) -> np.ndarray:
    """The same numbers as float32: a bf16 word is the upper half of one."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def _next_words(numbers: np.ndarray) -> np.ndarray:
    """The bf16 words of numbers that are not negative, rounded up."""
    return ((numbers.view(np.uint32) + 0xFFFF) >> 16).astype(np.uint16)


def _by_group(
    channels: np.ndarray, steps: np.ndarray, into: np.ndarray, group_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Channels and where their result goes as views [n, L, groups, channels], each group's step beside it.

    The whole groups of all layers come first, then the smaller last groups, if there are any.
    """
    n, num_layers, hidden_size = channels.shape
    whole = hidden_size // group_size
    for start, end, size in ((0, whole, group_size), (whole, steps.shape[2], hidden_size % group_size)):
        if start < end:
            places = slice(start * group_size, start * group_size + (end - start) * size)
            shape = (n, num_layers, end - start, size)
            yield channels[:, :, places].reshape(shape), steps[:, :, start:end, None], into[:, :, places].reshape(shape)
