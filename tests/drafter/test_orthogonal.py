import pytest
import torch

from drafter.orthogonal import orthogonalize, orthogonalized

SIZES = [(1, 20, 20), (3, 12, 40), (2, 40, 12), (1, 30, 32)]


def decaying(size, slowest):
    """Random matrices whose singular values fall geometrically to ``slowest`` times the largest."""
    generator = torch.Generator().manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(size, generator=generator, dtype=torch.float64), full_matrices=False)
    return (u * torch.logspace(0, torch.tensor(slowest).log10().item(), u.shape[-1], dtype=torch.float64)) @ vh


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 0.02), (torch.float32, 0.02), (torch.bfloat16, 0.06)])
@pytest.mark.parametrize("size", SIZES)
def test_the_result_is_near_the_polar_factor(size, dtype, error):
    matrices = decaying(size, 0.03)
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    found = orthogonalize((7e-4 * matrices).to(dtype)).double()
    assert torch.linalg.matrix_norm(found - u @ vh, ord=2).max() < error


@pytest.mark.parametrize("size", SIZES)
def test_directions_of_any_size_are_never_blown_up(size):
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.linalg.svdvals(orthogonalize(decaying(size, 1e-6).to(dtype)).float())
        assert values.max() < 1.06 and values.min() >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e6])
def test_the_size_of_a_gradient_makes_no_difference(scale, dtype):
    matrices = decaying((2, 12, 40), 0.1)
    found = orthogonalize((scale * matrices).to(dtype)).float()
    assert (found - orthogonalize(matrices.to(dtype)).float()).abs().max() < 0.05


def test_zeros_stay_zeros_beside_others():
    matrices = torch.cat([torch.zeros(1, 6, 20), decaying((1, 6, 20), 0.5).float()])
    for dtype in (torch.float32, torch.bfloat16):
        found = orthogonalize(matrices.to(dtype))
        assert (found[0] == 0).all()
        assert torch.linalg.svdvals(found[1].float()).min() > 0.9


def test_matrices_of_one_shape_are_together_and_come_back_to_their_places():
    matrices = [decaying((1, m, n), 0.2)[0] * (i + 1) for i, (m, n) in enumerate([(4, 9), (5, 5), (4, 9), (9, 4)])]
    found = {}
    batches = list(orthogonalized(matrices))
    assert sorted(len(places) for places, _ in batches) == [1, 1, 2]
    for places, some in batches:
        found |= dict(zip(places, some, strict=True))
    for place, matrix in enumerate(matrices):
        u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
        assert (found[place] - u @ vh).abs().max() < 0.02
