"""Semi-orthogonal matrices by matrix products alone, which is what a Muon step takes its time for.

Legend: S matrices of one shape m x n, with m <= n once a tall one is turned; their Gram matrices are m x m.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Odd quintics (x, x^3, x^5), applied one after another: each brings the interval that the one before it left as near
# to 1 as a quintic can. Singular values in [0.01, 1] of the largest one end up in [0.98, 1.02].
# Source: Polar Express, arXiv 2505.16932, algorithm 1, for a lower end of 0.01 and four steps; all but the last with
# its safety factor of 1.01, since rounding may leave a value above an interval's upper end.
_QUINTICS = (
    (7.9102606, -22.0785801, 15.8689943),
    (3.6073446, -2.6466437, 0.5110361),
    (2.6448183, -1.9269070, 0.4315078),
    (1.9588931, -1.3403574, 0.3841442),
)
# From this width over height on it is less work to iterate on Gram matrices: 2 n/m + 13 products of m x m matrices
# against 4 (2 n/m + 1).
_WIDE = 1.5


def orthogonalize(matrices: Tensor) -> Tensor:  # [S, m, n] or [m, n] -> the same
    """Nearly the nearest semi-orthogonal matrices, computed in the dtype that is given.

    bfloat16 pays where the hardware multiplies it: other CPUs take a hundred times as long as for float32.
    """
    m, n = matrices.shape[-2:]
    if m > n:
        return orthogonalize(matrices.mT).mT
    # The Gram matrix has the square of the condition number: too much for 8 bits of mantissa.
    return _by_gram(matrices) if n > _WIDE * m and matrices.dtype.itemsize > 2 else _by_steps(matrices)


def orthogonalized(matrices: Sequence[Tensor]) -> Iterator[tuple[list[int], Sequence[Tensor]]]:  # [m, n] each
    """All of them: their places in the sequence, and what became of them. On a GPU equal shapes are one batch; a CPU
    takes twice as long for a batched product of bfloat16 matrices as for the products one by one.
    """
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for place, matrix in enumerate(matrices):
        by_shape[matrix.shape].append(place)
    for places in by_shape.values():
        some = [matrices[place] for place in places]
        if some[0].device.type == "cpu":
            yield places, [orthogonalize(matrix) for matrix in some]
        else:
            yield places, orthogonalize(torch.stack(some))


def _by_steps(x: Tensor) -> Tensor:
    gram, square, size = _unit_gram(x)
    x = (_quintic(0, gram, square) / size) @ x
    for step in range(1, len(_QUINTICS)):
        gram = x @ x.mT
        x = _quintic(step, gram, gram @ gram) @ x
    return x


def _by_gram(x: Tensor) -> Tensor:
    """The same in exact arithmetic: all factors are polynomials of one symmetric matrix, and so commute."""
    gram, square, size = _unit_gram(x)
    product = factor = _quintic(0, gram, square)
    for step in range(1, len(_QUINTICS)):
        gram = factor @ (factor @ gram)
        factor = _quintic(step, gram, gram @ gram)
        product = factor @ product
    return (product / size) @ x


def _quintic(step: int, gram: Tensor, square: Tensor) -> Tensor:  # -> [S, m, m]
    """What a step multiplies the matrices with: a I + b G + c G^2."""
    a, b, c = _QUINTICS[step]
    factor = (b * gram).add_(square, alpha=c)
    factor.diagonal(dim1=-2, dim2=-1).add_(a)
    return factor


def _unit_gram(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # -> G, G^2 [S, m, m] and a size [S, 1, 1]
    """Gram matrices of the matrices over their size, a bound on the largest singular value that is close to it.

    The bound is the Schatten 8-norm, out of products that are needed anyway. That of Muon's own normalisation, the
    Frobenius norm, is several times too large, which costs a step.
    """
    gram = x @ x.mT
    # Over the trace first: the fourth power of a small gradient is nothing in float32. A matrix of zeros stays one.
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp_min(1e-30)
    gram = gram / trace
    square = gram @ gram
    largest = square.norm(dim=(-2, -1), keepdim=True).sqrt().clamp_min(1e-6)
    return gram / largest, square / largest**2, (trace * largest).sqrt()
