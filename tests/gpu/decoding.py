"""A kernel that only decodes, with and without inline PTX."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tq_core import codebook, ptx
from tq_core.kernels.codes import align_words, decode_units


@triton.jit
def decode(
    unit_ptr, out_ptr,
    KIND: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr, CUBIC: tl.constexpr,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    unit = tl.load(unit_ptr + offs)
    extra = unit
    if CODES == 11:
        following = tl.load(unit_ptr + offs + 1)
        unit, extra = align_words(unit, following, offs % 3, KIND)
    codes = decode_units(unit, extra, out_ptr, KIND, BITS, CODES, False, CUBIC, ASM, CONSTRAINTS)
    for p in tl.static_range(CODES):
        tl.store(out_ptr + offs * CODES + p, codes[p])


def decoded(kind: str, bits: int, unit_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int16 bits of the numbers by PTX and by the plain path."""
    generator = torch.Generator().manual_seed(bits)
    if unit_bytes == 2:
        units = torch.arange(2**16).to(torch.uint16)
    else:
        units = torch.randint(-(2**31), 2**31, (2**20 + 1,), generator=generator).int()
    codes = 11 if (bits, unit_bytes) == (3, 4) else 8 * unit_bytes // bits
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
