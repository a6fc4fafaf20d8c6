"""Quantise keys and values and write them into the packed cache, in one kernel.

For each token and KV head: offset, matrix in IEEE fp32, norm, codes, bytes, metadata. The rules
are those of docs/format.md, step by step, so that the bytes are the reference's.
"""

import triton
import triton.language as tl

from tq_core.kernels.codes import typed_ptr, value_offset
from tq_core.kernels.query import power_of_two

FP16_MAX = tl.constexpr(65504.0)
INPUT_MAX = tl.constexpr(2.0**59)


@triton.jit
def _finite(x, LIMIT: tl.constexpr):
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


@triton.jit
def _load(row_ptr, offs, mask_r, offset_ptr, STRIDE_D, HAS_OFFSET: tl.constexpr,
          HEAD_DIM: tl.constexpr):  # fmt: skip
    """Rows ``[R, len(offs)]`` in fp32, finite, less the offset; 0 outside."""
    mask_d = offs < HEAD_DIM
    mask = mask_r[:, None] & mask_d[None, :]
    x = tl.load(row_ptr[:, None] + offs[None, :] * STRIDE_D, mask=mask, other=0.0).to(tl.float32)
    x = _finite(x, INPUT_MAX)
    if HAS_OFFSET:
        x = x - tl.load(offset_ptr + offs, mask=mask_d, other=0.0)[None, :]
    return tl.where(mask, x, 0.0)


@triton.jit
def _coded(row_ptr, mask_r, offset_ptr, matrix_ptr, STRIDE_D: tl.constexpr,
           HAS_OFFSET: tl.constexpr, HAS_MATRIX: tl.constexpr, HEAD_DIM: tl.constexpr,
           BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Vectors before and after the matrix, both divided by a power of two, and that power."""
    x = _load(row_ptr, tl.arange(0, BLOCK_D), mask_r, offset_ptr, STRIDE_D, HAS_OFFSET, HEAD_DIM)
    scale, inverse = power_of_two(tl.max(tl.abs(x), 1))
    x = x * inverse[:, None]
    y = x
    if HAS_MATRIX:
        y = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        offs_o = tl.arange(0, BLOCK_D)
        for k in range(0, HEAD_DIM, BLOCK_K):
            offs_k = k + tl.arange(0, BLOCK_K)
            part = _load(row_ptr, offs_k, mask_r, offset_ptr, STRIDE_D, HAS_OFFSET, HEAD_DIM)
            matrix = tl.load(
                matrix_ptr + offs_o[None, :] * HEAD_DIM + offs_k[:, None],
                mask=(offs_o < HEAD_DIM)[None, :] & (offs_k < HEAD_DIM)[:, None],
                other=0.0,
            )
            y = tl.dot(part * inverse[:, None], matrix, y, input_precision="ieee")
    return x, y, scale


@triton.jit
def _pack(codes, BITS: tl.constexpr, CODES: tl.constexpr, FIRST: tl.constexpr,
          BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Words of ``CODES`` neighbouring codes, ``BITS`` bits each from bit ``FIRST`` on."""
    codes = (codes >> FIRST) & ((1 << BITS) - 1)
    grouped = tl.reshape(codes, [BLOCK_R, BLOCK_D // CODES, CODES])
    return tl.sum(grouped << (BITS * tl.arange(0, CODES))[None, None, :], 2)


@triton.jit
def _codebook(x, y, scale, edges_ptr, levels_ptr, NUM_LEVELS: tl.constexpr,
              NORM_OF_CODED: tl.constexpr, NORM_CORRECTION: tl.constexpr, HEAD_DIM: tl.constexpr,
              BLOCK_D: tl.constexpr):  # fmt: skip
    """Codes int32 ``[R, D]`` and fp16 scales ``[R]``."""
    if NORM_OF_CODED:
        norm = tl.sqrt_rn(tl.sum(y * y, 1))
    else:
        norm = tl.sqrt_rn(tl.sum(x * x, 1))
    unit = tl.where(
        norm[:, None] > 0, tl.div_rn(y, tl.where(norm > 0, norm, 1.0)[:, None] + 0 * y), 0.0
    )
    codes = tl.zeros(y.shape, tl.int32)
    for i in tl.static_range(NUM_LEVELS - 1):
        codes += (unit >= tl.load(edges_ptr + i)).to(tl.int32)
    norm = norm * scale
    if NORM_CORRECTION:
        level = tl.load(levels_ptr + codes)
        level = tl.where((tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :], level, 0.0)
        length = tl.sqrt_rn(tl.sum(level * level, 1))
        norm = tl.where(length > 0, tl.div_rn(norm, tl.where(length > 0, length, 1.0)), 0.0)
    return codes, tl.minimum(norm, FP16_MAX).to(tl.float16)


@triton.jit
def _e4m3(x):
    """e4m3fn bytes of fp32: nearest even, saturating."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Adding 2**14 rounds to a multiple of 2**-9, the step of the subnormals.
    small = (size + 16384.0).to(tl.int32, bitcast=True) & 0xFF
    return tl.where(size < 0.015625, small, normal) | sign


@triton.jit
def _unsigned_zero(x):
    return tl.where(x == 0, 0.0, x).to(tl.float16)


@triton.jit(do_not_specialize=["num_tokens", "num_pages"])
def store(
    key_ptr, value_ptr, slot_ptr, key_matrix_ptr, value_matrix_ptr, key_offset_ptr,
    value_offset_ptr, key_scale_ptr, key_edges_ptr, key_levels_ptr, value_edges_ptr,
    value_levels_ptr, previous_ptr,
    num_tokens, num_pages,
    cache_ptr,
    KEY_STRIDE_N: tl.constexpr, KEY_STRIDE_H: tl.constexpr, KEY_STRIDE_D: tl.constexpr,
    VALUE_STRIDE_N: tl.constexpr, VALUE_STRIDE_H: tl.constexpr, VALUE_STRIDE_D: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    HAS_KEY_OFFSET: tl.constexpr, KEY_OFFSET_STRIDE: tl.constexpr,
    HAS_VALUE_OFFSET: tl.constexpr, VALUE_OFFSET_STRIDE: tl.constexpr,
    HAS_KEY_MATRIX: tl.constexpr, KEY_MATRIX_STRIDE: tl.constexpr, HAS_KEY_TRANSFORM: tl.constexpr,
    HAS_VALUE_MATRIX: tl.constexpr, VALUE_MATRIX_STRIDE: tl.constexpr,
    HAS_VALUE_TRANSFORM: tl.constexpr, KEY_SCALE_STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    KEY_HEAD_STRIDE: tl.constexpr, KEY_SLOT_STRIDE: tl.constexpr,
    VALUE_BASE: tl.constexpr, VALUE_HEAD_STRIDE: tl.constexpr, VALUE_SLOT_STRIDE: tl.constexpr,
    VALUE_WORD_MAJOR: tl.constexpr, VALUE_WHOLE: tl.constexpr, VALUE_TAIL: tl.constexpr,
    META_BASE: tl.constexpr, META_HEAD_STRIDE: tl.constexpr, META_VALUE: tl.constexpr,
    META_PAIRS: tl.constexpr,
    KEY_FP8: tl.constexpr, KEY_BITS: tl.constexpr, KEY_PLANAR: tl.constexpr,
    VALUE_AFFINE: tl.constexpr, VALUE_BITS: tl.constexpr, NORM_CORRECTION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``BLOCK_R`` tokens of one KV head; ``previous_ptr``, the cache too, is how JAX aliases it."""
    pid = tl.program_id(0)
    head = pid % NUM_KV_HEADS
    row = (pid // NUM_KV_HEADS).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    slot = tl.load(slot_ptr + row * SLOT_STRIDE, mask=row < num_tokens, other=-1).to(tl.int64)
    mask_r = (slot >= 0) & (slot // PAGE_SIZE < num_pages)
    slot = tl.where(mask_r, slot, 0)
    page_ptr = cache_ptr + (slot // PAGE_SIZE) * PAGE_STRIDE
    place = (slot % PAGE_SIZE).to(tl.int32)
    meta_ptr = typed_ptr(cache_ptr, 2) + (slot // PAGE_SIZE) * (PAGE_STRIDE // 2)
    meta_at = META_BASE // 2 + head * (META_HEAD_STRIDE // 2) + place

    x, y, scale = _coded(
        key_ptr + row * KEY_STRIDE_N + head * KEY_STRIDE_H, mask_r,
        key_offset_ptr + head * KEY_OFFSET_STRIDE, key_matrix_ptr + head * KEY_MATRIX_STRIDE,
        KEY_STRIDE_D, HAS_KEY_OFFSET, HAS_KEY_MATRIX, HEAD_DIM, BLOCK_R, BLOCK_D, BLOCK_K,
    )  # fmt: skip
    if KEY_FP8:
        key_scale = tl.load(key_scale_ptr + head * KEY_SCALE_STRIDE)
        y = _finite(y * scale[:, None], INPUT_MAX)
        codes = _e4m3(tl.div_rn(y, key_scale + 0 * y))
    else:
        codes, stored = _codebook(
            x, y, scale, key_edges_ptr, key_levels_ptr, 1 << KEY_BITS, HAS_KEY_TRANSFORM,
            NORM_CORRECTION, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        bits = stored.to(tl.uint16, bitcast=True)
        tl.store(meta_ptr + meta_at, bits, mask=mask_r)
    key_ptrs = (page_ptr + head * KEY_HEAD_STRIDE + place * KEY_SLOT_STRIDE)[:, None]
    if KEY_PLANAR:
        low = _pack(codes, 2, 4, 0, BLOCK_R, BLOCK_D)
        offs = tl.arange(0, BLOCK_D // 4)
        mask = mask_r[:, None] & (offs < HEAD_DIM // 4)[None, :]
        tl.store(key_ptrs + offs[None, :], low.to(tl.uint8), mask=mask)
        high = _pack(codes, 1, 8, 2, BLOCK_R, BLOCK_D)
        offs = tl.arange(0, BLOCK_D // 8)
        mask = mask_r[:, None] & (offs < HEAD_DIM // 8)[None, :]
        tl.store(key_ptrs + (HEAD_DIM // 4 + offs)[None, :], high.to(tl.uint8), mask=mask)
    else:
        KEY_CODES: tl.constexpr = 8 if KEY_BITS == 3 else 8 // KEY_BITS
        KEY_UNIT: tl.constexpr = KEY_BITS * KEY_CODES // 8
        word = _pack(codes, KEY_BITS, KEY_CODES, 0, BLOCK_R, BLOCK_D)
        offs = tl.arange(0, BLOCK_D // KEY_CODES)
        mask = mask_r[:, None] & (offs < HEAD_DIM // KEY_CODES)[None, :]
        for i in tl.static_range(KEY_UNIT):
            byte = ((word >> (8 * i)) & 0xFF).to(tl.uint8)
            tl.store(key_ptrs + (offs * KEY_UNIT + i)[None, :], byte, mask=mask)

    x, y, scale = _coded(
        value_ptr + row * VALUE_STRIDE_N + head * VALUE_STRIDE_H, mask_r,
        value_offset_ptr + head * VALUE_OFFSET_STRIDE,
        value_matrix_ptr + head * VALUE_MATRIX_STRIDE,
        VALUE_STRIDE_D, HAS_VALUE_OFFSET, HAS_VALUE_MATRIX, HEAD_DIM, BLOCK_R, BLOCK_D, BLOCK_K,
    )  # fmt: skip
    if VALUE_AFFINE:
        TOP: tl.constexpr = (1 << VALUE_BITS) - 1
        v = _finite(y * scale[:, None], FP16_MAX)
        inside = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
        low = tl.min(tl.where(inside, v, FP16_MAX), 1)
        high = tl.max(tl.where(inside, v, -FP16_MAX), 1)
        zero = _unsigned_zero(low.to(tl.float16).to(tl.float32))
        wide_zero = zero.to(tl.float32)
        span = high - wide_zero
        step = _unsigned_zero(tl.div_rn(span, TOP + 0 * span).to(tl.float16).to(tl.float32))
        wide_step = step.to(tl.float32)
        divisor = tl.where(wide_step == 0, 1.0, wide_step)
        steps = tl.floor(tl.div_rn(v - wide_zero[:, None], divisor[:, None] + 0 * v) + 0.5)
        steps = tl.minimum(tl.maximum(steps, 0.0), TOP)
        codes = tl.where((wide_step == 0)[:, None], 0.0, steps).to(tl.int32)
        if META_PAIRS:
            scale_at = meta_at + META_VALUE // 2 + place
            zero_at = scale_at + 1
        else:
            scale_at = meta_at + META_VALUE // 2
            zero_at = scale_at + PAGE_SIZE
        tl.store(meta_ptr + scale_at, step.to(tl.uint16, bitcast=True), mask=mask_r)
        tl.store(meta_ptr + zero_at, zero.to(tl.uint16, bitcast=True), mask=mask_r)
    else:
        codes, stored = _codebook(
            x, y, scale, value_edges_ptr, value_levels_ptr, 1 << VALUE_BITS, HAS_VALUE_TRANSFORM,
            NORM_CORRECTION, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        bits = stored.to(tl.uint16, bitcast=True)
        tl.store(meta_ptr + meta_at + META_VALUE // 2, bits, mask=mask_r)
    VALUE_CODES: tl.constexpr = 8 if VALUE_BITS == 3 else 8 // VALUE_BITS
    VALUE_UNIT: tl.constexpr = VALUE_BITS * VALUE_CODES // 8
    word = _pack(codes, VALUE_BITS, VALUE_CODES, 0, BLOCK_R, BLOCK_D)
    offs = tl.arange(0, BLOCK_D // VALUE_CODES)
    mask = mask_r[:, None] & (offs < HEAD_DIM // VALUE_CODES)[None, :]
    value_ptrs = (page_ptr + VALUE_BASE + head * VALUE_HEAD_STRIDE)[:, None]
    for i in tl.static_range(VALUE_UNIT):
        at = value_offset(
            (offs * VALUE_UNIT + i)[None, :], place[:, None], 1, VALUE_SLOT_STRIDE,
            VALUE_WORD_MAJOR, VALUE_WHOLE, VALUE_TAIL, PAGE_SIZE,
        )  # fmt: skip
        byte = ((word >> (8 * i)) & 0xFF).to(tl.uint8)
        tl.store(value_ptrs + at, byte, mask=mask)
