"""Bytes of a page as tensor views, and codes to bytes and back, in torch operations.

A code is decoded by looking up its byte: a table entry holds every code of one byte (2, 4 and
8 bit) or of 12 bits (3 bit) as adjacent floats, moved as one 4, 8 or 16 byte element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tq_core import packing
from tq_core.codec import Codec
from tq_core.layout import WORD, CacheLayout

#: Dtype as wide as that many float32.
_WIDE = {1: torch.float32, 2: torch.float64, 4: torch.complex128}


class Region(NamedTuple):
    """An affine set of bytes: ``[P, Hk, ...]`` at ``offset + sum(index * strides)`` of a page."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of one slot and head."""
        return math.prod(self.shape[2:])

    def view(self, pages: Tensor) -> Tensor:
        """The bytes as a view ``[num_pages, P, Hk, ...]`` of pages that are dense inside."""
        return pages.as_strided(
            (pages.shape[0], *self.shape),
            (pages.stride(0), *self.strides),
            pages.storage_offset() + self.offset,
        )

    def words(self) -> Region | None:
        """The same bytes as whole words, where they are: offset and strides count words."""
        if self.shape[-1] != WORD or self.strides[-1] != 1:
            return None
        if self.offset % WORD or any(s % WORD for s in self.strides[:-1]):
            return None
        strides = tuple(s // WORD for s in self.strides[:-1])
        return Region(self.offset // WORD, self.shape[:-1], strides)


class Regions(NamedTuple):
    """Where a page holds its keys, its values, and each metadata field (two bytes)."""

    key: tuple[Region, ...]
    value: tuple[Region, ...]
    fields: tuple[Region, ...]


@lru_cache(maxsize=64)
def regions(layout: CacheLayout) -> Regions:
    """The regions of a layout, derived from its index arrays."""
    low = layout.meta_index()
    both = np.stack([low, low + 1], -1)  # [P, Hk, F, 2]
    return Regions(
        _split(layout.key_index()),
        _split(layout.value_index()),
        tuple(r for f in range(both.shape[2]) if (r := _affine(both[:, :, f]))),
    )


def _affine(index: np.ndarray) -> Region | None:
    offset = int(index.flat[0])
    strides = tuple(
        int(index.take(1, axis).flat[0]) - offset if size > 1 else 0
        for axis, size in enumerate(index.shape)
    )
    steps = np.indices(index.shape, sparse=True)
    place = offset + sum(i * s for i, s in zip(steps, strides, strict=True))
    return Region(offset, index.shape, strides) if np.array_equal(place, index) else None


def _split(index: np.ndarray) -> tuple[Region, ...]:
    """One region for all bytes of a token, or one of whole words and one of the bytes left."""
    whole = _affine(index)
    if whole is not None:
        return (whole,)
    cut = index.shape[-1] - index.shape[-1] % WORD
    parts = [_affine(index[..., :cut].reshape(*index.shape[:2], -1, WORD))]
    if cut < index.shape[-1]:
        parts.append(_affine(index[..., cut:]))
    result = tuple(part for part in parts if part is not None)
    assert len(result) == len(parts), "unknown byte order"
    return result


@dataclass(frozen=True)
class Table:
    """Decoder of packed codes.

    Attributes:
        entries: levels of all codes of one index, ``[256]`` or ``[4096]``, as one wide element.
        bits, packing: of the codes.
        per_index: codes of one index.
    """

    entries: Tensor
    bits: int
    packing: str
    per_index: int

    def padded_bytes(self, num_bytes: int) -> int:
        """Bytes to read for ``num_bytes``, those of the last index filled up."""
        return -(-num_bytes // 3) * 3 if self.bits == 3 and self.packing == "dense" else num_bytes

    def indices(self, data: Tensor, num_codes: int) -> Tensor:
        """Table indices int32 ``[..., n]`` of packed bytes, int32 ``[..., padded_bytes]``."""
        if self.bits != 3:
            return data
        if self.packing == "planar":
            split = packing.packed_bytes(num_codes, 2)
            low, high = data[..., :split], data[..., split:]
            nibbles = torch.stack([high & 15, high >> 4], -1).flatten(-2)[..., :split]
            return nibbles.bitwise_left_shift_(8).bitwise_or_(low)
        first, second, third = data.unflatten(-1, (-1, 3)).unbind(-1)
        return torch.stack(
            [first | (second & 15) << 8, second >> 4 | third << 4],
            -1,
        ).flatten(-2)


def make_table(
    levels: np.ndarray, bits: int, packing_: str = "dense", *, device: torch.device
) -> Table:
    """Table of float32 ``levels`` ``[2**bits]``."""
    if bits == 3:
        index = np.arange(4096)[:, None]
        place = np.arange(4)
        if packing_ == "planar":
            codes = index >> 2 * place & 3 | (index >> 8 + place & 1) << 2
        else:
            codes = index >> 3 * place & 7
    else:
        codes = packing.byte_codes(bits)
    per_index = codes.shape[1]
    entries = torch.tensor(levels[codes], dtype=torch.float32).view(_WIDE[per_index]).flatten()
    return Table(entries.to(device), bits, packing_, per_index)


def key_levels(codec: Codec) -> np.ndarray:
    """float32 value of every key code."""
    return packing.e4m3_values() if codec.centroids is None else codec.centroids


def value_levels(codec: Codec) -> np.ndarray:
    """float32 value of every value code: a codebook's centroid, or the code itself."""
    if codec.value_centroids is not None:
        return codec.value_centroids
    return np.arange(2**codec.config.value_bits, dtype=np.float32)


class PageReader:
    """Gathers pages and decodes them, a bounded number of tokens at a time.

    Holds the scratch memory of one call. Results of :meth:`keys` and :meth:`values` share it: each
    is valid until the next of these calls.
    """

    def __init__(self, layout: CacheLayout, key: Table, value: Table, device: torch.device) -> None:
        self.layout = layout
        self.regions = regions(layout)
        self.tables = {"key": key, "value": value}
        self.device = device
        self._scratch: dict[str, Tensor] = {}

    def gather(self, cache: Tensor, page: Tensor) -> Tensor:
        """Pages ``[W, n]`` of the cache, as uint8 ``[W, n, page_bytes]``."""
        flat = cache.as_strided(
            (cache.shape[0], self.layout.page_bytes), (cache.stride(0), 1), cache.storage_offset()
        )
        return flat.index_select(0, page.flatten()).unflatten(0, page.shape)

    def keys(self, pages: Tensor, slots: slice) -> tuple[Tensor, Tensor | None]:
        """Key levels float32 ``[W, Hk, T, D]`` and scales ``[W, Hk, T]`` (codebook keys)."""
        levels = self._levels("key", self.regions.key, pages, slots)
        has_scale = self.layout.config.key_is_codebook
        return levels, self._field(0, pages, slots) if has_scale else None

    def values(self, pages: Tensor, slots: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """Value levels ``[W, Hk, T, D]``, scales ``[W, Hk, T]``, and zeros (affine values)."""
        levels = self._levels("value", self.regions.value, pages, slots)
        if self.layout.config.value_is_codebook:
            return levels, self._field(-1, pages, slots), None
        return levels, self._field(-2, pages, slots), self._field(-1, pages, slots)

    def _levels(self, name: str, parts: tuple[Region, ...], pages: Tensor, slots: slice) -> Tensor:
        table, layout = self.tables[name], self.layout
        num_pages, num_slots = pages.shape[1], slots.stop - slots.start
        num_bytes = sum(part.num_bytes for part in parts)
        lead = (pages.shape[0], layout.num_kv_heads, num_pages, num_slots)
        data = self._buffer("data", (*lead, table.padded_bytes(num_bytes)), torch.int32)
        flat = pages.flatten(0, 1)
        start = 0
        for part in parts:
            stop = start + part.num_bytes
            data[..., start:stop].copy_(self._bytes(part, flat, pages.shape[:2], slots))
            start = stop
        data[..., start:].zero_()
        index = table.indices(data, layout.head_dim)
        size = index.shape[-1] * table.per_index
        levels = self._buffer("levels", (*lead, size), torch.float32)
        torch.index_select(
            table.entries, 0, index.flatten(), out=levels.flatten().view(table.entries.dtype)
        )
        return levels.flatten(2, 3)[..., : layout.head_dim]

    def _bytes(self, part: Region, flat: Tensor, lead: torch.Size, slots: slice) -> Tensor:
        """uint8 ``[W, Hk, n, slots, bytes]``."""
        words = part.words() if flat.shape[1] % WORD == 0 else None
        if words is not None:
            view = words.view(flat.view(torch.int32))[:, slots].unflatten(0, lead)
            if view.ndim == 4:  # one word a token and head
                view = view.unsqueeze(-1)
            view = view.permute(0, 3, 1, 2, 4)
            # Not `contiguous`, which leaves a single word the strides that it has.
            return view.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        view = part.view(flat)[:, slots].unflatten(0, lead)
        return view.permute(0, 3, 1, 2, *range(4, view.ndim)).flatten(4)

    def _field(self, number: int, pages: Tensor, slots: slice) -> Tensor:
        """A metadata field, float32 ``[W, Hk, T]``."""
        place = self.regions.fields[number]
        strides = tuple(stride // 2 for stride in place.strides[:2])
        halves = Region(place.offset // 2, place.shape[:2], strides)
        view = halves.view(pages.flatten(0, 1).view(torch.float16))
        view = view[:, slots].unflatten(0, pages.shape[:2])  # [W, n, slots, Hk]
        return view.permute(0, 3, 1, 2).flatten(2).float()

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape)
        have = self._scratch.get(name)
        if have is None or have.numel() < size:
            have = torch.empty(size, dtype=dtype, device=self.device)
            self._scratch[name] = have
        return have[:size].view(shape)


def pack(codes: Tensor, bits: int, packing_: str = "dense") -> Tensor:
    """Packs integer codes ``[..., n]`` to uint8 ``[..., packed_bytes]``."""
    if packing_ == "planar":
        return torch.cat([pack(codes & 3, 2), pack(codes >> 2, 1)], -1)
    if bits == 8:
        return codes.to(torch.uint8)
    num_bytes = packing.packed_bytes(codes.shape[-1], bits)
    codes = torch.nn.functional.pad(codes.to(torch.int32), (0, -codes.shape[-1] % 8))
    # Eight codes fill ``bits`` bytes exactly; 8 * 4 bits may set the sign bit, which is harmless.
    groups = codes.unflatten(-1, (-1, 8))
    shifts = torch.arange(8, dtype=torch.int32, device=codes.device)
    word = (groups << bits * shifts).sum(-1, dtype=torch.int32)
    data = word[..., None] >> 8 * shifts[:bits] & 255
    return data.to(torch.uint8).flatten(-2)[..., :num_bytes]
