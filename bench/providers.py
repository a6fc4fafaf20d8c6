"""Attention providers: each gives the calls that are timed, or raises with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tq_torch
from bench.gpu import Cache, Run, Shape, copies
from tq_core.validation import check_attention
from tq_torch import launch, ops

PAGE = 16


def tq(
    query: Tensor, data: Cache, shape: Shape, preset: str, query_len: int, plan: dict[str, int]
) -> Run:
    """The public function: query transform, attention, merge."""
    count = copies(data.cache.numel())
    caches = [data.cache, *(data.cache.clone() for _ in range(count - 1))]
    rows = torch.arange(shape.B + 1, device="cuda", dtype=torch.int32) * query_len
    what: dict[str, Any] = {"layout": data.layout, "codec": data.codec}
    start = None if query_len == 1 else rows
    call = check_attention(
        *map(ops.spec, (query, data.cache, data.table, data.lens)),
        None if start is None else ops.spec(start),
        max_query_len=query_len,
        max_seq_len=shape.L,
        **what,
    )
    made = launch.attention_plan(
        query, data.cache, query, call=call, decode=start is None, overrides=plan or None, **what
    )

    def attend(cache: Tensor) -> Tensor:
        arrays = [query, cache, data.table, data.lens]
        if start is None:
            return tq_torch.decode_attention(
                *arrays, max_seq_len=shape.L, backend="triton", plan=plan or None, **what
            )
        return tq_torch.attention(
            *arrays, start, max_query_len=query_len, max_seq_len=shape.L, backend="triton",
            plan=plan or None, **what,
        )  # fmt: skip

    fields = {
        "preset": preset, "dtype": "bfloat16", "page_size": data.layout.page_size,
        "order": data.layout.order, "num_splits": made.num_splits,
    }  # fmt: skip
    num_bytes = shape.B * shape.L * data.layout.bytes_per_token
    return Run("tq_torch", [lambda c=c: attend(c) for c in caches], num_bytes, fields)


def _bf16(num_bytes: int, calls: list[Callable[[], Any]], provider: str, **fields: Any) -> Run:
    base = {"preset": "", "dtype": "bfloat16", "page_size": "", "order": "", "num_splits": ""}
    return Run(provider, calls, num_bytes, {**base, **fields})


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, shape: Shape, query_len: int, backend: SDPBackend
) -> Run:
    """Torch SDPA over a contiguous bf16 cache; rows of a chunk see all tokens up to their own."""
    rows = query.view(shape.B, query_len, shape.Hk * shape.g, shape.D).transpose(1, 2).contiguous()
    pairs = [(key, value)]
    pairs += [(key.clone(), value.clone()) for _ in range(copies(shape.bf16_bytes) - 1)]
    options: dict[str, Any] = {"enable_gqa": True}
    if query_len > 1:
        from torch.nn.attention.bias import causal_lower_right

        options = {"attn_mask": causal_lower_right(query_len, shape.L)}
        pairs = [tuple(x.repeat_interleave(shape.g, 1) for x in pair) for pair in pairs]

    def attend(key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(rows, key, value, **options)

    attend(*pairs[0])
    name = {
        SDPBackend.CUDNN_ATTENTION: "torch SDPA cuDNN",
        SDPBackend.FLASH_ATTENTION: "torch SDPA FlashAttention",
        SDPBackend.EFFICIENT_ATTENTION: "torch SDPA efficient",
    }[backend]
    return _bf16(shape.bf16_bytes, [lambda p=p: attend(*p) for p in pairs], name)


def flashinfer(
    query: Tensor, key: Tensor, value: Tensor, shape: Shape, query_len: int, dtype: torch.dtype
) -> Run:
    """FlashInfer over 16-token pages in random order."""
    import flashinfer as fi

    width = -(-shape.L // PAGE)
    pages = torch.randperm(shape.B * width, device="cuda").int()
    page_shape = (shape.B * width, PAGE, shape.Hk, shape.D)

    def paged(x: Tensor) -> Tensor:
        flat = torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, width * PAGE - shape.L))
        result = torch.empty(page_shape, dtype=dtype, device="cuda")
        result[pages.long()] = flat.reshape(page_shape).to(dtype)
        return result

    pairs = [(paged(key), paged(value))]
    num_bytes = shape.bf16_bytes * dtype.itemsize // 2
    pairs += [tuple(x.clone() for x in pairs[0]) for _ in range(copies(num_bytes) - 1)]
    start = torch.arange(shape.B + 1, dtype=torch.int32, device="cuda")
    last = torch.full((shape.B,), (shape.L - 1) % PAGE + 1, dtype=torch.int32, device="cuda")
    workspace = torch.zeros(256 * 2**20, dtype=torch.uint8, device="cuda")
    heads = (shape.Hk * shape.g, shape.Hk, shape.D, PAGE)
    if query_len == 1:
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=shape.g >= 4
        )
        wrapper.plan(
            start * width, pages, last, *heads, q_data_type=query.dtype, kv_data_type=dtype
        )
    else:
        wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            start * query_len, start * width, pages, last, *heads, causal=True,
            q_data_type=query.dtype, kv_data_type=dtype,
        )  # fmt: skip
    wrapper.run(query, pairs[0])
    calls = [lambda p=p: wrapper.run(query, p) for p in pairs]
    short = {torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "float8_e4m3fn"}[dtype]
    return _bf16(num_bytes, calls, "FlashInfer", dtype=short, page_size=PAGE)


def device_copy(num_bytes: int) -> Run:
    """A copy of ``num_bytes``, read and written: the roof."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    run = _bf16(2 * num_bytes, [lambda: target.copy_(source)], "device copy", dtype="uint8")
    return run
