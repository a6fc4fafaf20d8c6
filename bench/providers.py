"""Providers: each gives the calls that are timed, or raises with its reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

import tq_torch
from bench import gpu
from bench.gpu import Cache, Item, Run, Shape, copies
from tq_core.validation import check_attention
from tq_torch import launch, ops

#: Tokens of FlashInfer's pages.
PAGE = 16
#: Bytes that a copy reads, where a cache is no smaller.
COPY_BYTES = 2**29
SDPA = {
    SDPBackend.CUDNN_ATTENTION: "torch SDPA cuDNN",
    SDPBackend.FLASH_ATTENTION: "torch SDPA FlashAttention",
}
#: Largest relative error of a peer by the type of its cache; e4m3 rounds its tokens by 3 %.
PEER_TOLERANCE = {torch.bfloat16: 1e-2, torch.float8_e4m3fn: 0.1}


def tq(query: Tensor, data: Cache, item: Item, count: int | None = None) -> Run:
    """The public function: query transform, attention, merge.

    ``count`` copies of the cache; default: what keeps it out of the L2.
    """
    shape, query_len, plan = item.shape, item.query_len, item.plan
    count = copies(data.cache.numel()) if count is None else count
    caches = [data.cache, *(data.cache.clone() for _ in range(count - 1))]
    rows = torch.arange(shape.B + 1, device=gpu.DEVICE, dtype=torch.int32) * query_len
    what: dict[str, Any] = {"layout": data.layout, "codec": data.codec}
    start = None if query_len == 1 else rows
    specs = {
        "query": ops.spec(query),
        "cache": ops.spec(data.cache),
        "block_table": ops.spec(data.table),
        "seq_lens": ops.spec(data.lens),
        "query_start_loc": None if start is None else ops.spec(start),
        "sinks": None,
        "alibi_slopes": None,
        "out": ops.spec(query),
    }
    hints = {"max_query_len": query_len, "max_seq_len": shape.L}
    made = launch.attention_plan(
        check_attention(**specs, **hints, **what), specs, **what, device=query.device,
        cache_align=launch.align(data.cache), overrides=plan,
    )  # fmt: skip

    def attend(cache: Tensor, out: Tensor | None = None) -> Tensor:
        arrays = [query, cache, data.table, data.lens]
        options = {"max_seq_len": shape.L, "backend": gpu.BACKEND, "plan": plan, "out": out, **what}
        if start is None:
            return tq_torch.decode_attention(*arrays, **options)
        return tq_torch.attention(*arrays, start, max_query_len=query_len, **options)

    fields = {
        "preset": item.preset, "dtype": "bfloat16", "page_size": data.layout.page_size,
        "order": data.layout.order, "num_splits": made.num_splits,
    }  # fmt: skip
    num_bytes = shape.B * shape.L * data.layout.bytes_per_token
    return Run("tq_torch", [partial(attend, c) for c in caches], num_bytes, fields)


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
    if query_len > 1 and backend is SDPBackend.CUDNN_ATTENTION:
        options["attn_mask"] = lower_right_mask(query_len, shape.L, query)
    elif query_len > 1:
        options["attn_mask"] = causal_lower_right(query_len, shape.L)

    def attend(key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(rows, key, value, **options)
        return out.transpose(1, 2)

    attend(*pairs[0])
    calls = [partial(attend, *pair) for pair in pairs]
    return _bf16(shape.bf16_bytes, calls, SDPA[backend])


def lower_right_mask(query_len: int, length: int, like: Tensor) -> Tensor:
    """Additive ``[1, 1, query_len, length]``: -inf at the tokens after a row's own."""
    mask = torch.full((query_len, length), -torch.inf, dtype=like.dtype, device=like.device)
    return mask.triu_(length - query_len + 1)[None, None]


def flashinfer(
    query: Tensor, key: Tensor, value: Tensor, shape: Shape, query_len: int, dtype: torch.dtype
) -> Run:
    """FlashInfer over 16-token pages in random order."""
    import flashinfer as fi

    width = -(-shape.L // PAGE)
    pages = torch.randperm(shape.B * width, device=gpu.DEVICE).int()
    page_shape = (shape.B * width, PAGE, shape.Hk, shape.D)

    def paged(x: Tensor) -> Tensor:
        flat = torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, width * PAGE - shape.L))
        result = torch.empty(page_shape, dtype=dtype, device=gpu.DEVICE)
        result[pages.long()] = flat.reshape(page_shape).to(dtype)
        return result

    pairs = [(paged(key), paged(value))]
    num_bytes = shape.bf16_bytes * dtype.itemsize // 2
    pairs += [tuple(x.clone() for x in pairs[0]) for _ in range(copies(num_bytes) - 1)]
    start = torch.arange(shape.B + 1, dtype=torch.int32, device=gpu.DEVICE)
    last = torch.full((shape.B,), (shape.L - 1) % PAGE + 1, dtype=torch.int32, device=gpu.DEVICE)
    workspace = torch.zeros(256 * 2**20, dtype=torch.uint8, device=gpu.DEVICE)
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
    calls = [partial(wrapper.run, query, pair) for pair in pairs]
    return _bf16(num_bytes, calls, "FlashInfer", dtype=ops.dtype_name(dtype), page_size=PAGE)


def device_copy(num_bytes: int) -> Run:
    """A copy of ``num_bytes``, read and written: the roof."""
    shape = (copies(2 * num_bytes), num_bytes)
    source = torch.randint(256, shape, dtype=torch.uint8, device=gpu.DEVICE)
    target = torch.empty_like(source)
    calls = [partial(t.copy_, s) for t, s in zip(target, source, strict=True)]
    return _bf16(2 * num_bytes, calls, "device copy", dtype="uint8")


def peers(
    query: Tensor, key: Tensor, value: Tensor, shape: Shape, query_len: int
) -> dict[str, tuple[Callable[[], Run], float | None]]:
    """What the packed cache is compared with, by name: how to make it, its largest error."""
    arrays = (query, key, value, shape, query_len)
    make: dict[str, tuple[Callable[[], Run], float | None]] = {}
    for backend, name in SDPA.items():
        make[name] = partial(sdpa, *arrays, backend), PEER_TOLERANCE[torch.bfloat16]
    for dtype in PEER_TOLERANCE if query_len == 1 else [torch.bfloat16]:
        name = f"FlashInfer {ops.dtype_name(dtype)}"
        make[name] = partial(flashinfer, *arrays, dtype), PEER_TOLERANCE[dtype]
    make["device copy"] = partial(device_copy, min(COPY_BYTES, shape.bf16_bytes)), None
    return make
