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
    """Lines that bring 16-bit windows of both units together, by the window's first bit."""
    if unit_bytes == 2:
        codes = 16 // bits
        return [], {0: f"${codes}"}, codes
    straddle = bits == 3 and unit_bytes == 4
    codes = 11 if straddle else unit_bytes * 8 // bits
    windows = {0: ("lo", "0x5410"), 16: ("hi", "0x7632")}
    if bits == 3:
        windows[8] = ("mid", "0x6521")
    lines = [".reg .b32 " + ", ".join(name for name, _ in windows.values()) + ";"]
    lines += [
        f"prmt.b32 {name}, ${codes}, ${codes + 1}, {selector};"
        for name, selector in windows.values()
    ]
    if straddle:
        lines.append(f".reg .b32 tail; prmt.b32 tail, ${codes + 2}, ${codes + 3}, 0x5410;")
    return lines, {first: name for first, (name, _) in windows.items()}, codes


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
        unit_bytes: 2, 3 or 4; 3-bit codes take 3, or 4 for words and eleventh codes as
            ``codes.align_words`` gives them.
        coefficients: of the cubic, highest power first; for ``"poly"``.
    """
    fits = unit_bytes in (2, 4) if 8 % bits == 0 else unit_bytes in (3, 4)
    if kind not in ("int", "fp8", "poly") or not fits:
        return "", ""
    lines, windows, codes = _halves(unit_bytes, bits)
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
    whole = min(codes, unit_bytes * 8 // bits)
    places = [_window(windows, bits * p, bits) for p in range(whole)]
    if codes > whole:
        places.append(("tail", 6 if kind == "int" else 7))
    if kind == "int":
        # A code keeps its place inside its byte: the reader divides by a power of two later.
        for p, (source, place) in enumerate(places):
            mask = ((1 << bits) - 1) << place % 8
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
    inputs = 1 if unit_bytes == 2 else 4 if codes > whole else 2
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
    """
    if bits == 4:
        lines = "xor.b32 t, $2, 0x88888888; shr.b32 s, $2, 16; shr.b32 u, t, 16; "
        lines += "prmt.b32 x, $3, $4, $2; prmt.b32 y, $5, $6, t; or.b32 $0, x, y; "
        lines += "prmt.b32 x, $3, $4, s; prmt.b32 y, $5, $6, u; or.b32 $1, x, y;"
        names, outputs, inputs = "s, t, u, x, y", 2, 5
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
