"""Inline PTX for decoding codes two at a time, the twins of the helpers in kernels/codes.py.

Every generator returns the text for ``tl.inline_asm_elementwise`` with ``pack=2``: two units come
in (one register of two 16-bit units, or two registers), and each output register holds the same
code of both, as two fp16 numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def _pair(bits: int) -> str:
    return f"0x{bits << 16 | bits:08X}"


def _half(number: float) -> str:
    return _pair(int(np.float16(number).view(np.uint16)))


def _halves(unit_bytes: int, bits: int) -> tuple[list[str], dict[int, str], int]:
    """Lines that bring 16-bit windows of both units together, windows by first bit, registers."""
    codes = unit_bytes * 8 // bits
    if unit_bytes == 2:
        return [], {0: f"${codes}"}, 1
    lines = []
    low, inputs = (f"${codes}", f"${codes + 1}"), 2
    windows = {0: "0x5410", 16: "0x7632"}
    if unit_bytes != 4:
        windows[8] = "0x6521"
    if unit_bytes == 6:
        # Words that hold a unit's first and last bits, and the place of its first.
        high, inputs = (f"${codes + 2}", f"${codes + 3}"), 6
        phase = (f"${codes + 4}", f"${codes + 5}")
        lines = [".reg .b32 a0, a1, b0, b1, w24, w32, w40;"]
        for i in range(2):
            lines.append(f"shf.r.wrap.b32 a{i}, {low[i]}, {high[i]}, {phase[i]};")
            lines.append(f"shr.b32 b{i}, {high[i]}, {phase[i]};")
        low = ("a0", "a1")
    lines.append(".reg .b32 " + ", ".join(f"w{first}" for first in windows) + ";")
    lines += [f"prmt.b32 w{w}, {low[0]}, {low[1]}, {pick};" for w, pick in windows.items()]
    names = {first: f"w{first}" for first in windows}
    if unit_bytes == 6:
        lines.append("prmt.b32 w32, b0, b1, 0x5410; shr.b32 w40, w32, 8;")
        # The last byte of either low word, and the byte after it.
        lines.append("shr.b32 w24, w16, 8; shl.b32 b0, w32, 8;")
        lines.append("lop3.b32 w24, b0, w24, 0xFF00FF00, 0xE4;")
        names |= {24: "w24", 32: "w32", 40: "w40"}
    return lines, names, inputs


def _window(windows: dict[int, str], first: int, bits: int) -> tuple[str, int]:
    """A window that holds the code at bit ``first``, and the code's place in it."""
    start = max(w for w in windows if w <= first and first + bits <= w + 16)
    return windows[start], first - start


def decode_asm(
    kind: str, bits: int, unit_bytes: int, coefficients: Sequence[float] = ()
) -> tuple[str, str]:
    """PTX and constraints that decode a unit, or ``("", "")`` where there is no such twin.

    Args:
        kind: ``"int"``, ``"fp8"`` or ``"poly"``.
        bits: width of a code.
        unit_bytes: 2 or 4; of 3-bit codes 3, or 6 for two words and the place of the first bit.
        coefficients: of the cubic, highest power first; for ``"poly"``.
    """
    fits = unit_bytes in (2, 4) if 8 % bits == 0 else unit_bytes in (3, 6)
    if kind not in ("int", "fp8", "poly") or not fits:
        return "", ""
    lines, windows, inputs = _halves(unit_bytes, bits)
    codes = unit_bytes * 8 // bits
    body: list[str] = []
    shifted: dict[str, str] = {}

    def shift(source: str, right: int) -> str:
        if not right:
            return source
        key = f"{source}>>{right}"
        if key not in shifted:
            shifted[key] = f"s{len(shifted)}"
            operation = f"shr.b32 {{}}, {source}, {right};"
            if right < 0:
                operation = f"shl.b32 {{}}, {source}, {-right};"
            body.append(".reg .b32 " + shifted[key] + ";")
            body.append(operation.format(shifted[key]))
        return shifted[key]

    # Step by step over all codes: neighbouring instructions do not wait for each other.
    places = [_window(windows, bits * p, bits) for p in range(codes)]
    if kind == "int":
        # A code keeps its place inside its byte: the reader divides by a power of two later.
        byte = ""
        for p, (source, place) in enumerate(places):
            mask = ((1 << bits) - 1) << place % 8
            if bits == 4 and place == 8:
                # The upper bytes alone: what is left of them without one code is the other, and
                # numbers are subtracted elsewhere than bits are masked.
                byte = f"b{p}"
                body.append(f".reg .b32 {byte}; prmt.b32 {byte}, {source}, 0, 0x4341;")
                body.append(f"and.b32 ${p}, {byte}, {_pair(mask)};")
            elif bits == 4 and place == 12:
                body.append(f"sub.rn.f16x2 ${p}, {byte}, ${p - 1};")
            else:
                body.append(f"and.b32 ${p}, {shift(source, place // 8 * 8)}, {_pair(mask)};")
    elif kind == "fp8":
        for p, (source, place) in enumerate(places):
            magnitude, sign = shift(source, place - 7), shift(source, place - 8)
            body.append(f".reg .b32 m{p}; and.b32 m{p}, {magnitude}, {_pair(0x3F80)};")
            body.append(f"lop3.b32 ${p}, {sign}, {_pair(0x8000)}, m{p}, 0xEA;")
    else:
        for i, number in enumerate(coefficients):
            body.append(f".reg .b32 c{i}; mov.b32 c{i}, {_half(number)};")
        field = _pair(((1 << bits) - 1) << (10 - bits))
        for p, (source, place) in enumerate(places):
            source = shift(source, place - (10 - bits))
            body.append(f".reg .b32 t{p};")
            body.append(f"lop3.b32 t{p}, {source}, {field}, {_pair(0x3C00)}, 0xEA;")
        for i in range(1, len(coefficients)):
            for p in range(codes):
                factor = "c0" if i == 1 else f"${p}"
                body.append(f"fma.rn.f16x2 ${p}, t{p}, {factor}, c{i};")
    constraints = ",".join(["=&r"] * codes + ["r"] * inputs)
    return "{ " + " ".join(lines + body) + " }", constraints


def _spread(source: str) -> str:
    """Lines that turn the 12 low bits of both halves of ``source`` into four nibbles, in ``y``."""
    return (
        f"shl.b32 y, {source}, 2; lop3.b32 y, y, {source}, 0xFF00FF00, 0xE4; "
        "shl.b32 z, y, 1; lop3.b32 y, z, y, 0xF0F0F0F0, 0xE4; and.b32 y, y, 0x77777777;"
    )


def _every_other(source: str) -> str:
    """Lines that move bits 0, 2, 4 ... 14 of ``source`` to bits 2, 6, 10 ... 30, in ``h``."""
    return (
        f"shl.b32 z, {source}, 8; lop3.b32 h, z, {source}, 0x00FF0000, 0xE4; "
        "shl.b32 z, h, 4; lop3.b32 h, z, h, 0x0F000F00, 0xE4; "
        "and.b32 h, h, 0x05050505; shl.b32 z, h, 2; lop3.b32 h, z, h, 0x10101010, 0xE4; "
        "and.b32 h, h, 0x11111111; shl.b32 h, h, 2;"
    )


def grid_asm(bits: int, packing: str) -> tuple[str, str]:
    """PTX and constraints of ``codes.decode_grid``: words and table words to words of bytes.

    A byte permutation looks up four nibbles of three bits in eight bytes. Of four bits, the fourth
    makes it repeat the byte's sign, which is 0 in tables of seven bits: looking up the code in the
    lower half and the code with its highest bit turned in the upper half leaves a single byte that
    is not 0.

    With four bits the upper halves of words are brought down by a product with 2**16, the last
    input: it is computed elsewhere than shifts, permutations and logic are. Elsewhere is full of
    shifts to the left with three bits, and with two it was measured to be no faster.
    """
    if bits == 4:
        lines = "xor.b32 t, $2, 0x88888888; mul.hi.u32 s, $2, $7; mul.hi.u32 u, t, $7; "
        lines += "prmt.b32 x, $3, $4, $2; prmt.b32 y, $5, $6, t; or.b32 $0, x, y; "
        lines += "prmt.b32 x, $3, $4, s; prmt.b32 y, $5, $6, u; or.b32 $1, x, y;"
        names, outputs, inputs = "s, t, u, x, y", 2, 6
    elif bits == 2:
        lines = "and.b32 x, $4, 0x33333333; shr.b32 y, $4, 2; and.b32 y, y, 0x33333333; "
        lines += "prmt.b32 $0, $5, $5, x; prmt.b32 $1, $5, $5, y; "
        lines += "shr.b32 x, x, 16; shr.b32 y, y, 16; "
        lines += "prmt.b32 $2, $5, $5, x; prmt.b32 $3, $5, $5, y;"
        names, outputs, inputs = "x, y", 4, 2
    elif packing == "dense":
        # Groups of four codes, g and g + 4 in the halves of a register.
        gather = (
            "prmt.b32 x, $8, $9, 0x7610;",
            "shr.b32 z, $8, 12; shf.r.clamp.b32 v, $9, $10, 28; prmt.b32 x, z, v, 0x5410;",
            "prmt.b32 x, $8, $9, 0x0043; prmt.b32 x, x, $10, 0x6510;",
            "prmt.b32 x, $9, $10, 0x7610; shr.b32 x, x, 4;",
        )
        lines = " ".join(
            f"{line} {_spread('x')} prmt.b32 ${g}, $11, $12, y; shr.b32 z, y, 16; "
            f"prmt.b32 ${g + 4}, $11, $12, z;"
            for g, line in enumerate(gather)
        )
        names, outputs, inputs = "v, x, y, z", 8, 5
    else:
        parts = []
        for word in range(2):
            for parity in range(2):
                out = 4 * word + parity
                parts.append(
                    f"shr.b32 x, $10, {16 * word + parity}; {_every_other('x')} "
                    f"shr.b32 y, ${8 + word}, {2 * parity}; "
                    "lop3.b32 y, y, 0x33333333, h, 0xEA; "
                    f"prmt.b32 ${out}, $11, $12, y; shr.b32 z, y, 16; "
                    f"prmt.b32 ${out + 2}, $11, $12, z;"
                )
        lines = " ".join(parts)
        names, outputs, inputs = "h, x, y, z", 8, 5
    return f"{{ .reg .b32 {names}; {lines} }}", ",".join(["=&r"] * outputs + ["r"] * inputs)
