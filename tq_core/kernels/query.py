"""Transforms of whole rows by a D x D matrix, queries before and outputs after attention.

A query becomes ``q' = M q / s`` and the row constant ``q . mu`` of a key offset. For grid codebooks
``q'`` is an integer of up to 127 * 128, two bytes ``128 high + low``, in the order in which the
first dot of attention wants them, and ``s`` what makes its largest coordinate that number. For
others it is fp16 and ``s`` a power of two near the query's largest coordinate, so that any finite
fp16 or bf16 query fits.

Queries and ``M`` are fp16 numbers here, and where those lack something, 2048 times the rest as
another: 22 bits. A bf16 or fp16 query and a signed Hadamard matrix need no second number.
Outputs are transformed with the precision of fp32: the dots are IEEE, or on NVIDIA three TF32 dots
that add up to it.
"""

import triton
import triton.language as tl

from tq_core.kernels.codes import grid_coordinate
from tq_core.kernels.order import let_next_start, wait_for_previous

LARGEST = tl.constexpr(127.0 * 128.0)
#: What the second fp16 number of a pair is multiplied by.
FINER = tl.constexpr(2048.0)


@triton.jit
def power_of_two(x):
    """A power of two at or below ``x`` and its exact inverse; ``x`` >= 0, fp32."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def _load_matrix(
    matrix_ptr, offs_o, mask_o, offs_k, HEAD_DIM: tl.constexpr, LOW_AT: tl.constexpr
):  # fmt: skip
    """Columns of ``M`` transposed, ``[K, O]``: the numbers and, behind ``LOW_AT``, their rest."""
    at = matrix_ptr + offs_o[None, :] * HEAD_DIM + offs_k[:, None]
    mask = mask_o[None, :] & (offs_k < HEAD_DIM)[:, None]
    high = tl.load(at, mask=mask, other=0.0)
    low = high
    if LOW_AT > 0:
        low = tl.load(at + LOW_AT, mask=mask, other=0.0)
    return high, low


@triton.jit
def _dot(x, high, low, y, rest, LOW: tl.constexpr, LOW_AT: tl.constexpr):
    """Adds ``x`` times a matrix to ``y``, and 2048 times the smaller products to ``rest``."""
    x_high = x.to(tl.float16)
    y = tl.dot(x_high, high, y)
    if LOW_AT > 0:
        rest = tl.dot(x_high, low, rest)
    if LOW:
        rest = tl.dot(((x - x_high.to(tl.float32)) * FINER).to(tl.float16), high, rest)
    return y, rest


@triton.jit
def _transformed(
    row_ptr, matrix_ptr, inverse, mask_n, offs_o, mask_o,
    STRIDE_D: tl.constexpr, HAS_MATRIX: tl.constexpr, LOW: tl.constexpr, LOW_AT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Coordinates ``offs_o`` of the transformed rows times ``inverse``, fp32."""
    if HAS_MATRIX:
        y = tl.zeros([inverse.shape[0], offs_o.shape[0]], tl.float32)
        rest = y
        for k in range(0, HEAD_DIM, BLOCK_K):
            offs_k = k + tl.arange(0, BLOCK_K)
            high, low = _load_matrix(matrix_ptr, offs_o, mask_o, offs_k, HEAD_DIM, LOW_AT)
            part = tl.load(
                row_ptr[:, None] + offs_k[None, :] * STRIDE_D,
                mask=mask_n[:, None] & (offs_k < HEAD_DIM)[None, :],
                other=0.0,
            )
            part = part.to(tl.float32) * inverse[:, None]
            y, rest = _dot(part, high, low, y, rest, LOW, LOW_AT)
        return y + rest * (1 / FINER)
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
def _store_integers(out_ptr, y, mask, NUM_OUT: tl.constexpr):
    """Rounds ``y`` to integers and stores their high and low bytes, ``NUM_OUT`` apart."""
    number = tl.floor(y + 0.5).to(tl.int32)
    high = (number + 64) >> 7
    tl.store(out_ptr, high.to(tl.int8), mask=mask)
    tl.store(out_ptr + NUM_OUT, (number - high * 128).to(tl.int8), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def transform_query(
    query_ptr, matrix_ptr, factor_ptr, offset_ptr,
    num_tokens,
    out_ptr, row_terms_ptr,
    STRIDE_N: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_D: tl.constexpr,
    NUM_QUERY_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    INTEGER: tl.constexpr, HAS_MATRIX: tl.constexpr, MATRIX_STRIDE: tl.constexpr,
    LOW_AT: tl.constexpr, FACTOR_STRIDE: tl.constexpr, HAS_OFFSET: tl.constexpr,
    OFFSET_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_OUT: tl.constexpr,
    BLOCK_KEY: tl.constexpr, KEY_CODES: tl.constexpr, KEY_STRIDED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_O: tl.constexpr,
    PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """fp16 ``[N, Hq, D]`` or int8 ``[N, Hq, 2, K]`` queries; fp32 ``[N, Hq]`` scales, constants.

    A program has ``BLOCK_N`` rows of one KV head, and all of their coordinates with ``INTEGER``:
    those in the order of ``grid_coordinate``, zeros where it has none.
    """
    BLOCKS_O: tl.constexpr = 1 if INTEGER else (HEAD_DIM + BLOCK_O - 1) // BLOCK_O
    LOW: tl.constexpr = query_ptr.dtype.element_ty == tl.float32
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
    factor = tl.load(factor_ptr + head * FACTOR_STRIDE)

    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    offs_o = block_o * BLOCK_O + tl.arange(0, BLOCK_O)
    coordinate = offs_o
    if INTEGER:
        coordinate = grid_coordinate(offs_o, BLOCK_KEY, KEY_CODES, KEY_STRIDED)
    mask_o = coordinate < HEAD_DIM
    # All of a matrix that fits is asked for at once, before there is a query.
    WHOLE: tl.constexpr = HAS_MATRIX and BLOCK_K >= HEAD_DIM and BLOCK_O * BLOCKS_O >= NUM_OUT
    if WHOLE:
        high, low = _load_matrix(matrix_ptr, coordinate, mask_o, offs_d, HEAD_DIM, LOW_AT)
    wait_for_previous(PDL)
    # Not before: the next kernel may then read what kernels before this one have written.
    let_next_start(EARLY)
    mask = mask_n[:, None] & mask_d[None, :]
    x = tl.load(row_ptr[:, None] + offs_d[None, :] * STRIDE_D, mask=mask, other=0.0).to(tl.float32)
    scale, inverse = power_of_two(tl.max(tl.abs(x), 1))
    if block_o == 0:
        if HAS_OFFSET:
            mu = tl.load(offset_ptr + head * OFFSET_STRIDE + offs_d, mask=mask_d, other=0.0)
            const_ptr = row_terms_ptr + num_tokens.to(tl.int64) * NUM_QUERY_HEADS
            tl.store(const_ptr + flat, tl.sum(x * mu[None, :], 1), mask=mask_n)

    out = out_ptr + flat[:, None] * (2 * NUM_OUT if INTEGER else NUM_OUT)
    if INTEGER and BLOCK_O < NUM_OUT:
        # More than stays in registers: computed twice, to the same bits.
        top = tl.zeros([BLOCK_N], tl.float32)
        for o in range(0, NUM_OUT, BLOCK_O):
            coordinate = grid_coordinate(o + offs_o, BLOCK_KEY, KEY_CODES, KEY_STRIDED)
            y = _transformed(
                row_ptr, matrix_ptr, inverse, mask_n, coordinate, coordinate < HEAD_DIM, STRIDE_D,
                HAS_MATRIX, LOW, LOW_AT, HEAD_DIM, BLOCK_K,
            )  # fmt: skip
            other = _largest(y)
            top = tl.where((other != other) | (other > top), other, top)
        finer = LARGEST / tl.maximum(top, 1e-30)
        for o in range(0, NUM_OUT, BLOCK_O):
            coordinate = grid_coordinate(o + offs_o, BLOCK_KEY, KEY_CODES, KEY_STRIDED)
            y = _transformed(
                row_ptr, matrix_ptr, inverse, mask_n, coordinate, coordinate < HEAD_DIM, STRIDE_D,
                HAS_MATRIX, LOW, LOW_AT, HEAD_DIM, BLOCK_K,
            )  # fmt: skip
            mask_out = mask_n[:, None] & (o + offs_o < NUM_OUT)[None, :]
            _store_integers(out + (o + offs_o)[None, :], y * finer[:, None], mask_out, NUM_OUT)
        scale = scale * (top / LARGEST)
    else:
        if WHOLE:
            y = tl.zeros([BLOCK_N, BLOCK_O], tl.float32)
            y, rest = _dot(x * inverse[:, None], high, low, y, y, LOW, LOW_AT)
            if LOW or LOW_AT > 0:
                y = y + rest * (1 / FINER)
        else:
            y = _transformed(
                row_ptr, matrix_ptr, inverse, mask_n, coordinate, mask_o, STRIDE_D, HAS_MATRIX, LOW,
                LOW_AT, HEAD_DIM, BLOCK_K,
            )  # fmt: skip
        mask_out = mask_n[:, None] & (offs_o < NUM_OUT)[None, :]
        if INTEGER:
            top = _largest(y)
            finer = LARGEST / tl.maximum(top, 1e-30)
            _store_integers(out + offs_o[None, :], y * finer[:, None], mask_out, NUM_OUT)
            scale = scale * (top / LARGEST)
        else:
            tl.store(out + offs_o[None, :], y.to(tl.float16), mask=mask_out)
    if block_o == 0:
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
    PRECISION: tl.constexpr, PDL: tl.constexpr,
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
    wait_for_previous(PDL)
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
