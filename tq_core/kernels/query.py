"""Transforms of whole rows by a D x D matrix, queries before and outputs after attention.

The precision is that of fp32: the dots are IEEE, or on NVIDIA three TF32 dots that add up to it.

A query becomes ``q' = M q / s`` and the row constant ``q . mu`` of a key offset. For grid codebooks
``q'`` is an integer of up to 127 * 128, two bytes ``128 high + low``, and ``s`` what makes its
largest coordinate that number. For others it is fp16 and ``s`` a power of two near the query's
largest coordinate, so that any finite fp16 or bf16 query fits.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(127.0 * 128.0)


@triton.jit
def power_of_two(x):
    """A power of two at or below ``x`` and its exact inverse; ``x`` >= 0, fp32."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def _transformed(
    row_ptr, matrix_ptr, inverse, mask_n, offs_o, mask_o,
    STRIDE_D: tl.constexpr, HAS_MATRIX: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Coordinates ``offs_o`` of the transformed rows times ``inverse``, fp32."""
    if HAS_MATRIX:
        y = tl.zeros([inverse.shape[0], offs_o.shape[0]], tl.float32)
        for k in range(0, HEAD_DIM, BLOCK_K):
            offs_k = k + tl.arange(0, BLOCK_K)
            mask_k = offs_k < HEAD_DIM
            at = matrix_ptr + offs_o[None, :] * HEAD_DIM + offs_k[:, None]
            matrix = tl.load(at, mask=mask_o[None, :] & mask_k[:, None], other=0.0)
            part = tl.load(
                row_ptr[:, None] + offs_k[None, :] * STRIDE_D,
                mask=mask_n[:, None] & mask_k[None, :],
                other=0.0,
            )
            part = part.to(tl.float32) * inverse[:, None]
            y = tl.dot(part, matrix, y, input_precision=PRECISION)
        return y
    else:
        y = tl.load(
            row_ptr[:, None] + offs_o[None, :] * STRIDE_D,
            mask=mask_n[:, None] & mask_o[None, :],
            other=0.0,
        )
        return y.to(tl.float32) * inverse[:, None]


@triton.jit
def _largest(y):
    """The largest magnitude of each row, NaN where the row has a number that is not finite."""
    return tl.max(tl.abs(y), 1) + tl.sum(y * 0.0, 1)


@triton.jit
def _store_integers(out_ptr, y, mask, HEAD_DIM: tl.constexpr):
    """Rounds ``y`` to integers and stores their high and low bytes, ``HEAD_DIM`` apart."""
    number = tl.floor(y + 0.5).to(tl.int32)
    high = (number + 64) >> 7
    tl.store(out_ptr, high.to(tl.int8), mask=mask)
    tl.store(out_ptr + HEAD_DIM, (number - high * 128).to(tl.int8), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def transform_query(
    query_ptr, matrix_ptr, factor_ptr, offset_ptr,
    num_tokens,
    out_ptr, row_terms_ptr,
    STRIDE_N: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_D: tl.constexpr,
    NUM_QUERY_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    INTEGER: tl.constexpr, HAS_MATRIX: tl.constexpr, MATRIX_STRIDE: tl.constexpr,
    FACTOR_STRIDE: tl.constexpr, HAS_OFFSET: tl.constexpr, OFFSET_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_O: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """fp16 ``[N, Hq, D]`` or int8 ``[N, Hq, 2, D]`` queries; fp32 ``[N, Hq]`` scales, constants.

    A program has ``BLOCK_N`` rows of one KV head, and all of their coordinates with ``INTEGER``.
    """
    BLOCKS_O: tl.constexpr = 1 if INTEGER else (HEAD_DIM + BLOCK_O - 1) // BLOCK_O
    pid = tl.program_id(0)
    block_o = pid % BLOCKS_O
    head = (pid // BLOCKS_O) % NUM_KV_HEADS
    column = (pid // BLOCKS_O // NUM_KV_HEADS).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = column < num_tokens.to(tl.int64) * GROUP
    token = column // GROUP
    query_head = head * GROUP + column % GROUP
    row_ptr = query_ptr + token * STRIDE_N + query_head * STRIDE_H
    flat = token * NUM_QUERY_HEADS + query_head
    matrix_ptr = matrix_ptr + head * MATRIX_STRIDE

    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    mask = mask_n[:, None] & mask_d[None, :]
    x = tl.load(row_ptr[:, None] + offs_d[None, :] * STRIDE_D, mask=mask, other=0.0).to(tl.float32)
    scale, inverse = power_of_two(tl.max(tl.abs(x), 1))
    if block_o == 0:
        if HAS_OFFSET:
            mu = tl.load(offset_ptr + head * OFFSET_STRIDE + offs_d, mask=mask_d, other=0.0)
            const_ptr = row_terms_ptr + num_tokens.to(tl.int64) * NUM_QUERY_HEADS
            tl.store(const_ptr + flat, tl.sum(x * mu[None, :], 1), mask=mask_n)

    if INTEGER:
        out = out_ptr + flat[:, None] * (2 * HEAD_DIM)
        if BLOCK_O >= HEAD_DIM:
            offs_o = tl.arange(0, BLOCK_O)
            y = _transformed(
                row_ptr, matrix_ptr, inverse, mask_n, offs_o, offs_o < HEAD_DIM, STRIDE_D,
                HAS_MATRIX, HEAD_DIM, BLOCK_K, PRECISION,
            )  # fmt: skip
            top = _largest(y)
            finer = LARGEST / tl.maximum(top, 1e-30)
            mask_out = mask_n[:, None] & (offs_o < HEAD_DIM)[None, :]
            _store_integers(out + offs_o[None, :], y * finer[:, None], mask_out, HEAD_DIM)
        else:
            # More than stays in registers: computed twice, to the same bits.
            top = tl.zeros([BLOCK_N], tl.float32)
            for o in range(0, HEAD_DIM, BLOCK_O):
                offs_o = o + tl.arange(0, BLOCK_O)
                y = _transformed(
                    row_ptr, matrix_ptr, inverse, mask_n, offs_o, offs_o < HEAD_DIM, STRIDE_D,
                    HAS_MATRIX, HEAD_DIM, BLOCK_K, PRECISION,
                )  # fmt: skip
                other = _largest(y)
                top = tl.where((other != other) | (other > top), other, top)
            finer = LARGEST / tl.maximum(top, 1e-30)
            for o in range(0, HEAD_DIM, BLOCK_O):
                offs_o = o + tl.arange(0, BLOCK_O)
                mask_o = offs_o < HEAD_DIM
                y = _transformed(
                    row_ptr, matrix_ptr, inverse, mask_n, offs_o, mask_o, STRIDE_D, HAS_MATRIX,
                    HEAD_DIM, BLOCK_K, PRECISION,
                )  # fmt: skip
                mask_out = mask_n[:, None] & mask_o[None, :]
                _store_integers(out + offs_o[None, :], y * finer[:, None], mask_out, HEAD_DIM)
        scale = scale * (top / LARGEST)
    else:
        offs_o = block_o * BLOCK_O + tl.arange(0, BLOCK_O)
        mask_o = offs_o < HEAD_DIM
        y = _transformed(
            row_ptr, matrix_ptr, inverse, mask_n, offs_o, mask_o, STRIDE_D, HAS_MATRIX, HEAD_DIM,
            BLOCK_K, PRECISION,
        )  # fmt: skip
        out = out_ptr + flat[:, None] * HEAD_DIM + offs_o[None, :]
        tl.store(out, y.to(tl.float16), mask=mask_n[:, None] & mask_o[None, :])
    if block_o == 0:
        factor = tl.load(factor_ptr + head * FACTOR_STRIDE)
        tl.store(row_terms_ptr + flat, scale * factor, mask=mask_n)


@triton.jit(do_not_specialize=["num_tokens"])
def transform_output(
    coded_ptr, matrix_ptr,
    num_tokens,
    out_ptr,
    STRIDE_N: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_D: tl.constexpr,
    NUM_QUERY_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    MATRIX_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_O: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows fp32 ``[N, Hq, D]`` in the coded basis of the values to the output's dtype and basis."""
    BLOCKS_O: tl.constexpr = (HEAD_DIM + BLOCK_O - 1) // BLOCK_O
    pid = tl.program_id(0)
    block_o = pid % BLOCKS_O
    head = (pid // BLOCKS_O) % NUM_KV_HEADS
    column = (pid // BLOCKS_O // NUM_KV_HEADS).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = column < num_tokens.to(tl.int64) * GROUP
    token = column // GROUP
    query_head = head * GROUP + column % GROUP
    offs_o = block_o * BLOCK_O + tl.arange(0, BLOCK_O)
    mask_o = offs_o < HEAD_DIM
    row_ptr = coded_ptr + (token * NUM_QUERY_HEADS + query_head) * HEAD_DIM
    y = tl.zeros([BLOCK_N, BLOCK_O], tl.float32)
    for k in range(0, HEAD_DIM, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        mask_k = offs_k < HEAD_DIM
        part = tl.load(
            row_ptr[:, None] + offs_k[None, :], mask=mask_n[:, None] & mask_k[None, :], other=0.0
        )
        matrix = tl.load(
            matrix_ptr + head * MATRIX_STRIDE + offs_o[None, :] * HEAD_DIM + offs_k[:, None],
            mask=mask_o[None, :] & mask_k[:, None],
            other=0.0,
        )
        y = tl.dot(part, matrix, y, input_precision=PRECISION)
    out = out_ptr + (token * STRIDE_N + query_head * STRIDE_H)[:, None]
    tl.store(
        out + (offs_o * STRIDE_D)[None, :],
        y.to(out_ptr.dtype.element_ty),
        mask=mask_n[:, None] & mask_o[None, :],
    )
