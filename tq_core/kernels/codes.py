"""Packed codes -> fp16 matrix operands. Everything that knows how a code lies in a byte.

A *unit* is a run of 1 to 4 bytes that holds ``CODES`` whole codes; code p of unit u is coordinate
``u * CODES + p``. Decoding a tile of units gives ``CODES`` tiles, one for each p, so that a dot
over head_dim becomes ``CODES`` smaller dots and codes never move between lanes.

3-bit codes that fill whole words are read by words instead: three words hold 32 codes, and word j
begins ``j % 3`` bits before its first whole code. It yields ten whole codes and, but for every
third word, an eleventh whose last bits are the next word's; code p is coordinate
``32 * (j // 3) + 11 * (j % 3) + p``.

What a decoded number means, by ``KIND``:

* ``"int"``: code p times ``2**(BITS * p % 8)`` as an fp16 subnormal, multiples of 2**-24;
* ``"fp8"``: the e4m3fn number divided by 256, exact;
* ``"poly"``: a cubic in half precision at ``1 + code / 2**BITS``; the codec declares its values as
  the centroids;
* ``"table"``: entry of a 2**BITS-entry fp16 table.

The inline PTX given as ``ASM`` computes the same bits as the plain path, two numbers a register.
"""

import triton
import triton.language as tl


@triton.jit
def typed_ptr(byte_ptr, BYTES: tl.constexpr):
    """The cache as elements of 1, 2 or 4 bytes."""
    if BYTES == 4:
        return byte_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    elif BYTES == 2:
        return byte_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
    else:
        return byte_ptr


@triton.jit
def load_masked(ptr, mask, MASKED: tl.constexpr):
    """A load with or without its mask."""
    if MASKED:
        return tl.load(ptr, mask=mask, other=0)
    else:
        return tl.load(ptr)


@triton.jit
def coordinate(offs_u, p: tl.constexpr, CODES: tl.constexpr):
    """Coordinate of code p of unit ``offs_u``."""
    if CODES == 11:
        return offs_u // 3 * 32 + offs_u % 3 * 11 + p
    else:
        return offs_u * CODES + p


@triton.jit
def has_code(offs_u, p: tl.constexpr, CODES: tl.constexpr, NUM_UNITS: tl.constexpr):
    """Whether unit ``offs_u`` has a code p."""
    if CODES == 11 and p == 10:
        return (offs_u < NUM_UNITS) & (offs_u % 3 < 2)
    else:
        return offs_u < NUM_UNITS


@triton.jit
def align_words(word, following, phase, KIND: tl.constexpr):
    """Words of 3-bit codes shifted to their first whole code, and the eleventh codes.

    An eleventh code lies where decoding wants it, from bit 6 (``"int"``) or 7 on. ``phase`` is the
    unit modulo 3, and comes from memory: only loads and what follows from them can be computed
    where the matrix unit wants its operands.
    """
    AT: tl.constexpr = 6 if KIND == "int" else 7
    phase = phase.to(tl.uint32, bitcast=True)
    word = word.to(tl.uint32, bitcast=True) >> phase
    tail = (word >> (30 - AT)) | (following.to(tl.uint32, bitcast=True) << (AT + 2 - phase))
    return word.to(tl.int32, bitcast=True), tail.to(tl.int32, bitcast=True)


@triton.jit
def _join_words(low, high, offs_u):
    """The three bytes of unit ``offs_u`` from the words that hold its first and its last byte.

    The fourth byte of the result is arbitrary.
    """
    shift = offs_u * 3 % 4 * 8
    low = low.to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)
    return low.to(tl.int32, bitcast=True) | ((high << 1) << (31 - shift))


@triton.jit
def load_keys(
    page_ptr,
    slot_at,
    offs_u,
    mask_u,
    UNIT: tl.constexpr,
    ELEMENT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Key units ``offs_u``; ``slot_at`` is where each slot's codes begin, in elements.

    ``page_ptr`` (a scalar or one a slot) points to elements of ``ELEMENT`` bytes: a whole unit
    where the layout aligns it, else a byte.
    """
    ptr = (page_ptr + slot_at)[:, None]
    if UNIT == ELEMENT:
        return load_masked(ptr + offs_u[None, :], mask_u[None, :], MASKED)
    else:
        offs = offs_u[None, :] * UNIT
        word = load_masked(ptr + offs, mask_u[None, :], MASKED).to(tl.int32)
        for i in tl.static_range(1, UNIT):
            byte = load_masked(ptr + (offs + i), mask_u[None, :], MASKED).to(tl.int32)
            word = word | (byte << (8 * i))
        return word.to(tl.uint16) if UNIT == 2 else word


@triton.jit
def value_offset(
    element,
    slot,
    BYTES: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    WORD_MAJOR: tl.constexpr,
    WHOLE: tl.constexpr,
    TAIL: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Offset of a value element from the start of its head's values, in elements of ``BYTES``."""
    if WORD_MAJOR:
        PER_WORD: tl.constexpr = 4 // BYTES
        if PER_WORD == 1:
            in_words = element * PAGE_SIZE
        else:
            in_words = (element // PER_WORD) * (PAGE_SIZE * PER_WORD) + element % PER_WORD
        if TAIL == 0:
            return in_words + slot * PER_WORD
        else:
            in_tail = PAGE_SIZE * (WHOLE // BYTES) + slot * (TAIL // BYTES)
            in_tail = in_tail + (element - WHOLE // BYTES)
            return tl.where(element < WHOLE // BYTES, in_words + slot * PER_WORD, in_tail)
    else:
        return element + slot * (SLOT_STRIDE // BYTES)


@triton.jit
def load_values(
    page_ptr,
    slot,
    offs_u,
    mask,
    UNIT: tl.constexpr,
    ELEMENT: tl.constexpr,
    MASKED: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    WORD_MAJOR: tl.constexpr,
    WHOLE: tl.constexpr,
    TAIL: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Value units; ``slot`` and ``offs_u`` lie on different axes and broadcast to the tile.

    ``page_ptr`` points to the head's values in elements of ``ELEMENT`` bytes.
    """
    if UNIT == 3 and ELEMENT == 4:
        first = offs_u * 3 // 4
        last = (offs_u * 3 + 2) // 4
        at = value_offset(first, slot, 4, SLOT_STRIDE, WORD_MAJOR, WHOLE, TAIL, PAGE_SIZE)
        low = load_masked(page_ptr + at, mask, MASKED)
        at = value_offset(last, slot, 4, SLOT_STRIDE, WORD_MAJOR, WHOLE, TAIL, PAGE_SIZE)
        high = load_masked(page_ptr + at, mask, MASKED)
        return _join_words(low, high, offs_u)
    COUNT: tl.constexpr = UNIT // ELEMENT
    offs = value_offset(
        offs_u * COUNT, slot, ELEMENT, SLOT_STRIDE, WORD_MAJOR, WHOLE, TAIL, PAGE_SIZE
    )
    if COUNT == 1:
        return load_masked(page_ptr + offs, mask, MASKED)
    else:
        word = load_masked(page_ptr + offs, mask, MASKED).to(tl.int32)
        for i in tl.static_range(1, COUNT):
            offs = value_offset(
                offs_u * COUNT + i, slot, ELEMENT, SLOT_STRIDE, WORD_MAJOR, WHOLE, TAIL, PAGE_SIZE
            )
            byte = load_masked(page_ptr + offs, mask, MASKED).to(tl.int32)
            word = word | (byte << (8 * i))
        return word.to(tl.uint16) if UNIT == 2 else word


@triton.jit
def half_to_float(bits):
    """fp16 bits in the low half of an integer, as fp32."""
    return (bits & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def decode_number(
    code,
    table_ptr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    CUBIC: tl.constexpr,
):
    """fp16 numbers of int32 codes, see the module's list of kinds."""
    if KIND == "int":
        return (code << SHIFT).to(tl.uint16).to(tl.float16, bitcast=True)
    elif KIND == "fp8":
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        return bits.to(tl.uint16).to(tl.float16, bitcast=True)
    elif KIND == "poly":
        bits = (code << (10 - BITS)) | 0x3C00
        t = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        r = (t * CUBIC[0] + CUBIC[1]).to(tl.float16).to(tl.float32)
        r = (r * t + CUBIC[2]).to(tl.float16).to(tl.float32)
        return (r * t + CUBIC[3]).to(tl.float16)
    else:
        return tl.load(table_ptr + code)


@triton.jit
def decode_units(
    unit,
    extra,
    table_ptr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    PLANAR: tl.constexpr,
    CUBIC: tl.constexpr,
    ASM: tl.constexpr,
    ASM_CONSTRAINTS: tl.constexpr,
):
    """Tuple of ``CODES`` fp16 tiles of the shape of ``unit``.

    ``PLANAR``: ``unit`` holds the low two bits of eight 3-bit codes, ``extra`` their high bits.
    With 11 codes the two are the results of ``align_words``.
    """
    if ASM != "":
        if CODES == 11:
            return tl.inline_asm_elementwise(
                ASM, ASM_CONSTRAINTS, [unit, extra], (tl.float16,) * 11, is_pure=True, pack=2
            )
        elif CODES == 2:
            return tl.inline_asm_elementwise(
                ASM, ASM_CONSTRAINTS, [unit], (tl.float16, tl.float16), is_pure=True, pack=2
            )
        elif CODES == 4:
            return tl.inline_asm_elementwise(
                ASM, ASM_CONSTRAINTS, [unit], (tl.float16,) * 4, is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                ASM, ASM_CONSTRAINTS, [unit], (tl.float16,) * 8, is_pure=True, pack=2
            )
    else:
        word = unit.to(tl.int32)
        out = ()
        for p in tl.static_range(CODES):
            if PLANAR:
                code = ((word >> (2 * p)) & 3) | (((extra.to(tl.int32) >> p) & 1) << 2)
            elif p == 10:
                code = (extra >> (6 if KIND == "int" else 7)) & 7
            else:
                code = (word >> (BITS * p)) & ((1 << BITS) - 1)
            out = out + (decode_number(code, table_ptr, KIND, BITS, BITS * p % 8, CUBIC),)
        return out
