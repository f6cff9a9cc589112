"""Hadamard matrices of all constructions, their fast transforms, and what stands in where there is none."""

from __future__ import annotations

import pytest
import torch

from octavo.compress.hadamard import hadamard_core, hadamard_factors, rotation_of
from octavo.layers.rotation import Rotation, power_of_two_part, rotated, sylvester

# Paley over primes, over 5^2 = 25 and 3^3 = 27 and 7^2 = 49 elements, of both kinds; Williamson.
CORES = (4, 8, 12, 20, 28, 36, 52, 60, 76, 92, 100, 108, 148)
# Hidden and intermediate sizes of SmolLM2, Qwen2 and Qwen3, Gemma 2 and 3, Llama 2 and 3, Mistral, Phi-4.
REAL = (576, 640, 896, 960, 1152, 1536, 2304, 2560, 3072, 3584, 3840, 4608, 4864, 5120, 5376, 6912, 8960, 9728, 11008)
LARGE = (13824, 14336, 17408, 17920, 18944, 21504, 25600, 27648, 28672, 29568)


@pytest.mark.parametrize("order", CORES)
def test_cores_are_hadamard_matrices(order: int) -> None:
    matrix = hadamard_core(order)
    assert matrix is not None
    assert matrix.shape == (order, order)
    assert bool((matrix.abs() == 1).all())
    assert torch.equal(matrix @ matrix.t(), order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("order", [*REAL, *LARGE])
def test_sizes_of_real_models_have_one(order: int) -> None:
    factors = hadamard_factors(order)
    assert factors is not None
    rotation = Rotation(order, factors)
    assert rotation.block == order
    rows = torch.randn(2, order, dtype=torch.float64, generator=torch.Generator().manual_seed(order))
    turned = rotation.apply(rows)
    torch.testing.assert_close(turned @ turned.t(), rows @ rows.t(), rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(rotation.invert(turned), rows, rtol=1e-12, atol=1e-12)
    for factor in factors:
        torch.testing.assert_close(factor.abs(), torch.full_like(factor, len(factor) ** -0.5))


def test_the_fast_transform_is_the_product_with_the_matrix() -> None:
    rows = torch.randn(3, 5, 192, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for kind in ("hadamard", "random-hadamard", "random-matrix"):
        for block in (None, 48, 64):
            rotation, note = rotation_of(192, kind, seed=3, block=block)
            assert note is None
            matrix = rotation.matrix()
            torch.testing.assert_close(matrix @ matrix.t(), torch.eye(192, dtype=torch.float64), rtol=0, atol=1e-12)
            torch.testing.assert_close(rotation.apply(rows), rows @ matrix, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(rotation.invert(rows), rows @ matrix.t(), rtol=1e-12, atol=1e-12)
            if block is not None:
                blocks = torch.block_diag(*[torch.ones(block, block)] * (192 // block))
                assert bool((matrix[blocks == 0] == 0).all())


def test_sylvester_is_the_doubled_matrix() -> None:
    expected = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(8):
        expected = torch.cat([torch.cat([expected, expected], 1), torch.cat([expected, -expected], 1)])
    found = Rotation(256, sylvester(256)).matrix() * 16
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert power_of_two_part(11008) == 256


def test_signs_follow_the_seed() -> None:
    first, again, other = (rotation_of(64, "random-hadamard", seed)[0].signs for seed in (1, 1, 2))
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("order", [10, 13696 // 32])
def test_an_order_without_one_gets_a_random_orthogonal_matrix(order: int) -> None:
    rotation, note = rotation_of(order, "hadamard", seed=0)
    assert note is not None
    assert str(order) in note
    matrix = rotation.matrix()
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(order, dtype=torch.float64), rtol=0, atol=1e-12)


def test_weights_are_rotated_along_either_dimension() -> None:
    rotation, _ = rotation_of(24, "random-hadamard", seed=5)
    matrix = rotation.matrix().float()
    weight = torch.randn(3, 24, 24, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(rotated(weight, rotation), weight @ matrix)
    torch.testing.assert_close(rotated(weight, rotation, dim=1), matrix.t() @ weight)
    scale = torch.rand(24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(rotated(weight, rotation, scale=scale), weight * scale.float() @ matrix)
