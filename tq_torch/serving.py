"""What a server does before its first request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tq_core.codec import Codec
from tq_core.layout import CacheLayout
from tq_torch.api import attention, decode_attention, store


def warmup(
    cache: Tensor,
    *,
    layout: CacheLayout,
    codec: Codec,
    num_query_heads: int,
    dtype: torch.dtype,
    max_pages: int,
    decode_batches: Iterable[int] = (),
    chunk_batches: Iterable[tuple[int, int, int | None]] = (),
    max_seq_lens: Iterable[int | None] = (None,),
    slot_dtype: torch.dtype = torch.int64,
    backend: str | None = None,
    **options: Any,
) -> None:
    """Compiles the kernels of the given batches, so that no request waits for a compiler.

    It makes the calls themselves, with sequences of no tokens and slots of -1: nothing of the cache
    is read or written. What is compiled follows from shapes, dtypes, strides, options and hints
    alone, never from contents. Arrays here are dense and aligned to 16 bytes; a server whose
    queries or keys are slices of other arrays calls its own model in the same way, instead.

    The codec's constants are on the device then, so that a CUDA graph can be captured.

    Args:
        cache: the cache that will be used, uint8 ``layout.shape(num_pages)``.
        layout: the cache's layout.
        codec: the codec of its contents.
        num_query_heads: Hq.
        dtype: of queries, keys and values.
        max_pages: width of the block tables.
        decode_batches: numbers of sequences of ``decode_attention`` calls.
        chunk_batches: numbers of sequences, of query rows in all, and ``max_query_len`` (or None)
            of ``attention`` calls.
        max_seq_lens: the hints ``max_seq_len`` of either, None for calls without.
        slot_dtype: of ``slot_mapping``, ``torch.int64`` or ``torch.int32``.
        backend: as in :func:`tq_torch.attention`.
        options: further arguments of :func:`tq_torch.attention`, sinks and slopes included.

    Raises:
        TypeError: as the functions that it calls.
        ValueError: likewise.

    Example:
        >>> from tq_core import CacheLayout, Codec, QuantConfig
        >>> from tq_torch import empty_cache
        >>> layout = CacheLayout(QuantConfig.preset("4bit"), 2, 64, 16)
        >>> warmup(
        ...     empty_cache(layout, 8),
        ...     layout=layout,
        ...     codec=Codec(layout.config, 64),
        ...     num_query_heads=8,
        ...     dtype=torch.bfloat16,
        ...     max_pages=4,
        ...     decode_batches=range(1, 9),
        ...     chunk_batches=[(1, 32, 32), (4, 64, 61)],
        ... )
    """
    device, what = cache.device, {"layout": layout, "codec": codec, "backend": backend}
    lengths = list(max_seq_lens)

    def tokens(num: int, heads: int) -> Tensor:
        return torch.zeros(num, heads, layout.head_dim, dtype=dtype, device=device)

    def write(num: int) -> None:
        key, slots = tokens(num, layout.num_kv_heads), torch.full((num,), -1, device=device)
        store(key, key.clone(), cache, slots.to(slot_dtype), **what)

    def table(num_seqs: int) -> tuple[Tensor, Tensor]:
        shape = (num_seqs, max_pages)
        return (
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(num_seqs, dtype=torch.int32, device=device),
        )

    for num_seqs in decode_batches:
        write(num_seqs)
        query, (pages, lens) = tokens(num_seqs, num_query_heads), table(num_seqs)
        for length in lengths:
            decode_attention(query, cache, pages, lens, max_seq_len=length, **what, **options)
    for num_seqs, num_tokens, query_len in chunk_batches:
        write(num_tokens)
        query, (pages, lens) = tokens(num_tokens, num_query_heads), table(num_seqs)
        starts = torch.zeros(num_seqs + 1, dtype=torch.int32, device=device)
        hints = {"max_query_len": query_len, **what, **options}
        for length in lengths:
            attention(query, cache, pages, lens, starts, max_seq_len=length, **hints)
