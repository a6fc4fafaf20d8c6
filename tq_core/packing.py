"""Codes <-> bytes: dense and planar bit packing, and the e4m3fn number format, in numpy."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

E4M3_MAX = 448.0


def packed_bytes(num_codes: int, bits: int, packing: str = "dense") -> int:
    """Bytes that ``num_codes`` codes of ``bits`` bits take."""
    if packing == "planar":
        return -(-num_codes * 2 // 8) + -(-num_codes // 8)
    return -(-num_codes * bits // 8)


def pack(codes: np.ndarray, bits: int, packing: str = "dense") -> np.ndarray:
    """Packs codes along the last axis.

    Args:
        codes: uint8 ``[..., n]``, each below ``2**bits``.
        bits: width of a code, 1 to 8.
        packing: ``"dense"``, a little-endian bit stream, or ``"planar"`` (3 bit): the low two
            bits of all codes as a dense 2-bit stream, then all high bits as a 1-bit stream.

    Returns:
        uint8 ``[..., packed_bytes(n, bits, packing)]``; unused high bits of the last byte are 0.
    """
    codes = np.asarray(codes, np.uint8)
    if packing == "planar":
        return np.concatenate([pack(codes & 3, 2), pack(codes >> 2, 1)], axis=-1)
    stream = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & 1  # [..., n, bits]
    stream = stream.reshape(*codes.shape[:-1], codes.shape[-1] * bits)
    packed: np.ndarray = np.packbits(stream, axis=-1, bitorder="little")
    return packed


def unpack(data: np.ndarray, num_codes: int, bits: int, packing: str = "dense") -> np.ndarray:
    """Inverse of :func:`pack`: uint8 ``[..., bytes]`` to uint8 codes ``[..., num_codes]``."""
    data = np.asarray(data, np.uint8)
    if packing == "planar":
        split = packed_bytes(num_codes, 2)
        return unpack(data[..., :split], num_codes, 2) | (
            unpack(data[..., split:], num_codes, 1) << 2
        )
    stream = np.unpackbits(data, axis=-1, count=num_codes * bits, bitorder="little")
    stream = stream.reshape(*data.shape[:-1], num_codes, bits)
    weights = (1 << np.arange(bits)).astype(np.uint8)
    codes: np.ndarray = (stream * weights).sum(-1, dtype=np.uint8)
    return codes


@lru_cache(maxsize=1)
def e4m3_values() -> np.ndarray:
    """The value of each of the 256 e4m3fn bytes, float32 ``[256]`` (NaN at 0x7F and 0xFF)."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    value = np.where(
        exponent == 0,
        np.ldexp(mantissa / 8.0, -6),
        np.ldexp(1 + mantissa / 8.0, exponent - 7),
    )
    value = np.where(byte & 127 == 127, np.nan, value)
    result = np.where(byte & 128, -value, value).astype(np.float32)
    result.flags.writeable = False
    return result


def encode_e4m3(x: np.ndarray) -> np.ndarray:
    """Rounds float32 to e4m3fn bytes: nearest, ties to even, saturating at +-448, NaN as 0."""
    x = np.nan_to_num(np.asarray(x, np.float32), nan=0.0, posinf=E4M3_MAX, neginf=-E4M3_MAX)
    magnitude = np.minimum(np.abs(x), np.float32(E4M3_MAX))
    _, exponent = np.frexp(magnitude)
    # A binade [2^e, 2^(e+1)) holds 8 steps; below 2^-6 the step stays that of the subnormals.
    step_exponent = np.maximum(exponent - 1, -6) - 3
    rounded = np.ldexp(np.rint(np.ldexp(magnitude, -step_exponent)), step_exponent)
    byte = np.searchsorted(e4m3_values()[:127], rounded).astype(np.uint8)
    return byte | (np.signbit(x).astype(np.uint8) << 7)


@lru_cache(maxsize=16)
def byte_codes(bits: int) -> np.ndarray:
    """The codes inside each byte, for widths that divide 8: uint8 ``[256, 8 // bits]``."""
    if 8 % bits:
        raise ValueError(f"bits: expected a divisor of 8, got {bits}")
    result = unpack(np.arange(256, dtype=np.uint8)[:, None], 8 // bits, bits)
    result.flags.writeable = False
    return result
