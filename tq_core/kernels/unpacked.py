"""Attention of long chunks: tokens are decoded once, then attended by a dense kernel.

The tokens of a call are taken piece by piece. ``unpack`` decodes the bytes of a piece to 16-bit
keys and values in a scratch of its size, and ``attention_unpacked`` adds the piece to the running
softmax of every block of query rows that sees some of it. A block whose tokens end in a piece
writes its output there, so the number of pieces is only a bound.

Scratch rows have the coordinates in the order of decoding: code ``p`` of unit ``u`` is column
``p * BLOCK + u``. Queries are read in that order and outputs written back in the ordinary one.
Both are fp16: keys with their token's scale, times a constant that keeps any of them finite, and
values over a power of two above all of their tile's, which the softmax weights of the tile make up
for: the running maximum is that of the weights times it, so neither tiny nor huge values cost
precision. Scores and sums are fp32, exponentials base 2.
Source: FlashAttention-2 (arXiv 2307.08691).
"""

import triton
import triton.language as tl

from tq_core.kernels.codes import (
    decode_units,
    half_to_float,
    load_keys,
    load_values,
    typed_ptr,
)
from tq_core.kernels.order import wait_for_previous

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEVER = tl.constexpr(-1.0e30)


@triton.jit(do_not_specialize=["table_stride", "piece"])
def unpack(
    cache_ptr, block_table_ptr, seq_lens_ptr, query_start_loc_ptr, key_table_ptr, value_table_ptr,
    after_ptr,
    table_stride, piece,
    key_out_ptr, value_out_ptr, exponent_ptr,
    NUM_KV_HEADS: tl.constexpr, TILE: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    KEY_HEAD_STRIDE: tl.constexpr, KEY_SLOT_STRIDE: tl.constexpr,
    VALUE_BASE: tl.constexpr, VALUE_HEAD_STRIDE: tl.constexpr, VALUE_SLOT_STRIDE: tl.constexpr,
    VALUE_WORD_MAJOR: tl.constexpr, VALUE_WHOLE: tl.constexpr, VALUE_TAIL: tl.constexpr,
    META_BASE: tl.constexpr, META_HEAD_STRIDE: tl.constexpr, META_VALUE: tl.constexpr,
    META_PAIRS: tl.constexpr,
    KEY_KIND: tl.constexpr, KEY_BITS: tl.constexpr, KEY_UNIT: tl.constexpr,
    KEY_ELEMENT: tl.constexpr, KEY_CODES: tl.constexpr, KEY_PLANAR: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_KIND: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_UNIT: tl.constexpr,
    VALUE_ELEMENT: tl.constexpr, VALUE_CODES: tl.constexpr, VALUE_FACTOR: tl.constexpr,
    VALUE_CUBIC: tl.constexpr, VALUE_LARGEST: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_KEY: tl.constexpr, NUM_VALUE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """``BLOCK_T`` tokens of a sequence and head in piece number ``piece``, of ``PIECE`` tokens.

    Keys are fp16 ``[B, Hk, PIECE, BLOCK_KEY * KEY_CODES]``, values fp16 ``[B, Hk, PIECE,
    BLOCK_VALUE * VALUE_CODES]`` over two to the exponents fp32 ``[B, Hk, PIECE / TILE]``; columns
    that are no coordinate are 0. Tokens that no row sees are not written.
    """
    pid = tl.program_id(0)
    head = pid % NUM_KV_HEADS
    TILES: tl.constexpr = PIECE // BLOCK_T
    seq = (pid // NUM_KV_HEADS // TILES).to(tl.int64)
    place = (pid // NUM_KV_HEADS % TILES) * BLOCK_T + tl.arange(0, BLOCK_T)
    token = piece * PIECE + place
    rows_ptr = query_start_loc_ptr + seq
    num_rows = tl.load(rows_ptr + 1) - tl.load(rows_ptr)
    # Pages of a sequence without rows need not exist, nor those before the first row's window.
    seq_len = tl.where(num_rows > 0, tl.load(seq_lens_ptr + seq), 0)
    live = token < seq_len
    first = 0
    if WINDOW > 0:
        first = seq_len - num_rows - WINDOW + 1
        live = live & (token >= first)
    wait_for_previous(PDL)
    if (tl.min(token, 0) >= seq_len) | (tl.max(token, 0) < first):
        return
    pages_ptr = block_table_ptr + seq * table_stride
    page = tl.load(pages_ptr + token // PAGE_SIZE, mask=live, other=0).to(tl.int64)
    slot = token % PAGE_SIZE
    row = (seq * NUM_KV_HEADS + head) * PIECE + place
    meta_ptr = typed_ptr(cache_ptr, 2) + page * (PAGE_STRIDE // 2)
    meta_at = META_BASE // 2 + head * (META_HEAD_STRIDE // 2) + slot

    offs_u = tl.arange(0, BLOCK_KEY)
    mask_u = offs_u < NUM_KEY
    key_ptr = typed_ptr(cache_ptr, KEY_ELEMENT) + page * (PAGE_STRIDE // KEY_ELEMENT)
    key_at = head * (KEY_HEAD_STRIDE // KEY_ELEMENT) + slot * (KEY_SLOT_STRIDE // KEY_ELEMENT)
    unit = load_keys(key_ptr, key_at, offs_u, mask_u, KEY_UNIT, KEY_ELEMENT, NUM_KEY != BLOCK_KEY)
    extra = unit
    if KEY_PLANAR:
        byte_at = head * KEY_HEAD_STRIDE + slot * KEY_SLOT_STRIDE + HEAD_DIM // 4
        extra = load_keys(
            cache_ptr + page * PAGE_STRIDE, byte_at, offs_u, mask_u, 1, 1, NUM_KEY != BLOCK_KEY
        )
    keys = decode_units(
        unit, extra, 0, key_table_ptr, KEY_KIND, KEY_BITS, KEY_CODES, KEY_PLANAR, (), "", ""
    )
    scale = tl.full([BLOCK_T], KEY_SIZE, tl.float32)
    if KEY_KIND != "fp8":
        scale = scale * half_to_float(tl.load(meta_ptr + meta_at, mask=live, other=0))
    at = row[:, None] * (BLOCK_KEY * KEY_CODES) + offs_u[None, :]
    for p in tl.static_range(KEY_CODES):
        x = keys[p].to(tl.float32) * scale[:, None]
        x = tl.where((offs_u * KEY_CODES + p < HEAD_DIM)[None, :], x, 0.0)
        tl.store(key_out_ptr + at + p * BLOCK_KEY, x.to(tl.float16), mask=live[:, None])

    offs_v = tl.arange(0, BLOCK_VALUE)
    value_at = VALUE_BASE // VALUE_ELEMENT + head * (VALUE_HEAD_STRIDE // VALUE_ELEMENT)
    value_ptr = typed_ptr(cache_ptr, VALUE_ELEMENT) + value_at
    value_ptr = value_ptr + page * (PAGE_STRIDE // VALUE_ELEMENT)
    unit = load_values(
        value_ptr[:, None], slot[:, None], offs_v[None, :], (offs_v < NUM_VALUE)[None, :],
        VALUE_UNIT, VALUE_ELEMENT, NUM_VALUE != BLOCK_VALUE, VALUE_SLOT_STRIDE, VALUE_WORD_MAJOR,
        VALUE_WHOLE, VALUE_TAIL, PAGE_SIZE,
    )  # fmt: skip
    values = decode_units(
        unit, unit, 0, value_table_ptr, VALUE_KIND, VALUE_BITS, VALUE_CODES, False, VALUE_CUBIC,
        "", "",
    )  # fmt: skip
    value_meta = META_BASE // 2 + head * (META_HEAD_STRIDE // 2) + META_VALUE // 2
    scale, zero = _load_value_meta(
        meta_ptr + value_meta, slot, live, VALUE_KIND, META_PAIRS, PAGE_SIZE
    )
    # A bound of the values of a whole tile of `attention_unpacked`.
    tile = place // TILE
    offs_a = piece * PIECE + tl.min(tile, 0) * TILE + tl.arange(0, TILE)
    live_a = (offs_a < seq_len) & (offs_a >= first)
    page_a = tl.load(pages_ptr + offs_a // PAGE_SIZE, mask=live_a, other=0).to(tl.int64)
    meta_a = typed_ptr(cache_ptr, 2) + page_a * (PAGE_STRIDE // 2) + value_meta
    scale_a, zero_a = _load_value_meta(
        meta_a, offs_a % PAGE_SIZE, live_a, VALUE_KIND, META_PAIRS, PAGE_SIZE
    )
    bound = tl.abs(scale_a) * VALUE_LARGEST
    if VALUE_KIND == "int":
        bound = tl.maximum(tl.abs(zero_a), tl.abs(scale_a * VALUE_LARGEST + zero_a))
    # A bound of 0 or a subnormal number gives the least of them; the next power of two else.
    top = tl.max(tl.where(live_a, bound, 0.0), 0)
    exponent = tl.maximum(((top.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 126, -60)
    shrink = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    exponent_at = (seq * NUM_KV_HEADS + head) * (PIECE // TILE) + tl.min(tile, 0)
    tl.store(exponent_ptr + exponent_at, exponent.to(tl.float32))
    at = row[:, None] * (BLOCK_VALUE * VALUE_CODES) + offs_v[None, :]
    for p in tl.static_range(VALUE_CODES):
        x = values[p].to(tl.float32) * VALUE_FACTOR
        if VALUE_KIND == "int":
            x = values[p].to(tl.float32) * (VALUE_FACTOR / 2 ** (VALUE_BITS * p % 8))
        x = (x * scale[:, None] + zero[:, None]) * shrink
        x = tl.where((offs_v * VALUE_CODES + p < HEAD_DIM)[None, :], x, 0.0)
        tl.store(value_out_ptr + at + p * BLOCK_VALUE, x.to(tl.float16), mask=live[:, None])


@triton.jit
def _load_value_meta(
    meta_ptr, slot, live, VALUE_KIND: tl.constexpr, META_PAIRS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Scales and zeros of tokens in ``slot`` of their pages; no zeros but for integer values."""
    scale_at = slot
    if META_PAIRS:
        scale_at = 2 * slot
    scale = half_to_float(tl.load(meta_ptr + scale_at, mask=live, other=0))
    zero = tl.zeros_like(scale)
    if VALUE_KIND == "int":
        zero_at = scale_at + (1 if META_PAIRS else PAGE_SIZE)
        zero = half_to_float(tl.load(meta_ptr + zero_at, mask=live, other=0))
    return scale, zero


@triton.jit
def _columns(NUM: tl.constexpr, CODES: tl.constexpr):
    """The coordinate of each column of a scratch row, of ``CODES`` runs of ``NUM`` units."""
    column = tl.arange(0, NUM * CODES)
    return column % NUM * CODES + column // NUM


@triton.jit
def rows_of_block(
    block, num_tokens, num_seqs, query_start_loc_ptr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Sequence, first row, number of rows and first column of a block of query rows.

    Blocks count ``BLOCK_N`` rows of all heads of a group. The sequence is ``num_seqs`` for rows
    past the last one; the first column is not below the rows' where there are no such rows.
    """
    low = 0
    high = num_seqs
    while low < high:
        mid = (low + high + 1) // 2
        at = tl.load(query_start_loc_ptr + mid) * GROUP // BLOCK_N + mid
        if at <= block:
            low = mid
        else:
            high = mid - 1
    first_row = tl.load(query_start_loc_ptr + low)
    first_column = (block - (first_row * GROUP // BLOCK_N + low)) * BLOCK_N
    num_rows = num_tokens - first_row
    if low < num_seqs:
        num_rows = tl.load(query_start_loc_ptr + low + 1) - first_row
    return low, first_row, num_rows, first_column


@triton.jit
def _dense_tile(
    t, acc, m, l, q, key_ptr, value_ptr, exponent_ptr, first, end, row_scale, row_const, slope,
    position,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_ALIBI: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """``BLOCK_T`` tokens from place ``t`` of the piece on, whose first token is ``first``."""
    offs_t = t + tl.arange(0, BLOCK_T)
    token = first + offs_t
    key_at = key_ptr + offs_t[:, None] * WIDTH_K + tl.arange(0, WIDTH_K)[None, :]
    value_at = value_ptr + offs_t[:, None] * WIDTH_V + tl.arange(0, WIDTH_V)[None, :]
    if MASKED:
        mask_t = token < end
        if WINDOW > 0:
            mask_t = mask_t & (token > tl.min(position, 0) - WINDOW)
        k = tl.load(key_at, mask=mask_t[:, None], other=0.0)
        v = tl.load(value_at, mask=mask_t[:, None], other=0.0)
    else:
        k = tl.load(key_at)
        v = tl.load(value_at)
    exponent = tl.load(exponent_ptr + t // BLOCK_T)
    s = tl.dot(q, tl.trans(k))
    # Scaled before masks: a tiny scale would make a masked score the largest.
    SCALED: tl.constexpr = MASKED or HAS_OFFSET or SOFTCAP > 0 or HAS_ALIBI
    if SCALED:
        s = s * row_scale[:, None]
        if HAS_OFFSET:
            s = s + row_const[:, None]
        if SOFTCAP > 0:
            e = tl.exp2(tl.abs(s) * (-2 * LOG2E / SOFTCAP))
            s = tl.where(s < 0, -SOFTCAP * LOG2E, SOFTCAP * LOG2E) * ((1 - e) / (1 + e))
        if HAS_ALIBI:
            s = s + slope[:, None] * (token[None, :] - position[:, None]).to(tl.float32)
    if MASKED:
        seen = mask_t[None, :]
        if CAUSAL:
            seen = seen & (token[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (token[None, :] > (position - WINDOW)[:, None])
        s = tl.where(seen, s, NEVER)
    if SCALED:
        m_new = tl.maximum(m, tl.max(s, 1) + exponent)
        weight = tl.exp2(s + (exponent - m_new)[:, None])
    else:
        # A row's scale is not negative: it need not be applied before the maximum.
        m_new = tl.maximum(m, tl.max(s, 1) * row_scale + exponent)
        weight = tl.exp2(s * row_scale[:, None] + (exponent - m_new)[:, None])
    if MASKED:
        weight = tl.where(seen, weight, 0.0)
    decay = tl.exp2(m - m_new)
    l = l * decay + tl.sum(weight, 1) * tl.exp2(-exponent)
    acc = tl.dot(weight.to(tl.float16), v, acc * decay[:, None])
    return acc, m_new, l


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "num_blocks", "piece"])
def attention_unpacked(
    query_ptr, row_terms_ptr, key_ptr, value_ptr, exponent_ptr, seq_lens_ptr,
    query_start_loc_ptr, value_shift_ptr, sinks_ptr, slopes_ptr,
    previous_sums_ptr, previous_state_ptr, previous_out_ptr, previous_lse_ptr,
    num_tokens, num_seqs, num_blocks, piece,
    sums_ptr, state_ptr, out_ptr, lse_ptr,
    PIECE: tl.constexpr, PDL: tl.constexpr,
    NUM_QUERY_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    OUT_STRIDE_N: tl.constexpr, OUT_STRIDE_H: tl.constexpr, OUT_STRIDE_D: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_VALUE_SHIFT: tl.constexpr, SHIFT_STRIDE: tl.constexpr,
    SCALE: tl.constexpr, KEY_SIZE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_ALIBI: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr, KEY_CODES: tl.constexpr, VALUE_CODES: tl.constexpr,
    BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Piece number ``piece`` for one (block of query rows, KV head).

    ``previous_*`` are ``sums``, ``state``, ``out`` and ``lse`` again, which are written in place:
    fp32 ``[N * Hq, BLOCK_VALUE * VALUE_CODES]`` of unnormalised sums and ``[N * Hq, 2]`` of
    (maximum, sum), of rows that see tokens of several pieces; and the results, of rows whose tokens
    end here.
    """
    WIDTH_K: tl.constexpr = BLOCK_KEY * KEY_CODES
    WIDTH_V: tl.constexpr = BLOCK_VALUE * VALUE_CODES
    pid = tl.program_id(0)
    block = pid % num_blocks
    head = pid // num_blocks
    wait_for_previous(PDL)
    seq, first_row, num_rows, first_column = rows_of_block(
        block, num_tokens, num_seqs, query_start_loc_ptr, GROUP, BLOCK_N
    )
    if first_column >= num_rows * GROUP:
        return
    column = first_column + tl.arange(0, BLOCK_N)
    mask_n = column < num_rows * GROUP
    row = column // GROUP
    query_head = head * GROUP + column % GROUP
    flat = (first_row + row).to(tl.int64) * NUM_QUERY_HEADS + query_head
    seq_len = tl.load(seq_lens_ptr + seq, mask=seq < num_seqs, other=0)
    shift = seq_len - num_rows
    position = shift + row
    first_position = shift + tl.min(row, 0)
    last_position = tl.minimum(shift + tl.max(row, 0), seq_len - 1)

    # Tokens that some row of the block sees, and those that every row sees.
    end = seq_len
    whole_end = seq_len
    if CAUSAL:
        end = tl.minimum(seq_len, last_position + 1)
        whole_end = tl.minimum(seq_len, first_position + 1)
    begin = 0
    whole_begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0)
        whole_begin = tl.maximum(last_position - WINDOW + 1, 0)
    end = tl.maximum(end, begin)
    # Those of this piece, by their place in it.
    first = piece * PIECE
    is_last = (end <= first + PIECE) & ((end > first) | (piece == 0))
    has_tokens = (begin < first + PIECE) & (end > first) & (begin < end)
    if begin == end:
        is_last = piece == 0
    if is_last | has_tokens:
        start = tl.maximum(begin - first, 0) // BLOCK_T
        stop = tl.cdiv(tl.minimum(tl.maximum(end - first, 0), PIECE), BLOCK_T)
        stop = tl.maximum(stop, start)
        whole_start = tl.cdiv(tl.maximum(whole_begin - first, 0), BLOCK_T)
        whole_start = tl.minimum(tl.maximum(whole_start, start), stop)
        whole_stop = tl.minimum(tl.maximum(whole_end - first, 0), PIECE) // BLOCK_T
        whole_stop = tl.minimum(tl.maximum(whole_stop, whole_start), stop)

        coordinate = _columns(BLOCK_KEY, KEY_CODES)
        q = tl.load(
            query_ptr + flat[:, None] * HEAD_DIM + coordinate[None, :],
            mask=mask_n[:, None] & (coordinate < HEAD_DIM)[None, :],
            other=0.0,
        )
        if SCALE < 0:
            q = -q
        SIZE: tl.constexpr = (SCALE if SCALE >= 0 else -SCALE) / KEY_SIZE
        UNIT: tl.constexpr = SIZE if SOFTCAP > 0 else SIZE * LOG2E
        row_scale = tl.load(row_terms_ptr + flat, mask=mask_n, other=0.0)
        row_const = row_scale
        row_scale = row_scale * UNIT
        if HAS_OFFSET:
            const_ptr = row_terms_ptr + num_tokens.to(tl.int64) * NUM_QUERY_HEADS
            row_const = tl.load(const_ptr + flat, mask=mask_n, other=0.0)
            row_const = row_const * (SCALE if SOFTCAP > 0 else SCALE * LOG2E)
        slope = row_scale
        if HAS_ALIBI:
            slope = tl.load(slopes_ptr + query_head, mask=mask_n, other=0.0) * LOG2E

        m = tl.full([BLOCK_N], NEVER, tl.float32)
        l = tl.zeros([BLOCK_N], tl.float32)
        acc = tl.zeros([BLOCK_N, WIDTH_V], tl.float32)
        sums_at = flat[:, None] * WIDTH_V + tl.arange(0, WIDTH_V)[None, :]
        if begin < first:
            m = tl.load(state_ptr + flat * 2, mask=mask_n, other=NEVER)
            l = tl.load(state_ptr + flat * 2 + 1, mask=mask_n, other=0.0)
            acc = tl.load(sums_ptr + sums_at, mask=mask_n[:, None], other=0.0)
        scratch_at = (seq.to(tl.int64) * NUM_KV_HEADS + head) * PIECE
        key_ptr = key_ptr + scratch_at * WIDTH_K
        value_ptr = value_ptr + scratch_at * WIDTH_V
        exponent_ptr = exponent_ptr + scratch_at // BLOCK_T
        for t in range(whole_start * BLOCK_T, whole_stop * BLOCK_T, BLOCK_T):
            acc, m, l = _dense_tile(
                t, acc, m, l, q, key_ptr, value_ptr, exponent_ptr, first, end, row_scale,
                row_const, slope, position, False, SOFTCAP, HAS_OFFSET, HAS_ALIBI, CAUSAL, WINDOW,
                WIDTH_K, WIDTH_V, BLOCK_T,
            )  # fmt: skip
        # The other tiles, masked: those before the whole ones, then those after.
        before = whole_start - start
        for i in range(before + stop - whole_stop):
            tile = tl.where(i < before, start + i, whole_stop + i - before)
            acc, m, l = _dense_tile(
                tile * BLOCK_T, acc, m, l, q, key_ptr, value_ptr, exponent_ptr, first, end,
                row_scale, row_const, slope, position, True, SOFTCAP, HAS_OFFSET, HAS_ALIBI,
                CAUSAL, WINDOW, WIDTH_K, WIDTH_V, BLOCK_T,
            )  # fmt: skip

        if is_last:
            nothing = tl.full([BLOCK_N], float("-inf"), tl.float32)
            total = l
            decay = tl.exp2(m - m)
            if HAS_SINKS:
                nothing = tl.load(sinks_ptr + query_head, mask=mask_n, other=float("-inf"))
                sink = nothing * LOG2E
                m_new = tl.maximum(m, tl.where(sink == float("-inf"), NEVER, sink))
                decay = tl.exp2(m - m_new)
                m = m_new
                total = l * decay + tl.exp2(sink - m)
            lse = tl.where(l != 0, (m + tl.log2(total)) * LN2, nothing)
            tl.store(lse_ptr + flat, lse, mask=mask_n)
            o = acc * (decay / tl.where(total != 0, total, 1.0))[:, None]
            out_coordinate = _columns(BLOCK_VALUE, VALUE_CODES)
            mask_d = out_coordinate < HEAD_DIM
            if HAS_VALUE_SHIFT:
                nu = tl.load(
                    value_shift_ptr + head * SHIFT_STRIDE + out_coordinate, mask=mask_d, other=0.0
                )
                share = l * decay / tl.where(total != 0, total, 1.0)
                o = o + share[:, None] * nu[None, :]
            o = tl.where((l != 0)[:, None], o, 0.0)
            row_at = (first_row + row).to(tl.int64) * OUT_STRIDE_N + query_head * OUT_STRIDE_H
            tl.store(
                out_ptr + row_at[:, None] + (out_coordinate * OUT_STRIDE_D)[None, :],
                o.to(out_ptr.dtype.element_ty),
                mask=mask_n[:, None] & mask_d[None, :],
            )
        else:
            tl.store(state_ptr + flat * 2, m, mask=mask_n)
            tl.store(state_ptr + flat * 2 + 1, l, mask=mask_n)
            tl.store(sums_ptr + sums_at, acc, mask=mask_n[:, None])
