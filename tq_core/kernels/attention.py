"""Attention over the packed cache, and the merge of its KV splits.

With ``c`` a decoded code, ``g`` a token's key scale and ``q'`` the transformed query, a score is
``s = scale * (g * (q' . c) + q . mu)``. A value is ``w * c + z`` (scale, code, zero), so an output
row is ``sum_t p_t w_t c_t + sum_t p_t z_t``: no per-token factor ever touches an element.
Tokens lie on the M axis of every dot, query rows (of all heads of a group) on the N axis.
``p_t w_t`` is what enters the second dot as fp16; the running maximum is therefore that of
``log2(p_t w_t)``, and small or huge value scales cost no precision.

Keys of grid codebooks are bytes, and ``q'`` is two: ``128 high + low``, neighbouring columns of one
int8 dot, whose sums are exact. The matrix unit has at least eight columns. Where there are only
four query rows, every other one is theirs, and what follows the dot is done for those alone.

Reads, for each tile of ``BLOCK_T`` tokens of one KV head: key codes, value codes, metadata, and the
block table. Scores and sums are fp32, exponentials base 2.
Source: docs/format.md; online softmax as in FlashAttention (arXiv 2205.14135), KV splits as in
Flash-Decoding.
"""

import triton
import triton.language as tl

from tq_core.kernels.codes import (
    decode_grid,
    decode_units,
    grid_operand,
    half_to_float,
    load_grid,
    load_grid_run,
    load_grid_table,
    load_keys,
    load_masked,
    load_values,
    typed_ptr,
)
from tq_core.kernels.order import let_next_start, prefetch, wait_for_previous
from tq_core.kernels.shares import cut, lay_out, pick

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEVER = tl.constexpr(-1.0e30)
#: Parts of a sequence that `merge` loads at once where there are no more.
FEW_PARTS = tl.constexpr(4)


@triton.jit
def _exponent(half):
    """log2 of a power of two above |scale|; ``half`` has the fp16 bits in its low half."""
    # An integer below 2**23 in the mantissa of 2**23 is a float without a conversion: 1024 times
    # the exponent, where it stands.
    bits = (half & 0x7C00) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) * (1 / 1024) - (8192.0 + 14.0)


@triton.jit
def _partial_sum(x):
    """Sums of every eighth row, ``[T, N]`` to ``[8, N]``."""
    return tl.sum(tl.reshape(x, [x.shape[0] // 8, 8, x.shape[1]]), 0)


@triton.jit
def _even_columns(x, NUM: tl.constexpr):
    """The even ones of ``2 * NUM`` columns; all of ``NUM``."""
    if x.shape[1] == NUM:
        return x
    else:
        even, _ = tl.split(tl.reshape(x, [x.shape[0], NUM, 2]))
        return even


@triton.jit
def _pairs(v):
    """Half as many tiles of twice the rows, codes p and p + len(v) / 2 in one."""
    HALF: tl.constexpr = len(v) // 2
    out = ()
    for p in tl.static_range(HALF):
        x = tl.permute(tl.join(v[p], v[p + HALF]), (2, 0, 1))
        out = out + (tl.reshape(x, [2 * v[p].shape[0], v[p].shape[1]]),)
    return out


@triton.jit
def _stacked(v):
    """2 to 16 tiles ``[U, T]``, code p of unit u in tile p, as one: row ``u * len(v) + p``."""
    UNITS: tl.constexpr = v[0].shape[0]
    TOKENS: tl.constexpr = v[0].shape[1]
    CODES: tl.constexpr = len(v)
    joined = v
    if CODES >= 16:
        joined = _joined(joined)
    if CODES >= 8:
        joined = _joined(joined)
    if CODES >= 4:
        joined = _joined(joined)
    x = tl.join(joined[0], joined[1])
    if CODES == 16:
        x = tl.permute(x, (0, 2, 3, 4, 5, 1))
    elif CODES == 8:
        x = tl.permute(x, (0, 2, 3, 4, 1))
    elif CODES == 4:
        x = tl.permute(x, (0, 2, 3, 1))
    else:
        x = tl.permute(x, (0, 2, 1))
    return tl.reshape(x, [UNITS * CODES, TOKENS])


@triton.jit
def _joined(v):
    """Half as many tensors, the one at p joined with the one half the tuple further on."""
    HALF: tl.constexpr = len(v) // 2
    out = ()
    for p in tl.static_range(HALF):
        out = out + (tl.join(v[p], v[p + HALF]),)
    return out


@triton.jit
def _load_key_scale(
    j, page, slot, first, mask_t, meta_ptr, cache_ptr, pages_ptr, head, first_token, end_token,
    MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    META_BASE: tl.constexpr, META_HEAD_STRIDE: tl.constexpr, KEY_PAIR_LOAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The key scales of a tile's tokens, fp32 ``[BLOCK_T]``."""
    if KEY_PAIR_LOAD:
        # Two tokens a load: four bytes are the least that can be fetched ahead of use.
        offs_e = 2 * tl.arange(0, BLOCK_T // 2)
        even = j * BLOCK_T + offs_e
        mask_even = (even >= first_token - 1) & (even < end_token)
        if PAGE_SIZE % BLOCK_T == 0:
            even_page = page
            even_slot = offs_e
        else:
            if BLOCK_T % PAGE_SIZE == 0:
                place = j * (BLOCK_T // PAGE_SIZE) + offs_e // PAGE_SIZE
                even_slot = offs_e % PAGE_SIZE
            else:
                place = even // PAGE_SIZE
                even_slot = even % PAGE_SIZE
            mask_page = mask_even & (place >= first_token // PAGE_SIZE)
            even_page = load_masked(pages_ptr + place, mask_page, MASKED).to(tl.int64)
        pair_at = META_BASE // 4 + head * (META_HEAD_STRIDE // 4) + first // 2
        pair_ptr = typed_ptr(cache_ptr, 4) + pair_at + even_page * (PAGE_STRIDE // 4)
        pair = load_masked(pair_ptr + even_slot // 2, mask_even, MASKED)
        return tl.interleave(half_to_float(pair), half_to_float(pair >> 16))
    else:
        return half_to_float(load_masked(meta_ptr + slot, mask_t, MASKED))


@triton.jit
def _wide_tile(
    acc, m, l, z, q, row_scale, row_bias, row_const, slope, position, k, key_scale,
    v, scale_bits, value_scale, value_zero, token, mask_t,
    MASKED: tl.constexpr, HAS_VALUE_SHIFT: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_ALIBI: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    KEY_KIND: tl.constexpr, KEY_CODES: tl.constexpr, VALUE_KIND: tl.constexpr,
):  # fmt: skip
    """What follows the loads of a tile where query rows lie on the M axis: the same numbers.

    Decoded keys and values go through shared memory, once for all rows of the program, and the
    dots are those of a group of warps.
    """
    if KEY_KIND == "grid":
        operand = tl.trans(k)
        high = tl.dot(q[0], operand, out_dtype=tl.int32)
        low = tl.dot(q[1], operand, out_dtype=tl.int32)
        s = (high * 128 + low).to(tl.float32) * row_scale[:, None] + row_bias[:, None]
    else:
        s = tl.dot(q[0], tl.trans(k[0]))
        for p in tl.static_range(1, KEY_CODES):
            s = tl.dot(q[p], tl.trans(k[p]), s)
        s = s * row_scale[:, None]
    if KEY_KIND != "fp8":
        s = s * key_scale[None, :]
    if HAS_OFFSET:
        s = s + row_const[:, None]
    if SOFTCAP > 0:
        t = tl.exp2(tl.abs(s) * (-2 * LOG2E / SOFTCAP))
        s = tl.where(s < 0, -SOFTCAP * LOG2E, SOFTCAP * LOG2E) * ((1 - t) / (1 + t))
    if HAS_ALIBI:
        s = s + slope[:, None] * (token[None, :] - position[:, None]).to(tl.float32)
    if MASKED:
        seen = mask_t[None, :]
        if CAUSAL:
            seen = seen & (token[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (token[None, :] > (position - WINDOW)[:, None])
        s = tl.where(seen, s, NEVER)
    m_new = tl.maximum(m, tl.max(s + _exponent(scale_bits)[None, :], 1))
    weight = tl.exp2(s - m_new[:, None])
    if MASKED:
        weight = tl.where(seen, weight, 0.0)
    decay = tl.exp2(m - m_new)
    scaled = (weight * value_scale[None, :]).to(tl.float16)
    if HAS_VALUE_SHIFT:
        inverse = 1 / tl.where(value_scale == 0, 1.0, value_scale)
        rounded = scaled.to(tl.float32) * inverse[None, :]
        weight = tl.where((value_scale == 0)[None, :], weight, rounded)
    l = l * decay + tl.sum(weight, 1)
    if VALUE_KIND == "int":
        z = z * decay + tl.sum(weight * value_zero[None, :], 1)
    part = tl.dot(scaled, tl.trans(v))
    return (tl.fma(acc[0], decay[:, None] + tl.zeros_like(acc[0]), part),), m_new, l, z


@triton.jit
def _tile(
    j, acc, m, l, z,
    q, row_scale, row_bias, row_const, slope, position, key_table, value_phase,
    cache_ptr, pages_ptr, key_table_ptr, value_table_ptr,
    head, first_token, end_token,
    MASKED: tl.constexpr, HAS_VALUE_SHIFT: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_ALIBI: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    KEY_HEAD_STRIDE: tl.constexpr, KEY_SLOT_STRIDE: tl.constexpr,
    VALUE_BASE: tl.constexpr, VALUE_HEAD_STRIDE: tl.constexpr, VALUE_SLOT_STRIDE: tl.constexpr,
    VALUE_WORD_MAJOR: tl.constexpr, VALUE_WHOLE: tl.constexpr, VALUE_TAIL: tl.constexpr,
    META_BASE: tl.constexpr, META_HEAD_STRIDE: tl.constexpr, META_VALUE: tl.constexpr,
    META_PAIRS: tl.constexpr, META_PAIR_LOAD: tl.constexpr, KEY_PAIR_LOAD: tl.constexpr,
    KEY_KIND: tl.constexpr, KEY_BITS: tl.constexpr, KEY_UNIT: tl.constexpr,
    KEY_ELEMENT: tl.constexpr, KEY_CODES: tl.constexpr, KEY_PLANAR: tl.constexpr,
    KEY_BYTES: tl.constexpr, KEY_ASM: tl.constexpr, KEY_CONSTRAINTS: tl.constexpr,
    VALUE_KIND: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_UNIT: tl.constexpr,
    VALUE_ELEMENT: tl.constexpr, VALUE_CODES: tl.constexpr, VALUE_PAIRED: tl.constexpr,
    VALUE_CUBIC: tl.constexpr, VALUE_ASM: tl.constexpr, VALUE_CONSTRAINTS: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_KEY: tl.constexpr, NUM_VALUE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of tokens: scores, online softmax, weighted values."""
    offs_t = tl.arange(0, BLOCK_T)
    token = j * BLOCK_T + offs_t
    # A tile inside one page looks it up once; other tiles look up the page of each token. ``first``
    # is the tile's first slot, apart so that what differs between lanes is known to the compiler.
    first = 0
    if PAGE_SIZE % BLOCK_T == 0:
        TILES: tl.constexpr = PAGE_SIZE // BLOCK_T
        page = tl.load(pages_ptr + j // TILES).to(tl.int64)
        slot = offs_t
        if TILES > 1:
            first = (j % TILES) * BLOCK_T
    else:
        if BLOCK_T % PAGE_SIZE == 0:
            place = j * (BLOCK_T // PAGE_SIZE) + offs_t // PAGE_SIZE
            slot = offs_t % PAGE_SIZE
        else:
            place = token // PAGE_SIZE
            slot = token % PAGE_SIZE
        mask_page = (place >= first_token // PAGE_SIZE) & (token < end_token)
        page = load_masked(pages_ptr + place, mask_page, MASKED).to(tl.int64)
    mask_t = (token >= first_token) & (token < end_token)

    offs_u = tl.arange(0, BLOCK_KEY)
    key_at = head * (KEY_HEAD_STRIDE // KEY_ELEMENT) + first * (KEY_SLOT_STRIDE // KEY_ELEMENT)
    key_ptr = typed_ptr(cache_ptr, KEY_ELEMENT) + key_at + page * (PAGE_STRIDE // KEY_ELEMENT)
    key_slot = slot * (KEY_SLOT_STRIDE // KEY_ELEMENT)
    RUN: tl.constexpr = PAGE_SIZE % BLOCK_T == 0 and KEY_ELEMENT == 4 and not KEY_PLANAR
    if KEY_KIND == "grid" and RUN:
        words = load_grid_run(
            key_ptr, BLOCK_T, KEY_SLOT_STRIDE // 4, BLOCK_KEY, KEY_BITS, KEY_BYTES,
            BLOCK_KEY * KEY_UNIT != KEY_BYTES,
        )  # fmt: skip
    elif KEY_KIND == "grid":
        words = load_grid(
            key_ptr, key_slot, offs_u, KEY_BITS, KEY_PLANAR, KEY_ELEMENT, KEY_BYTES,
            BLOCK_KEY * KEY_UNIT != KEY_BYTES,
        )  # fmt: skip
    else:
        unit = load_keys(
            key_ptr, key_slot, offs_u, offs_u < NUM_KEY, KEY_UNIT, KEY_ELEMENT, NUM_KEY != BLOCK_KEY
        )  # [BLOCK_T, BLOCK_KEY]
        extra = unit
        if KEY_PLANAR:
            byte_at = head * KEY_HEAD_STRIDE + first * KEY_SLOT_STRIDE + HEAD_DIM // 4
            extra = load_keys(
                cache_ptr + byte_at + page * PAGE_STRIDE, slot * KEY_SLOT_STRIDE, offs_u,
                offs_u < NUM_KEY, 1, 1, NUM_KEY != BLOCK_KEY,
            )  # fmt: skip

    offs_v = tl.arange(0, BLOCK_VALUE)
    value_at = VALUE_BASE // VALUE_ELEMENT + head * (VALUE_HEAD_STRIDE // VALUE_ELEMENT)
    value_slot = slot
    if VALUE_WORD_MAJOR and VALUE_TAIL > 0:
        value_slot = slot + first
    elif VALUE_WORD_MAJOR:
        value_at += first * (4 // VALUE_ELEMENT)
    else:
        value_at += first * (VALUE_SLOT_STRIDE // VALUE_ELEMENT)
    value_ptr = typed_ptr(cache_ptr, VALUE_ELEMENT) + value_at
    value_ptr = value_ptr + page * (PAGE_STRIDE // VALUE_ELEMENT)
    if PAGE_SIZE % BLOCK_T != 0:
        value_ptr = value_ptr[None, :]
    # Of 48 bits, the word where they begin; two units share three words.
    HALVES: tl.constexpr = VALUE_UNIT == 6
    VALUE_WORD: tl.constexpr = 4 if HALVES else VALUE_UNIT
    word_v = offs_v // 2 * 3 + offs_v % 2 if HALVES else offs_v
    value_unit = load_values(
        value_ptr, value_slot[None, :], word_v[:, None], (offs_v < NUM_VALUE)[:, None], VALUE_WORD,
        VALUE_ELEMENT, NUM_VALUE != BLOCK_VALUE, VALUE_SLOT_STRIDE, VALUE_WORD_MAJOR, VALUE_WHOLE,
        VALUE_TAIL, PAGE_SIZE,
    )  # fmt: skip  # [BLOCK_VALUE, BLOCK_T]
    value_extra = value_unit
    if HALVES:
        value_extra = load_values(
            value_ptr, value_slot[None, :], word_v[:, None] + 1, (offs_v < NUM_VALUE)[:, None],
            VALUE_WORD, VALUE_ELEMENT, NUM_VALUE != BLOCK_VALUE, VALUE_SLOT_STRIDE,
            VALUE_WORD_MAJOR, VALUE_WHOLE, VALUE_TAIL, PAGE_SIZE,
        )  # fmt: skip

    meta_at = head * (META_HEAD_STRIDE // 2) + META_BASE // 2 + first
    meta_ptr = typed_ptr(cache_ptr, 2) + meta_at + page * (PAGE_STRIDE // 2)
    if META_PAIR_LOAD:
        pair_at = (META_BASE + META_VALUE) // 4 + head * (META_HEAD_STRIDE // 4) + first
        pair_ptr = typed_ptr(cache_ptr, 4) + pair_at + page * (PAGE_STRIDE // 4)
        pair = load_masked(pair_ptr + slot, mask_t, MASKED)
        scale_bits = pair
        value_zero = half_to_float(pair >> 16)
    else:
        if META_PAIRS:
            at = META_VALUE // 2 + first + slot * 2
            zero_at = at + 1
        else:
            at = META_VALUE // 2 + slot
            zero_at = at + PAGE_SIZE
        scale_bits = load_masked(meta_ptr + at, mask_t, MASKED).to(tl.int32)
        if VALUE_KIND == "int":
            value_zero = half_to_float(load_masked(meta_ptr + zero_at, mask_t, MASKED))

    value_scale = half_to_float(scale_bits)

    BLOCK_N: tl.constexpr = m.shape[0]
    if KEY_KIND == "grid":
        lanes = ()
        for w in tl.static_range(len(words)):
            lanes = lanes + (tl.reshape(words[w], [BLOCK_T, 4, BLOCK_KEY // 4]),)
        decoded = decode_grid(
            lanes, key_table, key_table_ptr, KEY_BITS, KEY_CODES, KEY_PLANAR, KEY_ASM,
            KEY_CONSTRAINTS,
        )  # fmt: skip
        k = grid_operand(decoded, KEY_CODES)
    else:
        k = decode_units(
            unit, extra, 0, key_table_ptr, KEY_KIND, KEY_BITS, KEY_CODES, KEY_PLANAR, (),
            KEY_ASM, KEY_CONSTRAINTS,
        )  # fmt: skip
    if WIDE:
        key_scale = value_scale
        if KEY_KIND != "fp8":
            key_scale = _load_key_scale(
                j, page, slot, first, mask_t, meta_ptr, cache_ptr, pages_ptr, head, first_token,
                end_token, MASKED, PAGE_SIZE, PAGE_STRIDE, META_BASE, META_HEAD_STRIDE,
                KEY_PAIR_LOAD, BLOCK_T,
            )  # fmt: skip
        if VALUE_KIND != "int":
            value_zero = value_scale
        v = decode_units(
            value_unit, value_extra, value_phase, value_table_ptr, VALUE_KIND, VALUE_BITS,
            VALUE_CODES, False, VALUE_CUBIC, VALUE_ASM, VALUE_CONSTRAINTS,
        )  # fmt: skip
        return _wide_tile(
            acc, m, l, z, q, row_scale, row_bias, row_const, slope, position, k, key_scale,
            _stacked(v), scale_bits, value_scale, value_zero, token, mask_t, MASKED,
            HAS_VALUE_SHIFT, SOFTCAP, HAS_OFFSET, HAS_ALIBI, CAUSAL, WINDOW, KEY_KIND, KEY_CODES,
            VALUE_KIND,
        )  # fmt: skip
    else:
        if KEY_KIND == "grid":
            parts = tl.dot(k, q[0], out_dtype=tl.int32)
            high, low = tl.split(tl.reshape(parts, [BLOCK_T, BLOCK_N, 2]))
            s = (high * 128 + low).to(tl.float32)  # [BLOCK_T, BLOCK_N]
        else:
            s = tl.dot(k[0], q[0])
            for p in tl.static_range(1, KEY_CODES):
                s = tl.dot(k[p], q[p], s)
            s = _even_columns(s, BLOCK_N)
        s = s * row_scale[None, :]
        if KEY_KIND == "grid":
            s = s + row_bias[None, :]
        if KEY_KIND != "fp8":
            key_scale = _load_key_scale(
                j, page, slot, first, mask_t, meta_ptr, cache_ptr, pages_ptr, head, first_token,
                end_token, MASKED, PAGE_SIZE, PAGE_STRIDE, META_BASE, META_HEAD_STRIDE,
                KEY_PAIR_LOAD, BLOCK_T,
            )  # fmt: skip
            s = s * key_scale[:, None]
        if HAS_OFFSET:
            s = s + row_const[None, :]
        if SOFTCAP > 0:
            t = tl.exp2(tl.abs(s) * (-2 * LOG2E / SOFTCAP))
            s = tl.where(s < 0, -SOFTCAP * LOG2E, SOFTCAP * LOG2E) * ((1 - t) / (1 + t))
        if HAS_ALIBI:
            s = s + slope[None, :] * (token[:, None] - position[None, :]).to(tl.float32)
        if MASKED:
            seen = mask_t[:, None]
            if CAUSAL:
                seen = seen & (token[:, None] <= position[None, :])
            if WINDOW > 0:
                seen = seen & (token[:, None] > (position - WINDOW)[None, :])
            s = tl.where(seen, s, NEVER)

        m_new = tl.maximum(m, tl.max(s + _exponent(scale_bits)[:, None], 0))
        weight = tl.exp2(s - m_new[None, :])
        if MASKED:
            weight = tl.where(seen, weight, 0.0)
        decay = tl.exp2(m - m_new)
        scaled = (weight * value_scale[:, None]).to(tl.float16)
        if HAS_VALUE_SHIFT:
            # What the offset adds cancels a mean of the coded values: all sums then take the
            # weights as the matrix unit gets them.
            inverse = 1 / tl.where(value_scale == 0, 1.0, value_scale)
            rounded = scaled.to(tl.float32) * inverse[:, None]
            weight = tl.where((value_scale == 0)[:, None], weight, rounded)
        # One partial sum for each row of a matrix-unit tile: adding those up waits for the end.
        l = l * decay[None, :] + _partial_sum(weight)
        if VALUE_KIND == "int":
            z = z * decay[None, :] + _partial_sum(weight * value_zero[:, None])
        v = decode_units(
            value_unit, value_extra, value_phase, value_table_ptr, VALUE_KIND, VALUE_BITS,
            VALUE_CODES, False, VALUE_CUBIC, VALUE_ASM, VALUE_CONSTRAINTS,
        )  # fmt: skip
        if VALUE_PAIRED:
            v = _pairs(v)
        columns = scaled
        if BLOCK_N < 8:
            columns = tl.broadcast_to(scaled[:, :, None], [BLOCK_T, BLOCK_N, 2])
            columns = tl.reshape(columns, [BLOCK_T, 2 * BLOCK_N])
        new = ()
        for p in tl.static_range(len(v)):
            # The matrix unit truncates what it adds to an accumulator, a bias that grows with the
            # number of tiles. So it starts each tile from zero, and the tiles are added up here.
            part = _even_columns(tl.dot(v[p], columns), BLOCK_N)
            new = new + (tl.fma(acc[p], decay[None, :] + tl.zeros_like(acc[p]), part),)
        return new, m_new, l, z


@triton.jit
def _prefetch_tile(
    j, end_token, cache_ptr, pages_ptr, head,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    META_BASE: tl.constexpr, META_HEAD_STRIDE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Asks for the whole pages of tile ``j``, of one head, before there is a query."""
    PAGES: tl.constexpr = BLOCK_T // PAGE_SIZE
    LANES: tl.constexpr = 32 // PAGES
    lane = tl.arange(0, 32)
    place = j * PAGES + lane // LANES
    last = tl.maximum(end_token - 1, 0) // PAGE_SIZE
    page = tl.load(pages_ptr + tl.minimum(place, last)).to(tl.int64)
    page_ptr = cache_ptr + page * PAGE_STRIDE
    part: tl.constexpr = HEAD_STRIDE // LANES
    prefetch(page_ptr + head * HEAD_STRIDE + lane % LANES * part, part)
    # Several lanes may ask for the same part of the metadata.
    chunks: tl.constexpr = META_HEAD_STRIDE // 16
    meta_ptr = page_ptr + META_BASE + head * META_HEAD_STRIDE
    prefetch(meta_ptr + lane % LANES % chunks * 16, 16)


@triton.jit
def _store_final(
    out_ptr, lse_ptr, flat, row, query_head, acc, m, l, z, mask_n, shift_ptr, sinks_ptr,
    OUT_STRIDE_N: tl.constexpr, OUT_STRIDE_H: tl.constexpr, OUT_STRIDE_D: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_VALUE_SHIFT: tl.constexpr,
    VALUE_KIND: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_CODES: tl.constexpr,
    VALUE_PAIRED: tl.constexpr, VALUE_FACTOR: tl.constexpr, HEAD_DIM: tl.constexpr,
    NUM_VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Output and LSE of rows whose sums are whole; the sink is counted here."""
    total = l
    decay = l
    nothing = tl.full([m.shape[0]], float("-inf"), tl.float32)
    if HAS_SINKS:
        nothing = tl.load(sinks_ptr + query_head, mask=mask_n, other=float("-inf"))
        sink = nothing * LOG2E
        # The maximum moves up to the sink's where that is larger.
        m_new = tl.maximum(m, tl.where(sink == float("-inf"), NEVER, sink))
        decay = tl.exp2(m - m_new)
        m = m_new
        l = l * decay
        z = z * decay
        total = l + tl.exp2(sink - m)
    lse = tl.where(l != 0, (m + tl.log2(total)) * LN2, nothing)
    tl.store(lse_ptr + flat, lse, mask=mask_n)
    norm = 1 / tl.where(total != 0, total, 1.0)
    at = row.to(tl.int64) * OUT_STRIDE_N + query_head * OUT_STRIDE_H
    _store_rows(
        out_ptr, at, acc, l, z, decay, norm, mask_n, shift_ptr, HAS_SINKS, True, OUT_STRIDE_D,
        HAS_VALUE_SHIFT, VALUE_KIND, VALUE_BITS, VALUE_CODES, VALUE_PAIRED, VALUE_FACTOR, HEAD_DIM,
        NUM_VALUE, BLOCK_VALUE, WIDE,
    )  # fmt: skip


@triton.jit
def _store_rows(
    out_ptr, at, acc, l, z, decay, norm, mask_row, shift_ptr,
    DECAYED: tl.constexpr, NORMED: tl.constexpr, STRIDE_D: tl.constexpr,
    HAS_VALUE_SHIFT: tl.constexpr, VALUE_KIND: tl.constexpr, VALUE_BITS: tl.constexpr,
    VALUE_CODES: tl.constexpr, VALUE_PAIRED: tl.constexpr, VALUE_FACTOR: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Stores weighted sums of values, one row at each ``at``; ``z`` and ``l`` are decayed."""
    TOGETHER: tl.constexpr = 2 if VALUE_PAIRED else 1
    for p in tl.static_range(len(acc)):
        if WIDE:
            offs_d = tl.arange(0, BLOCK_VALUE * VALUE_CODES)
            mask_d = offs_d < HEAD_DIM
            o = tl.trans(acc[p])
        else:
            offs_r = tl.arange(0, BLOCK_VALUE * TOGETHER)
            mask_d = offs_r % BLOCK_VALUE < NUM_VALUE
            offs_d = offs_r % BLOCK_VALUE * VALUE_CODES + p
            offs_d = offs_d + offs_r // BLOCK_VALUE * (VALUE_CODES // TOGETHER)
            o = acc[p]
        if VALUE_KIND == "int" and WIDE:
            place = 1 << (offs_d % VALUE_CODES * VALUE_BITS % 8)
            o = o * (VALUE_FACTOR / place.to(tl.float32))[:, None]
        elif VALUE_KIND == "int":
            o = o * (VALUE_FACTOR / 2 ** (VALUE_BITS * p % 8))
        else:
            o = o * VALUE_FACTOR
        if DECAYED:
            o = o * decay[None, :]
        if VALUE_KIND == "int":
            o = o + z[None, :]
        if HAS_VALUE_SHIFT:
            nu = tl.load(shift_ptr + offs_d, mask=mask_d, other=0.0)
            o = o + nu[:, None] * l[None, :]
        if NORMED:
            o = o * norm[None, :]
        tl.store(
            out_ptr + at[None, :] + (offs_d * STRIDE_D)[:, None],
            o.to(out_ptr.dtype.element_ty),
            mask=mask_row[None, :] & mask_d[:, None],
        )


@triton.jit
def _store_part(
    out_ptr, lse_ptr, part, acc, m, l, z, mask_n, shift_ptr,
    HAS_VALUE_SHIFT: tl.constexpr, VALUE_KIND: tl.constexpr, VALUE_BITS: tl.constexpr,
    VALUE_CODES: tl.constexpr, VALUE_PAIRED: tl.constexpr, VALUE_FACTOR: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Unnormalised sums, maximum and mass of rows, for `merge`."""
    tl.store(lse_ptr + part * 2, m, mask=mask_n)
    tl.store(lse_ptr + part * 2 + 1, l, mask=mask_n)
    _store_rows(
        out_ptr, part * HEAD_DIM, acc, l, z, l, l, mask_n & (l != 0), shift_ptr, False, False, 1,
        HAS_VALUE_SHIFT, VALUE_KIND, VALUE_BITS, VALUE_CODES, VALUE_PAIRED, VALUE_FACTOR, HEAD_DIM,
        NUM_VALUE, BLOCK_VALUE, WIDE,
    )  # fmt: skip


@triton.jit
def _attend(
    query_ptr, row_terms_ptr, cache_ptr, block_table_ptr, key_table_ptr, value_table_ptr,
    phase_ptr, value_shift_ptr, sinks_ptr, slopes_ptr, num_tokens, table_stride,
    seq, seq_len, first_row, num_rows, first_column, head, split, num_splits, part, is_whole,
    out_ptr, lse_ptr, direct_ptr, direct_lse_ptr,
    DECODE: tl.constexpr, PARTIAL: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
    NUM_QUERY_HEADS: tl.constexpr, GROUP: tl.constexpr,
    OUT_STRIDE_N: tl.constexpr, OUT_STRIDE_H: tl.constexpr, OUT_STRIDE_D: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_VALUE_SHIFT: tl.constexpr, SHIFT_STRIDE: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_ALIBI: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    KEY_HEAD_STRIDE: tl.constexpr, KEY_SLOT_STRIDE: tl.constexpr,
    VALUE_BASE: tl.constexpr, VALUE_HEAD_STRIDE: tl.constexpr, VALUE_SLOT_STRIDE: tl.constexpr,
    VALUE_WORD_MAJOR: tl.constexpr, VALUE_WHOLE: tl.constexpr, VALUE_TAIL: tl.constexpr,
    META_BASE: tl.constexpr, META_HEAD_STRIDE: tl.constexpr, META_VALUE: tl.constexpr,
    META_PAIRS: tl.constexpr, META_PAIR_LOAD: tl.constexpr, KEY_PAIR_LOAD: tl.constexpr,
    KEY_KIND: tl.constexpr, KEY_BITS: tl.constexpr, KEY_UNIT: tl.constexpr,
    KEY_ELEMENT: tl.constexpr, KEY_CODES: tl.constexpr, KEY_PLANAR: tl.constexpr,
    KEY_BYTES: tl.constexpr, KEY_BIAS: tl.constexpr,
    KEY_ASM: tl.constexpr, KEY_CONSTRAINTS: tl.constexpr,
    VALUE_KIND: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_UNIT: tl.constexpr,
    VALUE_ELEMENT: tl.constexpr, VALUE_CODES: tl.constexpr, VALUE_PAIRED: tl.constexpr,
    VALUE_FACTOR: tl.constexpr,
    VALUE_CUBIC: tl.constexpr, VALUE_ASM: tl.constexpr, VALUE_CONSTRAINTS: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_KEY: tl.constexpr, NUM_VALUE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, WIDE: tl.constexpr, PREFETCH: tl.constexpr,
    SPLIT_TILES: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """A block of query rows over a range of its sequence's tiles.

    The range is that of KV split ``split`` of ``num_splits``; with ``SHARED`` from tile ``split``
    on ``num_splits`` tiles. ``part``: places of its partial sums. ``is_whole``: with ``SHARED``,
    that there are no others, so that the output and LSE go to ``direct_ptr``.
    """
    column = first_column + tl.arange(0, BLOCK_N)
    mask_n = column < num_rows * GROUP
    row = column // GROUP
    query_head = head * GROUP + column % GROUP
    flat = (first_row + row).to(tl.int64) * NUM_QUERY_HEADS + query_head
    shift = seq_len - num_rows
    position = shift + row
    first_position = shift + tl.min(row, 0)
    last_position = tl.minimum(shift + tl.max(row, 0), seq_len - 1)

    # Tokens that some row of the block sees, and the tiles that every row sees whole.
    end_token = seq_len
    whole_end = seq_len
    if CAUSAL:
        end_token = tl.minimum(seq_len, last_position + 1)
        whole_end = tl.minimum(seq_len, first_position + 1)
    first_token = 0
    whole_start = 0
    if WINDOW > 0:
        first_token = tl.maximum(first_position - WINDOW + 1, 0)
        whole_start = tl.maximum(last_position - WINDOW + 1, 0)
    start = first_token // BLOCK_T
    stop = tl.cdiv(tl.maximum(end_token, 0), BLOCK_T)
    if SHARED:
        start = tl.minimum(split, stop)
        stop = tl.minimum(split + num_splits, stop)
    elif SPLIT_TILES > 0:
        stop = tl.minimum(stop, (split + 1) * SPLIT_TILES)
        start = tl.minimum(tl.maximum(start, split * SPLIT_TILES), stop)
    else:
        per_split = tl.cdiv(tl.maximum(stop - start, 0), num_splits)
        start = start + split * per_split
        stop = tl.minimum(start + per_split, stop)
    whole_start = tl.minimum(tl.maximum(tl.cdiv(whole_start, BLOCK_T), start), stop)
    whole_stop = tl.minimum(tl.maximum(tl.maximum(whole_end, 0) // BLOCK_T, whole_start), stop)
    if SPLIT_TILES > 0 and WINDOW > 0:
        # Whole tiles would come before the masked ones, and which are whole depends on the block.
        whole_start = start
        whole_stop = start

    # Columns of the first dot: two or one of a query row's.
    WIDTH: tl.constexpr = 2 * BLOCK_N if KEY_KIND == "grid" else max(8, BLOCK_N)
    TIMES: tl.constexpr = WIDTH // BLOCK_N
    offs_c = tl.arange(0, WIDTH)
    column_c = first_column + offs_c // TIMES
    mask_c = column_c < num_rows * GROUP
    flat_c = (first_row + column_c // GROUP).to(tl.int64) * NUM_QUERY_HEADS
    flat_c = flat_c + head * GROUP + column_c % GROUP
    key_table = ()
    if KEY_KIND == "grid":
        key_table = load_grid_table(key_table_ptr, KEY_BITS)
    value_phase = 0
    if VALUE_UNIT == 6:
        # From memory: only what follows from loads is computed where the matrix unit wants it.
        value_phase = tl.load(phase_ptr + tl.arange(0, BLOCK_VALUE))[:, None]
    pages_ptr = block_table_ptr + seq.to(tl.int64) * table_stride
    if EARLY and PREFETCH:
        if start < stop:
            _prefetch_tile(
                start, end_token, cache_ptr, pages_ptr, head, PAGE_SIZE, PAGE_STRIDE,
                KEY_HEAD_STRIDE, META_BASE, META_HEAD_STRIDE, BLOCK_T,
            )  # fmt: skip
    wait_for_previous(PDL)
    if SPLIT_TILES > 0:
        if start >= stop:
            tl.store(lse_ptr + part * 2 + 1, tl.zeros([BLOCK_N], tl.float32), mask=mask_n)
            return
    q = ()
    if KEY_KIND == "grid":
        offs_k = tl.arange(0, BLOCK_KEY * KEY_CODES)
        if WIDE:
            at = (flat * 2 * BLOCK_KEY * KEY_CODES)[:, None] + offs_k[None, :]
            q = (tl.load(query_ptr + at, mask=mask_n[:, None], other=0),)
            at = at + BLOCK_KEY * KEY_CODES
            q = q + (tl.load(query_ptr + at, mask=mask_n[:, None], other=0),)
        else:
            at = (flat_c * 2 + offs_c % 2)[None, :] * (BLOCK_KEY * KEY_CODES) + offs_k[:, None]
            q = (tl.load(query_ptr + at, mask=mask_c[None, :], other=0),)
    elif WIDE:
        offs_u = tl.arange(0, BLOCK_KEY)
        for p in tl.static_range(KEY_CODES):
            at = flat[:, None] * HEAD_DIM + (offs_u * KEY_CODES + p)[None, :]
            mask_q = mask_n[:, None] & (offs_u < NUM_KEY)[None, :]
            q = q + (tl.load(query_ptr + at, mask=mask_q, other=0.0),)
    else:
        offs_u = tl.arange(0, BLOCK_KEY)
        mask_c = mask_c & (offs_c % TIMES == 0)
        for p in tl.static_range(KEY_CODES):
            at = flat_c[None, :] * HEAD_DIM + (offs_u * KEY_CODES + p)[:, None]
            mask_q = mask_c[None, :] & (offs_u < NUM_KEY)[:, None]
            q = q + (tl.load(query_ptr + at, mask=mask_q, other=0.0),)
    # From here on a score is in units of 1 / log2(e), or with a softcap in its own.
    UNIT: tl.constexpr = SCALE if SOFTCAP > 0 else SCALE * LOG2E
    row_scale = tl.load(row_terms_ptr + flat, mask=mask_n, other=0.0) * UNIT
    row_bias = tl.zeros_like(row_scale)
    if KEY_KIND == "grid" and KEY_BIAS != 0:
        if WIDE:
            high, low = tl.sum(q[0].to(tl.int32), 1), tl.sum(q[1].to(tl.int32), 1)
        else:
            high, low = tl.split(tl.reshape(tl.sum(q[0].to(tl.int32), 0), [BLOCK_N, 2]))
        row_bias = (high * 128 + low).to(tl.float32) * row_scale * -KEY_BIAS
    row_const = row_scale
    if HAS_OFFSET:
        const_ptr = row_terms_ptr + num_tokens.to(tl.int64) * NUM_QUERY_HEADS
        row_const = tl.load(const_ptr + flat, mask=mask_n, other=0.0) * UNIT
    slope = row_scale
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + query_head, mask=mask_n, other=0.0) * LOG2E

    m = tl.full([BLOCK_N], NEVER, tl.float32)
    acc = ()
    # Rows of a matrix of values, and codes of a unit that are rows of one.
    TOGETHER: tl.constexpr = 2 if VALUE_PAIRED else 1
    ROWS: tl.constexpr = BLOCK_VALUE * TOGETHER
    if WIDE:
        l = tl.zeros([BLOCK_N], tl.float32)
        z = tl.zeros([BLOCK_N], tl.float32)
        acc = (tl.zeros([BLOCK_N, BLOCK_VALUE * VALUE_CODES], tl.float32),)
    else:
        l = tl.zeros([8, BLOCK_N], tl.float32)
        z = tl.zeros([8, BLOCK_N], tl.float32)
        for _ in tl.static_range(VALUE_CODES // TOGETHER):
            acc = acc + (tl.zeros([ROWS, BLOCK_N], tl.float32),)
    # A block of one position needs no mask of its own: the range of tokens says it all.
    ROW_CAUSAL: tl.constexpr = CAUSAL and not DECODE
    ROW_WINDOW: tl.constexpr = 0 if DECODE else WINDOW
    for j in range(whole_start, whole_stop):
        acc, m, l, z = _tile(
            j, acc, m, l, z, q, row_scale, row_bias, row_const, slope, position, key_table,
            value_phase, cache_ptr, pages_ptr, key_table_ptr, value_table_ptr, head, first_token,
            end_token, False, HAS_VALUE_SHIFT, SOFTCAP, HAS_OFFSET, HAS_ALIBI, ROW_CAUSAL,
            ROW_WINDOW, PAGE_SIZE, PAGE_STRIDE, KEY_HEAD_STRIDE, KEY_SLOT_STRIDE, VALUE_BASE,
            VALUE_HEAD_STRIDE, VALUE_SLOT_STRIDE, VALUE_WORD_MAJOR, VALUE_WHOLE, VALUE_TAIL,
            META_BASE, META_HEAD_STRIDE, META_VALUE, META_PAIRS, META_PAIR_LOAD, KEY_PAIR_LOAD,
            KEY_KIND, KEY_BITS, KEY_UNIT, KEY_ELEMENT, KEY_CODES, KEY_PLANAR, KEY_BYTES, KEY_ASM,
            KEY_CONSTRAINTS, VALUE_KIND, VALUE_BITS, VALUE_UNIT, VALUE_ELEMENT, VALUE_CODES,
            VALUE_PAIRED, VALUE_CUBIC, VALUE_ASM, VALUE_CONSTRAINTS, HEAD_DIM, NUM_KEY, NUM_VALUE,
            BLOCK_T, BLOCK_KEY, BLOCK_VALUE, WIDE,
        )  # fmt: skip
    # The other tiles, masked: those before the whole ones, then those after.
    before = whole_start - start
    for i in range(before + stop - whole_stop):
        j = tl.where(i < before, start + i, whole_stop + i - before)
        acc, m, l, z = _tile(
            j, acc, m, l, z, q, row_scale, row_bias, row_const, slope, position, key_table,
            value_phase, cache_ptr, pages_ptr, key_table_ptr, value_table_ptr, head, first_token,
            end_token, True, HAS_VALUE_SHIFT, SOFTCAP, HAS_OFFSET, HAS_ALIBI, ROW_CAUSAL,
            ROW_WINDOW, PAGE_SIZE, PAGE_STRIDE, KEY_HEAD_STRIDE, KEY_SLOT_STRIDE, VALUE_BASE,
            VALUE_HEAD_STRIDE, VALUE_SLOT_STRIDE, VALUE_WORD_MAJOR, VALUE_WHOLE, VALUE_TAIL,
            META_BASE, META_HEAD_STRIDE, META_VALUE, META_PAIRS, META_PAIR_LOAD, KEY_PAIR_LOAD,
            KEY_KIND, KEY_BITS, KEY_UNIT, KEY_ELEMENT, KEY_CODES, KEY_PLANAR, KEY_BYTES, KEY_ASM,
            KEY_CONSTRAINTS, VALUE_KIND, VALUE_BITS, VALUE_UNIT, VALUE_ELEMENT, VALUE_CODES,
            VALUE_PAIRED, VALUE_CUBIC, VALUE_ASM, VALUE_CONSTRAINTS, HEAD_DIM, NUM_KEY, NUM_VALUE,
            BLOCK_T, BLOCK_KEY, BLOCK_VALUE, WIDE,
        )  # fmt: skip

    if not WIDE:
        l = tl.sum(l, 0)
        z = tl.sum(z, 0)
    shift_ptr = value_shift_ptr + head * SHIFT_STRIDE
    if not PARTIAL:
        _store_final(
            out_ptr, lse_ptr, flat, first_row + row, query_head, acc, m, l, z, mask_n, shift_ptr,
            sinks_ptr, OUT_STRIDE_N, OUT_STRIDE_H, OUT_STRIDE_D, HAS_SINKS, HAS_VALUE_SHIFT,
            VALUE_KIND, VALUE_BITS, VALUE_CODES, VALUE_PAIRED, VALUE_FACTOR, HEAD_DIM, NUM_VALUE,
            BLOCK_VALUE, WIDE,
        )  # fmt: skip
    elif SHARED:
        if is_whole:
            _store_final(
                direct_ptr, direct_lse_ptr, flat, first_row + row, query_head, acc, m, l, z, mask_n,
                shift_ptr, sinks_ptr, OUT_STRIDE_N, OUT_STRIDE_H, OUT_STRIDE_D, HAS_SINKS,
                HAS_VALUE_SHIFT, VALUE_KIND, VALUE_BITS, VALUE_CODES, VALUE_PAIRED, VALUE_FACTOR,
                HEAD_DIM, NUM_VALUE, BLOCK_VALUE, WIDE,
            )  # fmt: skip
        else:
            _store_part(
                out_ptr, lse_ptr, part, acc, m, l, z, mask_n, shift_ptr, HAS_VALUE_SHIFT,
                VALUE_KIND, VALUE_BITS, VALUE_CODES, VALUE_PAIRED, VALUE_FACTOR, HEAD_DIM,
                NUM_VALUE, BLOCK_VALUE, WIDE,
            )  # fmt: skip
    else:
        _store_part(
            out_ptr, lse_ptr, part, acc, m, l, z, mask_n, shift_ptr, HAS_VALUE_SHIFT, VALUE_KIND,
            VALUE_BITS, VALUE_CODES, VALUE_PAIRED, VALUE_FACTOR, HEAD_DIM, NUM_VALUE, BLOCK_VALUE,
            WIDE,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs", "num_blocks", "table_stride", "num_splits"]
)
def attention(
    query_ptr, row_terms_ptr, cache_ptr, block_table_ptr, seq_lens_ptr, query_start_loc_ptr,
    key_table_ptr, value_table_ptr, phase_ptr, value_shift_ptr, sinks_ptr, slopes_ptr,
    num_tokens, num_seqs, num_blocks, table_stride, num_splits,
    out_ptr, lse_ptr, direct_ptr, direct_lse_ptr,
    DECODE: tl.constexpr, ONE_BLOCK: tl.constexpr, SHORT: tl.constexpr,
    PARTIAL: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
    NUM_QUERY_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    OUT_STRIDE_N: tl.constexpr, OUT_STRIDE_H: tl.constexpr, OUT_STRIDE_D: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_VALUE_SHIFT: tl.constexpr, SHIFT_STRIDE: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_ALIBI: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    KEY_HEAD_STRIDE: tl.constexpr, KEY_SLOT_STRIDE: tl.constexpr,
    VALUE_BASE: tl.constexpr, VALUE_HEAD_STRIDE: tl.constexpr, VALUE_SLOT_STRIDE: tl.constexpr,
    VALUE_WORD_MAJOR: tl.constexpr, VALUE_WHOLE: tl.constexpr, VALUE_TAIL: tl.constexpr,
    META_BASE: tl.constexpr, META_HEAD_STRIDE: tl.constexpr, META_VALUE: tl.constexpr,
    META_PAIRS: tl.constexpr, META_PAIR_LOAD: tl.constexpr, KEY_PAIR_LOAD: tl.constexpr,
    KEY_KIND: tl.constexpr, KEY_BITS: tl.constexpr, KEY_UNIT: tl.constexpr,
    KEY_ELEMENT: tl.constexpr, KEY_CODES: tl.constexpr, KEY_PLANAR: tl.constexpr,
    KEY_BYTES: tl.constexpr, KEY_BIAS: tl.constexpr,
    KEY_ASM: tl.constexpr, KEY_CONSTRAINTS: tl.constexpr,
    VALUE_KIND: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_UNIT: tl.constexpr,
    VALUE_ELEMENT: tl.constexpr, VALUE_CODES: tl.constexpr, VALUE_PAIRED: tl.constexpr,
    VALUE_FACTOR: tl.constexpr,
    VALUE_CUBIC: tl.constexpr, VALUE_ASM: tl.constexpr, VALUE_CONSTRAINTS: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_KEY: tl.constexpr, NUM_VALUE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, WIDE: tl.constexpr, PREFETCH: tl.constexpr,
    SPLIT_TILES: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """One (block of query rows, KV head, KV split), or a share of several.

    ``PARTIAL``: ``out_ptr`` is fp32 ``[N * Hq, num_splits, D]`` of unnormalised sums and
    ``lse_ptr`` fp32 ``[N * Hq, num_splits, 2]`` of (maximum, sum); a split that saw nothing writes
    only a zero sum. Otherwise they are the output and the natural-log LSE ``[N, Hq]``.
    ``WIDE``: query rows lie on the M axis of the dots, for blocks of 64 rows or more.
    ``DECODE``: row b belongs to sequence b; otherwise ``num_blocks`` covers every sequence's rows
    and the rows past the last sequence, found by bisection of ``query_start_loc``.
    ``SHORT``: sequences of at most that many rows, of all heads of a group, are another launch's.
    ``ONE_BLOCK``: that launch, a block for each sequence; it has partial sums
    ``[B, Hk, BLOCK_N, num_splits, ...]``.
    ``SPLIT_TILES``: split s has as many tiles from tile ``s * SPLIT_TILES`` of its sequence on, and
    a row's tiles come in their order, whatever other rows its block has; 0: splits are equal parts.
    ``BLOCK_B``: at least B, where a block has all rows of a sequence, or with ``DECODE``:
    ``num_splits`` programs share the tiles of all sequences (`shares`), of each of ``num_blocks``
    blocks of a head. Partial sums are ``[num_splits + B, Hk, BLOCK_N, ...]``, with ``DECODE``
    ``[num_splits + B, Hq, ...]``; behind them ``lse_ptr`` has int32 places of the first and of the
    last part of each token's first head. What has one part goes to ``direct_ptr`` and
    ``direct_lse_ptr``, used for nothing else. 0: each sequence has ``num_splits``.
    """
    let_next_start(EARLY)
    pid = tl.program_id(0)
    if BLOCK_B > 0:
        head = pid % NUM_KV_HEADS
        block = pid // NUM_KV_HEADS % num_blocks
        share = pid // NUM_KV_HEADS // num_blocks
        first_column = block * BLOCK_N
        lens, firsts, tiles, ends = lay_out(
            seq_lens_ptr, query_start_loc_ptr, num_seqs, DECODE, WINDOW, BLOCK_B, BLOCK_T
        )
        from_seq, from_tile = cut(share, num_splits, num_seqs, tiles, ends)
        to_seq, to_tile = cut(share + 1, num_splits, num_seqs, tiles, ends)
        wait_for_previous(PDL)
        PART_ROWS: tl.constexpr = NUM_QUERY_HEADS if DECODE else NUM_KV_HEADS * BLOCK_N
        table_ptr = typed_ptr(lse_ptr, 4)
        table_ptr = table_ptr + (num_splits + num_seqs).to(tl.int64) * PART_ROWS * 2
        for step in range(to_seq - from_seq + tl.minimum(to_tile, 1)):
            seq = from_seq + step
            count = pick(tiles, seq)
            start = tl.where(seq == from_seq, from_tile, 0)
            stop = tl.where(seq == to_seq, to_tile, count)
            if count > 0:
                first_row = seq
                num_rows = 1
                if not DECODE:
                    first_row = tl.load(query_start_loc_ptr + seq)
                    num_rows = tl.load(query_start_loc_ptr + seq + 1) - first_row
                place = share + seq
                offs_n = tl.arange(0, BLOCK_N)
                if (head == 0) & (block == 0):
                    token_ptr = table_ptr + (first_row + offs_n).to(tl.int64) * 2
                    # That of its first head.
                    places = place * PART_ROWS + offs_n * GROUP
                    num_first = tl.where(start == 0, num_rows, 0)
                    num_last = tl.where(stop == count, num_rows, 0)
                    tl.store(token_ptr, places, mask=offs_n < num_first)
                    tl.store(token_ptr + 1, places, mask=offs_n < num_last)
                if DECODE:
                    part = place.to(tl.int64) * NUM_QUERY_HEADS + head * GROUP + first_column
                else:
                    part = (place * NUM_KV_HEADS + head).to(tl.int64) * BLOCK_N
                _attend(
                    query_ptr, row_terms_ptr, cache_ptr, block_table_ptr, key_table_ptr,
                    value_table_ptr, phase_ptr, value_shift_ptr, sinks_ptr, slopes_ptr, num_tokens,
                    table_stride,
                    seq, pick(lens, seq), first_row, num_rows, first_column, head,
                    pick(firsts, seq) + start, stop - start, part + offs_n,
                    (start == 0) & (stop == count), out_ptr, lse_ptr, direct_ptr, direct_lse_ptr,
                    DECODE, PARTIAL, PDL, EARLY, NUM_QUERY_HEADS, GROUP, OUT_STRIDE_N, OUT_STRIDE_H,
                    OUT_STRIDE_D, HAS_SINKS, HAS_VALUE_SHIFT, SHIFT_STRIDE, SCALE, SOFTCAP,
                    HAS_OFFSET, HAS_ALIBI, CAUSAL, WINDOW, PAGE_SIZE, PAGE_STRIDE, KEY_HEAD_STRIDE,
                    KEY_SLOT_STRIDE, VALUE_BASE, VALUE_HEAD_STRIDE, VALUE_SLOT_STRIDE,
                    VALUE_WORD_MAJOR, VALUE_WHOLE, VALUE_TAIL, META_BASE, META_HEAD_STRIDE,
                    META_VALUE, META_PAIRS, META_PAIR_LOAD, KEY_PAIR_LOAD, KEY_KIND, KEY_BITS,
                    KEY_UNIT, KEY_ELEMENT, KEY_CODES, KEY_PLANAR, KEY_BYTES, KEY_BIAS, KEY_ASM,
                    KEY_CONSTRAINTS, VALUE_KIND, VALUE_BITS, VALUE_UNIT, VALUE_ELEMENT, VALUE_CODES,
                    VALUE_PAIRED, VALUE_FACTOR, VALUE_CUBIC, VALUE_ASM, VALUE_CONSTRAINTS, HEAD_DIM,
                    NUM_KEY, NUM_VALUE, BLOCK_T, BLOCK_N, BLOCK_KEY, BLOCK_VALUE, WIDE, PREFETCH,
                    SPLIT_TILES, True,
                )  # fmt: skip
        return
    block = pid % num_blocks
    rest = pid // num_blocks
    head = rest % NUM_KV_HEADS
    split = rest // NUM_KV_HEADS
    offs_n = tl.arange(0, BLOCK_N)

    if DECODE:
        BLOCKS: tl.constexpr = (GROUP + BLOCK_N - 1) // BLOCK_N
        seq = block // BLOCKS
        first_row = seq
        num_rows: tl.constexpr = 1
        first_column = (block % BLOCKS) * BLOCK_N
    elif ONE_BLOCK:
        seq = block
        first_row = tl.load(query_start_loc_ptr + seq)
        num_rows = tl.load(query_start_loc_ptr + seq + 1) - first_row
        first_column = 0
        if num_rows * GROUP > BLOCK_N:
            return
    else:
        low = 0
        high = num_seqs
        while low < high:
            mid = (low + high + 1) // 2
            at = tl.load(query_start_loc_ptr + mid) * GROUP // BLOCK_N + mid
            if at <= block:
                low = mid
            else:
                high = mid - 1
        seq = low
        first_row = tl.load(query_start_loc_ptr + seq)
        first_column = (block - (first_row * GROUP // BLOCK_N + seq)) * BLOCK_N
        if seq == num_seqs:
            num_rows = num_tokens - first_row
        else:
            num_rows = tl.load(query_start_loc_ptr + seq + 1) - first_row
    if first_column >= num_rows * GROUP:
        return

    column = first_column + offs_n
    mask_n = column < num_rows * GROUP
    row = column // GROUP
    query_head = head * GROUP + column % GROUP
    flat = (first_row + row).to(tl.int64) * NUM_QUERY_HEADS + query_head
    part = flat * num_splits + split
    if ONE_BLOCK:
        part = ((seq * NUM_KV_HEADS + head).to(tl.int64) * BLOCK_N + offs_n) * num_splits + split
    if SHORT > 0:
        if (seq < num_seqs) & (num_rows * GROUP <= SHORT):
            if PARTIAL:
                tl.store(lse_ptr + part * 2 + 1, tl.zeros([BLOCK_N], tl.float32), mask=mask_n)
            return
    if DECODE:
        seq_len = tl.load(seq_lens_ptr + seq)
    else:
        seq_len = tl.load(seq_lens_ptr + seq, mask=seq < num_seqs, other=0)
    _attend(
        query_ptr, row_terms_ptr, cache_ptr, block_table_ptr, key_table_ptr, value_table_ptr,
        phase_ptr, value_shift_ptr, sinks_ptr, slopes_ptr, num_tokens, table_stride,
        seq, seq_len, first_row, num_rows, first_column, head, split, num_splits, part, False,
        out_ptr, lse_ptr, direct_ptr, direct_lse_ptr,
        DECODE, PARTIAL, PDL, EARLY, NUM_QUERY_HEADS, GROUP, OUT_STRIDE_N, OUT_STRIDE_H,
        OUT_STRIDE_D, HAS_SINKS, HAS_VALUE_SHIFT, SHIFT_STRIDE, SCALE, SOFTCAP, HAS_OFFSET,
        HAS_ALIBI, CAUSAL, WINDOW, PAGE_SIZE, PAGE_STRIDE, KEY_HEAD_STRIDE, KEY_SLOT_STRIDE,
        VALUE_BASE, VALUE_HEAD_STRIDE, VALUE_SLOT_STRIDE, VALUE_WORD_MAJOR, VALUE_WHOLE, VALUE_TAIL,
        META_BASE, META_HEAD_STRIDE, META_VALUE, META_PAIRS, META_PAIR_LOAD, KEY_PAIR_LOAD,
        KEY_KIND, KEY_BITS, KEY_UNIT, KEY_ELEMENT, KEY_CODES, KEY_PLANAR, KEY_BYTES, KEY_BIAS,
        KEY_ASM, KEY_CONSTRAINTS, VALUE_KIND, VALUE_BITS, VALUE_UNIT, VALUE_ELEMENT, VALUE_CODES,
        VALUE_PAIRED, VALUE_FACTOR, VALUE_CUBIC, VALUE_ASM, VALUE_CONSTRAINTS, HEAD_DIM, NUM_KEY,
        NUM_VALUE, BLOCK_T, BLOCK_N, BLOCK_KEY, BLOCK_VALUE, WIDE, PREFETCH, SPLIT_TILES, False,
    )  # fmt: skip


@triton.jit
def _add_splits(
    first, num_splits, o, top, mass, part_ptr, state_ptr, stride, offs_d, mask_d,
    HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """The output, maximum and sum of a row with ``BLOCK_S`` more splits, from ``first`` on."""
    offs_s = first + tl.arange(0, BLOCK_S)
    mask_s = offs_s < num_splits
    at_s = offs_s * stride
    l = tl.load(state_ptr + at_s * 2 + 1, mask=mask_s, other=0.0)
    if SPARSE:
        mask_s = l != 0
    part = tl.load(
        part_ptr + at_s[:, None] * HEAD_DIM + offs_d[None, :],
        mask=mask_s[:, None] & mask_d[None, :],
        other=0.0,
    )
    m = tl.load(state_ptr + at_s * 2, mask=mask_s, other=NEVER)
    # What a split that saw nothing left in its place is not a number to count on.
    live = l != 0
    m = tl.where(live, m, NEVER)
    new_top = tl.maximum(top, tl.max(m, 0))
    weight = tl.exp2(m - new_top)
    decay = tl.exp2(top - new_top)
    mass = mass * decay + tl.sum(weight * l, 0)
    part = tl.where(live[:, None], part * weight[:, None], 0.0)
    return o * decay + tl.sum(part, 0), new_top, mass


@triton.jit(do_not_specialize=["num_splits", "num_seqs"])
def merge(
    part_ptr, state_ptr, sinks_ptr, query_start_loc_ptr, previous_out_ptr, previous_lse_ptr,
    num_splits, num_seqs,
    out_ptr, lse_ptr,
    DECODE: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    NUM_QUERY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_SINKS: tl.constexpr,
    OUT_STRIDE_N: tl.constexpr, OUT_STRIDE_H: tl.constexpr, OUT_STRIDE_D: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, SPARSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Output and LSE of one row from the partial sums of its splits; the sink is counted here.

    A program is one warp and has ``BLOCK_D`` coordinates; ``BLOCK_S`` splits are loaded at once.
    ``ONE_BLOCK``: of the rows of `attention` with that flag; the others stay as they are, in
    ``previous_out_ptr`` and ``previous_lse_ptr``, which are the outputs.
    ``SHARED``: of sequences whose parts lie where `attention` with ``BLOCK_B`` says, where
    ``num_splits``, ``DECODE`` and ``BLOCK_N`` are from; rows of one part are in
    ``previous_out_ptr`` already. Otherwise each has ``num_splits``.
    ``SPARSE``: most splits may have seen nothing: their sums are not read.
    """
    BLOCKS: tl.constexpr = (HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    pid = tl.program_id(0)
    part_row = (pid // BLOCKS).to(tl.int64)
    row = part_row
    block = pid % BLOCKS
    if ONE_BLOCK:
        column = pid // BLOCKS % BLOCK_N
        unit = pid // BLOCKS // BLOCK_N
        kv_heads: tl.constexpr = NUM_QUERY_HEADS // GROUP
        seq = unit // kv_heads
        first_row = tl.load(query_start_loc_ptr + seq)
        num_columns = (tl.load(query_start_loc_ptr + seq + 1) - first_row) * GROUP
        if (num_columns > BLOCK_N) | (column >= num_columns):
            return
        row = (first_row + column // GROUP).to(tl.int64) * NUM_QUERY_HEADS
        row = row + unit % kv_heads * GROUP + column % GROUP
    head = row % NUM_QUERY_HEADS
    offs_d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    stride = 1
    first_part = part_row * num_splits
    if SHARED:
        stride = NUM_QUERY_HEADS if DECODE else NUM_QUERY_HEADS // GROUP * BLOCK_N
        token = row // NUM_QUERY_HEADS
        table_ptr = typed_ptr(state_ptr, 4)
        table_ptr = table_ptr + (num_splits + num_seqs).to(tl.int64) * stride * 2
        wait_for_previous(PDL)
        place = tl.load(table_ptr + token * 2)
        num_splits = (tl.load(table_ptr + token * 2 + 1) - place) // stride + 1
        first_part = place.to(tl.int64)
        if DECODE:
            first_part = first_part + head
        else:
            first_part = first_part + head // GROUP * BLOCK_N + head % GROUP
            # Rows past the last sequence have no parts, and nothing was written for them.
            past = token >= tl.load(query_start_loc_ptr + num_seqs)
            num_splits = tl.where(past, 0, num_splits)
        if num_splits == 1:
            return
    state_ptr = state_ptr + first_part * 2
    part_ptr = part_ptr + first_part * HEAD_DIM
    top = NEVER
    nothing = float("-inf")
    if HAS_SINKS:
        nothing = tl.load(sinks_ptr + head)
        sink = nothing * LOG2E
        top = tl.where(sink == float("-inf"), NEVER, sink)
    mass = 0.0
    o = tl.zeros([BLOCK_D], tl.float32)
    if not SHARED:
        wait_for_previous(PDL)
    if SHARED and BLOCK_S > FEW_PARTS:
        # Most sequences have few parts where some have many.
        if num_splits <= FEW_PARTS:
            o, top, mass = _add_splits(
                0, num_splits, o, top, mass, part_ptr, state_ptr, stride, offs_d, mask_d, HEAD_DIM,
                FEW_PARTS, SPARSE,
            )  # fmt: skip
            num_splits = 0
    for first in range(0, num_splits, BLOCK_S):
        o, top, mass = _add_splits(
            first, num_splits, o, top, mass, part_ptr, state_ptr, stride, offs_d, mask_d, HEAD_DIM,
            BLOCK_S, SPARSE,
        )  # fmt: skip
    total = mass
    if HAS_SINKS:
        total = total + tl.exp2(sink - top)
    o = tl.where(mass != 0, o / tl.where(total != 0, total, 1.0), 0.0)
    at = (row // NUM_QUERY_HEADS) * OUT_STRIDE_N + head * OUT_STRIDE_H + offs_d * OUT_STRIDE_D
    tl.store(out_ptr + at, o.to(out_ptr.dtype.element_ty), mask=mask_d)
    if block == 0:
        lse = tl.where(mass != 0, (top + tl.log2(total)) * LN2, nothing)
        tl.store(lse_ptr + row, lse)
