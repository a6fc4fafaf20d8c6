"""The bytes of a page: where a token's lie, reading and writing them, and the codes inside.

Everything takes tokens by page and slot and knows nothing of what the codes mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tq_core.layout import WORD, CacheLayout
from tq_core.packing import byte_codes, packed_bytes


def divmod_positive(x: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder, rounded towards zero: cheaper than ``//``, equal for ``x >= 0``."""
    size = np.asarray(divisor, x.dtype)
    return lax.div(x, size), lax.rem(x, size)


def ceil_divide(x: jax.Array, divisor: int) -> jax.Array:
    """``x / divisor`` rounded up, for ``x >= 0``."""
    return divmod_positive(x + (divisor - 1), divisor)[0]


class Run(NamedTuple):
    """Contiguous bytes of a token: ``width`` bytes at ``base + stride * slot``, once per base."""

    base: np.ndarray  # int32 [Hk, K]
    stride: int
    width: int


def code_runs(layout: CacheLayout) -> tuple[list[Run], list[Run]]:
    """Where the key codes and the value codes of a token lie in its page."""
    heads, size = layout.num_kv_heads, layout.page_size
    kd, vd, both = layout.key_bytes, layout.value_bytes, layout.code_bytes
    head = np.arange(heads, dtype=np.int32)[:, None]
    if layout.order == "token":
        return [Run(head * both, heads * both, kd)], [Run(head * both + kd, heads * both, vd)]
    plane = head * (size * both)
    if layout.order == "head":
        return [Run(plane, both, kd)], [Run(plane + kd, both, vd)]
    words, tail = divmod(vd, WORD)
    values = plane + size * kd
    runs = []
    if words:
        word = np.arange(words, dtype=np.int32)[None, :]
        runs.append(Run(values + word * (size * WORD), WORD, WORD))
    if tail:
        runs.append(Run(values + size * words * WORD, tail, tail))
    return [Run(plane, kd, kd)], runs


def field_runs(layout: CacheLayout) -> list[Run]:
    """Where the metadata fields of a token lie in its page."""
    fields, size = layout.num_meta_fields, layout.page_size
    head = np.arange(layout.num_kv_heads, dtype=np.int32)[:, None]
    base = layout.meta_offset + head * (2 * fields * size)
    if layout.order == "planes" and not layout.config.value_is_codebook:
        pair = Run(base + 2 * (fields - 2) * size, 4, 4)
        return [Run(base, 2, 2), pair] if fields == 3 else [pair]
    return [Run(base + np.arange(fields, dtype=np.int32)[None, :] * (2 * size), 2, 2)]


def flat_pages(cache: jax.Array, layout: CacheLayout) -> jax.Array:
    """The cache as uint8 [num_pages, page_bytes]."""
    return cache.reshape(cache.shape[0], layout.page_bytes)


def locate(
    token: jax.Array, row: jax.Array, block_table: jax.Array, num_pages: int, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Page and slot of ``token`` int32 [T] of sequence ``row``, forced into range."""
    column, slot = divmod_positive(token, page_size)
    column = jnp.clip(column, 0, block_table.shape[1] - 1)
    return jnp.clip(block_table[row, column], 0, num_pages - 1), slot


def read(flat: jax.Array, runs: Sequence[Run], page: jax.Array, slot: jax.Array) -> jax.Array:
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


def write(
    cache: jax.Array, runs: Sequence[Run], page: jax.Array, slot: jax.Array, data: jax.Array
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
            row, byte = divmod_positive(place, slot_bytes)
            index = (page[:, None, None], *divmod_positive(row, heads), byte)
            cache = cache.at[index].set(part, mode="drop")
        else:
            index = jnp.stack(jnp.broadcast_arrays(page[:, None, None], offset), -1)
            part = part.reshape(*offset.shape, width)
            flat = lax.scatter(flat, index, part, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)
    return cache if 1 in (page_size, heads) else flat.reshape(cache.shape)


def fields(data: jax.Array) -> jax.Array:
    """Metadata bytes uint8 [..., 2 F] as float32 [..., F]."""
    pairs = data.reshape(*data.shape[:-1], -1, 2)
    return lax.bitcast_convert_type(pairs, jnp.float16).astype(jnp.float32)


def field_bytes(bits: jax.Array) -> jax.Array:
    """Bits of metadata fields uint16 [..., F] as bytes uint8 [..., 2 F]."""
    return lax.bitcast_convert_type(bits, jnp.uint8).reshape(*bits.shape[:-1], -1)


def look_up(table: np.ndarray, index: jax.Array) -> jax.Array:
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


def decode(data: jax.Array, levels: np.ndarray, dim: int, bits: int, packing: str) -> jax.Array:
    """Packed bytes uint8 [..., bytes] as ``levels`` [2**bits] of their codes, float32 [..., D]."""
    levels = levels.astype(np.float32)
    if bits == 8:
        return look_up(levels[:, None], data)
    if bits != 3:
        return look_up(levels[byte_codes(bits)], data)[..., :dim]
    # Without the barriers XLA works each word out again for each of the four codes in it.
    if packing == "planar":
        split = packed_bytes(dim, 2)
        high = data[..., split:].astype(jnp.int32)
        high = jnp.stack([high & 15, high >> 4], -1).reshape(*high.shape[:-1], -1)
        low = _pad_last(data[..., :split], 2).astype(jnp.int32)
        words = lax.optimization_barrier(low | high[..., : low.shape[-1]] << 8)
        return look_up(_planar_table(levels), words)[..., :dim]
    triple = _pad_last(data, 3).astype(jnp.int32).reshape(*data.shape[:-1], -1, 3)
    triple = triple[..., 0] | triple[..., 1] << 8 | triple[..., 2] << 16
    triple = lax.optimization_barrier(triple)[..., None]
    words = (triple >> np.arange(0, 24, 12, dtype=np.int32) & 4095).reshape(*data.shape[:-1], -1)
    return look_up(_word_table(levels), words)[..., :dim]


def pack(codes: jax.Array, bits: int, packing: str = "dense") -> jax.Array:
    """Codes int32 [..., D] to bytes uint8 [..., packed_bytes(D)]."""
    if packing == "planar":
        return jnp.concatenate([pack(codes & 3, 2), pack(codes >> 2, 1)], -1)
    size = packed_bytes(codes.shape[-1], bits)
    per_word = 8 if bits == 3 else 8 // bits
    groups = _pad_last(codes, per_word).reshape(*codes.shape[:-1], -1, per_word)
    words = sum(groups[..., i] << bits * i for i in range(per_word))
    data = jnp.stack([words >> 8 * i & 255 for i in range(per_word * bits // 8)], -1)
    return data.reshape(*codes.shape[:-1], -1)[..., :size].astype(jnp.uint8)


def half_bits(x: jax.Array) -> jax.Array:
    """float32 as the bits of fp16, uint16, with zeros unsigned.

    The integer step also keeps XLA from treating a round trip through fp16 as the identity.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16)
    return jnp.where(bits == 0x8000, jnp.uint16(0), bits)


def half_value(bits: jax.Array) -> jax.Array:
    """Bits of fp16, uint16, as float32."""
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
