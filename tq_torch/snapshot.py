"""Files of caches, from and to tensors on any device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tq_core import snapshot
from tq_core.codec import Codec
from tq_core.layout import CacheLayout
from tq_core.snapshot import CacheFile, Put
from tq_torch import ops
from tq_torch.api import empty_cache


def save_cache(
    path: str | os.PathLike[str],
    cache: Tensor,
    *,
    layout: CacheLayout,
    codec: Codec | None = None,
    pages: Sequence[int] | np.ndarray | Tensor | None = None,
    block_table: Tensor | None = None,
    seq_lens: Tensor | None = None,
) -> None:
    """Writes a cache as one checked safetensors file, atomically: a crash leaves the old file.

    ``tq_core``, ``tq_torch`` and ``tq_jax`` read each other's files. From a GPU the pages come in
    blocks of about 16 MiB; the call waits for the device. Pages are written as they are, those
    that were never stored to, and hold whatever was in memory, included.

    Args:
        path: file to create or replace.
        cache: uint8 ``layout.shape(num_pages)`` on any device; pages may be strided.
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
        >>> from tq_core import CacheLayout, Codec, QuantConfig
        >>> layout = CacheLayout(QuantConfig.preset("4bit"), 2, 64, 16)
        >>> codec, cache = Codec(layout.config, 64), empty_cache(layout, 8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_cache(f"{folder}/c", cache, layout=layout, codec=codec, pages=[5, 2])
        ...     file = load_cache(f"{folder}/c", layout=layout, codec=codec)
        >>> torch.equal(file.cache, cache[[5, 2]])
        True
    """
    given = {"cache": cache, "block_table": block_table, "seq_lens": seq_lens}
    for name, x in given.items():
        if (x is not None or name == "cache") and not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")

    def fetch(index: Any) -> np.ndarray:
        if isinstance(index, np.ndarray):
            index = torch.from_numpy(index).to(cache.device)
        block: np.ndarray = cache[index].cpu().numpy()
        return block

    snapshot.write_cache(
        path,
        fetch,
        ops.spec(cache),
        layout=layout,
        codec=codec,
        pages=_array(pages),
        block_table=_array(block_table),
        seq_lens=_array(seq_lens),
    )


def load_cache(
    path: str | os.PathLike[str],
    *,
    layout: CacheLayout | None = None,
    codec: Codec | None = None,
    pages: Sequence[int] | np.ndarray | Tensor | None = None,
    device: torch.device | str | int | None = None,
) -> CacheFile:
    """Reads a file of ``save_cache``, whichever package wrote it, and checks all of it.

    Pages go to the device in blocks of about 16 MiB, so that host memory never holds them all.

    Args:
        path: the file.
        layout: what the file's layout must be. Default: any.
        codec: what the file's codec must be. Default: any.
        pages: places of the file's pages to load, distinct, in any order; a table in the file is
            renumbered. Default: all.
        device: torch device of all tensors. Default: torch's default device.

    Returns:
        :class:`tq_core.CacheFile` of tensors: the pages in a cache of their own, and what the file
        has beside them.

    Raises:
        FileNotFoundError: no such file, or PermissionError: one that may not be read.
        ImportError: the ``safetensors`` package is missing.
        RuntimeError: this build of torch has no such device.
        TypeError: an argument of the wrong type.
        ValueError: not a cache file, one of another version, layout or codec, a damaged one, or
            ``pages`` that it does not have or that its sequences cannot do without.

    Example:
        >>> import tempfile
        >>> from tq_core import CacheLayout, QuantConfig
        >>> layout = CacheLayout(QuantConfig.preset("4bit"), 2, 64, 16)
        >>> cache, free = empty_cache(layout, 8), torch.tensor([6, 3])
        >>> table, lens = torch.tensor([[1, 0]]).int(), torch.tensor([20]).int()
        >>> what = {"layout": layout, "block_table": table, "seq_lens": lens}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_cache(f"{folder}/c", cache, pages=[1, 0], **what)
        ...     file = load_cache(f"{folder}/c", layout=layout)
        >>> cache[free] = file.cache  # into free pages of a cache that is in use
        >>> free[file.block_table].tolist()
        [[6, 3]]
    """

    def allocate(found: CacheLayout, num_pages: int) -> tuple[Tensor, Put]:
        cache = empty_cache(found, num_pages, device)

        def put(index: Any, block: np.ndarray) -> None:
            if isinstance(index, np.ndarray):
                index = torch.from_numpy(index).to(cache.device)
            cache[index] = torch.from_numpy(block).to(cache.device)

        return cache, put

    file = snapshot.read_cache(path, allocate, layout=layout, codec=codec, pages=_array(pages))
    if file.block_table is None:
        return file
    rest = {name: getattr(file, name) for name in ("block_table", "seq_lens")}
    tensors = {name: torch.tensor(x, device=file.cache.device) for name, x in rest.items()}
    return replace(file, **tensors)


def _array(x: Any) -> Any:
    return x.detach().cpu().numpy() if isinstance(x, Tensor) else x
