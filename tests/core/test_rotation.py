from __future__ import annotations

import hashlib

import numpy as np
import pytest

from tq_core import Codec, QuantConfig
from tq_core.rotation import hadamard, make_rotation

FAMILIES = sorted(
    {base * 2**k for base in (1, 2, 12, 20, 28, 36) for k in range(10) if base * 2**k <= 576}
)
HADAMARD_DIMS = (8, 64, 72, 80, 96, 100, 112, 128, 160, 192, 256, 576)
HAAR_DIMS = (9, 10, 33, 70, 92, 101, 330, 575)


@pytest.mark.parametrize("order", FAMILIES)
def test_hadamard_of_a_base_order_times_a_power_of_two(order):
    assert_hadamard(hadamard(order), order)


def assert_hadamard(matrix, order):
    assert matrix is not None
    assert matrix.dtype == np.int8
    assert matrix.shape == (order, order)
    assert set(np.unique(matrix)) <= {-1, 1}
    wide = matrix.astype(np.float32)  # exact: sums of at most 576 ones
    assert np.array_equal(wide @ wide.T, order * np.eye(order))


def test_hadamard_where_it_is_found_it_is_one():
    found = 0
    for order in range(1, 577):
        matrix = hadamard(order)
        if matrix is None:
            continue
        assert order <= 2 or order % 4 == 0
        found += 1
        if order % 3 == 0 or order in HADAMARD_DIMS:
            assert_hadamard(matrix, order)
    assert found == 119  # of the 146 orders up to 576 that can exist


@pytest.mark.parametrize("order", [0, -4, 3, 6, 10, 30, 98])
def test_no_hadamard_matrix(order):
    assert hadamard(order) is None


def test_hadamard_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        hadamard(12)[0, 0] = 0


@pytest.mark.parametrize("head_dim", sorted({*HADAMARD_DIMS, *HAAR_DIMS, *range(11, 577, 31)}))
def test_rotation_is_orthogonal(head_dim):
    rotation = make_rotation(head_dim)
    assert rotation.dtype == np.float32
    assert rotation.shape == (head_dim, head_dim)
    wide = rotation.astype(np.float64)
    assert np.abs(wide @ wide.T - np.eye(head_dim)).max() < 1e-6
    assert np.abs(wide.T @ wide - np.eye(head_dim)).max() < 1e-6


@pytest.mark.parametrize("head_dim", HADAMARD_DIMS)
def test_rotation_is_a_hadamard_matrix_with_signed_columns(head_dim):
    """The signs belong to the input axes: R = H diag(s) / sqrt(D), not diag(s) H / sqrt(D)."""
    signs = make_rotation(head_dim) * np.sqrt(head_dim) * hadamard(head_dim)
    np.testing.assert_allclose(signs, np.broadcast_to(signs[0], signs.shape), rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.abs(signs), 1, rtol=0, atol=1e-6)
    assert np.unique(signs[0].round()).tolist() == [-1, 1]


def test_signs_of_seed_0():
    signs = make_rotation(8) * np.sqrt(8) * hadamard(8)
    assert signs[0].round().astype(int).tolist() == [-1, 1, 1, 1, -1, -1, -1, -1]


def test_signs_are_the_top_bits_of_the_generator():
    """PCG64 is specified: its raw stream is the same in every numpy."""
    draws = np.random.PCG64(5).random_raw(64).tolist()
    signs = make_rotation(64, seed=5) * 8 * hadamard(64)
    assert signs[0].round().tolist() == [-1 if draw >> 63 else 1 for draw in draws]


@pytest.mark.parametrize("head_dim", [64, 70])
def test_seeds(head_dim):
    assert np.array_equal(make_rotation(head_dim, 3), make_rotation(head_dim, 3))
    assert not np.array_equal(make_rotation(head_dim, 3), make_rotation(head_dim, 4))


def test_hadamard_rotation_of_128_is_pinned():
    """Rotations are saved with a codec, yet the default one should not drift either."""
    data = np.ascontiguousarray(make_rotation(128), "<f4").tobytes()
    assert hashlib.sha256(data).hexdigest()[:16] == "b395c3872170347f"


@pytest.mark.parametrize("head_dim", [9, 33])
def test_haar_rotation_has_no_preferred_sign_or_axis(head_dim):
    """Without the sign fix of QR the first row would be mostly negative."""
    draws = np.array([make_rotation(head_dim, seed) for seed in range(300)])
    deviation = head_dim**-0.5 / np.sqrt(len(draws))
    assert np.abs(draws.mean(0)).max() < 5 * deviation
    squares = (draws**2).mean(0) * head_dim
    assert np.abs(squares - 1).max() < 6 * np.sqrt(2 / len(draws))


@pytest.mark.parametrize("scale", [96**-0.5, 128**-0.5])
def test_a_leading_block_of_a_larger_hadamard_matrix_is_refused(scale):
    block = hadamard(128)[:96, :96] * scale
    with pytest.raises(ValueError, match="rotation: expected an orthogonal matrix, got max"):
        Codec(QuantConfig(), 96, rotation=block)
