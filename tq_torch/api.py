"""The public functions. Shapes, devices and backends are checked in the operators they call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tq_core.codec import Codec
from tq_core.contents import check_argument
from tq_core.layout import CacheLayout
from tq_core.support import BACKENDS
from tq_core.validation import check_codec, check_merge, check_options
from tq_torch import native, ops


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
        RuntimeError: this build of torch has no such device.

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
    try:
        return torch.empty(layout.shape(num_pages), dtype=torch.uint8, device=device)
    except (AssertionError, NotImplementedError, ImportError) as error:  # no such device
        reason = str(error).partition(". ")[0]
        raise RuntimeError(
            f"device: torch {torch.__version__} cannot allocate on {str(device)!r}: {reason}"
        ) from error


def store(
    key: Tensor,
    value: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: CacheLayout,
    codec: Codec,
    backend: str | None = None,
    check: bool | None = None,
) -> None:
    """Quantises keys and values and writes them into the cache, in place.

    NaN is stored as 0 and infinities saturate, so no reader ever meets them. Where two rows have
    one slot, ``"native"`` stores the later row; the kernels may store parts of both.

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
        check: whether to check what the tensors hold, see docs/api.md, which waits for the device.
            None: whether ``TQ_CHECK=1`` is in the environment now.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, stride, device or backend; on the CPU also a slot outside the
            cache (on a GPU kernels skip it); with ``check`` what is wrong in the tensors. The
            message names the argument.
        RuntimeError: ``check`` while a CUDA graph is captured.

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
    check_codec(layout, codec)
    if check is not None:
        check_argument(check)
    options = ops.common_options(layout.descriptor, codec.digest, _name_of_backend(backend), check)
    torch.ops.tq.store.default(key, value, cache, slot_mapping, options)


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
    plan: Mapping[str, int | str] | None = None,
    check: bool | None = None,
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
        seq_lens: int32 ``[B]``, cached tokens of each sequence, the call's own included; at most
            ``max_pages * page_size``. Off the CPU neither lengths nor pages are checked, which
            would wait for the device: what a wrong one gives is undefined, and kernels then read
            memory that is not the cache's.
        query_start_loc: int32 ``[B + 1]``, ascending from 0.
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
        plan: overrides of the launch plan, see ``tq_core.dispatch.plan_attention``; an impossible
            one raises. With ``{"deterministic": "batch"}`` the bits of a row's result do not depend
            on what else is in the call; the others are for tests and benchmarks.
        check: as in :func:`store`.

    Returns:
        ``[N, Hq, D]`` in the query's dtype (``out`` if given); with ``return_lse`` also the
        natural-log LSE, fp32 ``[N, Hq]``, sink included. A row that sees nothing gives 0 and LSE
        ``-inf`` (the sink, if there is one).

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, size, stride, device or backend, or an input that requires a
            gradient; on the CPU also lengths and pages that do not exist; with ``check`` what is
            wrong in the tensors. The message names the argument.
        RuntimeError: ``check`` while a CUDA graph is captured.

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
        plan=plan,
        check=check,
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
    plan: Mapping[str, int | str] | None = None,
    check: bool | None = None,
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
        plan: overrides of the launch plan, see ``tq_core.dispatch.plan_attention``; an impossible
            one raises. With ``{"deterministic": "batch"}`` the bits of a row's result do not depend
            on what else is in the call; the others are for tests and benchmarks.
        check: as in :func:`store`.

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
        plan=plan,
        check=check,
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
    check: bool | None = None,
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
        check: as in :func:`store`.

    Returns:
        Keys and values, each ``[B, max_pages * page_size, Hk, D]``, zero past a sequence's end.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, stride, device or backend; on the CPU, and with ``check``, also
            lengths and pages that do not exist. The message names the argument.
        RuntimeError: ``check`` while a CUDA graph is captured.

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
    check_codec(layout, codec)
    if check is not None:
        check_argument(check)
    options = ops.common_options(layout.descriptor, codec.digest, _name_of_backend(backend), check)
    keys, values = torch.ops.tq.dequantize.default(cache, block_table, seq_lens, dtype, options)
    return keys, values


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
    check_merge(ops.spec(out_a), ops.spec(lse_a), ops.spec(out_b), ops.spec(lse_b))
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
    plan: Mapping[str, int | str] | None,
    check: bool | None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    _check_tensors(query=query, cache=cache, block_table=block_table, seq_lens=seq_lens)
    optional = {"sinks": sinks, "alibi_slopes": alibi_slopes, "out": out}
    _check_tensors(**{name: t for name, t in optional.items() if t is not None})
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse: expected a bool, got {return_lse!r}")
    if check is not None:
        check_argument(check)
    check_codec(layout, codec)
    check_options(decode=query_start_loc is None, **options)
    overrides = "" if plan is None else ops.plan_key(plan, options["num_kv_splits"])
    softcap = options.pop("softcap")
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.ops.tq.attention.default(
        query,
        cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        sinks,
        alibi_slopes,
        options.pop("scale"),
        options.pop("max_query_len"),
        options.pop("max_seq_len"),
        ops.attention_options(
            layout=layout.descriptor,
            codec=codec.digest,
            softcap=None if softcap is None else float(softcap),
            plan=overrides,
            backend=_name_of_backend(backend),
            check=check,
            **options,
        ),
    )
    return (out, lse) if return_lse else out


def _name_of_backend(backend: str | None) -> str | None:
    if backend is not None and not isinstance(backend, str):
        raise ValueError(f"backend: expected one of {list(BACKENDS)}, got {backend!r}")
    return backend


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
