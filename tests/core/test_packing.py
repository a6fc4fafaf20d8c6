from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tq_core import packing

LENGTHS = (1, 2, 3, 5, 7, 8, 9, 63, 64, 72, 80, 96, 100, 112, 128, 192, 256, 575, 576)


def dense_oracle(codes: list[int], bits: int) -> bytes:
    """Code i in bits [bits * i, bits * i + bits) of one big little-endian number."""
    number = sum(code << (bits * i) for i, code in enumerate(codes))
    return number.to_bytes(-(-len(codes) * bits // 8), "little")


def planar_oracle(codes: list[int]) -> bytes:
    return dense_oracle([c & 3 for c in codes], 2) + dense_oracle([c >> 2 for c in codes], 1)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("n", LENGTHS)
def test_dense(bits, n, rng):
    codes = rng.integers(2**bits, size=(4, n)).astype(np.uint8)
    codes[0], codes[1] = 0, 2**bits - 1
    data = packing.pack(codes, bits)
    assert data.dtype == np.uint8
    assert [row.tobytes() for row in data] == [dense_oracle(c, bits) for c in codes.tolist()]
    assert data.shape[-1] == packing.packed_bytes(n, bits) == -(-n * bits // 8)
    assert np.array_equal(packing.unpack(data, n, bits), codes)


@pytest.mark.parametrize("n", LENGTHS)
def test_planar(n, rng):
    codes = rng.integers(8, size=(4, n)).astype(np.uint8)
    data = packing.pack(codes, 3, "planar")
    assert [row.tobytes() for row in data] == [planar_oracle(c) for c in codes.tolist()]
    assert data.shape[-1] == packing.packed_bytes(n, 3, "planar")
    assert np.array_equal(packing.unpack(data, n, 3, "planar"), codes)


def test_planar_size():
    assert packing.packed_bytes(128, 3, "planar") == 128 // 4 + 128 // 8
    assert all(
        packing.packed_bytes(n, 3, "planar") == packing.packed_bytes(n, 3) for n in range(8, 577, 8)
    )
    # Each of the two streams ends on a byte of its own: 100 codes are 25 + 13 bytes, not 37.5.
    assert packing.packed_bytes(100, 3, "planar") == 38
    assert packing.packed_bytes(9, 3, "planar") == 3 + 2


def test_eight_3_bit_codes_are_a_24_bit_little_endian_word():
    codes = [1, 2, 3, 4, 5, 6, 7, 0]
    word = sum(c << (3 * i) for i, c in enumerate(codes))
    assert packing.pack(codes, 3).tolist() == [word & 255, word >> 8 & 255, word >> 16]
    assert packing.pack(codes, 3).tobytes() == bytes.fromhex("d158 1f")


def test_4_bit_keeps_the_even_coordinate_in_the_low_nibble():
    assert packing.pack([0x1, 0x2, 0xA, 0xF], 4).tobytes() == bytes.fromhex("21fa")


def test_2_bit_holds_four_codes_a_byte():
    assert packing.pack([1, 2, 3, 0, 3], 2).tobytes() == bytes([0b00_11_10_01, 0b11])


def test_unused_high_bits_are_zero_and_ignored():
    data = packing.pack([7, 7, 7], 3)
    assert data.tolist() == [0xFF, 0x01]
    assert packing.unpack(data | np.array([0, 0xFE], np.uint8), 3, 3).tolist() == [7, 7, 7]


def test_leading_axes_are_kept(rng):
    codes = rng.integers(8, size=(2, 3, 5, 24)).astype(np.uint8)
    for kind in ("dense", "planar"):
        data = packing.pack(codes, 3, kind)
        assert data.shape == (2, 3, 5, 9)
        assert np.array_equal(packing.unpack(data, 24, 3, kind), codes)
        assert np.array_equal(data[1, 2, 3], packing.pack(codes[1, 2, 3], 3, kind))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_byte_codes(bits):
    table = packing.byte_codes(bits)
    assert table.shape == (256, 8 // bits)
    for byte in range(256):
        assert dense_oracle(table[byte].tolist(), bits) == bytes([byte])
    assert not table.flags.writeable


def test_byte_codes_refuses_straddling_codes():
    with pytest.raises(ValueError, match="bits: expected a divisor of 8, got 3"):
        packing.byte_codes(3)


def e4m3_oracle(byte: int) -> Fraction:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 0:
        magnitude = Fraction(mantissa, 8) / 2**6
    else:
        magnitude = (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    return -magnitude if byte & 128 else magnitude


FINITE_E4M3 = [b for b in range(256) if b & 127 != 127]


def test_e4m3_values():
    values = packing.e4m3_values()
    assert values.dtype == np.float32
    for byte in FINITE_E4M3:
        assert Fraction(float(values[byte])) == e4m3_oracle(byte)
    assert np.isnan(values[[0x7F, 0xFF]]).all()
    assert np.signbit(values[0x80])
    assert (values[0x38], values[0x01], values[0x08], values[0x7E]) == (1, 2**-9, 2**-6, 448)


def test_e4m3_encode_inverts_decode():
    assert packing.encode_e4m3(packing.e4m3_values()[FINITE_E4M3]).tolist() == FINITE_E4M3


def test_e4m3_encode_rounds_to_nearest_even_exhaustively():
    """Every boundary between neighbours, and the float32 numbers on both sides of it."""
    for low in range(0x7E):
        a, b = e4m3_oracle(low), e4m3_oracle(low + 1)
        middle = np.float32(float((a + b) / 2))
        assert Fraction(float(middle)) == (a + b) / 2
        below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))
        even = low if low % 2 == 0 else low + 1
        x = np.array([below, middle, above])
        want = [low, even, low + 1]
        assert packing.encode_e4m3(x).tolist() == want
        assert packing.encode_e4m3(-x).tolist() == [byte | 128 for byte in want]


def test_e4m3_encode_saturates_and_replaces_nan():
    x = np.array([448, 449, 463.9, 464, 1e9, np.inf, np.nan, 0, 1e-9], np.float32)
    assert packing.encode_e4m3(x).tolist() == [0x7E] * 6 + [0, 0, 0]
    assert packing.encode_e4m3(-x[:6]).tolist() == [0xFE] * 6
    assert packing.encode_e4m3(np.float32([-0.0, -1e-9])).tolist() == [0x80, 0x80]
