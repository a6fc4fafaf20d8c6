"""The public functions: check the arguments, choose a backend, call it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tq_core.codec import Codec
from tq_core.layout import CacheLayout
from tq_core.support import choose_backend
from tq_core.validation import (
    ArraySpec,
    check_attention,
    check_dequantize,
    check_merge,
    check_store,
)
from tq_torch import native


def empty_cache(
    layout: CacheLayout, num_pages: int, device: torch.device | str | int | None = None
) -> Tensor:
    """Allocates a paged cache.

    Args:
        layout: sizes and byte order.
        num_pages: number of pages, at least 0.
        device: torch device. Default: torch's default device.

    Returns:
        uint8 ``[num_pages, page_size, num_kv_heads, slot_bytes]``, uninitialised: a token is read
        only after it was stored.

    Raises:
        TypeError: ``layout`` is not a ``CacheLayout``, or ``num_pages`` not an int.
        ValueError: ``num_pages`` is negative.

    Example:
        >>> from tq_core import CacheLayout, QuantConfig
        >>> layout = CacheLayout(QuantConfig.preset("4bit"), 8, 128, 16)
        >>> empty_cache(layout, 10).shape
        torch.Size([10, 16, 8, 134])
    """
    if not isinstance(layout, CacheLayout):
        raise TypeError(f"layout: expected a CacheLayout, got {type(layout).__name__}")
    if isinstance(num_pages, bool) or not isinstance(num_pages, int):
        raise TypeError(f"num_pages: expected an int, got {num_pages!r}")
    if num_pages < 0:
        raise ValueError(f"num_pages: expected at least 0, got {num_pages}")
    return torch.empty(layout.shape(num_pages), dtype=torch.uint8, device=device)


def store(
    key: Tensor,
    value: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: CacheLayout,
    codec: Codec,
    backend: str | None = None,
) -> None:
    """Quantises keys and values and writes them into the cache, in place.

    NaN is stored as 0 and infinities saturate, so no reader ever meets them. Where two rows have
    one slot, the later row is stored.

    Args:
        key: ``[N, Hk, D]`` in fp16, bf16 or fp32, after RoPE; any strides.
        value: ``[N, Hk, D]`` likewise; its dtype may differ from the key's.
        cache: uint8 ``layout.shape(num_pages)``. Pages may be strided; nothing else of the memory
            between and around the written tokens changes.
        slot_mapping: int32 or int64 ``[N]``, ``page * page_size + slot``; negative: skip the row.
        layout: the cache's layout.
        codec: the codec of its contents.
        backend: None for the device's default, ``"triton"``, ``"native"`` or ``"interpret"``. A
            named backend that cannot serve the call raises.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, stride, device or backend; on the CPU also a slot outside the
            cache (on a GPU the device reports it later). The message names the argument.

    Example:
        >>> from tq_core import CacheLayout, Codec, QuantConfig
        >>> layout = CacheLayout(QuantConfig.preset("4bit"), 2, 64, 16)
        >>> codec = Codec(layout.config, 64)
        >>> cache = empty_cache(layout, 4)
        >>> key, value = torch.randn(2, 5, 2, 64)
        >>> store(key, value, cache, torch.arange(5), layout=layout, codec=codec)

    Source: TurboQuant, arXiv 2504.19874, section 3.
    """
    _check_tensors(key=key, value=value, cache=cache, slot_mapping=slot_mapping)
    check_store(
        _spec(key), _spec(value), _spec(cache), _spec(slot_mapping), layout=layout, codec=codec
    )
    _check_no_overlap("cache", cache, layout.page_bytes)
    if cache.device.type == "cpu":
        _check_slots(slot_mapping, cache.shape[0] * layout.page_size)
    backend_module = _backend(layout, backend, cache.device)
    backend_module.store(key, value, cache, slot_mapping, layout=layout, codec=codec)


def attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    layout: CacheLayout,
    codec: Codec,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    num_kv_splits: int | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed query rows over the packed cache; for inference.

    Row i of sequence b has position ``p = seq_lens[b] - query_len[b] + i`` and sees cached tokens
    ``j < seq_lens[b]`` with ``j <= p`` (causal) and ``j > p - sliding_window``. Its score is
    ``s = scale * (q . k_j)``, then ``softcap * tanh(s / softcap)``, then
    ``+ alibi_slopes[h] * (j - p)``. The new tokens of a call are stored before it.

    Args:
        query: ``[N, Hq, D]`` in fp16, bf16 or fp32, any strides; sequence b owns rows
            ``query_start_loc[b] : query_start_loc[b + 1]``.
        cache: uint8 ``layout.shape(num_pages)``; pages may be strided.
        block_table: int32 ``[B, max_pages]``. Entries past a sequence's end or wholly before its
            window are never used and may be anything.
        seq_lens: int32 ``[B]``, cached tokens of each sequence, the call's own included.
        query_start_loc: int32 ``[B + 1]``.
        layout: the cache's layout.
        codec: the codec of its contents.
        scale: factor of the scores. Default ``1 / sqrt(D)``.
        causal: whether a row sees no token after its own.
        sliding_window: tokens that a row sees at most, itself included. Default: all.
        softcap: limit of the scores' magnitude. Default: none.
        sinks: fp32 ``[Hq]``; ``exp(sink)`` joins the softmax denominator.
        alibi_slopes: fp32 ``[Hq]``.
        return_lse: also return the log-sum-exp of the scores.
        max_query_len: upper bound of a sequence's query rows. Default: N.
        max_seq_len: upper bound of ``seq_lens``. Default: what ``block_table`` can address.
            Neither bound changes the result; off the CPU a tight one saves work.
        num_kv_splits: parts a sequence is cut into by kernels; ``"native"`` has no use for it.
        out: ``[N, Hq, D]`` in the query's dtype to write into, any strides. Default: a new one.
        backend: None for the device's default, ``"triton"``, ``"native"`` or ``"interpret"``.

    Returns:
        ``[N, Hq, D]`` in the query's dtype (``out`` if given); with ``return_lse`` also the
        natural-log LSE, fp32 ``[N, Hq]``, sink included. A row that sees nothing gives 0 and LSE
        ``-inf`` (the sink, if there is one).

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, size, stride, device or backend, or an input that requires a
            gradient; on the CPU also lengths and pages that do not exist. The message names the
            argument.

    Example:
        >>> from tq_core import CacheLayout, Codec, QuantConfig
        >>> layout = CacheLayout(QuantConfig.preset("4bit"), 2, 64, 16)
        >>> codec = Codec(layout.config, 64)
        >>> cache = empty_cache(layout, 4)
        >>> key, value = torch.randn(2, 5, 2, 64)
        >>> store(key, value, cache, torch.arange(5), layout=layout, codec=codec)
        >>> attention(
        ...     torch.randn(5, 8, 64),
        ...     cache,
        ...     block_table=torch.tensor([[0]], dtype=torch.int32),
        ...     seq_lens=torch.tensor([5], dtype=torch.int32),
        ...     query_start_loc=torch.tensor([0, 5], dtype=torch.int32),
        ...     layout=layout,
        ...     codec=codec,
        ... ).shape
        torch.Size([5, 8, 64])

    Source: TurboQuant, arXiv 2504.19874, section 3; FlashAttention-2, arXiv 2307.08691.
    """
    _check_tensors(query_start_loc=query_start_loc)
    return _attention(
        query,
        cache,
        block_table,
        seq_lens,
        query_start_loc,
        layout=layout,
        codec=codec,
        scale=scale,
        causal=causal,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        return_lse=return_lse,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        num_kv_splits=num_kv_splits,
        out=out,
        backend=backend,
    )


def decode_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    layout: CacheLayout,
    codec: Codec,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    num_kv_splits: int | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`attention` with one query row a sequence, the last of its tokens.

    Args:
        query: ``[B, Hq, D]`` in fp16, bf16 or fp32, any strides; row b belongs to sequence b.
        cache: uint8 ``layout.shape(num_pages)``; pages may be strided.
        block_table: int32 ``[B, max_pages]``.
        seq_lens: int32 ``[B]``, cached tokens of each sequence, the new one included.
        layout: the cache's layout.
        codec: the codec of its contents.
        scale: factor of the scores. Default ``1 / sqrt(D)``.
        causal: makes no difference here, since the row is the last of its sequence.
        sliding_window: tokens that a row sees at most, itself included. Default: all.
        softcap: limit of the scores' magnitude. Default: none.
        sinks: fp32 ``[Hq]``; ``exp(sink)`` joins the softmax denominator.
        alibi_slopes: fp32 ``[Hq]``.
        return_lse: also return the log-sum-exp of the scores.
        max_query_len: None or 1.
        max_seq_len: upper bound of ``seq_lens``; off the CPU a tight one saves work.
        num_kv_splits: parts a sequence is cut into by kernels; ``"native"`` has no use for it.
        out: ``[B, Hq, D]`` in the query's dtype to write into, any strides. Default: a new one.
        backend: None for the device's default, ``"triton"``, ``"native"`` or ``"interpret"``.

    Returns:
        ``[B, Hq, D]`` in the query's dtype; with ``return_lse`` also the natural-log LSE, fp32
        ``[B, Hq]``.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: as :func:`attention`.

    Example:
        >>> from tq_core import CacheLayout, Codec, QuantConfig
        >>> layout = CacheLayout(QuantConfig.preset("3bit"), 2, 64, 16)
        >>> codec = Codec(layout.config, 64)
        >>> cache = empty_cache(layout, 4)
        >>> key, value = torch.randn(2, 5, 2, 64)
        >>> store(key, value, cache, torch.arange(5), layout=layout, codec=codec)
        >>> table, seq_lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([5]).int()
        >>> query = torch.randn(1, 4, 64)
        >>> decode_attention(query, cache, table, seq_lens, layout=layout, codec=codec).shape
        torch.Size([1, 4, 64])
    """
    return _attention(
        query,
        cache,
        block_table,
        seq_lens,
        None,
        layout=layout,
        codec=codec,
        scale=scale,
        causal=causal,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        return_lse=return_lse,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        num_kv_splits=num_kv_splits,
        out=out,
        backend=backend,
    )


def dequantize(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    layout: CacheLayout,
    codec: Codec,
    dtype: torch.dtype,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense keys and values of each sequence, as attention sees them.

    Args:
        cache: uint8 ``layout.shape(num_pages)``; pages may be strided.
        block_table: int32 ``[B, max_pages]``; entries past a sequence's end may be anything.
        seq_lens: int32 ``[B]``.
        layout: the cache's layout.
        codec: the codec of its contents.
        dtype: ``torch.float16``, ``torch.bfloat16`` or ``torch.float32``.
        backend: None for the device's default, or a backend's name.

    Returns:
        Keys and values, each ``[B, max_pages * page_size, Hk, D]``, zero past a sequence's end.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, stride, device or backend; on the CPU also lengths and pages
            that do not exist. The message names the argument.

    Example:
        >>> from tq_core import CacheLayout, Codec, QuantConfig
        >>> layout = CacheLayout(QuantConfig.preset("4bit"), 2, 64, 16)
        >>> codec = Codec(layout.config, 64)
        >>> cache = empty_cache(layout, 4)
        >>> key, value = torch.randn(2, 5, 2, 64)
        >>> store(key, value, cache, torch.arange(5), layout=layout, codec=codec)
        >>> table, seq_lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([5]).int()
        >>> keys, values = dequantize(
        ...     cache, table, seq_lens, layout=layout, codec=codec, dtype=torch.float32
        ... )
        >>> bool((keys[0, :5] - key).norm() < 0.15 * key.norm())
        True
    """
    _check_tensors(cache=cache, block_table=block_table, seq_lens=seq_lens)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected a torch.dtype, got {dtype!r}")
    check_dequantize(
        _spec(cache),
        _spec(block_table),
        _spec(seq_lens),
        layout=layout,
        codec=codec,
        dtype=_name(dtype),
    )
    if cache.device.type == "cpu":
        first = torch.zeros_like(seq_lens)
        _check_pages(block_table, seq_lens, first, cache.shape[0], layout.page_size)
    return _backend(layout, backend, cache.device).dequantize(
        cache, block_table, seq_lens, layout=layout, codec=codec, dtype=dtype
    )


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of tokens, from the results over each.

    Args:
        out_a: ``[N, Hq, D]`` in fp16, bf16 or fp32, normalised over the first set.
        lse_a: its natural-log LSE, fp32 ``[N, Hq]``. A sink may be in one of the two only.
        out_b: the same over the second set, in the dtype of ``out_a``.
        lse_b: its natural-log LSE, fp32 ``[N, Hq]``.

    Returns:
        Output ``[N, Hq, D]`` in the inputs' dtype, and natural-log LSE, fp32 ``[N, Hq]``. Where
        both sets are empty they are 0 and ``-inf``.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape or device, or an input that requires a gradient.

    Example:
        >>> out, lse = torch.ones(1, 1, 8), torch.zeros(1, 1)
        >>> merged, merged_lse = merge_attention_states(out, lse, 3 * out, lse)
        >>> merged[0, 0, 0].item(), round(merged_lse.item(), 4)
        (2.0, 0.6931)

    Source: FlashInfer, arXiv 2501.01005, section 2.2.
    """
    _check_tensors(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    check_merge(_spec(out_a), _spec(lse_a), _spec(out_b), _spec(lse_b))
    return native.merge_attention_states(out_a, lse_a, out_b, lse_b)


def _attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    *,
    layout: CacheLayout,
    codec: Codec,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    return_lse: bool,
    out: Tensor | None,
    backend: str | None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    _check_tensors(query=query, cache=cache, block_table=block_table, seq_lens=seq_lens)
    optional = {"sinks": sinks, "alibi_slopes": alibi_slopes, "out": out}
    _check_tensors(**{name: t for name, t in optional.items() if t is not None})
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse: expected a bool, got {return_lse!r}")
    call = check_attention(
        _spec(query),
        _spec(cache),
        _spec(block_table),
        _spec(seq_lens),
        None if query_start_loc is None else _spec(query_start_loc),
        layout=layout,
        codec=codec,
        sinks=None if sinks is None else _spec(sinks),
        alibi_slopes=None if alibi_slopes is None else _spec(alibi_slopes),
        out=None if out is None else _spec(out),
        **options,
    )
    if out is not None:
        _check_no_overlap("out", out)
    if query.device.type == "cpu":
        rows = torch.ones_like(seq_lens)
        if query_start_loc is not None:
            _check_rows(query_start_loc, call.num_tokens)
            rows = query_start_loc.diff()
        first = torch.where(rows > 0, 0, seq_lens)
        if call.sliding_window is not None:
            first = torch.maximum(first, seq_lens - rows - min(call.sliding_window, 2**30) + 1)
        _check_pages(block_table, seq_lens, first, cache.shape[0], layout.page_size)
    backend_module = _backend(layout, backend, query.device)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = backend_module.attention(
        query,
        cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        call=call,
        layout=layout,
        codec=codec,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )
    return (out, lse) if return_lse else out


def _backend(layout: CacheLayout, backend: str | None, device: torch.device) -> Any:
    """The module that implements the chosen backend."""
    target = "hip" if device.type == "cuda" and torch.version.hip else device.type
    name = choose_backend(layout, backend=backend, target=target)
    return {"native": native}[name]


def _spec(x: Tensor) -> ArraySpec:
    return ArraySpec(tuple(x.shape), _name(x.dtype), x.stride(), str(x.device))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_tensors(**tensors: Any) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if x.layout is not torch.strided:
            raise TypeError(f"{name}: expected a dense (strided) tensor, got {x.layout}")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: requires a gradient, and tq is for inference only; call it under "
                f"torch.no_grad() or pass {name}.detach()"
            )


def _check_no_overlap(name: str, x: Tensor, unit: int = 1) -> None:
    """The elements written to are distinct; ``unit`` elements of the first dimension are dense."""
    dims = [(x.stride(0), x.shape[0])] if unit > 1 else zip(x.stride(), x.shape, strict=True)
    extent = unit
    for stride, size in sorted(d for d in dims if d[1] > 1):
        if stride < extent:
            raise ValueError(
                f"{name}: expected memory of its own for every element, since it is written to, "
                f"got shape {tuple(x.shape)} with strides {x.stride()}"
            )
        extent = stride * (size - 1) + extent


# On the CPU the contents of index tensors are checked too: reading them costs no wait there.


def _check_slots(slot_mapping: Tensor, num_slots: int) -> None:
    if slot_mapping.numel() and int(slot_mapping.max()) >= num_slots:
        index = int(slot_mapping.argmax())
        raise ValueError(
            f"slot_mapping: expected slots below {num_slots} (num_pages * page_size) or negative "
            f"ones, got {int(slot_mapping[index])} at index {index}"
        )


def _check_rows(query_start_loc: Tensor, num_tokens: int) -> None:
    if bool((query_start_loc.diff() < 0).any()):
        raise ValueError(f"query_start_loc: expected ascending, got {query_start_loc.tolist()}")
    first, last = int(query_start_loc[0]), int(query_start_loc[-1])
    if first < 0 or last > num_tokens:
        raise ValueError(
            f"query_start_loc: expected rows in [0, {num_tokens}], the rows of query, got "
            f"[{first}, {last}]"
        )


def _check_pages(
    block_table: Tensor, seq_lens: Tensor, first: Tensor, num_pages: int, page_size: int
) -> None:
    """Tokens ``first[b] <= j < seq_lens[b]`` lie on pages that the table and the cache have."""
    if not seq_lens.numel():
        return
    capacity = block_table.shape[1] * page_size
    if int(seq_lens.max()) > capacity:
        index = int(seq_lens.argmax())
        raise ValueError(
            f"seq_lens: expected at most {capacity} tokens (max_pages * page_size of block_table), "
            f"got {int(seq_lens[index])} for sequence {index}"
        )
    start = torch.arange(block_table.shape[1], dtype=torch.int64) * page_size
    used = (start < seq_lens[:, None]) & (start + page_size > first[:, None])
    wrong = used & ((block_table < 0) | (block_table >= num_pages))
    if bool(wrong.any()):
        sequence, number = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"block_table: expected a page from 0 to {num_pages - 1} for page {number} of sequence "
            f"{sequence}, which has {int(seq_lens[sequence])} tokens, got "
            f"{int(block_table[sequence, number])}"
        )
