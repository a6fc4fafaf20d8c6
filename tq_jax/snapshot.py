"""Files of caches, from and to JAX arrays on any device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tq_core import snapshot
from tq_core.codec import Codec
from tq_core.layout import CacheLayout
from tq_core.snapshot import CacheFile, Put
from tq_core.validation import ArraySpec
from tq_jax.api import check_device

#: XLA takes arrays of the host that this divides the address of as they are.
_ALIGN = 64


def save_cache(
    path: str | os.PathLike[str],
    cache: jax.Array,
    *,
    layout: CacheLayout,
    codec: Codec | None = None,
    pages: Sequence[int] | np.ndarray | jax.Array | None = None,
    block_table: jax.Array | None = None,
    seq_lens: jax.Array | None = None,
) -> None:
    """Writes a cache as one checked safetensors file, atomically: a crash leaves the old file.

    ``tq_core``, ``tq_torch`` and ``tq_jax`` read each other's files. From a GPU the pages come in
    blocks of about 16 MiB. Not for traced arrays.

    Args:
        path: file to create or replace.
        cache: uint8 ``layout.shape(num_pages)`` on any device, or sharded over several.
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
        TypeError: a wrong type or dtype, or a traced array.
        ValueError: a wrong shape, a codec that does not match, a page that does not exist, or one
            that a sequence uses and ``pages`` leaves out. A negative entry of the table stays as it
            is: a sliding window has left such a page behind.

    Example:
        >>> import tempfile
        >>> from tq_core import CacheLayout, Codec, QuantConfig
        >>> from tq_jax import empty_cache
        >>> layout = CacheLayout(QuantConfig.preset("4bit"), 2, 64, 16)
        >>> codec, cache = Codec(layout.config, 64), empty_cache(layout, 8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_cache(f"{folder}/c", cache, layout=layout, codec=codec, pages=[5, 2])
        ...     file = load_cache(f"{folder}/c", layout=layout, codec=codec)
        >>> file.cache.shape
        (2, 16, 2, 70)
    """
    given = {"cache": cache, "block_table": block_table, "seq_lens": seq_lens}
    for name, x in given.items():
        if x is None and name != "cache":
            continue
        if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array | np.ndarray):
            raise TypeError(f"{name}: expected a concrete jax.Array, got {type(x).__name__}")

    def fetch(index: Any) -> np.ndarray:
        if isinstance(cache, np.ndarray):
            return cache[index]
        if isinstance(index, slice):
            # The place is traced, so that all blocks of a size share a program.
            size = index.stop - index.start
            return np.asarray(jax.lax.dynamic_slice_in_dim(cache, index.start, size))
        return np.asarray(jnp.take(cache, index.astype(np.int32), axis=0, mode="clip"))

    snapshot.write_cache(
        path,
        fetch,
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
    pages: Sequence[int] | np.ndarray | jax.Array | None = None,
    device: Any = None,
) -> CacheFile:
    """Reads a file of ``save_cache``, whichever package wrote it, and checks all of it.

    The pages are in host memory once, and then move to the device as a whole.

    Args:
        path: the file.
        layout: what the file's layout must be. Default: any.
        codec: what the file's codec must be. Default: any.
        pages: places of the file's pages to load, distinct, in any order; a table in the file is
            renumbered. Default: all.
        device: a device, or a sharding of the cache; None is JAX's default device.

    Returns:
        :class:`tq_core.CacheFile` of JAX arrays: the pages in a cache of their own, and what the
        file has beside them; beside a cache with a sharding that is on no device in particular.

    Raises:
        FileNotFoundError: no such file, or PermissionError: one that may not be read.
        ImportError: the ``safetensors`` package is missing.
        TypeError: an argument of the wrong type, ``device`` a name.
        ValueError: not a cache file, one of another version, layout or codec, a damaged one, or
            ``pages`` that it does not have or that its sequences cannot do without.

    Example:
        >>> import tempfile
        >>> from tq_core import CacheLayout, QuantConfig
        >>> from tq_jax import empty_cache
        >>> layout = CacheLayout(QuantConfig.preset("4bit"), 2, 64, 16)
        >>> cache, free = empty_cache(layout, 8), jnp.array([6, 3])
        >>> what = {"block_table": jnp.array([[1, 0]]), "seq_lens": jnp.array([20])}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_cache(f"{folder}/c", cache, layout=layout, pages=[1, 0], **what)
        ...     file = load_cache(f"{folder}/c", layout=layout)
        >>> cache = cache.at[free].set(file.cache)  # into free pages of a cache that is in use
        >>> free[file.block_table].tolist()
        [[6, 3]]
    """
    check_device(device)

    def allocate(found: CacheLayout, num_pages: int) -> tuple[np.ndarray, Put]:
        size = num_pages * found.page_bytes
        memory = np.empty(size + _ALIGN, np.uint8)
        start = -memory.ctypes.data % _ALIGN
        cache = memory[start : start + size].reshape(found.shape(num_pages))
        return cache, cache.__setitem__

    file = snapshot.read_cache(path, allocate, layout=layout, codec=codec, pages=pages)
    one = device if isinstance(device, jax.Device) else None
    table, lens = (
        None if x is None else jax.device_put(x, one) for x in (file.block_table, file.seq_lens)
    )
    return replace(file, cache=jax.device_put(file.cache, device), block_table=table, seq_lens=lens)
