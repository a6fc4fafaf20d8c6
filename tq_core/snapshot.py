"""Files that hold a cache, or some of its pages, and what restores sequences of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tq_core import files
from tq_core.codec import Codec
from tq_core.config import QuantConfig
from tq_core.layout import ORDER_TAGS, CacheLayout
from tq_core.validation import ArraySpec, check_cache, check_codec, check_layout, check_table

_TABLE = ("block_table", "seq_lens")

#: Pages by a slice or an array of their numbers, as uint8 ``[n, P, Hk, slot_bytes]``.
Fetch = Callable[[Any], np.ndarray]
#: Writes pages to the places that a slice or an array of numbers names.
Put = Callable[[Any, np.ndarray], None]


@dataclass(frozen=True, eq=False)
class CacheFile:
    """What ``load_cache`` read.

    Attributes:
        cache: uint8 ``layout.shape(num_pages)``, the pages of the file in their order.
        layout: the cache's layout.
        codec_digest: ``Codec.digest`` of the codec of its contents; None where the file has none.
        block_table: int32 ``[B, max_pages]`` into ``cache``; None where the file has none.
        seq_lens: int32 ``[B]``; None where the file has none.
    """

    cache: Any
    layout: CacheLayout
    codec_digest: str | None
    block_table: Any = None
    seq_lens: Any = None


def save_cache(
    path: str | os.PathLike[str],
    cache: np.ndarray,
    *,
    layout: CacheLayout,
    codec: Codec | None = None,
    pages: Sequence[int] | np.ndarray | None = None,
    block_table: np.ndarray | None = None,
    seq_lens: np.ndarray | None = None,
) -> None:
    """Writes a cache as one checked safetensors file, atomically: a crash leaves the old file.

    Pages are written as they are, those that were never stored to included.

    Args:
        path: file to create or replace.
        cache: uint8 ``layout.shape(num_pages)``; pages may be strided.
        layout: the cache's layout.
        codec: the codec of its contents, whose digest the file then names; ``Codec.save`` keeps
            the codec itself.
        pages: numbers of the pages to keep, distinct, in any order. Default: all.
        block_table: int32 ``[B, max_pages]`` to keep beside the pages. With ``pages`` its entries
            are renumbered to places in the file, and those that no sequence uses may become -1.
        seq_lens: int32 ``[B]``, needed with ``block_table`` and only then.

    Raises:
        ImportError: the ``safetensors`` package is missing.
        OSError: the file cannot be written; the one that was there is unchanged.
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, a codec that does not match, a page that does not exist, or one
            that a sequence uses and ``pages`` leaves out. A negative entry of the table stays as it
            is: a sliding window has left such a page behind.

    Example:
        >>> import tempfile
        >>> layout = CacheLayout(QuantConfig.preset("4bit"), 2, 64, 16)
        >>> cache, codec = np.zeros(layout.shape(8), np.uint8), Codec(layout.config, 64)
        >>> table, lens = np.array([[5, 2]], np.int32), np.array([20], np.int32)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_cache(
        ...         f"{folder}/prefix", cache, layout=layout, codec=codec,
        ...         pages=[5, 2], block_table=table, seq_lens=lens)
        ...     file = load_cache(f"{folder}/prefix", layout=layout, codec=codec)
        >>> file.cache.shape, file.block_table.tolist()
        ((2, 16, 2, 70), [[0, 1]])
    """
    if not isinstance(cache, np.ndarray):
        raise TypeError(f"cache: expected a numpy array, got {type(cache).__name__}")
    write_cache(
        path,
        cache.__getitem__,
        ArraySpec(cache.shape, cache.dtype.name),
        layout=layout,
        codec=codec,
        pages=pages,
        block_table=block_table,
        seq_lens=seq_lens,
    )


def load_cache(
    path: str | os.PathLike[str],
    *,
    layout: CacheLayout | None = None,
    codec: Codec | None = None,
    pages: Sequence[int] | np.ndarray | None = None,
) -> CacheFile:
    """Reads a file of ``save_cache``, whichever package wrote it, and checks all of it.

    Args:
        path: the file.
        layout: what the file's layout must be. Default: any.
        codec: what the file's codec must be. Default: any.
        pages: places of the file's pages to load, distinct, in any order; a table in the file is
            renumbered. Default: all.

    Returns:
        The pages, in arrays of their own, and what the file has beside them.

    Raises:
        FileNotFoundError: no such file, or PermissionError: one that may not be read.
        ImportError: the ``safetensors`` package is missing.
        TypeError: an argument of the wrong type.
        ValueError: not a cache file, one of another version, layout or codec, a damaged one, or
            ``pages`` that it does not have or that its sequences cannot do without.
    """

    def allocate(found: CacheLayout, num_pages: int) -> tuple[np.ndarray, Put]:
        cache = np.empty(found.shape(num_pages), np.uint8)
        return cache, cache.__setitem__

    return read_cache(path, allocate, layout=layout, codec=codec, pages=pages)


def write_cache(
    path: str | os.PathLike[str],
    fetch: Fetch,
    cache: ArraySpec,
    *,
    layout: CacheLayout,
    codec: Codec | None,
    pages: Any,
    block_table: Any,
    seq_lens: Any,
) -> None:
    """:func:`save_cache` of a cache that is fetched in blocks; the other arrays are numpy's."""
    check_layout(layout)
    if codec is not None:
        check_codec(layout, codec)
    check_cache(cache, layout)
    num_pages = cache.shape[0]
    chosen = None if pages is None else _checked_pages(pages, num_pages)
    arrays: dict[str, np.ndarray | files.Blocks] = {}
    if (block_table is None) != (seq_lens is None):
        missing = _TABLE[seq_lens is None]
        raise ValueError(f"{missing}: expected with {_TABLE[block_table is None]}, got None")
    if block_table is not None:
        table, lens = np.asarray(block_table), np.asarray(seq_lens)
        specs = (ArraySpec(x.shape, x.dtype.name) for x in (table, lens))
        check_table(cache, *specs, layout=layout)
        _check_contents(table, lens, num_pages, layout.page_size)
        if chosen is not None:
            table = _renumbered(table, lens, chosen, num_pages, layout.page_size)
        arrays = {"block_table": table, "seq_lens": lens}
    count = num_pages if chosen is None else len(chosen)

    def blocks() -> Iterator[np.ndarray]:
        step = max(1, files.BLOCK_BYTES // layout.page_bytes)
        for start in range(0, count, step):
            part = slice(start, min(start + step, count))
            yield fetch(part if chosen is None else chosen[part])

    arrays["cache"] = files.Blocks("uint8", layout.shape(count), blocks())
    files.save(path, arrays, _metadata(layout, codec))


def read_cache(
    path: str | os.PathLike[str],
    allocate: Callable[[CacheLayout, int], tuple[Any, Put]],
    *,
    layout: CacheLayout | None,
    codec: Codec | None,
    pages: Any,
) -> CacheFile:
    """:func:`load_cache` into what ``allocate`` makes for a layout and a number of pages."""
    if layout is not None:
        check_layout(layout)
    if codec is not None and not isinstance(codec, Codec):
        raise TypeError(f"codec: expected a Codec, got {type(codec).__name__}")
    with files.reading(path, "cache") as reader:
        where = reader.name
        found, digest = _described(where, reader.metadata)
        if layout is not None and layout != found:
            raise ValueError(f"layout: {where} has {found}, expected {layout}")
        if codec is not None and codec.digest != digest:
            has = "names no codec" if digest is None else f"has codec {digest[:12]}"
            raise ValueError(f"codec: {where} {has}, expected {codec.digest[:12]}")
        num_pages, has_table = _checked_arrays(where, reader.arrays, found)
        chosen = None if pages is None else _checked_pages(pages, num_pages)
        table = reader.array("block_table") if has_table else None
        cache, put = allocate(found, num_pages if chosen is None else len(chosen))
        order = None if chosen is None else np.argsort(chosen)
        for start, block in reader.blocks("cache"):
            if chosen is None or order is None:
                put(slice(start, start + len(block)), block)
                continue
            first, last = np.searchsorted(chosen, (start, start + len(block)), sorter=order)
            if first < last:
                places = order[first:last]
                put(places, block[chosen[places] - start])
        lens = reader.array("seq_lens") if has_table else None
        reader.check()
    if table is not None and lens is not None:
        try:
            _check_contents(table, lens, num_pages, found.page_size)
        except ValueError as error:
            raise ValueError(f"{where}: not a valid cache file: {error}") from error
        if chosen is not None:
            table = _renumbered(table, lens, chosen, num_pages, found.page_size)
    return CacheFile(cache, found, digest, table, lens)


def _metadata(layout: CacheLayout, codec: Codec | None) -> dict[str, str]:
    config = layout.config
    metadata = {
        "kind": "cache",
        "key": config.key,
        "value": config.value,
        "norm_correction": str(config.norm_correction).lower(),
        "key_packing": config.key_packing,
        "order": layout.tag,
        "num_kv_heads": str(layout.num_kv_heads),
        "head_dim": str(layout.head_dim),
        "page_size": str(layout.page_size),
    }
    return metadata if codec is None else {**metadata, "codec": codec.digest}


def _described(where: str, metadata: dict[str, str]) -> tuple[CacheLayout, str | None]:
    """The layout and the codec's digest of :func:`_metadata`."""
    try:
        config = QuantConfig(
            key=metadata["key"],
            value=metadata["value"],
            norm_correction={"true": True, "false": False}[metadata["norm_correction"]],
            key_packing=metadata["key_packing"],
        )
        order = {tag: name for name, tag in ORDER_TAGS.items()}[metadata["order"]]
        names = ("num_kv_heads", "head_dim", "page_size")
        heads, dim, size = (files.number(metadata, name) for name in names)
        return CacheLayout(config, heads, dim, size, order), files.digest(metadata, "codec")
    except KeyError as error:
        raise ValueError(
            f"{where}: not a valid cache file: its metadata lack, or do not know, {error}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{where}: not a valid cache file: {error}") from error


def _checked_arrays(
    where: str, arrays: dict[str, tuple[str, tuple[int, ...]]], layout: CacheLayout
) -> tuple[int, bool]:
    """Number of pages in a file with these arrays, and whether it has a table."""
    specs = {name: ArraySpec(shape, dtype) for name, (dtype, shape) in arrays.items()}
    names = sorted(specs)
    if names not in (["cache"], ["block_table", "cache", "seq_lens"]):
        raise ValueError(
            f"{where}: not a valid cache file: expected cache, or block_table, cache and seq_lens, "
            f"got {names}"
        )
    try:
        check_cache(specs["cache"], layout)
        if len(names) > 1:
            check_table(*(specs[name] for name in ("cache", *_TABLE)), layout=layout)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: not a valid cache file: {error}") from error
    return specs["cache"].shape[0], len(names) > 1


def _checked_pages(pages: Any, num_pages: int) -> np.ndarray:
    """Distinct numbers of pages that exist; int64."""
    given = np.asarray(pages)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise TypeError(f"pages: expected numbers of pages, got {pages!r:.80}")
    chosen = given.astype(np.int64)
    if (wrong := (chosen < 0) | (chosen >= num_pages)).any():
        index = int(wrong.argmax())
        raise ValueError(
            f"pages: expected numbers from 0 to {num_pages - 1}, got {chosen[index]} at index "
            f"{index}"
        )
    if len(np.unique(chosen)) < len(chosen):
        numbers, counts = np.unique(chosen, return_counts=True)
        raise ValueError(f"pages: expected distinct numbers, got {numbers[counts > 1][0]} twice")
    return chosen


def _check_contents(table: np.ndarray, lens: np.ndarray, num_pages: int, page_size: int) -> None:
    """Sequences are as long as the table allows, and their pages exist or are negative."""
    capacity = table.shape[1] * page_size
    if (wrong := (lens < 0) | (lens > capacity)).any():
        index = int(wrong.argmax())
        raise ValueError(
            f"seq_lens: expected 0 to {capacity} tokens (max_pages * page_size of block_table), "
            f"got {lens[index]} for sequence {index}"
        )
    wrong = _used(table, lens, page_size) & (table >= num_pages)
    if wrong.any():
        sequence, number = np.argwhere(wrong)[0]
        raise ValueError(
            f"block_table: expected pages below {num_pages}, got {table[sequence, number]} for "
            f"page {number} of sequence {sequence}"
        )


def _used(table: np.ndarray, lens: np.ndarray, page_size: int) -> np.ndarray:
    """Which entries lie before their sequence's end."""
    if not table.size:  # of any width, where there are no sequences
        return np.zeros(table.shape, bool)
    used: np.ndarray = np.arange(table.shape[1]) * page_size < lens[:, None]
    return used


def _renumbered(
    table: np.ndarray, lens: np.ndarray, pages: np.ndarray, num_pages: int, page_size: int
) -> np.ndarray:
    """The table with places in ``pages`` for numbers of pages; -1 for what is not there."""
    place = np.full(num_pages + 1, -1, np.int32)
    place[pages] = np.arange(len(pages), dtype=np.int32)
    exists = (table >= 0) & (table < num_pages)
    new: np.ndarray = place[np.where(exists, table, num_pages)]
    wrong = _used(table, lens, page_size) & exists & (new < 0)
    if wrong.any():
        sequence, number = np.argwhere(wrong)[0]
        raise ValueError(
            f"pages: expected page {table[sequence, number]} too, which is page {number} of "
            f"sequence {sequence}; where no reader needs it, make its entry of block_table -1"
        )
    return new
