"""Packed codes -> fp16 matrix operands. Everything that knows how a code lies in a byte.

A *unit* is a run of 1 to 4 bytes that holds ``CODES`` whole codes; code p of unit u is coordinate
``u * CODES + p``. Decoding a tile of units gives ``CODES`` tiles, one for each p, so that a dot
over head_dim becomes ``CODES`` smaller dots and codes never move between lanes.

3-bit values that fill whole words are read by 48 bits, 16 codes: the word where a unit begins and
the next, which share the place of the first bit, 0 or 16.

What a decoded number means, by ``KIND``:

* ``"int"``: code p times ``2**(BITS * p % 8)`` as an fp16 subnormal, multiples of 2**-24;
* ``"fp8"``: the e4m3fn number divided by 256, exact;
* ``"poly"``: a cubic in half precision at ``1 + code / 2**BITS``; the codec declares its values as
  the centroids;
* ``"table"``: entry of a 2**BITS-entry fp16 table.

Keys of a grid codebook (``KIND`` ``"grid"``) are bytes for the int8 matrix unit instead. Their unit
is a word, or three words of 3-bit codes, and yields an int32 word for every four codes. See
``decode_grid`` and ``grid_coordinate``.

The inline PTX given as ``ASM`` computes the same bits as the plain path, two numbers a register.
"""

import triton
import triton.language as tl

#: Neighbouring bytes that Triton gives a lane of an int8 operand which was joined from others: a
#: matter of speed, not of results.
LANE_BYTES = tl.constexpr(8 if triton.__version__.startswith(("3.6.", "3.7.")) else 4)


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
def _aligned(word, following, phase):
    """The 48 bits from bit ``phase`` on of two words: the low 32 and the high 16."""
    phase = phase.to(tl.uint32, bitcast=True)
    high = following.to(tl.uint32, bitcast=True)
    low = (word.to(tl.uint32, bitcast=True) >> phase) | ((high << 1) << (31 - phase))
    return low.to(tl.int32, bitcast=True), (high >> phase).to(tl.int32, bitcast=True)


@triton.jit
def _join_words(low, high, offs_u):
    """The three bytes of unit ``offs_u`` from the words that hold its first and its last byte.

    The fourth byte of the result is arbitrary.
    """
    shift = offs_u * 3 % 4 * 8
    low = low.to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)
    return low.to(tl.int32, bitcast=True) | ((high << 1) << (31 - shift))


@triton.jit
def grid_coordinate(
    offs_k, NUM_UNITS: tl.constexpr, CODES: tl.constexpr, STRIDED: tl.constexpr
):  # fmt: skip
    """Coordinate of column ``offs_k`` of the operand that ``grid_operand`` makes of units."""
    if LANE_BYTES == 8:
        half = offs_k // 4 % 2
        lane = offs_k // 8 % 4
    else:
        half = offs_k // 16 % 2
        lane = offs_k // 4 % 4
    word = offs_k // 32 % (CODES // 8) * 2 + half
    if STRIDED:
        place = word // 2 * 8 + offs_k % 4 * 2 + word % 2
    else:
        place = word * 4 + offs_k % 4
    return (lane * (NUM_UNITS // 4) + offs_k // (4 * CODES)) * CODES + place


@triton.jit
def _load_word(
    page_ptr, slot_at, index,
    FIRST: tl.constexpr, END: tl.constexpr, ELEMENT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Words ``index`` of bytes FIRST to END of every slot, 0 past the end; int32."""
    ptr = (page_ptr + slot_at)[:, None]
    if ELEMENT == 4:
        at = FIRST // 4 + index
        return load_masked(ptr + at[None, :], (at * 4 < END)[None, :], MASKED)
    else:
        at = FIRST + index * 4
        word = load_masked(ptr + at[None, :], (at < END)[None, :], True).to(tl.int32)
        for i in tl.static_range(1, 4):
            byte = load_masked(ptr + (at + i)[None, :], (at + i < END)[None, :], True)
            word = word | (byte.to(tl.int32) << (8 * i))
        return word


@triton.jit
def load_grid(
    page_ptr, slot_at, offs_u,
    BITS: tl.constexpr, PLANAR: tl.constexpr, ELEMENT: tl.constexpr, NUM_BYTES: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The words of units ``offs_u``, a tuple; arguments as in ``load_keys``."""
    if BITS != 3:
        return (_load_word(page_ptr, slot_at, offs_u, 0, NUM_BYTES, ELEMENT, MASKED),)
    elif PLANAR:
        LOW: tl.constexpr = NUM_BYTES // 3 * 2
        return (
            _load_word(page_ptr, slot_at, offs_u * 2, 0, LOW, ELEMENT, MASKED),
            _load_word(page_ptr, slot_at, offs_u * 2 + 1, 0, LOW, ELEMENT, MASKED),
            _load_word(page_ptr, slot_at, offs_u, LOW, NUM_BYTES, ELEMENT, MASKED),
        )
    else:
        # Four words from each unit's first: neighbours, so that lanes are laid along them.
        offs = tl.arange(0, 4 * offs_u.shape[0])
        index = offs // 4 * 3 + offs % 4
        word = _load_word(page_ptr, slot_at, index, 0, NUM_BYTES, ELEMENT, MASKED)
        word = tl.reshape(word, [word.shape[0], offs_u.shape[0], 2, 2])
        even, odd = tl.split(word)
        first, third = tl.split(even)
        second, _ = tl.split(odd)
        return first, second, third


@triton.jit
def load_grid_run(
    page_ptr, NUM_SLOTS: tl.constexpr, SLOT_STRIDE: tl.constexpr, NUM_UNITS: tl.constexpr,
    BITS: tl.constexpr, NUM_BYTES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """``load_grid`` of dense codes in whole words of neighbouring slots, ``SLOT_STRIDE`` apart.

    The tiles are loaded as vectors. With two axes lanes would be laid along the slots of 3-bit
    codes, and compilers differ in what they do with the others.
    """
    WORDS: tl.constexpr = 3 if BITS == 3 else 1
    offs = tl.arange(0, NUM_SLOTS * NUM_UNITS)
    index = offs % NUM_UNITS * WORDS
    ptr = page_ptr + (offs // NUM_UNITS * SLOT_STRIDE + index)
    words = ()
    for i in tl.static_range(WORDS):
        word = load_masked(ptr + i, (index + i) * 4 < NUM_BYTES, MASKED)
        words = words + (tl.reshape(word, [NUM_SLOTS, NUM_UNITS]),)
    return words


@triton.jit
def load_grid_table(table_ptr, BITS: tl.constexpr):
    """The table's words and 2**16, int32 ``[1, 4, 1]`` each, a copy for each lane of a row.

    Loaded lane by lane they are registers; as constants or scalars they would be uniform ones,
    which each use copies first.
    """
    offs = tl.arange(0, 4)[None, :, None]
    words = ()
    for i in tl.static_range(2**BITS // 4 + 1):
        words = words + (tl.load(table_ptr + 4 * i + offs),)
    return words


@triton.jit
def _grid_code(words, p: tl.constexpr, BITS: tl.constexpr, PLANAR: tl.constexpr):
    """Code p of a unit."""
    if PLANAR:
        code = ((words[p // 16] >> (2 * p % 32)) & 3) | (((words[2] >> p) & 1) << 2)
    elif BITS * p % 32 + BITS > 32:
        KEPT: tl.constexpr = 32 - BITS * p % 32
        code = (words[BITS * p // 32] >> (32 - KEPT)) & ((1 << KEPT) - 1)
        code = code | ((words[BITS * p // 32 + 1] << KEPT) & (2**BITS - 1))
    else:
        code = (words[BITS * p // 32] >> (BITS * p % 32)) & (2**BITS - 1)
    return code


@triton.jit
def decode_grid(
    words, table, table_ptr,
    BITS: tl.constexpr, CODES: tl.constexpr, PLANAR: tl.constexpr,
    ASM: tl.constexpr, ASM_CONSTRAINTS: tl.constexpr,
):  # fmt: skip
    """Tuple of ``CODES / 4`` int32 words of the table's bytes, each with those of four codes.

    ``words`` and ``table`` broadcast to one shape. Word w holds codes 4w to 4w + 3, or with 2-bit
    and planar codes, which are taken apart by their parity, every other one of eight.
    ``table_ptr`` has the table's words as ``load_grid_table`` reads them, then its entries.
    """
    if ASM != "":
        if CODES == 8:
            return tl.inline_asm_elementwise(
                ASM, ASM_CONSTRAINTS, [words[0], table[0], table[1], table[2], table[3], table[4]],
                (tl.int32,) * 2, is_pure=True, pack=1,
            )  # fmt: skip
        elif CODES == 16:
            return tl.inline_asm_elementwise(
                ASM, ASM_CONSTRAINTS, [words[0], table[0]], (tl.int32,) * 4, is_pure=True, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                ASM, ASM_CONSTRAINTS, [words[0], words[1], words[2], table[0], table[1]],
                (tl.int32,) * 8, is_pure=True, pack=1,
            )  # fmt: skip
    else:
        STRIDED: tl.constexpr = BITS == 2 or PLANAR
        out = ()
        for w in tl.static_range(CODES // 4):
            word = words[0] * 0
            for b in tl.static_range(4):
                if STRIDED:
                    code = _grid_code(words, w // 2 * 8 + 2 * b + w % 2, BITS, PLANAR)
                else:
                    code = _grid_code(words, 4 * w + b, BITS, PLANAR)
                entry = tl.load(table_ptr + 2**BITS + 4 + code)
                word = word | ((entry & 0xFF) << (8 * b))
            out = out + (word,)
        return out


@triton.jit
def _bytes(word):
    """The bytes of int32 words, int8 ``[..., 2, 2]``; the compiler makes nothing of it."""
    even = tl.join(word.to(tl.int8), (word >> 16).to(tl.int8))
    return tl.join(even, tl.join((word >> 8).to(tl.int8), (word >> 24).to(tl.int8)))


@triton.jit
def grid_operand(words, CODES: tl.constexpr):
    """Words ``[T, 4, U / 4]`` of ``decode_grid`` as a matrix operand, int8 ``[T, U * CODES]``.

    Columns follow the matrix unit, in which each of four lanes holds ``LANE_BYTES`` neighbours: so
    a lane has a run of units, reads it whole, and all that it decodes is already in its place.
    """
    COLUMNS: tl.constexpr = words[0].shape[2] * 4 * CODES
    # Axes: token, lane, unit of the lane, half and byte of the half of a word, word.
    LANES_OUTER: tl.constexpr = LANE_BYTES == 8
    if CODES == 8:
        x = tl.join(_bytes(words[0]), _bytes(words[1]))
        x = tl.permute(x, (0, 2, 1, 5, 3, 4) if LANES_OUTER else (0, 2, 5, 1, 3, 4))
    elif CODES == 16:
        low = tl.join(_bytes(words[0]), _bytes(words[1]))
        x = tl.join(low, tl.join(_bytes(words[2]), _bytes(words[3])))
        x = tl.permute(x, (0, 2, 6, 1, 5, 3, 4) if LANES_OUTER else (0, 2, 6, 5, 1, 3, 4))
    else:
        a = tl.join(_bytes(words[0]), _bytes(words[1]))
        b = tl.join(_bytes(words[2]), _bytes(words[3]))
        c = tl.join(_bytes(words[4]), _bytes(words[5]))
        d = tl.join(_bytes(words[6]), _bytes(words[7]))
        x = tl.join(tl.join(a, b), tl.join(c, d))
        x = tl.permute(x, (0, 2, 7, 6, 1, 5, 3, 4) if LANES_OUTER else (0, 2, 7, 6, 5, 1, 3, 4))
    return tl.reshape(x, [words[0].shape[0], COLUMNS])


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
    unit, extra, phase, table_ptr,
    KIND: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr, PLANAR: tl.constexpr,
    CUBIC: tl.constexpr, ASM: tl.constexpr, ASM_CONSTRAINTS: tl.constexpr,
):  # fmt: skip
    """Tuple of ``CODES`` fp16 tiles of the shape of ``unit``.

    ``PLANAR``: ``unit`` holds the low two bits of eight 3-bit codes, ``extra`` their high bits.
    16 codes of three bits lie in words ``unit`` and ``extra`` from bit ``phase`` of the former on.
    """
    if ASM != "":
        if BITS == 3 and CODES == 16:
            return tl.inline_asm_elementwise(
                ASM, ASM_CONSTRAINTS, [unit, extra, phase], (tl.float16,) * 16, is_pure=True, pack=2
            )
        elif CODES == 2:
            return tl.inline_asm_elementwise(
                ASM, ASM_CONSTRAINTS, [unit], (tl.float16, tl.float16), is_pure=True, pack=2
            )
        elif CODES == 4:
            return tl.inline_asm_elementwise(
                ASM, ASM_CONSTRAINTS, [unit], (tl.float16,) * 4, is_pure=True, pack=2
            )
        elif CODES == 8:
            return tl.inline_asm_elementwise(
                ASM, ASM_CONSTRAINTS, [unit], (tl.float16,) * 8, is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                ASM, ASM_CONSTRAINTS, [unit], (tl.float16,) * 16, is_pure=True, pack=2
            )
    else:
        word = unit.to(tl.int32)
        high = extra.to(tl.int32)
        if BITS == 3 and CODES == 16:
            word, high = _aligned(unit, extra, phase)
        out = ()
        for p in tl.static_range(CODES):
            if PLANAR:
                code = ((word >> (2 * p)) & 3) | (((high >> p) & 1) << 2)
            elif BITS * p >= 32:
                code = (high >> (BITS * p - 32)) & ((1 << BITS) - 1)
            elif BITS * p + BITS > 32:
                code = ((word >> (BITS * p)) & 3) | ((high & 1) << 2)
            else:
                code = (word >> (BITS * p)) & ((1 << BITS) - 1)
            out = out + (decode_number(code, table_ptr, KIND, BITS, BITS * p % 8, CUBIC),)
        return out
