from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from tq_core import codebook

POSITIVE_LEVELS = {
    2: [0.4527800, 1.5104176],
    3: [0.2450942, 0.7560053, 1.3439093, 2.1519457],
    4: [
        *(0.1283950, 0.3880483, 0.6567591, 0.9423405),
        *(1.2562312, 1.6180464, 2.0690172, 2.7325896),
    ],
}
ERRORS = {2: 0.1175, 3: 0.03454, 4: 0.009501}
# Simpson's rule on [-10, 10]: an independent way to every integral here.
GRID = np.linspace(-10, 10, 400_001)
WEIGHT = np.where(np.arange(GRID.size) % 2, 4.0, 2.0)
WEIGHT[[0, -1]] = 1
DENSITY = WEIGHT * (GRID[1] - GRID[0]) / 3 * np.exp(-(GRID**2) / 2) / math.sqrt(2 * math.pi)


def integrated_error(levels: np.ndarray) -> float:
    edges = (levels[1:] + levels[:-1]) / 2
    return float((DENSITY * (GRID - levels[np.searchsorted(edges, GRID)]) ** 2).sum())


@pytest.mark.parametrize("bits", POSITIVE_LEVELS)
def test_levels(bits):
    levels = codebook.lloyd_max(bits)
    want = np.array(POSITIVE_LEVELS[bits])
    np.testing.assert_allclose(levels, [*-want[::-1], *want], rtol=0, atol=0.5e-7 + 1e-12)


def test_one_bit_is_the_mean_of_the_half_normal():
    root = math.sqrt(2 / math.pi)
    np.testing.assert_allclose(codebook.lloyd_max(1), [-root, root], rtol=0, atol=1e-14)
    assert codebook.expected_error(codebook.lloyd_max(1)) == pytest.approx(
        1 - 2 / math.pi, abs=1e-14
    )


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_level_is_the_mean_of_its_cell(bits):
    levels = codebook.lloyd_max(bits)
    assert levels.shape == (2**bits,)
    assert (np.diff(levels) > 0).all()
    np.testing.assert_array_equal(levels, -levels[::-1])
    edges = [-math.inf, *((levels[1:] + levels[:-1]) / 2), math.inf]
    tail = [0.5 * math.erfc(e / math.sqrt(2)) for e in edges]
    density = [math.exp(-e * e / 2) / math.sqrt(2 * math.pi) for e in edges]
    # The upper half only: differences of tails near 1 would lose digits.
    for i in range(2 ** (bits - 1), 2**bits):
        mean = (density[i] - density[i + 1]) / (tail[i] - tail[i + 1])
        assert mean == pytest.approx(levels[i], abs=1e-11)


@pytest.mark.parametrize("bits", range(1, 9))
def test_moving_any_level_makes_the_error_larger(bits):
    levels = codebook.lloyd_max(bits)
    best = codebook.expected_error(levels)
    for i in range(0, len(levels), max(1, len(levels) // 8)):
        for step in (-1e-3, 1e-3):
            moved = levels.copy()
            moved[i] += step
            assert codebook.expected_error(moved) > best


@pytest.mark.parametrize("bits", ERRORS)
def test_expected_error_of_the_optimum(bits):
    levels = codebook.lloyd_max(bits)
    error = codebook.expected_error(levels)
    assert error == pytest.approx(ERRORS[bits], rel=3e-4)
    assert error == pytest.approx(integrated_error(levels), rel=1e-6)


@pytest.mark.parametrize(
    "levels",
    [[-1.0, 0.5], [-2.0, -0.1, 0.3, 5.0], list(np.linspace(-2.6, 2.6, 16)), [0.7]],
    ids=str,
)
def test_expected_error_of_other_levels(levels):
    levels = np.array(levels)
    assert codebook.expected_error(levels) == pytest.approx(integrated_error(levels), rel=1e-6)


def test_error_of_a_constant_guess_is_the_variance():
    assert codebook.expected_error(np.array([0.0])) == pytest.approx(1, abs=1e-14)


def test_optimal_error_is_one_minus_the_energy_of_the_levels():
    for bits in range(1, 9):
        levels = codebook.lloyd_max(bits)
        edges = (levels[1:] + levels[:-1]) / 2
        chosen = levels[np.searchsorted(edges, GRID)]
        energy = (DENSITY * chosen**2).sum()
        assert codebook.expected_error(levels) == pytest.approx(1 - energy, abs=2e-5)


def test_levels_are_cached_and_read_only():
    levels = codebook.lloyd_max(4)
    assert codebook.lloyd_max(4) is levels
    with pytest.raises(ValueError, match="read-only"):
        levels[0] = 0


@pytest.mark.parametrize("bits", [0, 9, -1])
def test_bits_out_of_range(bits):
    with pytest.raises(ValueError, match=f"bits: expected 1 to 8, got {bits}"):
        codebook.lloyd_max(bits)


def test_midpoints_keep_the_dtype():
    edges = codebook.midpoints(np.array([-1, 0, 4], np.float32))
    assert edges.dtype == np.float32
    assert edges.tolist() == [-0.5, 2]


@pytest.mark.parametrize("bits", codebook.CUBICS)
def test_a_cubic_is_evaluated_in_half_precision(bits):
    """Horner's scheme, each step one rounding, as a fused multiply-add of fp16 numbers does it."""
    for code, level in enumerate(codebook.cubic_levels(bits)):
        t = 1 + Fraction(code, 2**bits)
        first, *rest = codebook.CUBICS[bits].coefficients
        want = Fraction(first)
        for coefficient in rest:
            want = Fraction(float(np.float16(float(want * t + Fraction(coefficient)))))
        assert level == want


@pytest.mark.parametrize("bits, excess", [(2, 1e-4), (3, 1e-3), (4, 0.015)])
def test_a_cubic_is_nearly_optimal(bits, excess):
    levels = codebook.default_value_centroids(bits, 1).astype(np.float64)
    assert (np.diff(levels) > 0).all()
    best = codebook.expected_error(codebook.lloyd_max(bits))
    assert best < codebook.expected_error(levels) < best * (1 + excess)


@pytest.mark.parametrize("bits, excess", [(2, 1e-6), (3, 3e-5), (4, 3.4e-3)])
def test_a_grid_is_nearly_optimal(bits, excess):
    levels = codebook.default_centroids(bits, 1).astype(np.float64)
    assert (np.diff(levels) > 0).all()
    best = codebook.expected_error(codebook.lloyd_max(bits))
    assert best < codebook.expected_error(levels) < best * (1 + excess)


@pytest.mark.parametrize("bits", codebook.GRIDS)
def test_a_grid_is_bytes_and_its_scale_is_the_best(bits):
    grid = codebook.GRIDS[bits]
    levels = codebook.grid_levels(bits)
    entries = levels + grid.offset
    assert (entries == entries.astype(np.int8)).all()
    # Of four bits a byte permutation repeats the sign of what it looks up: there must be none.
    assert bits < 4 or (entries >= 0).all()
    errors = [codebook.expected_error(levels * grid.scale * s) for s in (0.9999, 1, 1.0001)]
    assert errors[1] == min(errors)


@pytest.mark.parametrize("head_dim", [8, 72, 128, 576])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_default_centroids(bits, head_dim):
    keys = values = codebook.lloyd_max(bits)
    if bits in codebook.CUBICS:
        values = codebook.cubic_levels(bits) * codebook.CUBICS[bits].scale
        keys = codebook.grid_levels(bits) * codebook.GRIDS[bits].scale
    for make, want in (
        (codebook.default_centroids, keys),
        (codebook.default_value_centroids, values),
    ):
        centroids = make(bits, head_dim)
        assert centroids.dtype == np.float32
        np.testing.assert_allclose(centroids * math.sqrt(head_dim), want, rtol=1e-6, atol=0)
