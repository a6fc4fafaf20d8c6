"""Orthogonal rotations for every head_dim: signed Hadamard where one exists, Haar elsewhere."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=64)
def hadamard(order: int) -> np.ndarray | None:
    """A Hadamard matrix of ``order``, or None where these constructions find none.

    Sylvester doubling, Kronecker products, and the two Paley constructions over prime fields and
    over fields of order p^2.

    Returns:
        int8 ``[order, order]`` of +-1 with ``H @ H.T == order * I``, read-only.
    """
    if order < 1 or (order > 2 and order % 4):
        return None
    result = _construct(order)
    if result is not None:
        result.flags.writeable = False
    return result


def _construct(order: int) -> np.ndarray | None:
    if order == 1:
        return np.ones((1, 1), np.int8)
    if order == 2:
        return np.array([[1, 1], [1, -1]], np.int8)
    for left in range(2, int(order**0.5) + 1):
        if order % left == 0:
            a, b = hadamard(left), hadamard(order // left)
            if a is not None and b is not None:
                return np.kron(a, b)
    by_first = _paley_one(order)
    return by_first if by_first is not None else _paley_two(order)


def _paley_one(order: int) -> np.ndarray | None:
    jacobsthal = _jacobsthal(order - 1)
    if jacobsthal is None:
        return None
    skew = np.zeros((order, order), np.int8)
    skew[0, 1:], skew[1:, 0], skew[1:, 1:] = 1, -1, jacobsthal
    return skew + np.eye(order, dtype=np.int8)


def _paley_two(order: int) -> np.ndarray | None:
    q = order // 2 - 1
    jacobsthal = _jacobsthal(q) if q % 4 == 1 else None
    if jacobsthal is None:
        return None
    conference = np.zeros((q + 1, q + 1), np.int8)
    conference[0, 1:], conference[1:, 0], conference[1:, 1:] = 1, 1, jacobsthal
    identity = np.eye(q + 1, dtype=np.int8)
    return np.kron(conference, np.array([[1, 1], [1, -1]], np.int8)) + np.kron(
        identity, np.array([[1, -1], [-1, -1]], np.int8)
    )


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % f for f in range(2, int(n**0.5) + 1))


def _jacobsthal(q: int) -> np.ndarray | None:
    """Quadratic character of the differences of all pairs in GF(q), q = p or p^2, p odd."""
    root = round(q**0.5)
    if _is_prime(q) and q > 2:
        elements = np.arange(q)
        squares = np.zeros(q, bool)
        squares[elements[1:] ** 2 % q] = True
        difference = (elements[:, None] - elements[None, :]) % q
    elif root * root == q and _is_prime(root) and root > 2:
        # GF(p^2) = GF(p)[x] / (x^2 - r), r a non-residue; an element a + b x has index a * p + b.
        p = root
        residues = {i * i % p for i in range(1, p)}
        r = next(i for i in range(2, p) if i not in residues)
        a, b = np.divmod(np.arange(q), p)
        squares = np.zeros(q, bool)
        squares[((a * a + r * b * b) % p * p + 2 * a * b % p)[1:]] = True
        difference = (a[:, None] - a) % p * p + (b[:, None] - b) % p
    else:
        return None
    return np.where(difference == 0, 0, np.where(squares[difference], 1, -1)).astype(np.int8)


def make_rotation(head_dim: int, seed: int = 0) -> np.ndarray:
    """The default orthogonal matrix: ``H diag(s) / sqrt(D)``, or Haar-random without an ``H``.

    The random signs come before the transform; without them a constant vector would land on one
    axis. Draws come from ``numpy.random.PCG64`` as raw integers, so they do not depend on the
    numpy version.

    Args:
        head_dim: D.
        seed: chooses the signs, or the Haar matrix.

    Returns:
        float32 ``[D, D]``; rows are the new axes.
    """
    bits = np.random.PCG64(seed)
    matrix = hadamard(head_dim)
    if matrix is not None:
        signs = 1.0 - 2.0 * (bits.random_raw(head_dim) >> np.uint64(63)).astype(np.float64)
        return (matrix * signs / np.sqrt(head_dim)).astype(np.float32)
    uniform = (bits.random_raw(2 * head_dim * head_dim) >> np.uint64(11)) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log1p(-uniform[: head_dim * head_dim]))
    normal = radius * np.cos(2.0 * np.pi * uniform[head_dim * head_dim :])
    q, r = np.linalg.qr(normal.reshape(head_dim, head_dim))
    return (q * np.sign(np.diag(r))).astype(np.float32)
