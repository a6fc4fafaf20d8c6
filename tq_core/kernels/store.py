"""Quantise keys and values and write them into the packed cache, in one kernel.

For each token and KV head: offset, matrix, norm, codes, bytes, metadata. The rules are those of
docs/format.md, step by step, so that the bytes are the reference's.

Products with a matrix are as exact as IEEE fp32 ones and better: a number of 24 bits is the sum of
three bf16 numbers, whose products are exact in fp32. A matrix whose entries are one number but for
their signs, as a signed Hadamard matrix is, needs one; so does a bf16 key without an offset. Where
both sides have three, the three smallest products are left out.
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
        x = tl.where(mask, x, 0.0)
    return x


@triton.jit
def _matrix(ptr, offs_k, NUM_PARTS: tl.constexpr, PART_STRIDE: tl.constexpr,
            HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Columns ``offs_k`` of a matrix, transposed: bf16 parts ``[K, BLOCK_D]``."""
    offs_o = tl.arange(0, BLOCK_D)
    at = ptr + offs_o[None, :] * HEAD_DIM + offs_k[:, None]
    mask = (offs_o < HEAD_DIM)[None, :] & (offs_k < HEAD_DIM)[:, None]
    parts = ()
    for i in tl.static_range(NUM_PARTS):
        part = tl.load(at + i * PART_STRIDE, mask=mask, other=0)
        parts = parts + (part.to(tl.bfloat16, bitcast=True),)
    return parts


@triton.jit
def _parts(x, NUM_PARTS: tl.constexpr):
    """bf16 numbers that add up to ``x``, fp32: 8 bits each."""
    parts = ()
    for _ in tl.static_range(NUM_PARTS):
        part = x.to(tl.bfloat16)
        x = x - part.to(tl.float32)
        parts = parts + (part,)
    return parts


@triton.jit
def _add_products(y, x, matrix, WIDEN: tl.constexpr):
    """Adds the products of two sums of parts to ``y``, small ones first.

    ``WIDEN``: as fp32, for Triton's interpreter, which multiplies the bits of bf16 numbers.
    """
    MOST: tl.constexpr = min(len(x) + len(matrix) - 2, 2)
    for less in tl.static_range(MOST + 1):
        for i in tl.static_range(len(x)):
            if MOST - less >= i and MOST - less - i < len(matrix):
                left, right = x[i], matrix[MOST - less - i]
                if WIDEN:
                    left, right = left.to(tl.float32), right.to(tl.float32)
                y = tl.dot(left, right, y, input_precision="ieee")
    return y


@triton.jit
def _coded(row_ptr, mask_r, offset_ptr, matrix_ptr, matrix, STRIDE_D: tl.constexpr,
           HAS_OFFSET: tl.constexpr, MATRIX_PARTS: tl.constexpr, PART_STRIDE: tl.constexpr,
           FACTOR: tl.constexpr, SCALED: tl.constexpr, WIDEN: tl.constexpr,
           HEAD_DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
           BLOCK_K: tl.constexpr):  # fmt: skip
    """Vectors before and after the matrix, with ``SCALED`` over a power of two, and that power.

    ``matrix``: what ``_matrix`` gave, or nothing where it does not stay.
    """
    x = _load(row_ptr, tl.arange(0, BLOCK_D), mask_r, offset_ptr, STRIDE_D, HAS_OFFSET, HEAD_DIM)
    scale = tl.full([BLOCK_R], 1.0, tl.float32)
    if SCALED:
        scale, inverse = power_of_two(tl.max(tl.abs(x), 1))
        x = x * inverse[:, None]
    y = x
    if MATRIX_PARTS > 0:
        if HAS_OFFSET or row_ptr.dtype.element_ty == tl.float32:
            PARTS: tl.constexpr = 3
        elif row_ptr.dtype.element_ty == tl.float16:
            PARTS: tl.constexpr = 2
        else:
            PARTS: tl.constexpr = 1
        y = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        if len(matrix) > 0:
            y = _add_products(y, _parts(x, PARTS), matrix, WIDEN)
        else:
            for k in range(0, HEAD_DIM, BLOCK_K):
                offs_k = k + tl.arange(0, BLOCK_K)
                part = _load(row_ptr, offs_k, mask_r, offset_ptr, STRIDE_D, HAS_OFFSET, HEAD_DIM)
                columns = _matrix(matrix_ptr, offs_k, MATRIX_PARTS, PART_STRIDE, HEAD_DIM, BLOCK_D)
                part = part * inverse[:, None]
                y = _add_products(y, _parts(part, PARTS), columns, WIDEN)
        y = y * FACTOR
    return x, y, scale


@triton.jit
def _pack(codes, BITS: tl.constexpr, CODES: tl.constexpr, BLOCK_R: tl.constexpr,
          BLOCK_D: tl.constexpr):  # fmt: skip
    """Words of ``CODES`` neighbouring codes of ``BITS`` bits."""
    grouped = tl.reshape(codes, [BLOCK_R, BLOCK_D // CODES, CODES])
    return tl.sum(grouped << (BITS * tl.arange(0, CODES))[None, None, :], 2)


@triton.jit
def _elements(codes, BITS: tl.constexpr, BYTES: tl.constexpr, BLOCK_R: tl.constexpr,
              BLOCK_D: tl.constexpr):  # fmt: skip
    """Bytes or words of packed codes, ``[R, groups]``: one of a group, or three of 3 bits."""
    if BITS == 3 and BYTES == 4:
        group = _pack(codes, 3, 8, BLOCK_R, BLOCK_D)
        even, odd = tl.split(tl.reshape(group, [BLOCK_R, BLOCK_D // 32, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return (
            first | (second << 24),
            (second >> 8) | (third << 16),
            (third >> 16) | (fourth << 8),
        )
    elif BITS == 3:
        word = _pack(codes, 3, 8, BLOCK_R, BLOCK_D)
        return (word & 0xFF, (word >> 8) & 0xFF, word >> 16)
    else:
        return (_pack(codes, BITS, 8 * BYTES // BITS, BLOCK_R, BLOCK_D),)


@triton.jit
def _write(ptr, place, codes, mask_r, AT: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr,
           SLOT_STRIDE: tl.constexpr, WORD_MAJOR: tl.constexpr,
           WHOLE: tl.constexpr, TAIL: tl.constexpr, PAGE_SIZE: tl.constexpr,
           HEAD_DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Packs codes of ``BITS`` bits, and stores them from byte ``AT`` of a slot's on.

    ``ptr``: where the codes of the head begin in each row's page, ``[R]``. ``BYTES``: of what is
    stored at once, 4 or 1.
    """
    elements = _elements(codes, BITS, BYTES, BLOCK_R, BLOCK_D)
    NUM: tl.constexpr = len(elements)
    GROUP: tl.constexpr = 8 * BYTES * NUM // BITS
    offs = tl.arange(0, BLOCK_D // GROUP)
    mask = mask_r[:, None] & (offs < HEAD_DIM // GROUP)[None, :]
    ptr = typed_ptr(ptr, BYTES)[:, None]
    for i in tl.static_range(NUM):
        at = value_offset(
            (AT // BYTES + offs * NUM + i)[None, :], place[:, None], BYTES, SLOT_STRIDE, WORD_MAJOR,
            WHOLE, TAIL, PAGE_SIZE,
        )  # fmt: skip
        tl.store(ptr + at, elements[i].to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _edges(edges_ptr, NUM: tl.constexpr):
    """The midpoints of a codebook's neighbours."""
    edges = ()
    for i in tl.static_range(NUM):
        edges = edges + (tl.load(edges_ptr + i),)
    return edges


@triton.jit
def _halved(x, codes, edges):
    """The next bit of codes, and the half of the edges that are left."""
    HALF: tl.constexpr = len(edges) // 2
    above = x >= edges[HALF]
    rest = ()
    for i in tl.static_range(HALF):
        rest = rest + (tl.where(above, edges[HALF + 1 + i], edges[i]),)
    return codes * 2 + above.to(tl.int32), rest


@triton.jit
def _search(x, edges, BITS: tl.constexpr):
    """How many of the ``2**BITS - 1`` ascending edges are at or below ``x``, int32."""
    codes = tl.zeros(x.shape, tl.int32)
    for _ in tl.static_range(BITS):
        codes, edges = _halved(x, codes, edges)
    return codes


@triton.jit
def _codebook(x, y, scale, edges, levels_ptr, BITS: tl.constexpr, NORM_OF_CODED: tl.constexpr,
              NORM_CORRECTION: tl.constexpr, HEAD_DIM: tl.constexpr,
              BLOCK_D: tl.constexpr):  # fmt: skip
    """Codes int32 ``[R, D]`` and fp16 scales ``[R]``."""
    if NORM_OF_CODED:
        norm = tl.sqrt_rn(tl.sum(y * y, 1))
    else:
        norm = tl.sqrt_rn(tl.sum(x * x, 1))
    inverse = tl.where(norm > 0, tl.div_rn(1.0 + 0 * norm, tl.where(norm > 0, norm, 1.0)), 0.0)
    codes = _search(y * inverse[:, None], edges, BITS)
    norm = norm * scale
    if NORM_CORRECTION:
        level = tl.load(levels_ptr + codes)
        level = tl.where((tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :], level, 0.0)
        length = tl.sqrt_rn(tl.sum(level * level, 1))
        norm = tl.where(length > 0, tl.div_rn(norm, tl.where(length > 0, length, 1.0)), 0.0)
    return codes, tl.minimum(norm, FP16_MAX).to(tl.float16)


@triton.jit
def _quotient(x, divisor, inverse):
    """``x / divisor``, as IEEE division but for the last bit in rare cases, or 0 for no inverse."""
    q = x * inverse
    return tl.fma(tl.fma(-q, divisor + tl.zeros_like(x), x), inverse + tl.zeros_like(x), q)


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


@triton.jit(do_not_specialize=["num_tokens", "num_pages", "num_programs"])
def store(
    key_ptr, value_ptr, slot_ptr, key_matrix_ptr, value_matrix_ptr, key_offset_ptr,
    value_offset_ptr, key_scale_ptr, key_edges_ptr, key_levels_ptr, value_edges_ptr,
    value_levels_ptr, previous_ptr,
    num_tokens, num_pages, num_programs,
    cache_ptr,
    KEY_STRIDE_N: tl.constexpr, KEY_STRIDE_H: tl.constexpr, KEY_STRIDE_D: tl.constexpr,
    VALUE_STRIDE_N: tl.constexpr, VALUE_STRIDE_H: tl.constexpr, VALUE_STRIDE_D: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    HAS_KEY_OFFSET: tl.constexpr, KEY_OFFSET_STRIDE: tl.constexpr,
    HAS_VALUE_OFFSET: tl.constexpr, VALUE_OFFSET_STRIDE: tl.constexpr,
    KEY_PARTS: tl.constexpr, KEY_PART_STRIDE: tl.constexpr, KEY_FACTOR: tl.constexpr,
    KEY_MATRIX_STRIDE: tl.constexpr, HAS_KEY_TRANSFORM: tl.constexpr,
    VALUE_PARTS: tl.constexpr, VALUE_PART_STRIDE: tl.constexpr, VALUE_FACTOR: tl.constexpr,
    VALUE_MATRIX_STRIDE: tl.constexpr, HAS_VALUE_TRANSFORM: tl.constexpr,
    KEY_SCALE_STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    KEY_HEAD_STRIDE: tl.constexpr, KEY_SLOT_STRIDE: tl.constexpr,
    VALUE_BASE: tl.constexpr, VALUE_HEAD_STRIDE: tl.constexpr, VALUE_SLOT_STRIDE: tl.constexpr,
    VALUE_WORD_MAJOR: tl.constexpr, VALUE_WHOLE: tl.constexpr, VALUE_TAIL: tl.constexpr,
    META_BASE: tl.constexpr, META_HEAD_STRIDE: tl.constexpr, META_VALUE: tl.constexpr,
    META_PAIRS: tl.constexpr,
    KEY_FP8: tl.constexpr, KEY_BITS: tl.constexpr, KEY_PLANAR: tl.constexpr,
    KEY_ELEMENT: tl.constexpr,
    VALUE_AFFINE: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_ELEMENT: tl.constexpr,
    NORM_CORRECTION: tl.constexpr, WIDEN: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Blocks of ``BLOCK_R`` tokens of one KV head, of which it has ``num_programs``.

    ``previous_ptr``, the cache too, is how JAX aliases it.
    """
    head = tl.program_id(0) % NUM_KV_HEADS
    offs_k = tl.arange(0, BLOCK_K)
    key_matrix_ptr += head * KEY_MATRIX_STRIDE
    value_matrix_ptr += head * VALUE_MATRIX_STRIDE
    # A matrix of one part that is a single block stays in registers.
    key_matrix = ()
    if KEY_PARTS == 1 and HEAD_DIM <= BLOCK_K:
        key_matrix = _matrix(key_matrix_ptr, offs_k, 1, KEY_PART_STRIDE, HEAD_DIM, BLOCK_D)
    value_matrix = ()
    if VALUE_PARTS == 1 and HEAD_DIM <= BLOCK_K:
        value_matrix = _matrix(value_matrix_ptr, offs_k, 1, VALUE_PART_STRIDE, HEAD_DIM, BLOCK_D)
    key_edges = ()
    if not KEY_FP8:
        key_edges = _edges(key_edges_ptr, (1 << KEY_BITS) - 1)
    value_edges = ()
    if not VALUE_AFFINE:
        value_edges = _edges(value_edges_ptr, (1 << VALUE_BITS) - 1)
    for block in range(
        tl.program_id(0) // NUM_KV_HEADS, tl.cdiv(num_tokens, BLOCK_R), num_programs
    ):
        row = block * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
        slot = tl.load(slot_ptr + row * SLOT_STRIDE, mask=row < num_tokens, other=-1).to(tl.int64)
        mask_r = (slot >= 0) & (slot // PAGE_SIZE < num_pages)
        slot = tl.where(mask_r, slot, 0)
        page_ptr = cache_ptr + (slot // PAGE_SIZE) * PAGE_STRIDE
        place = (slot % PAGE_SIZE).to(tl.int32)
        meta_ptr = typed_ptr(cache_ptr, 2) + (slot // PAGE_SIZE) * (PAGE_STRIDE // 2)
        meta_at = META_BASE // 2 + head * (META_HEAD_STRIDE // 2) + place

        x, y, scale = _coded(
            key_ptr + row * KEY_STRIDE_N + head * KEY_STRIDE_H, mask_r,
            key_offset_ptr + head * KEY_OFFSET_STRIDE, key_matrix_ptr, key_matrix, KEY_STRIDE_D,
            HAS_KEY_OFFSET, KEY_PARTS, KEY_PART_STRIDE, KEY_FACTOR, KEY_PARTS > 0 or not KEY_FP8,
            WIDEN, HEAD_DIM, BLOCK_R, BLOCK_D, BLOCK_K,
        )  # fmt: skip
        if KEY_FP8:
            key_scale = tl.load(key_scale_ptr + head * KEY_SCALE_STRIDE)
            if KEY_PARTS > 0:
                y = _finite(y * scale[:, None], INPUT_MAX)
            codes = _e4m3(tl.div_rn(y, key_scale + 0 * y))
        else:
            codes, stored = _codebook(
                x, y, scale, key_edges, key_levels_ptr, KEY_BITS, HAS_KEY_TRANSFORM,
                NORM_CORRECTION, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
            bits = stored.to(tl.uint16, bitcast=True)
            tl.store(meta_ptr + meta_at, bits, mask=mask_r)
        codes_ptr = page_ptr + head * KEY_HEAD_STRIDE
        if KEY_PLANAR:
            _write(
                codes_ptr, place, codes & 3, mask_r, 0, 2, KEY_ELEMENT, KEY_SLOT_STRIDE, False, 0,
                0, PAGE_SIZE, HEAD_DIM, BLOCK_R, BLOCK_D,
            )  # fmt: skip
            _write(
                codes_ptr, place, codes >> 2, mask_r, HEAD_DIM // 4, 1, KEY_ELEMENT,
                KEY_SLOT_STRIDE, False, 0, 0, PAGE_SIZE, HEAD_DIM, BLOCK_R, BLOCK_D,
            )  # fmt: skip
        else:
            _write(
                codes_ptr, place, codes, mask_r, 0, KEY_BITS, KEY_ELEMENT, KEY_SLOT_STRIDE,
                False, 0, 0, PAGE_SIZE, HEAD_DIM, BLOCK_R, BLOCK_D,
            )  # fmt: skip

        x, y, scale = _coded(
            value_ptr + row * VALUE_STRIDE_N + head * VALUE_STRIDE_H, mask_r,
            value_offset_ptr + head * VALUE_OFFSET_STRIDE, value_matrix_ptr, value_matrix,
            VALUE_STRIDE_D, HAS_VALUE_OFFSET, VALUE_PARTS, VALUE_PART_STRIDE, VALUE_FACTOR,
            VALUE_PARTS > 0 or not VALUE_AFFINE, WIDEN, HEAD_DIM, BLOCK_R, BLOCK_D, BLOCK_K,
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
            # No step, no codes but 0.
            inverse = tl.where(wide_step == 0, 0.0, tl.div_rn(1.0 + 0 * divisor, divisor))
            steps = _quotient(v - wide_zero[:, None], divisor[:, None], inverse[:, None])
            steps = tl.minimum(tl.maximum(tl.floor(steps + 0.5), 0.0), TOP)
            codes = steps.to(tl.int32)
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
                x, y, scale, value_edges, value_levels_ptr, VALUE_BITS, HAS_VALUE_TRANSFORM,
                NORM_CORRECTION, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
            bits = stored.to(tl.uint16, bitcast=True)
            tl.store(meta_ptr + meta_at + META_VALUE // 2, bits, mask=mask_r)
        _write(
            page_ptr + VALUE_BASE + head * VALUE_HEAD_STRIDE, place, codes, mask_r, 0, VALUE_BITS,
            VALUE_ELEMENT, VALUE_SLOT_STRIDE, VALUE_WORD_MAJOR, VALUE_WHOLE, VALUE_TAIL,
            PAGE_SIZE, HEAD_DIM, BLOCK_R, BLOCK_D,
        )  # fmt: skip
