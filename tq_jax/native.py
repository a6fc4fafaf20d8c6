"""The native backend: jnp and lax operations, on any device.

Attention streams over tiles of a bounded number of tokens with an online softmax (Milakov and
Gimelshein, arXiv 1805.02867). Keys stay in their rotated basis and values in theirs: the query is
rotated once, the output once (TurboQuant, arXiv 2504.19874).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tq_core.codebook import midpoints
from tq_core.codec import Codec
from tq_core.layout import CacheLayout
from tq_core.packing import E4M3_MAX, e4m3_values
from tq_core.reference import FP16_MAX, INPUT_MAX
from tq_core.validation import AttentionCall
from tq_jax import pages
from tq_jax.transforms import inference_only

_TILE_BYTES = 4 << 20  # fp32 keys and values of one tile
_WORK_BYTES = 4 << 20  # all intermediates of the blocks that run side by side
_MAX_TILE = 256
_MAX_ROWS = 128  # query rows times group that share one decoded tile
_MAX_WINDOW = 1 << 30  # position - window stays inside int32

_exact_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class _Tile(NamedTuple):
    """Decoded tokens, codes only: keys are ``key_scale * keys``, values ``scale * values + zero``.

    Absent scales and zeros are None.
    """

    keys: jax.Array  # [Hk, T, D]
    key_scale: jax.Array | None  # [Hk, T]
    values: jax.Array  # [Hk, T, D]
    value_scale: jax.Array  # [Hk, T]
    value_zero: jax.Array | None  # [Hk, T]


def _read_tile(
    flat: jax.Array,
    page: jax.Array,
    slot: jax.Array,
    valid: jax.Array,
    layout: CacheLayout,
    codec: Codec,
) -> _Tile:
    """The tokens at ``page``, ``slot`` [T]. Where not ``valid``, value scale and zero are 0."""
    config, dim = layout.config, layout.head_dim
    key_runs, value_runs = pages.code_runs(layout)
    key_data = pages.read(flat, key_runs, page, slot)
    value_data = pages.read(flat, value_runs, page, slot)
    fields = pages.fields(pages.read(flat, pages.field_runs(layout), page, slot))  # [Hk, T, F]
    key_levels = e4m3_values() if codec.centroids is None else codec.centroids
    value_levels = (
        np.arange(2**config.value_bits) if codec.value_centroids is None else codec.value_centroids
    )
    affine = not config.value_is_codebook
    # 0 * inf is NaN: bytes of tokens that nobody wrote must not reach the value sums.
    value_fields = jnp.where(valid[:, None], fields[..., -2 if affine else -1 :], 0.0)
    return _Tile(
        keys=pages.decode(key_data, key_levels, dim, config.key_bits, config.key_packing),
        key_scale=fields[..., 0] if config.key_is_codebook else None,
        values=pages.decode(value_data, value_levels, dim, config.value_bits, "dense"),
        value_scale=value_fields[..., 0],
        value_zero=value_fields[..., 1] if affine else None,
    )


def _divide(x: jax.Array, divisor: Any) -> jax.Array:
    """True division: XLA multiplies by the reciprocal of what it sees to be broadcast."""
    return x / lax.optimization_barrier(jnp.broadcast_to(divisor, x.shape))


def _coded_vectors(
    x: jax.Array, offset: np.ndarray | None, transform: np.ndarray | None
) -> jax.Array:
    """``T (x - offset)``, float32 [N, Hk, D], non-finite input replaced."""
    x = x.astype(jnp.float32)
    x = jnp.clip(jnp.where(jnp.isnan(x), 0.0, x), -INPUT_MAX, INPUT_MAX)
    if offset is not None:
        x = x - offset
    return x if transform is None else jnp.clip(_apply(transform, x), -INPUT_MAX, INPUT_MAX)


def _apply(matrix: np.ndarray, x: jax.Array) -> jax.Array:
    """``matrix`` [1 or Hk, D, D] times the vectors ``x`` [N, Hk, D]."""
    if matrix.shape[0] == 1:
        return _exact_einsum("ij,nhj->nhi", matrix[0], x)
    return _exact_einsum("hij,nhj->nhi", matrix, x)


def _quantize_codebook(
    coded: jax.Array, codec: Codec, centroids: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """Codes int32 [N, Hk, D] and scale bits uint16 [N, Hk]."""
    # Dividing by a power of two first is exact, and keeps the squares inside float32.
    largest = jnp.clip(jnp.abs(coded).max(-1, keepdims=True), 2.0**-126, 2.0**126)
    exponent = lax.bitcast_convert_type(largest, jnp.uint32) & jnp.uint32(0x7F800000)
    power = lax.bitcast_convert_type(exponent, jnp.float32)
    scaled = coded / power
    length = jnp.sqrt((scaled * scaled).sum(-1, keepdims=True))
    unit = jnp.where(length > 0, scaled / jnp.where(length > 0, length, 1.0), 0.0)
    rotated = _apply(codec.rotation[None], unit)
    codes = sum((rotated >= edge).astype(jnp.int32) for edge in midpoints(centroids))
    norm = (length * power)[..., 0]
    if codec.config.norm_correction:
        chosen = jnp.sqrt((pages.look_up(centroids[:, None], codes) ** 2).sum(-1))
        norm = jnp.where(chosen > 0, norm / jnp.where(chosen > 0, chosen, 1.0), 0.0)
    return codes, pages.half_bits(jnp.minimum(norm, FP16_MAX))


def _encode_e4m3(x: jax.Array) -> jax.Array:
    """Rounds to e4m3fn codes, int32: nearest, ties to even, saturating.

    In integers, because XLA's own conversion may round twice, through fp16.
    """
    sign = lax.bitcast_convert_type(x, jnp.uint32) >> 31 << 7
    magnitude = jnp.minimum(jnp.abs(x), E4M3_MAX)
    bits = lax.bitcast_convert_type(magnitude, jnp.uint32)
    normal = (bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - (120 << 3)
    subnormal = jnp.rint(magnitude * 512.0).astype(jnp.uint32)
    return (jnp.where(magnitude < 2.0**-6, subnormal, normal) | sign).astype(jnp.int32)


def _quantize_keys(key: jax.Array, codec: Codec) -> tuple[jax.Array, list[jax.Array]]:
    coded = _coded_vectors(key, codec.key_offset, codec.key_transform)
    if codec.centroids is not None:
        codes, scale = _quantize_codebook(coded, codec, codec.centroids)
        return codes, [scale]
    if (codec.key_scale != 1).any():
        coded = _divide(coded, codec.key_scale[:, None])
    return _encode_e4m3(coded), []


def _quantize_values(value: jax.Array, codec: Codec) -> tuple[jax.Array, list[jax.Array]]:
    coded = _coded_vectors(value, codec.value_offset, codec.value_transform)
    if codec.value_centroids is not None:
        codes, scale = _quantize_codebook(coded, codec, codec.value_centroids)
        return codes, [scale]
    levels = np.float32(2**codec.config.value_bits - 1)
    x = jnp.clip(coded, -FP16_MAX, FP16_MAX)
    zero_bits = pages.half_bits(x.min(-1))
    zero = pages.half_value(zero_bits)
    scale_bits = pages.half_bits(_divide(x.max(-1) - zero, levels))
    scale = pages.half_value(scale_bits)[..., None]
    steps = jnp.floor(_divide(x - zero[..., None], jnp.where(scale == 0, 1.0, scale)) + 0.5)
    codes = jnp.where(scale == 0, 0.0, jnp.clip(steps, 0.0, levels))
    return codes.astype(jnp.int32), [scale_bits, zero_bits]


def _zero_of(*arrays: jax.Array | None) -> jax.Array:
    """A float32 zero whose type depends on ``arrays``.

    Under ``jax.shard_map`` what a loop starts from must vary over the mesh axes of its results.
    """
    firsts = [a[(0,) * a.ndim] for a in arrays if a is not None]
    return sum(jnp.where(x == x, np.float32(0), np.float32(0)) for x in firsts)


def store(
    key: jax.Array,
    value: jax.Array,
    cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    layout: CacheLayout,
    codec: Codec,
) -> jax.Array:
    """The cache with ``key`` and ``value`` written; arguments as in :func:`tq_jax.store`."""
    return _store(key, value, cache, slot_mapping, layout=layout, codec=codec)


@partial(jax.jit, static_argnames=("layout", "codec"))
def _store(key, value, cache, slot_mapping, *, layout, codec):
    run = inference_only(partial(_store_chunks, layout=layout, codec=codec), "tq_jax.store")
    return run(key, value, cache, slot_mapping)


def _store_chunks(key, value, cache, slot_mapping, *, layout, codec):
    num_tokens, num_pages = key.shape[0], cache.shape[0]
    if 0 in (num_tokens, num_pages):
        return cache
    page, slot = pages.divmod_positive(slot_mapping, layout.page_size)
    inside = (slot_mapping >= 0) & (page < num_pages)
    page = jnp.where(inside, page, num_pages).astype(jnp.int32)
    slot = jnp.where(inside, slot, 0).astype(jnp.int32)
    size = max(1, _WORK_BYTES // (16 * layout.num_kv_heads * layout.head_dim))
    store_chunk = partial(_store_chunk, layout=layout, codec=codec)
    if num_tokens <= size:
        return store_chunk(key, value, cache, page, slot)

    def body(i, cache):
        # The last chunk overlaps the one before it and writes the same bytes again.
        start = jnp.minimum(i * size, num_tokens - size)
        parts = (lax.dynamic_slice_in_dim(a, start, size) for a in (key, value, page, slot))
        key_part, value_part, page_part, slot_part = parts
        return store_chunk(key_part, value_part, cache, page_part, slot_part)

    return lax.fori_loop(0, -(-num_tokens // size), body, cache)


def _store_chunk(key, value, cache, page, slot, *, layout, codec):
    config = layout.config
    key_codes, key_fields = _quantize_keys(key, codec)
    value_codes, value_fields = _quantize_values(value, codec)
    key_runs, value_runs = pages.code_runs(layout)
    fields = jnp.stack([*key_fields, *value_fields], -1)  # uint16 [N, Hk, F]
    for runs, data in (
        (key_runs, pages.pack(key_codes, config.key_bits, config.key_packing)),
        (value_runs, pages.pack(value_codes, config.value_bits)),
        (pages.field_runs(layout), pages.field_bytes(fields)),
    ):
        cache = pages.write(cache, runs, page, slot, data)
    return cache


def dequantize(
    cache: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    *,
    layout: CacheLayout,
    codec: Codec,
    dtype: str,
) -> tuple[jax.Array, jax.Array]:
    """Dense keys and values; arguments as in :func:`tq_jax.dequantize`."""
    return _dequantize(cache, block_table, seq_lens, layout=layout, codec=codec, dtype=dtype)


@partial(jax.jit, static_argnames=("layout", "codec", "dtype"))
def _dequantize(cache, block_table, seq_lens, *, layout, codec, dtype):
    num_seqs, max_pages = block_table.shape
    capacity = max_pages * layout.page_size
    shape = (num_seqs, capacity, layout.num_kv_heads, layout.head_dim)
    empty = jnp.zeros(shape, dtype)
    if 0 in shape or not cache.shape[0]:
        return empty, empty
    empty = empty + _zero_of(cache, block_table, seq_lens).astype(dtype)
    flat = pages.flat_pages(cache, layout)
    tile = _tile_size(layout, capacity)
    lengths = jnp.clip(seq_lens, 0, capacity)

    def one_tile(t, dense, row):
        start = jnp.minimum(t * tile, capacity - tile)
        token = start + jnp.arange(tile, dtype=jnp.int32)
        valid = token < lengths[row]
        page, slot = pages.locate(token, row, block_table, cache.shape[0], layout.page_size)
        parts = _reconstruct(_read_tile(flat, page, slot, valid, layout, codec), layout, codec)
        return tuple(
            lax.dynamic_update_slice(
                whole,
                jnp.where(valid[:, None, None], part, 0.0).astype(dtype)[None],
                (row, start, 0, 0),
            )
            for whole, part in zip(dense, parts, strict=True)
        )

    def one_sequence(row, dense):
        tiles = pages.ceil_divide(lengths[row], tile)
        return lax.fori_loop(0, tiles, partial(one_tile, row=row), dense)

    return lax.fori_loop(0, num_seqs, one_sequence, (empty, empty))


def _reconstruct(tile: _Tile, layout: CacheLayout, codec: Codec) -> tuple[jax.Array, jax.Array]:
    """Keys and values float32 [T, Hk, D]."""
    keys, values = tile.keys, tile.values * tile.value_scale[..., None]
    if tile.key_scale is not None:
        keys = keys * tile.key_scale[..., None]
    elif (codec.key_scale != 1).any():
        keys = keys * codec.key_scale[:, None, None]
    if tile.value_zero is not None:
        values = values + tile.value_zero[..., None]
    keys, values = keys.swapaxes(0, 1), values.swapaxes(0, 1)
    if codec.has_key_matrix:
        keys = _apply(codec.query_matrix.swapaxes(1, 2), keys)
    if codec.has_value_matrix:
        values = _apply(codec.output_matrix, values)
    if codec.key_offset is not None:
        keys = keys + codec.key_offset
    if codec.value_offset is not None:
        values = values + codec.value_offset
    return keys, values


def attention(
    query: jax.Array,
    cache: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array | None,
    sinks: jax.Array | None,
    alibi_slopes: jax.Array | None,
    *,
    call: AttentionCall,
    layout: CacheLayout,
    codec: Codec,
) -> tuple[jax.Array, jax.Array]:
    """Output [N, Hq, D] and LSE [N, Hq]; arguments as in :func:`tq_jax.attention`.

    ``query_start_loc`` None means one row a sequence.
    """
    return _attention(
        query,
        cache,
        block_table,
        seq_lens,
        query_start_loc,
        sinks,
        alibi_slopes,
        layout=layout,
        codec=codec,
        scale=call.scale,
        causal=call.causal,
        window=call.sliding_window,
        softcap=call.softcap,
        block_rows=_block_rows(call, layout),
    )


@partial(
    jax.jit,
    static_argnames=("layout", "codec", "scale", "causal", "window", "softcap", "block_rows"),
)
def _attention(
    query,
    cache,
    block_table,
    seq_lens,
    query_start_loc,
    sinks,
    alibi_slopes,
    **static,
):
    run = inference_only(partial(_attend, **static), "attention over a quantised cache")
    return run(query, cache, block_table, seq_lens, query_start_loc, sinks, alibi_slopes)


def _tile_size(layout: CacheLayout, capacity: int) -> int:
    """Tokens decoded at a time."""
    token_bytes = 8 * layout.num_kv_heads * layout.head_dim
    return max(1, min(_MAX_TILE, capacity, max(16, _TILE_BYTES // token_bytes)))


def _block_rows(call: AttentionCall, layout: CacheLayout) -> int:
    """Query rows of a block, R. Right for any lengths, good for those that the hints promise."""
    row_bytes = 4 * call.num_query_heads * layout.head_dim
    most = max(1, min(_MAX_ROWS // call.group, _MAX_ROWS // 2, _TILE_BYTES // row_bytes))
    mean = -(-call.num_tokens // max(1, call.num_seqs))
    likely = min(call.max_query_len, mean)
    return min(1 << (most.bit_length() - 1), 1 << max(0, likely - 1).bit_length())


class _Blocks(NamedTuple):
    """Query rows that run together, int32 [blocks] each. All rows of a block share a sequence."""

    sequence: jax.Array
    row: jax.Array  # the first row of the block
    rows: jax.Array
    position: jax.Array  # of the first row
    start: jax.Array  # the first token that any row sees
    stop: jax.Array  # one past the last


class _Softmax(NamedTuple):
    """Running sums of some rows: ``total`` of exp(score - top), ``mixed`` of that times values."""

    top: jax.Array  # [..., M], -inf where a row has seen nothing
    total: jax.Array  # [..., M]
    mixed: jax.Array  # [..., M, D]


def _plan_blocks(
    query_start_loc: jax.Array,
    seq_lens: jax.Array,
    num_blocks: int,
    block_rows: int,
    capacity: int,
    causal: bool,
    window: int | None,
) -> jax.Array:
    """The :class:`_Blocks` of a batch as int32 [blocks, 6], those with most tokens first."""
    first_row = query_start_loc[:-1]
    rows = jnp.maximum(query_start_loc[1:] - first_row, 0)
    counts = pages.ceil_divide(rows, block_rows)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    number = jnp.arange(num_blocks, dtype=jnp.int32)
    sequence = (ends <= number[:, None]).sum(-1, dtype=jnp.int32)
    sequence = jnp.minimum(sequence, len(seq_lens) - 1)
    table = jnp.stack([first_row, rows, seq_lens, ends - counts], -1)
    first_row, rows, seq_lens, first_block = table[sequence].T
    skipped = (number - first_block) * block_rows
    # A number past the last block falls behind the rows of the last sequence.
    size = jnp.clip(rows - skipped, 0, block_rows)
    position = seq_lens - rows + skipped
    stop = jnp.clip(seq_lens, 0, capacity)
    if causal:
        stop = jnp.minimum(stop, position + size)
    start = jnp.zeros_like(stop)
    if window is not None:
        start = jnp.maximum(start, position - (window - 1))
    stop = jnp.where(size > 0, jnp.maximum(stop, start), start)
    blocks = jnp.stack([sequence, first_row + skipped, size, position, start, stop], -1)
    return blocks[jnp.argsort(start - stop)]


def _attend(
    query,
    cache,
    block_table,
    seq_lens,
    query_start_loc,
    sinks,
    alibi_slopes,
    *,
    layout,
    codec,
    scale,
    causal,
    window,
    softcap,
    block_rows,
):
    num_tokens, num_query_heads, dim = query.shape
    heads, group = layout.num_kv_heads, num_query_heads // layout.num_kv_heads
    num_seqs, max_pages = block_table.shape
    num_pages, capacity = cache.shape[0], max_pages * layout.page_size
    out = jnp.zeros(query.shape, query.dtype)
    nothing = jnp.full(num_query_heads, -jnp.inf, jnp.float32) if sinks is None else sinks
    lse = jnp.broadcast_to(nothing, query.shape[:2])
    if 0 in (num_tokens, num_seqs, capacity, num_pages):
        return out, lse
    zero = _zero_of(query, cache, block_table, seq_lens, query_start_loc, sinks, alibi_slopes)
    out, lse = out + zero.astype(out.dtype), lse + zero
    if query_start_loc is None:
        query_start_loc = jnp.arange(num_seqs + 1, dtype=jnp.int32)
    window = None if window is None else min(window, _MAX_WINDOW)

    tile = _tile_size(layout, capacity)
    block_heads = heads * block_rows * group
    lane_bytes = 8 * heads * tile * dim + 12 * block_heads * (tile + dim)
    num_blocks = (num_tokens + min(num_seqs, num_tokens) * (block_rows - 1)) // block_rows
    lanes = max(1, min(num_blocks, _WORK_BYTES // lane_bytes))
    num_blocks = -(-num_blocks // lanes) * lanes
    blocks = _plan_blocks(
        query_start_loc, seq_lens, num_blocks, block_rows, capacity, causal, window
    )
    flat = pages.flat_pages(cache, layout)
    offs_row = jnp.arange(block_rows, dtype=jnp.int32)
    sink, slopes = (
        None if a is None else jnp.tile(a.reshape(heads, group), (1, block_rows))  # [Hk, M]
        for a in (sinks, alibi_slopes)
    )

    def step(t, state, q, bias, block):
        """One tile of tokens for one block; q [Hk, M, D], bias [Hk, M]."""
        token = block.start + t * tile + jnp.arange(tile, dtype=jnp.int32)
        valid = token < block.stop
        page, slot = pages.locate(token, block.sequence, block_table, num_pages, layout.page_size)
        part = _read_tile(flat, page, slot, valid, layout, codec)
        score = _exact_einsum("hmd,htd->hmt", q, part.keys)
        if part.key_scale is not None:
            score = score * part.key_scale[:, None]
        if bias is not None:
            score = score + bias[..., None]
        if softcap is not None:
            score = softcap * jnp.tanh(score / softcap)
        position = jnp.repeat(block.position + offs_row, group)[:, None]  # [M, 1]
        if slopes is not None:
            score = score + slopes[..., None] * (token - position).astype(jnp.float32)
        seen = jnp.broadcast_to(valid, (block_rows * group, tile))
        if causal:
            seen = seen & (token <= position)
        if window is not None:
            seen = seen & (token > position - window)
        score = jnp.where(seen, score, -jnp.inf)

        top = jnp.maximum(state.top, score.max(-1))
        shift = _finite(top)
        weight = jnp.exp(score - shift[..., None])
        gain = _exact_einsum("hmt,htd->hmd", weight * part.value_scale[:, None], part.values)
        if part.value_zero is not None:
            gain = gain + (weight * part.value_zero[:, None]).sum(-1)[..., None]
        decay = jnp.exp(state.top - shift)
        total = state.total * decay + weight.sum(-1)
        return _Softmax(top, total, state.mixed * decay[..., None] + gain)

    def run_lanes(c, result):
        block = _Blocks(*lax.dynamic_slice_in_dim(blocks, c * lanes, lanes).T)
        rows = block.row[:, None] + offs_row  # [C, R]
        inside = (offs_row < block.rows[:, None]) & (rows >= 0)
        rows = jnp.where(inside, rows, num_tokens)
        q = query.at[rows].get(mode="fill", fill_value=0).astype(jnp.float32)
        q = q.reshape(lanes, block_rows, heads, group, dim) * scale
        q, bias = (None if a is None else _merge_rows(a) for a in _coded_queries(q, codec))
        none = jnp.zeros(q.shape[:3], jnp.float32) + zero
        state = _Softmax(none - jnp.inf, none, jnp.zeros(q.shape, jnp.float32) + zero)
        tiles = pages.ceil_divide((block.stop - block.start).max(), tile)
        axes = (None, 0, 0, None if bias is None else 0, 0)
        state = lax.fori_loop(
            0, tiles, lambda t, state: jax.vmap(step, axes)(t, state, q, bias, block), state
        )
        values, mass, row_lse = _finish(state, sink)
        values, mass, row_lse = (_split_rows(a, block_rows) for a in (values, mass, row_lse))
        values = _decoded_outputs(values, mass, codec).reshape(*rows.shape, -1, dim)
        out, lse = result
        out = out.at[rows].set(values.astype(out.dtype), mode="drop")
        return out, lse.at[rows].set(row_lse.reshape(*rows.shape, -1), mode="drop")

    busy = (blocks[:, 5] > blocks[:, 4]).sum(dtype=jnp.int32)
    return lax.fori_loop(0, pages.ceil_divide(busy, lanes), run_lanes, (out, lse))


def _finite(top: jax.Array) -> jax.Array:
    """What to subtract before ``exp``: -inf minus -inf would be NaN."""
    return jnp.where(jnp.isneginf(top), 0.0, top)


def _finish(state: _Softmax, sink: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalised values [C, Hk, M, D], share of the softmax that tokens got, and LSE [C, Hk, M]."""
    top = state.top if sink is None else jnp.maximum(state.top, sink)
    shift = _finite(top)
    decay = jnp.exp(state.top - shift)
    seen = state.total * decay
    total = seen if sink is None else seen + jnp.exp(sink - shift)
    inverse = decay / jnp.where(total == 0, 1.0, total)
    return state.mixed * inverse[..., None], state.total * inverse, jnp.log(total) + shift


def _merge_rows(x: jax.Array) -> jax.Array:
    """[C, R, Hk, g, ...] to [C, Hk, R * g, ...]."""
    x = x.swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _split_rows(x: jax.Array, block_rows: int) -> jax.Array:
    """[C, Hk, R * g, ...] to [C, R, Hk, g, ...]."""
    return x.reshape(*x.shape[:2], block_rows, -1, *x.shape[3:]).swapaxes(1, 2)


def _coded_queries(q: jax.Array, codec: Codec) -> tuple[jax.Array, jax.Array | None]:
    """Queries [C, R, Hk, g, D] in the basis of the key codes, and their product with the offset."""
    bias = None
    if codec.key_offset is not None:
        offset = np.broadcast_to(codec.key_offset, (q.shape[2], q.shape[4]))
        bias = _exact_einsum("crhgd,hd->crhg", q, offset)
    if codec.has_key_matrix:
        q = _apply_grouped(codec.query_matrix, q)
    if codec.centroids is None and (codec.key_scale != 1).any():
        q = q * codec.key_scale[:, None, None]
    return q, bias


def _decoded_outputs(values: jax.Array, mass: jax.Array, codec: Codec) -> jax.Array:
    """Outputs [C, R, Hk, g, D] out of the basis of the value codes.

    ``mass`` [C, R, Hk, g] is the share of the softmax that went to tokens.
    """
    if codec.has_value_matrix:
        values = _apply_grouped(codec.output_matrix, values)
    if codec.value_offset is not None:
        values = values + mass[..., None] * codec.value_offset[:, None]
    return values


def _apply_grouped(matrix: np.ndarray, x: jax.Array) -> jax.Array:
    """``matrix`` [1 or Hk, D, D] times the vectors ``x`` [C, R, Hk, g, D]."""
    if matrix.shape[0] == 1:
        return _exact_einsum("ij,crhgj->crhgi", matrix[0], x)
    return _exact_einsum("hij,crhgj->crhgi", matrix, x)


@jax.jit
def merge_attention_states(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Output and LSE over both sets; as :func:`tq_jax.merge_attention_states`."""
    shift = _finite(jnp.maximum(lse_a, lse_b))
    weight_a, weight_b = jnp.exp(lse_a - shift), jnp.exp(lse_b - shift)
    total = weight_a + weight_b
    a, b = out_a.astype(jnp.float32), out_b.astype(jnp.float32)
    mixed = weight_a[..., None] * a + weight_b[..., None] * b
    out = mixed / jnp.where(total == 0, 1.0, total)[..., None]
    return out.astype(out_a.dtype), jnp.log(total) + shift
