"""The native backend: jnp and lax operations, on any device.

Attention streams over tiles of a bounded number of tokens with an online softmax (Milakov and
Gimelshein, arXiv 1805.02867). Keys stay in their rotated basis and values in theirs: the query is
rotated once, the output once (TurboQuant, arXiv 2504.19874).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tq_core.codebook import midpoints
from tq_core.codec import Codec
from tq_core.layout import WORD, CacheLayout
from tq_core.packing import E4M3_MAX, byte_codes, e4m3_values, packed_bytes
from tq_core.reference import FP16_MAX, INPUT_MAX
from tq_core.validation import AttentionCall

_TILE_BYTES = 4 << 20  # fp32 keys and values of one tile
_WORK_BYTES = 4 << 20  # all intermediates of the blocks that run side by side
_MAX_TILE = 256
_MAX_ROWS = 128  # query rows times group that share one decoded tile
_MAX_WINDOW = 1 << 30  # position - window stays inside int32

_exact_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def _divmod(x: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder, rounded towards zero: cheaper than ``//``, equal for ``x >= 0``."""
    size = np.asarray(divisor, x.dtype)
    return lax.div(x, size), lax.rem(x, size)


def _ceil_divide(x: jax.Array, divisor: int) -> jax.Array:
    return _divmod(x + (divisor - 1), divisor)[0]


# Bytes of a page


class _Run(NamedTuple):
    """Contiguous bytes of a token: ``width`` bytes at ``base + stride * slot``, once per base."""

    base: np.ndarray  # int32 [Hk, K]
    stride: int
    width: int


def _code_runs(layout: CacheLayout) -> tuple[list[_Run], list[_Run]]:
    """Where the key codes and the value codes of a token lie in its page."""
    heads, size = layout.num_kv_heads, layout.page_size
    kd, vd, both = layout.key_bytes, layout.value_bytes, layout.code_bytes
    head = np.arange(heads, dtype=np.int32)[:, None]
    if layout.order == "token":
        return [_Run(head * both, heads * both, kd)], [_Run(head * both + kd, heads * both, vd)]
    plane = head * (size * both)
    if layout.order == "head":
        return [_Run(plane, both, kd)], [_Run(plane + kd, both, vd)]
    words, tail = divmod(vd, WORD)
    values = plane + size * kd
    runs = []
    if words:
        word = np.arange(words, dtype=np.int32)[None, :]
        runs.append(_Run(values + word * (size * WORD), WORD, WORD))
    if tail:
        runs.append(_Run(values + size * words * WORD, tail, tail))
    return [_Run(plane, kd, kd)], runs


def _field_runs(layout: CacheLayout) -> list[_Run]:
    """Where the metadata fields of a token lie in its page."""
    fields, size = layout.num_meta_fields, layout.page_size
    head = np.arange(layout.num_kv_heads, dtype=np.int32)[:, None]
    base = layout.meta_offset + head * (2 * fields * size)
    if layout.order == "planes" and not layout.config.value_is_codebook:
        pair = _Run(base + 2 * (fields - 2) * size, 4, 4)
        return [_Run(base, 2, 2), pair] if fields == 3 else [pair]
    return [_Run(base + np.arange(fields, dtype=np.int32)[None, :] * (2 * size), 2, 2)]


def _flat_pages(cache: jax.Array, layout: CacheLayout) -> jax.Array:
    return cache.reshape(cache.shape[0], layout.page_bytes)


def _read(flat: jax.Array, runs: Sequence[_Run], page: jax.Array, slot: jax.Array) -> jax.Array:
    """Bytes of the tokens at ``page``, ``slot`` int32 [T] (both in range): uint8 [Hk, T, bytes]."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(3,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    parts = []
    for base, stride, width in runs:
        offset = base[:, None, :] + stride * slot[None, :, None]  # [Hk, T, K]
        index = jnp.stack(jnp.broadcast_arrays(page[None, :, None], offset), -1)
        part = lax.gather(
            flat, index, numbers, (1, width), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS
        )
        parts.append(part.reshape(*offset.shape[:2], -1))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1)


def _write(
    cache: jax.Array, runs: Sequence[_Run], page: jax.Array, slot: jax.Array, data: jax.Array
) -> jax.Array:
    """Puts ``data`` uint8 [N, Hk, bytes] at ``page``, ``slot``; pages out of range are dropped."""
    _, page_size, heads, slot_bytes = cache.shape
    flat = cache.reshape(cache.shape[0], -1)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(3,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    start = 0
    for base, stride, width in runs:
        offset = base[None] + stride * slot[:, None, None]  # [N, Hk, K]
        stop = start + base.shape[1] * width
        part = data[..., start:stop]
        start = stop
        if 1 in (page_size, heads):
            # XLA copies a whole array to give it a dimension of size 1: address byte by byte.
            place = (offset[..., None] + np.arange(width, dtype=np.int32)).reshape(part.shape)
            row, byte = _divmod(place, slot_bytes)
            index = (page[:, None, None], *_divmod(row, heads), byte)
            cache = cache.at[index].set(part, mode="drop")
        else:
            index = jnp.stack(jnp.broadcast_arrays(page[:, None, None], offset), -1)
            part = part.reshape(*offset.shape, width)
            flat = lax.scatter(flat, index, part, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)
    return cache if 1 in (page_size, heads) else flat.reshape(cache.shape)


def _fields(data: jax.Array) -> jax.Array:
    """Metadata bytes uint8 [..., 2 F] as float32 [..., F]."""
    pairs = data.reshape(*data.shape[:-1], -1, 2)
    return lax.bitcast_convert_type(pairs, jnp.float16).astype(jnp.float32)


# Codes to numbers


def _look_up(table: np.ndarray, index: jax.Array) -> jax.Array:
    """``table`` [n, codes] at ``index`` [..., words], flattened to [..., words * codes]."""
    found = jnp.asarray(table).at[index.astype(jnp.int32)].get(mode="promise_in_bounds")
    return found.reshape(*index.shape[:-1], -1)


def _word_table(levels: np.ndarray) -> np.ndarray:
    """Four levels for each 12-bit word of four 3-bit codes: [4096, 4]."""
    return levels[np.arange(4096)[:, None] >> np.arange(0, 12, 3) & 7]


def _planar_table(levels: np.ndarray) -> np.ndarray:
    """Four levels for each word of 8 low bits (four 2-bit codes) and 4 high bits: [4096, 4]."""
    word, place = np.arange(4096)[:, None], np.arange(4)
    return levels[(word >> 2 * place & 3) | (word >> 8 + place & 1) << 2]


def _pad_last(x: jax.Array, multiple: int) -> jax.Array:
    missing = -x.shape[-1] % multiple
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _decode(data: jax.Array, levels: np.ndarray, dim: int, bits: int, packing: str) -> jax.Array:
    """Packed bytes uint8 [..., bytes] as ``levels`` [2**bits] of their codes, float32 [..., D]."""
    levels = levels.astype(np.float32)
    if bits == 8:
        return _look_up(levels[:, None], data)
    if bits != 3:
        return _look_up(levels[byte_codes(bits)], data)[..., :dim]
    # Without the barriers XLA works each word out again for each of the four codes in it.
    if packing == "planar":
        split = packed_bytes(dim, 2)
        high = data[..., split:].astype(jnp.int32)
        high = jnp.stack([high & 15, high >> 4], -1).reshape(*high.shape[:-1], -1)
        low = _pad_last(data[..., :split], 2).astype(jnp.int32)
        words = lax.optimization_barrier(low | high[..., : low.shape[-1]] << 8)
        return _look_up(_planar_table(levels), words)[..., :dim]
    triple = _pad_last(data, 3).astype(jnp.int32).reshape(*data.shape[:-1], -1, 3)
    triple = triple[..., 0] | triple[..., 1] << 8 | triple[..., 2] << 16
    triple = lax.optimization_barrier(triple)[..., None]
    words = (triple >> np.arange(0, 24, 12, dtype=np.int32) & 4095).reshape(*data.shape[:-1], -1)
    return _look_up(_word_table(levels), words)[..., :dim]


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
    key_runs, value_runs = _code_runs(layout)
    key_data = _read(flat, key_runs, page, slot)
    value_data = _read(flat, value_runs, page, slot)
    fields = _fields(_read(flat, _field_runs(layout), page, slot))  # [Hk, T, F]
    key_levels = e4m3_values() if codec.centroids is None else codec.centroids
    value_levels = (
        np.arange(2**config.value_bits) if codec.value_centroids is None else codec.value_centroids
    )
    affine = not config.value_is_codebook
    # 0 * inf is NaN: bytes of tokens that nobody wrote must not reach the value sums.
    value_fields = jnp.where(valid[:, None], fields[..., -2 if affine else -1 :], 0.0)
    return _Tile(
        keys=_decode(key_data, key_levels, dim, config.key_bits, config.key_packing),
        key_scale=fields[..., 0] if config.key_is_codebook else None,
        values=_decode(value_data, value_levels, dim, config.value_bits, "dense"),
        value_scale=value_fields[..., 0],
        value_zero=value_fields[..., 1] if affine else None,
    )


def _locate(
    token: jax.Array, row: jax.Array, block_table: jax.Array, num_pages: int, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Page and slot of ``token`` int32 [T] of sequence ``row``, forced into range."""
    column, slot = _divmod(token, page_size)
    column = jnp.clip(column, 0, block_table.shape[1] - 1)
    return jnp.clip(block_table[row, column], 0, num_pages - 1), slot


# Numbers to codes


def _pack(codes: jax.Array, bits: int, packing: str = "dense") -> jax.Array:
    """Codes int32 [..., D] to bytes uint8 [..., packed_bytes(D)]."""
    if packing == "planar":
        return jnp.concatenate([_pack(codes & 3, 2), _pack(codes >> 2, 1)], -1)
    size = packed_bytes(codes.shape[-1], bits)
    per_word = 8 if bits == 3 else 8 // bits
    groups = _pad_last(codes, per_word).reshape(*codes.shape[:-1], -1, per_word)
    words = sum(groups[..., i] << bits * i for i in range(per_word))
    data = jnp.stack([words >> 8 * i & 255 for i in range(per_word * bits // 8)], -1)
    return data.reshape(*codes.shape[:-1], -1)[..., :size].astype(jnp.uint8)


def _half_bits(x: jax.Array) -> jax.Array:
    """float32 as the bits of fp16, uint16, with zeros unsigned.

    The integer step also keeps XLA from treating a round trip through fp16 as the identity.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16)
    return jnp.where(bits == 0x8000, jnp.uint16(0), bits)


def _half_value(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


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
        chosen = jnp.sqrt((_look_up(centroids[:, None], codes) ** 2).sum(-1))
        norm = jnp.where(chosen > 0, norm / jnp.where(chosen > 0, chosen, 1.0), 0.0)
    return codes, _half_bits(jnp.minimum(norm, FP16_MAX))


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
    zero_bits = _half_bits(x.min(-1))
    zero = _half_value(zero_bits)
    scale_bits = _half_bits(_divide(x.max(-1) - zero, levels))
    scale = _half_value(scale_bits)[..., None]
    steps = jnp.floor(_divide(x - zero[..., None], jnp.where(scale == 0, 1.0, scale)) + 0.5)
    codes = jnp.where(scale == 0, 0.0, jnp.clip(steps, 0.0, levels))
    return codes.astype(jnp.int32), [scale_bits, zero_bits]


# Entry points


def _zero_of(*arrays: jax.Array | None) -> jax.Array:
    """A float32 zero whose type depends on ``arrays``.

    Under ``jax.shard_map`` what a loop starts from must vary over the mesh axes of its results.
    """
    firsts = [a[(0,) * a.ndim] for a in arrays if a is not None]
    return sum(jnp.where(x == x, np.float32(0), np.float32(0)) for x in firsts)


def _inference_only(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """``function`` of arrays, with a sentence instead of a derivative."""
    wrapped = jax.custom_jvp(function)

    @wrapped.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise TypeError(
            f"{what} is inference-only and has no derivative: codes in a quantised cache are "
            "integers. Keep it out of jax.grad, jax.vjp and jax.jvp, or pass the inputs through "
            "jax.lax.stop_gradient"
        )

    return wrapped


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
    run = _inference_only(partial(_store_chunks, layout=layout, codec=codec), "tq_jax.store")
    return run(key, value, cache, slot_mapping)


def _store_chunks(key, value, cache, slot_mapping, *, layout, codec):
    num_tokens, num_pages = key.shape[0], cache.shape[0]
    if 0 in (num_tokens, num_pages):
        return cache
    page, slot = _divmod(slot_mapping, layout.page_size)
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
    key_runs, value_runs = _code_runs(layout)
    fields = jnp.stack([*key_fields, *value_fields], -1)  # uint16 [N, Hk, F]
    field_data = lax.bitcast_convert_type(fields, jnp.uint8).reshape(*fields.shape[:-1], -1)
    for runs, data in (
        (key_runs, _pack(key_codes, config.key_bits, config.key_packing)),
        (value_runs, _pack(value_codes, config.value_bits)),
        (_field_runs(layout), field_data),
    ):
        cache = _write(cache, runs, page, slot, data)
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
    flat = _flat_pages(cache, layout)
    tile = _tile_size(layout, capacity)
    lengths = jnp.clip(seq_lens, 0, capacity)

    def one_tile(t, dense, row):
        start = jnp.minimum(t * tile, capacity - tile)
        token = start + jnp.arange(tile, dtype=jnp.int32)
        valid = token < lengths[row]
        page, slot = _locate(token, row, block_table, cache.shape[0], layout.page_size)
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
        tiles = _ceil_divide(lengths[row], tile)
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
    run = _inference_only(partial(_attend, **static), "attention over a quantised cache")
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
    counts = _ceil_divide(rows, block_rows)
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
    flat = _flat_pages(cache, layout)
    offs_row = jnp.arange(block_rows, dtype=jnp.int32)
    slopes = None if alibi_slopes is None else _split_heads(alibi_slopes, heads, block_rows)

    def step(t, state, q, bias, block):
        """One tile of tokens for one block; q [Hk, M, D], bias [Hk, M]."""
        token = block.start + t * tile + jnp.arange(tile, dtype=jnp.int32)
        valid = token < block.stop
        page, slot = _locate(token, block.sequence, block_table, num_pages, layout.page_size)
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

        top, total, mixed = state
        new_top = jnp.maximum(top, score.max(-1))
        shift = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
        weight = jnp.exp(score - shift[..., None])
        decay = jnp.exp(top - shift)
        gain = _exact_einsum("hmt,htd->hmd", weight * part.value_scale[:, None], part.values)
        if part.value_zero is not None:
            gain = gain + (weight * part.value_zero[:, None]).sum(-1)[..., None]
        return new_top, total * decay + weight.sum(-1), mixed * decay[..., None] + gain

    def run_lanes(c, result):
        block = _Blocks(*lax.dynamic_slice_in_dim(blocks, c * lanes, lanes).T)
        rows = block.row[:, None] + offs_row  # [C, R]
        inside = (offs_row < block.rows[:, None]) & (rows >= 0)
        rows = jnp.where(inside, rows, num_tokens)
        q = query.at[rows].get(mode="fill", fill_value=0).astype(jnp.float32)
        q = q.reshape(lanes, block_rows, heads, group, dim) * scale
        q, bias = _coded_queries(q, codec)
        q, bias = (None if a is None else _merge_rows(a, heads) for a in (q, bias))
        sums = jnp.zeros(q.shape[:3], jnp.float32) + zero
        state = (sums - jnp.inf, sums, jnp.zeros(q.shape, jnp.float32) + zero)
        tiles = _ceil_divide((block.stop - block.start).max(), tile)
        axes = (None, 0, 0, None if bias is None else 0, 0)
        top, total, mixed = lax.fori_loop(
            0,
            tiles,
            lambda t, state: jax.vmap(step, axes)(t, state, q, bias, block),
            state,
        )
        return _finish(result, top, total, mixed, rows)

    def _finish(result, top, total, mixed, rows):
        seen = total
        if sinks is not None:
            sink = _split_heads(sinks, heads, block_rows)
            new_top = jnp.maximum(top, sink)
            shift = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
            decay = jnp.exp(top - shift)
            seen, mixed, top = total * decay, mixed * decay[..., None], new_top
            total = seen + jnp.exp(sink - shift)
        shift = jnp.where(jnp.isneginf(top), 0.0, top)
        row_lse = jnp.log(total) + shift
        divisor = jnp.where(total == 0, 1.0, total)
        values = (mixed / divisor[..., None]).reshape(lanes, heads, block_rows, group, dim)
        mass = (seen / divisor).reshape(lanes, heads, block_rows, group)
        values = _decoded_outputs(values, mass, codec)  # [C, R, Hk, g, D]
        shape = (lanes, block_rows, num_query_heads)
        row_lse = row_lse.reshape(lanes, heads, block_rows, group).swapaxes(1, 2).reshape(shape)
        out, lse = result
        out = out.at[rows].set(values.reshape(*shape, dim).astype(out.dtype), mode="drop")
        return out, lse.at[rows].set(row_lse, mode="drop")

    busy = (blocks[:, 5] > blocks[:, 4]).sum(dtype=jnp.int32)
    return lax.fori_loop(0, _ceil_divide(busy, lanes), run_lanes, (out, lse))


def _split_heads(x: jax.Array, heads: int, block_rows: int) -> jax.Array:
    """Per query head [Hq] to per row of a block [Hk, R * g]."""
    return jnp.tile(x.reshape(heads, -1), (1, block_rows))


def _merge_rows(x: jax.Array, heads: int) -> jax.Array:
    """[C, R, Hk, g, ...] to [C, Hk, R * g, ...]."""
    x = x.swapaxes(1, 2)
    return x.reshape(x.shape[0], heads, -1, *x.shape[4:])


def _coded_queries(q: jax.Array, codec: Codec) -> tuple[jax.Array, jax.Array | None]:
    """Queries [C, R, Hk, g, D] in the basis of the key codes, and their product with the offset."""
    bias = None
    if codec.key_offset is not None:
        offset = np.broadcast_to(codec.key_offset, (q.shape[2], q.shape[4]))
        bias = _exact_einsum("crhgd,hd->crhg", q, offset)
    if codec.has_key_matrix:
        matrix = codec.query_matrix
        q = (
            _exact_einsum("ed,crhgd->crhge", matrix[0], q)
            if matrix.shape[0] == 1
            else _exact_einsum("hed,crhgd->crhge", matrix, q)
        )
    if codec.centroids is None and (codec.key_scale != 1).any():
        q = q * codec.key_scale[:, None, None]
    return q, bias


def _decoded_outputs(values: jax.Array, mass: jax.Array, codec: Codec) -> jax.Array:
    """Outputs [C, Hk, R, g, D] out of the basis of the value codes, as [C, R, Hk, g, D].

    ``mass`` [C, Hk, R, g] is the share of the softmax that went to tokens.
    """
    if codec.has_value_matrix:
        matrix = codec.output_matrix
        values = (
            _exact_einsum("ed,chrgd->crhge", matrix[0], values)
            if matrix.shape[0] == 1
            else _exact_einsum("hed,chrgd->crhge", matrix, values)
        )
    else:
        values = values.swapaxes(1, 2)
    if codec.value_offset is not None:
        values = values + mass.swapaxes(1, 2)[..., None] * codec.value_offset[:, None]
    return values


@jax.jit
def merge_attention_states(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Output and LSE over both sets; as :func:`tq_jax.merge_attention_states`."""
    top = jnp.maximum(lse_a, lse_b)
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    weight_a, weight_b = jnp.exp(lse_a - shift), jnp.exp(lse_b - shift)
    total = weight_a + weight_b
    mixed = weight_a[..., None] * out_a.astype(jnp.float32) + weight_b[..., None] * out_b.astype(
        jnp.float32
    )
    out = mixed / jnp.where(total == 0, 1.0, total)[..., None]
    return out.astype(out_a.dtype), jnp.log(total) + shift
