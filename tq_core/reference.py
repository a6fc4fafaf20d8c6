"""The oracle: store, dequantize and attention in plain numpy, written from docs/format.md.

Slow and simple on purpose. Every backend is tested against it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tq_core import packing
from tq_core.codebook import midpoints
from tq_core.codec import Codec
from tq_core.layout import CacheLayout
from tq_core.validation import ArraySpec, check_attention, check_dequantize, check_store

FP16_MAX = 65504.0
#: Magnitudes are limited to this first, so that the norm of 576 coordinates fits float32.
INPUT_MAX = 2.0**59


def store(
    key: np.ndarray,
    value: np.ndarray,
    cache: np.ndarray,
    slot_mapping: np.ndarray,
    *,
    layout: CacheLayout,
    codec: Codec,
) -> None:
    """Quantises keys and values and writes them into ``cache`` in place.

    Args:
        key: ``[N, Hk, D]`` floats, post-RoPE.
        value: ``[N, Hk, D]`` floats.
        cache: uint8 ``layout.shape(num_pages)``.
        slot_mapping: integers ``[N]``, ``page * page_size + slot``; negative ones are skipped.
        layout: the cache's layout.
        codec: the codec of its contents.
    """
    arrays = [_spec(np.asarray(a)) for a in (key, value, cache, slot_mapping)]
    check_store(*arrays, layout=layout, codec=codec)
    key_codes, key_fields = quantize_keys(key, layout=layout, codec=codec)
    value_codes, value_fields = quantize_values(value, layout=layout, codec=codec)
    config = layout.config
    key_data = packing.pack(key_codes, config.key_bits, config.key_packing)
    value_data = packing.pack(value_codes, config.value_bits)
    fields = np.stack([*key_fields, *value_fields], -1).astype("<f2")  # [N, Hk, F]
    key_index, value_index, meta_index = (
        layout.key_index(),
        layout.value_index(),
        layout.meta_index(),
    )
    for row, slot in enumerate(np.asarray(slot_mapping)):
        if slot < 0:
            continue
        page_number, place = divmod(int(slot), layout.page_size)
        page = cache[page_number].reshape(-1)
        page[key_index[place]] = key_data[row]
        page[value_index[place]] = value_data[row]
        field_bytes = fields[row].view(np.uint8).reshape(layout.num_kv_heads, -1, 2)
        page[meta_index[place]] = field_bytes[..., 0]
        page[meta_index[place] + 1] = field_bytes[..., 1]
        cache[page_number] = page.reshape(cache.shape[1:])


def quantize_keys(
    key: np.ndarray, *, layout: CacheLayout, codec: Codec
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Codes uint8 ``[N, Hk, D]`` and metadata fields fp16 ``[N, Hk]`` of keys."""
    coded = coded_vectors(key, codec.key_offset, codec.key_transform)
    if not codec.config.key_is_codebook:
        scaled = coded.astype(np.float32) / codec.key_scale[:, None]
        return packing.encode_e4m3(scaled), []
    return _quantize_codebook(coded, codec, codec.centroids)


def quantize_values(
    value: np.ndarray, *, layout: CacheLayout, codec: Codec
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Codes uint8 ``[N, Hk, D]`` and metadata fields fp16 ``[N, Hk]`` of values."""
    coded = coded_vectors(value, codec.value_offset, codec.value_transform)
    if codec.config.value_is_codebook:
        return _quantize_codebook(coded, codec, codec.value_centroids)
    levels = np.float32(2**codec.config.value_bits - 1)
    x = np.clip(coded, -FP16_MAX, FP16_MAX).astype(np.float32)
    zero = _unsigned_zero(x.min(-1).astype(np.float16))
    span = x.max(-1) - zero.astype(np.float32)
    scale = _unsigned_zero((span / levels).astype(np.float16))
    wide_zero, wide_scale = zero.astype(np.float32)[..., None], scale.astype(np.float32)[..., None]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        steps = np.floor((x - wide_zero) / wide_scale + np.float32(0.5))
    codes = np.where(wide_scale == 0, 0, np.clip(np.nan_to_num(steps), 0, levels))
    return codes.astype(np.uint8), [scale, zero]


def coded_vectors(
    x: np.ndarray, offset: np.ndarray | None, transform: np.ndarray | None
) -> np.ndarray:
    """``T (x - offset)`` in float64 ``[N, Hk, D]``, non-finite input replaced."""
    x = np.nan_to_num(np.asarray(x).astype(np.float32), nan=0.0, posinf=np.inf, neginf=-np.inf)
    x = np.clip(x, np.float32(-INPUT_MAX), np.float32(INPUT_MAX))
    if offset is not None:
        x = x - offset
    if transform is None:
        return x.astype(np.float64)
    product = np.einsum("hij,nhj->nhi", *_per_head(transform, x.shape[1]), x.astype(np.float64))
    return np.clip(product, -INPUT_MAX, INPUT_MAX)


def _per_head(array: np.ndarray, heads: int) -> tuple[np.ndarray]:
    return (np.broadcast_to(array.astype(np.float64), (heads, *array.shape[1:])),)


def _unsigned_zero(x: np.ndarray) -> np.ndarray:
    return np.where(x == 0, np.float16(0), x)


def _quantize_codebook(
    coded: np.ndarray, codec: Codec, centroids: np.ndarray | None
) -> tuple[np.ndarray, list[np.ndarray]]:
    assert centroids is not None
    norm = np.sqrt((coded**2).sum(-1))
    unit = np.divide(coded, norm[..., None], out=np.zeros_like(coded), where=norm[..., None] > 0)
    rotated = unit @ codec.rotation.astype(np.float64).T
    codes = np.searchsorted(midpoints(centroids).astype(np.float64), rotated, side="right")
    if codec.config.norm_correction:
        length = np.sqrt((centroids.astype(np.float64)[codes] ** 2).sum(-1))
        norm = np.divide(norm, length, out=np.zeros_like(norm), where=length > 0)
    scale = np.minimum(norm, FP16_MAX).astype(np.float16)
    return codes.astype(np.uint8), [scale]


@np.errstate(invalid="ignore", over="ignore")
def dequantize_pages(
    pages: np.ndarray, *, layout: CacheLayout, codec: Codec
) -> tuple[np.ndarray, np.ndarray]:
    """All slots of some pages: uint8 ``[n, P, Hk, slot_bytes]`` to float64 ``[n, P, Hk, D]`` twice.

    Slots that were never written give whatever their bytes mean.
    """
    flat = np.ascontiguousarray(pages).reshape(len(pages), -1)
    config, dim = layout.config, layout.head_dim
    fields = np.stack([flat[:, layout.meta_index()], flat[:, layout.meta_index() + 1]], -1)
    fields = np.ascontiguousarray(fields).view("<f2")[..., 0].astype(np.float64)  # [n, P, Hk, F]
    key_codes = packing.unpack(
        flat[:, layout.key_index()], dim, config.key_bits, config.key_packing
    )
    value_codes = packing.unpack(flat[:, layout.value_index()], dim, config.value_bits)
    rotation = codec.rotation.astype(np.float64)
    if config.key_is_codebook:
        assert codec.centroids is not None
        keys = fields[..., :1] * (codec.centroids.astype(np.float64)[key_codes] @ rotation)
    else:
        keys = packing.e4m3_values().astype(np.float64)[key_codes] * codec.key_scale[:, None]
    if config.value_is_codebook:
        assert codec.value_centroids is not None
        values = fields[..., -1:] * (
            codec.value_centroids.astype(np.float64)[value_codes] @ rotation
        )
    else:
        values = value_codes * fields[..., -2:-1] + fields[..., -1:]
    return (
        _uncoded_vectors(keys, codec.key_offset, codec.key_transform),
        _uncoded_vectors(values, codec.value_offset, codec.value_transform),
    )


def _uncoded_vectors(
    x: np.ndarray, offset: np.ndarray | None, transform: np.ndarray | None
) -> np.ndarray:
    """``offset + T^-1 x``, ``x`` float64 ``[n, P, Hk, D]``."""
    if transform is not None:
        inverse = np.linalg.inv(transform.astype(np.float64))
        x = np.einsum("hij,nphj->nphi", *_per_head(inverse, x.shape[2]), x)
    return x if offset is None else x + offset


def _sequence(
    cache: np.ndarray, pages: np.ndarray, length: int, first: int, layout: CacheLayout, codec: Codec
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values ``[length, Hk, D]`` of a sequence; tokens before ``first`` are zero."""
    size = layout.page_size
    start, stop = first // size, -(-length // size)
    shape = (length, layout.num_kv_heads, layout.head_dim)
    keys, values = np.zeros(shape), np.zeros(shape)
    if start < stop:
        for whole, part in zip(
            (keys, values),
            dequantize_pages(cache[pages[start:stop]], layout=layout, codec=codec),
            strict=True,
        ):
            flat = part.reshape(-1, *shape[1:])
            whole[start * size :] = flat[: length - start * size]
    return keys, values


def dequantize(
    cache: np.ndarray,
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    *,
    layout: CacheLayout,
    codec: Codec,
    dtype: Any = np.float64,
) -> tuple[np.ndarray, np.ndarray]:
    """Dense keys and values of each sequence.

    Returns:
        Two arrays ``[B, max_pages * page_size, Hk, D]`` of ``dtype``; zero past a sequence's end.
    """
    arrays = [_spec(np.asarray(a)) for a in (cache, block_table, seq_lens)]
    check_dequantize(*arrays, layout=layout, codec=codec, dtype="float32")
    capacity = block_table.shape[1] * layout.page_size
    shape = (len(seq_lens), capacity, layout.num_kv_heads, layout.head_dim)
    keys, values = np.zeros(shape, dtype), np.zeros(shape, dtype)
    for b, length in enumerate(np.minimum(seq_lens, capacity)):
        if length > 0:
            keys[b, :length], values[b, :length] = _sequence(
                cache, block_table[b], int(length), 0, layout, codec
            )
    return keys, values


def attention(
    query: np.ndarray,
    cache: np.ndarray,
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    query_start_loc: np.ndarray,
    *,
    layout: CacheLayout,
    codec: Codec,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    return_lse: bool = False,
    dtype: Any = np.float64,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Attention over the dequantised cache; the semantics are those of ``docs/api.md``.

    Args:
        query: ``[N, Hq, D]`` floats; sequence b owns rows
            ``query_start_loc[b] : query_start_loc[b + 1]``.
        cache: uint8 ``layout.shape(num_pages)``.
        block_table: int32 ``[B, max_pages]``.
        seq_lens: int32 ``[B]``, cached tokens of each sequence, this call's included.
        query_start_loc: int32 ``[B + 1]``.
        layout, codec: what the cache holds.
        scale, causal, sliding_window, softcap, sinks, alibi_slopes: see ``docs/api.md``.
        return_lse: also return the log-sum-exp.
        dtype: dtype of the arithmetic and of the result.

    Returns:
        ``[N, Hq, D]`` of ``dtype``, and with ``return_lse`` the natural-log LSE ``[N, Hq]``.
    """
    query, cache, block_table, seq_lens, query_start_loc = map(
        np.asarray, (query, cache, block_table, seq_lens, query_start_loc)
    )
    sinks, alibi_slopes = (None if a is None else np.asarray(a) for a in (sinks, alibi_slopes))
    call = check_attention(
        _spec(query),
        _spec(cache),
        _spec(block_table),
        _spec(seq_lens),
        _spec(query_start_loc),
        layout=layout,
        codec=codec,
        scale=scale,
        causal=causal,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=None if sinks is None else _spec(sinks),
        alibi_slopes=None if alibi_slopes is None else _spec(alibi_slopes),
    )
    heads, group = layout.num_kv_heads, call.group
    out = np.zeros((call.num_tokens, heads, group, layout.head_dim), dtype)
    lse = np.full((call.num_tokens, heads, group), -np.inf, dtype)
    sink = None if sinks is None else sinks.astype(dtype).reshape(heads, group, 1)
    slope = None if alibi_slopes is None else alibi_slopes.astype(dtype).reshape(heads, group, 1, 1)
    if sink is not None:
        lse[:] = sink[..., 0]
    for b, (start, stop, length) in enumerate(
        zip(query_start_loc[:-1], query_start_loc[1:], seq_lens, strict=True)
    ):
        rows, length = int(stop - start), int(length)
        if rows <= 0 or length <= 0:
            continue
        position = (length - rows + np.arange(rows))[:, None]
        token = np.arange(length)[None, :]
        seen = (token <= position) if causal else np.ones((rows, length), bool)
        if sliding_window is not None:
            seen = seen & (token > position - sliding_window)
        columns = np.flatnonzero(seen.any(0))
        if not len(columns):
            continue
        first = int(columns[0])
        keys, values = (
            a.astype(dtype) for a in _sequence(cache, block_table[b], length, first, layout, codec)
        )
        q = query[start:stop].astype(np.float32).astype(dtype)
        q = q.reshape(rows, heads, group, layout.head_dim)
        score = np.einsum("ihgd,jhd->hgij", q, keys, optimize=True) * dtype(call.scale)
        if softcap is not None:
            score = softcap * np.tanh(score / softcap)
        if slope is not None:
            score = score + slope * (token - position).astype(dtype)
        score = np.where(seen, score, -np.inf)
        top = score.max(-1)
        if sink is not None:
            top = np.maximum(top, sink)
        shift = np.where(np.isneginf(top), 0, top)
        weight = np.exp(score - shift[..., None])
        total = weight.sum(-1)
        if sink is not None:
            total = total + np.exp(sink - shift)
        mixed = np.einsum("hgij,jhd->ihgd", weight, values, optimize=True)
        divisor = np.where(total > 0, total, 1).transpose(2, 0, 1)
        out[start:stop] = mixed / divisor[..., None]
        with np.errstate(divide="ignore"):
            lse[start:stop] = (np.log(total) + shift).transpose(2, 0, 1)
    out = out.reshape(call.num_tokens, heads * group, layout.head_dim)
    lse = lse.reshape(call.num_tokens, heads * group)
    return (out, lse) if return_lse else out


def merge_attention_states(
    out_a: np.ndarray, lse_a: np.ndarray, out_b: np.ndarray, lse_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Attention over the union of two disjoint sets of tokens.

    Args:
        out_a, out_b: ``[N, Hq, D]``, each normalised over its own set.
        lse_a, lse_b: their natural-log LSE ``[N, Hq]``; a sink may be in one of them only.

    Returns:
        Output and LSE over both, float64.
    """
    top = np.maximum(lse_a, lse_b).astype(np.float64)
    shift = np.where(np.isneginf(top), 0, top)
    weight_a, weight_b = np.exp(lse_a - shift), np.exp(lse_b - shift)
    total = weight_a + weight_b
    mixed = weight_a[..., None] * out_a + weight_b[..., None] * out_b
    with np.errstate(divide="ignore"):
        lse = np.log(total) + shift
    return mixed / np.where(total > 0, total, 1)[..., None], lse


def _spec(array: np.ndarray) -> ArraySpec:
    return ArraySpec(array.shape, array.dtype.name)
