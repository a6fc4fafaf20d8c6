"""Codebooks of the normal distribution: Lloyd-Max, and two kinds close to it for the kernels.

Source: S. Lloyd, "Least squares quantization in PCM" (1982); J. Max (1960). A coordinate of a
randomly rotated unit vector in D dimensions is close to N(0, 1/D), which is why one codebook per
bit width serves every model (TurboQuant, arXiv 2504.19874).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

MAX_BITS = 8


def _density(x: np.ndarray) -> np.ndarray:
    return np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _upper_tail(x: np.ndarray) -> np.ndarray:
    return np.array([0.5 * math.erfc(v / math.sqrt(2)) for v in x])


def _half_cells(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Edges, densities at them, probability and mean of each cell of the positive half."""
    edges = np.concatenate([[0.0], 0.5 * (levels[1:] + levels[:-1]), [np.inf]])
    density = _density(edges)
    probability = -np.diff(_upper_tail(edges))
    return edges, density, probability, -np.diff(density) / probability


@lru_cache(maxsize=MAX_BITS)
def lloyd_max(bits: int) -> np.ndarray:
    """Levels that minimise the squared error of coding N(0, 1) with ``2**bits`` codes.

    Args:
        bits: 1 to 8.

    Returns:
        float64 ``[2**bits]``, ascending and antisymmetric.

    Raises:
        ValueError: ``bits`` out of range.
    """
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits: expected 1 to {MAX_BITS}, got {bits}")
    half = 2 ** (bits - 1)
    # Start from the asymptotically optimal point density, a normal of variance 3.
    lo, hi = np.zeros(half), np.full(half, 20.0)
    target = 0.5 - (np.arange(half) + 0.5) / (2 * half)
    for _ in range(60):
        mid = 0.5 * (lo + hi)
        above = _upper_tail(mid / math.sqrt(3)) > target
        lo, hi = np.where(above, mid, lo), np.where(above, hi, mid)
    levels = 0.5 * (lo + hi)
    # Newton on "every level is the mean of its cell"; an edge depends on its two levels only, so
    # the Jacobian is tridiagonal.
    for _ in range(100):
        edges, density, probability, mean = _half_cells(levels)
        d_lower = density[:-1] * (mean - edges[:-1]) / probability
        d_upper = np.zeros(half)
        d_upper[:-1] = density[1:-1] * (edges[1:-1] - mean[:-1]) / probability[:-1]
        d_lower[0] = 0.0  # the edge at zero is fixed by symmetry
        jacobian = np.diag(1 - 0.5 * (d_lower + d_upper))
        jacobian[np.arange(1, half), np.arange(half - 1)] = -0.5 * d_lower[1:]
        jacobian[np.arange(half - 1), np.arange(1, half)] = -0.5 * d_upper[:-1]
        step = np.linalg.solve(jacobian, levels - mean)
        levels = levels - step
        if np.abs(step).max() < 1e-13:
            break
    result = np.concatenate([-levels[::-1], levels])
    result.flags.writeable = False
    return result


def expected_error(levels: np.ndarray) -> float:
    """Mean squared error of coding N(0, 1) with ``levels``, in closed form.

    Args:
        levels: ascending ``[n]``; not necessarily optimal.
    """
    levels = np.asarray(levels, np.float64)
    edges = np.concatenate([[-np.inf], midpoints(levels), [np.inf]])
    probability = -np.diff(_upper_tail(edges))
    density = _density(edges)
    first_moment = -np.diff(density)
    finite = np.where(np.isfinite(edges), edges, 0.0)
    second_moment = probability - np.diff(finite * density)
    return float((second_moment - 2 * levels * first_moment + levels**2 * probability).sum())


def midpoints(centroids: np.ndarray) -> np.ndarray:
    """Bucket edges ``[n - 1]`` of ascending centroids ``[n]``, in their own dtype."""
    return (centroids[1:] + centroids[:-1]) * centroids.dtype.type(0.5)


class Grid(NamedTuple):
    """A codebook whose levels are small integers, so that keys meet the int8 matrix unit.

    Attributes:
        half: the positive levels, ascending; all whole, or all halves of odd numbers.
        scale: what turns them into levels of N(0, 1).
    """

    half: tuple[float, ...]
    scale: float

    @property
    def offset(self) -> float:
        """What levels are less than the bytes 0 to 127 of a table, 0 for signed bytes."""
        return 63.5 if self.half[0] % 1 else 0.0


#: Of all grids of whole levels up to 127 (2 and 3 bit), and of halves of odd numbers up to 63.5
#: (4 bit), those of the least squared error: +0.00005 %, +0.002 % and +0.34 % over Lloyd-Max.
GRIDS = {
    2: Grid((18, 60), 0.0251724961293356),
    3: Grid((10, 31, 55, 88), 0.024446138784694937),
    4: Grid((2.5, 7.5, 12.5, 18.5, 24.5, 31.5, 40.5, 53.5), 0.0511187118314689),
}


def grid_levels(bits: int) -> np.ndarray:
    """Levels of ``GRIDS[bits]`` before scaling: float64 ``[2**bits]``."""
    half = np.array(GRIDS[bits].half, np.float64)
    return np.concatenate([-half[::-1], half])


class Cubic(NamedTuple):
    """A codebook whose levels are a cubic in half precision, so that a GPU needs no table.

    Attributes:
        coefficients: fp16 numbers, highest power first; the levels are the results of Horner's
            scheme at ``1 + code / 2**bits``, every step rounded to fp16.
        scale: what turns the results into levels of N(0, 1).
    """

    coefficients: tuple[float, float, float, float]
    scale: float


#: Found by a search over the fp16 coefficients near the best odd cubic for the least squared error:
#: +0.0003 %, +0.04 % and +1.5 % over Lloyd-Max.
CUBICS = {
    2: Cubic((6.13671875, -25.3125, 41.5625, -25.25), 1 / 1.8921152934511918),
    3: Cubic((9.6640625, -41.6875, 66.0625, -37.53125), 1 / 1.6301446648052507),
    4: Cubic((9.0, -39.6875, 62.34375, -34.46875), 1 / 1.0464266772657729),
}


@lru_cache(maxsize=8)
def cubic_levels(bits: int) -> np.ndarray:
    """Levels of ``CUBICS[bits]`` before scaling, exactly fp16: float64 ``[2**bits]``."""
    t = (1 + np.arange(2**bits) / 2**bits).astype(np.float16)
    first, *rest = (np.float16(c) for c in CUBICS[bits].coefficients)
    result = np.full_like(t, first)
    for coefficient in rest:
        # Products of two fp16 numbers are exact in fp64, so this rounds once, as a fused step does.
        exact = result.astype(np.float64) * t.astype(np.float64) + np.float64(coefficient)
        result = exact.astype(np.float16)
    levels = result.astype(np.float64)
    levels.flags.writeable = False
    return levels


def default_centroids(bits: int, head_dim: int) -> np.ndarray:
    """Codebook of keys, a coordinate of a rotated unit vector: float32 ``[2**bits]``, ascending.

    The grid where ``GRIDS`` has the width, else Lloyd-Max.
    """
    levels = grid_levels(bits) * GRIDS[bits].scale if bits in GRIDS else lloyd_max(bits)
    return (levels / math.sqrt(head_dim)).astype(np.float32)


def default_value_centroids(bits: int, head_dim: int) -> np.ndarray:
    """Codebook of values: as ``default_centroids``, with ``CUBICS`` in place of ``GRIDS``."""
    levels = cubic_levels(bits) * CUBICS[bits].scale if bits in CUBICS else lloyd_max(bits)
    return (levels / math.sqrt(head_dim)).astype(np.float32)
