"""Packed pages back to dense keys and values."""

import triton
import triton.language as tl

from tq_core.kernels.codes import (
    decode_units,
    half_to_float,
    load_keys,
    load_values,
    typed_ptr,
)


@triton.jit
def _write(
    parts, scale, zero, shift_ptr, matrix_ptr, out_ptr, row_at, mask_t, live,
    FACTOR: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr,
    HAS_MATRIX: tl.constexpr, HAS_SHIFT: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_UNITS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Writes ``shift + M^-1 (scale * c + zero)`` of one tile of tokens, 0 where not ``live``."""
    offs_u = tl.arange(0, BLOCK_U)
    x = ()
    for p in tl.static_range(CODES):
        wide = parts[p].to(tl.float32)
        if KIND == "int":
            wide = wide * (FACTOR / 2 ** (BITS * p % 8)) * scale[:, None] + zero[:, None]
        else:
            wide = wide * FACTOR * scale[:, None]
        mask_x = live[:, None] & (offs_u < NUM_UNITS)[None, :]
        x = x + (tl.where(mask_x, wide, 0.0),)
    if HAS_MATRIX:
        for o in range(0, HEAD_DIM, BLOCK_O):
            offs_o = o + tl.arange(0, BLOCK_O)
            mask_o = offs_o < HEAD_DIM
            y = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
            for p in tl.static_range(CODES):
                offs_d = offs_u * CODES + p
                matrix = tl.load(
                    matrix_ptr + offs_d[:, None] * HEAD_DIM + offs_o[None, :],
                    mask=(offs_u < NUM_UNITS)[:, None] & mask_o[None, :],
                    other=0.0,
                )
                y = tl.dot(x[p], matrix, y, input_precision=PRECISION)
            _add_and_store(y, offs_o, mask_o, shift_ptr, out_ptr, row_at, mask_t, live, HAS_SHIFT)
    else:
        for p in tl.static_range(CODES):
            _add_and_store(
                x[p], offs_u * CODES + p, offs_u < NUM_UNITS, shift_ptr, out_ptr, row_at, mask_t,
                live, HAS_SHIFT,
            )  # fmt: skip


@triton.jit
def _add_and_store(
    y, offs, mask_d, shift_ptr, out_ptr, row_at, mask_t, live, HAS_SHIFT: tl.constexpr
):
    if HAS_SHIFT:
        y = y + tl.load(shift_ptr + offs, mask=mask_d, other=0.0)[None, :]
        y = tl.where(live[:, None], y, 0.0)
    tl.store(
        out_ptr + row_at[:, None] + offs[None, :],
        y.to(out_ptr.dtype.element_ty),
        mask=mask_t[:, None] & mask_d[None, :],
    )


@triton.jit(do_not_specialize=["capacity", "table_stride"])
def dequantize(
    cache_ptr, block_table_ptr, seq_lens_ptr, key_table_ptr, value_table_ptr, key_factor_ptr,
    key_matrix_ptr, value_matrix_ptr, key_offset_ptr, value_offset_ptr,
    capacity, table_stride,
    key_out_ptr, value_out_ptr,
    NUM_KV_HEADS: tl.constexpr,
    HAS_KEY_MATRIX: tl.constexpr, KEY_MATRIX_STRIDE: tl.constexpr,
    HAS_VALUE_MATRIX: tl.constexpr, VALUE_MATRIX_STRIDE: tl.constexpr,
    HAS_KEY_OFFSET: tl.constexpr, KEY_OFFSET_STRIDE: tl.constexpr,
    HAS_VALUE_OFFSET: tl.constexpr, VALUE_OFFSET_STRIDE: tl.constexpr,
    FACTOR_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    KEY_HEAD_STRIDE: tl.constexpr, KEY_SLOT_STRIDE: tl.constexpr,
    VALUE_BASE: tl.constexpr, VALUE_HEAD_STRIDE: tl.constexpr, VALUE_SLOT_STRIDE: tl.constexpr,
    VALUE_WORD_MAJOR: tl.constexpr, VALUE_WHOLE: tl.constexpr, VALUE_TAIL: tl.constexpr,
    META_BASE: tl.constexpr, META_HEAD_STRIDE: tl.constexpr, META_VALUE: tl.constexpr,
    META_PAIRS: tl.constexpr,
    KEY_KIND: tl.constexpr, KEY_BITS: tl.constexpr, KEY_UNIT: tl.constexpr,
    KEY_ELEMENT: tl.constexpr, KEY_CODES: tl.constexpr, KEY_PLANAR: tl.constexpr,
    VALUE_KIND: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_UNIT: tl.constexpr,
    VALUE_ELEMENT: tl.constexpr, VALUE_CODES: tl.constexpr, VALUE_FACTOR: tl.constexpr,
    VALUE_CUBIC: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_KEY: tl.constexpr, NUM_VALUE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_O: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``BLOCK_T`` tokens of one sequence and head, to ``[B, capacity, Hk, D]`` twice."""
    pid = tl.program_id(0)
    head = pid % NUM_KV_HEADS
    tiles = tl.cdiv(capacity, BLOCK_T)
    seq = (pid // NUM_KV_HEADS // tiles).to(tl.int64)
    token = (pid // NUM_KV_HEADS % tiles) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = token < capacity
    live = mask_t & (token < tl.load(seq_lens_ptr + seq))
    pages_ptr = block_table_ptr + seq * table_stride
    page = tl.load(pages_ptr + token // PAGE_SIZE, mask=live, other=0).to(tl.int64)
    slot = token % PAGE_SIZE
    row_at = ((seq * capacity + token) * NUM_KV_HEADS + head) * HEAD_DIM
    meta_ptr = typed_ptr(cache_ptr, 2) + page * (PAGE_STRIDE // 2)
    meta_at = META_BASE // 2 + head * (META_HEAD_STRIDE // 2) + slot

    offs_u = tl.arange(0, BLOCK_KEY)
    key_ptr = typed_ptr(cache_ptr, KEY_ELEMENT) + page * (PAGE_STRIDE // KEY_ELEMENT)
    key_at = head * (KEY_HEAD_STRIDE // KEY_ELEMENT) + slot * (KEY_SLOT_STRIDE // KEY_ELEMENT)
    mask_u = offs_u < NUM_KEY
    unit = load_keys(key_ptr, key_at, offs_u, mask_u, KEY_UNIT, KEY_ELEMENT, True)
    extra = unit
    if KEY_PLANAR:
        byte_at = head * KEY_HEAD_STRIDE + slot * KEY_SLOT_STRIDE + HEAD_DIM // 4
        extra = load_keys(cache_ptr + page * PAGE_STRIDE, byte_at, offs_u, mask_u, 1, 1, True)
    keys = decode_units(
        unit, extra, 0, key_table_ptr, KEY_KIND, KEY_BITS, KEY_CODES, KEY_PLANAR, (), "", ""
    )
    scale = tl.zeros([BLOCK_T], tl.float32) + tl.load(key_factor_ptr + head * FACTOR_STRIDE)
    if KEY_KIND != "fp8":
        scale = scale * half_to_float(tl.load(meta_ptr + meta_at, mask=live, other=0))
    _write(
        keys, scale, scale, key_offset_ptr + head * KEY_OFFSET_STRIDE,
        key_matrix_ptr + head * KEY_MATRIX_STRIDE, key_out_ptr, row_at, mask_t, live,
        1.0, KEY_KIND, KEY_BITS, KEY_CODES, HAS_KEY_MATRIX, HAS_KEY_OFFSET,
        PRECISION, HEAD_DIM, NUM_KEY, BLOCK_T, BLOCK_KEY, BLOCK_O,
    )  # fmt: skip

    offs_v = tl.arange(0, BLOCK_VALUE)
    value_at = VALUE_BASE // VALUE_ELEMENT + head * (VALUE_HEAD_STRIDE // VALUE_ELEMENT)
    value_ptr = typed_ptr(cache_ptr, VALUE_ELEMENT) + value_at
    value_ptr = value_ptr + page * (PAGE_STRIDE // VALUE_ELEMENT)
    unit = load_values(
        value_ptr[:, None], slot[:, None], offs_v[None, :], (offs_v < NUM_VALUE)[None, :],
        VALUE_UNIT, VALUE_ELEMENT, True, VALUE_SLOT_STRIDE, VALUE_WORD_MAJOR, VALUE_WHOLE,
        VALUE_TAIL, PAGE_SIZE,
    )  # fmt: skip
    values = decode_units(
        unit, unit, 0, value_table_ptr, VALUE_KIND, VALUE_BITS, VALUE_CODES, False, VALUE_CUBIC,
        "", "",
    )  # fmt: skip
    if META_PAIRS:
        scale_at = meta_at + META_VALUE // 2 + slot
        zero_at = scale_at + 1
    else:
        scale_at = meta_at + META_VALUE // 2
        zero_at = scale_at + PAGE_SIZE
    scale = half_to_float(tl.load(meta_ptr + scale_at, mask=live, other=0))
    zero = scale
    if VALUE_KIND == "int":
        zero = half_to_float(tl.load(meta_ptr + zero_at, mask=live, other=0))
    _write(
        values, scale, zero, value_offset_ptr + head * VALUE_OFFSET_STRIDE,
        value_matrix_ptr + head * VALUE_MATRIX_STRIDE, value_out_ptr, row_at, mask_t, live,
        VALUE_FACTOR, VALUE_KIND, VALUE_BITS, VALUE_CODES, HAS_VALUE_MATRIX, HAS_VALUE_OFFSET,
        PRECISION, HEAD_DIM, NUM_VALUE, BLOCK_T, BLOCK_VALUE, BLOCK_O,
    )  # fmt: skip
