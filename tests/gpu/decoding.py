"""Kernels that only decode, with and without inline PTX."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from tq_core import codebook, dispatch, ptx
from tq_core.kernels.codes import decode_grid, decode_units, load_grid_table


@triton.jit
def decode(
    unit_ptr, out_ptr,
    KIND: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr, CUBIC: tl.constexpr,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    unit = tl.load(unit_ptr + offs)
    following = unit
    if BITS == 3 and CODES == 16:
        following = tl.load(unit_ptr + offs + 1)
    codes = decode_units(
        unit, following, offs % 2 * 16, out_ptr, KIND, BITS, CODES, False, CUBIC, ASM, CONSTRAINTS
    )
    for p in tl.static_range(CODES):
        tl.store(out_ptr + offs * CODES + p, codes[p])


def decoded(kind: str, bits: int, unit_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int16 bits of the numbers by PTX and by the plain path."""
    generator = torch.Generator().manual_seed(bits)
    if unit_bytes == 2:
        units = torch.arange(2**16).to(torch.uint16)
    else:
        units = torch.randint(-(2**31), 2**31, (2**20 + 1,), generator=generator).int()
    codes = 8 * unit_bytes // bits
    cubic = codebook.CUBICS[bits].coefficients if kind == "poly" else ()
    units = units.cuda()
    count = len(units) - len(units) % 1024
    results = []
    for asm in (ptx.decode_asm(kind, bits, unit_bytes, cubic), ("", "")):
        out = torch.full((count * codes,), float("nan"), dtype=torch.float16, device="cuda")
        decode[(count // 1024,)](units, out, kind, bits, codes, cubic, *asm, 1024, num_warps=1)
        results.append(out.view(torch.int16))
    assert ptx.decode_asm(kind, bits, unit_bytes, cubic) != ("", "")
    return results[0], results[1]


@triton.jit
def decode_words(
    word_ptr, table_ptr, out_ptr,
    BITS: tl.constexpr, CODES: tl.constexpr, PLANAR: tl.constexpr,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.arange(0, BLOCK)[:, None, None] * 4 + tl.arange(0, 4)[None, :, None]
    offs = tl.program_id(0) * BLOCK * 4 + offs
    words = (tl.load(word_ptr + offs),)
    if BITS == 3:
        words = (words[0], tl.load(word_ptr + offs + 1), tl.load(word_ptr + offs + 2))
    table = load_grid_table(table_ptr, BITS)
    out = decode_grid(words, table, table_ptr, BITS, CODES, PLANAR, ASM, CONSTRAINTS)
    for w in tl.static_range(CODES // 4):
        tl.store(out_ptr + offs * (CODES // 4) + w, out[w])


def decoded_grid(bits: int, packing: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of a grid's bytes by PTX and by the plain path, of a million random words."""
    generator = torch.Generator().manual_seed(bits)
    words = torch.randint(-(2**31), 2**31, (2**20 + 2,), generator=generator).int().cuda()
    table = dispatch.grid_array(codebook.default_centroids(bits, 128), 128)
    codes = 32 if bits == 3 else 32 // bits
    results = []
    for asm in (ptx.grid_asm(bits, packing), ("", "")):
        out = torch.zeros(2**20 * codes // 4, dtype=torch.int32, device="cuda")
        grid = (2**20 // 512,)
        arrays = words, torch.tensor(table.astype(np.int32)).cuda(), out
        decode_words[grid](*arrays, bits, codes, packing == "planar", *asm, 128, num_warps=1)
        results.append(out)
    return results[0], results[1]
