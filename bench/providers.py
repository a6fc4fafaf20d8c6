"""Providers: each gives the calls that are timed, or raises with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

import tq_torch
from bench import gpu
from bench.gpu import Cache, Item, Run, Shape, copies, rotation
from tq_core.dispatch import AttentionPlan
from tq_core.validation import check_attention
from tq_torch import launch, ops

#: Tokens of the pages of bf16 and fp8 caches.
PAGE = 16
#: Query heads a KV head from which FlashInfer is asked for its kernel with tensor cores.
TENSOR_CORES_FROM = 4
#: Bytes that a copy reads, where a cache is no smaller.
COPY_BYTES = 2**29
SDPA = {
    SDPBackend.CUDNN_ATTENTION: "torch SDPA cuDNN",
    SDPBackend.FLASH_ATTENTION: "torch SDPA FlashAttention",
}
#: Largest relative error of a peer by the type of its cache; e4m3 rounds its tokens by 3 %.
PEER_TOLERANCE = {torch.bfloat16: 1e-2, torch.float8_e4m3fn: 0.1}

#: How a peer is made, and its largest relative error; None where it attends to nothing.
Peer = tuple[Callable[[], Run], float | None]


def rotated(data: Cache) -> list[Tensor]:
    """The cache and so many copies of it that calls on them in turn find none in the L2 cache."""
    return [cache for (cache,) in rotation(data.cache)]


def plan_of(query: Tensor, data: Cache, item: Item) -> AttentionPlan:
    """What a call on ``data`` launches, in torch and in JAX."""
    what: dict[str, Any] = {"layout": data.layout, "codec": data.codec}
    start = _query_start(item)
    specs: dict[str, Any] = {
        "query": ops.spec(query),
        "cache": ops.spec(data.cache),
        "block_table": ops.spec(data.table),
        "seq_lens": ops.spec(data.lens),
        "query_start_loc": None if start is None else ops.spec(start),
        "sinks": None,
        "alibi_slopes": None,
        "out": ops.spec(query),
    }
    hints: dict[str, Any] = {"max_query_len": item.query_len, "max_seq_len": item.shape.L}
    return launch.attention_plan(
        check_attention(**specs, **hints, **what), specs, **what, device=query.device,
        cache_align=launch.align(data.cache), overrides=item.plan,
    )  # fmt: skip


def packed_run(
    query: Tensor, data: Cache, item: Item, calls: Sequence[Callable[..., Any]], provider: str
) -> Run:
    """A run over the packed cache."""
    fields = {
        "preset": item.preset, "dtype": "bfloat16", "page_size": data.layout.page_size,
        "order": data.layout.order, "num_splits": plan_of(query, data, item).num_splits,
        "plan": " ".join(f"{n}={v}" for n, v in item.overrides if n != "num_splits"),
    }  # fmt: skip
    num_bytes = item.shape.B * item.shape.L * data.layout.bytes_per_token
    return Run(provider, calls, num_bytes, fields)


def _query_start(item: Item) -> Tensor | None:
    """Where the rows of each sequence start; None for a decode."""
    if item.query_len == 1:
        return None
    rows = torch.arange(item.shape.B + 1, device=gpu.DEVICE, dtype=torch.int32)
    return rows * item.query_len


def tq(query: Tensor, data: Cache, item: Item, caches: Sequence[Tensor]) -> Run:
    """The public function on each of ``caches``: query transform, attention, merge."""
    start = _query_start(item)
    common: dict[str, Any] = {
        "max_seq_len": item.shape.L, "backend": gpu.BACKEND, "plan": item.plan,
        "layout": data.layout, "codec": data.codec,
    }  # fmt: skip

    def attend(cache: Tensor, out: Tensor | None = None) -> Any:
        arrays = query, cache, data.table, data.lens
        if start is None:
            return tq_torch.decode_attention(*arrays, out=out, **common)
        return tq_torch.attention(*arrays, start, max_query_len=item.query_len, out=out, **common)

    return packed_run(query, data, item, [partial(attend, c) for c in caches], "tq_torch")


def peer_run(
    num_bytes: int, calls: Sequence[Callable[..., Any]], provider: str, **fields: Any
) -> Run:
    """A run without a preset, of a bf16 cache unless ``fields`` name another dtype."""
    base = {"preset": "", "dtype": "bfloat16", "page_size": "", "order": "", "num_splits": ""}
    return Run(provider, calls, num_bytes, {**base, **fields})


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, shape: Shape, query_len: int, backend: SDPBackend
) -> Run:
    """Torch SDPA over a contiguous bf16 cache; rows of a chunk see all tokens up to their own."""
    rows = query.view(shape.B, query_len, shape.Hk * shape.g, shape.D).transpose(1, 2).contiguous()
    options: dict[str, Any] = {"enable_gqa": True}
    if query_len > 1 and backend is SDPBackend.CUDNN_ATTENTION:
        options["attn_mask"] = lower_right_mask(query_len, shape.L, query)
    elif query_len > 1:
        options["attn_mask"] = causal_lower_right(query_len, shape.L)

    def attend(key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(rows, key, value, **options)
        return out.transpose(1, 2)

    attend(key, value)
    calls = [partial(attend, *pair) for pair in rotation(key, value)]
    return peer_run(shape.bf16_bytes, calls, SDPA[backend])


def lower_right_mask(query_len: int, length: int, like: Tensor) -> Tensor:
    """Additive ``[1, 1, query_len, length]``: -inf at the tokens after a row's own."""
    mask = torch.full((query_len, length), -torch.inf, dtype=like.dtype, device=like.device)
    return mask.triu_(length - query_len + 1)[None, None]


def random_pages(shape: Shape) -> Tensor:
    """Page indices int32 ``[B, pages of a sequence]`` in random order."""
    width = -(-shape.L // PAGE)
    return torch.randperm(shape.B * width, device=gpu.DEVICE).int().view(shape.B, width)


def paged(x: Tensor, pages: Tensor, dtype: torch.dtype, heads_first: bool = False) -> Tensor:
    """Tokens ``[B, Hk, L, D]`` in pages: ``[pages, PAGE, Hk, D]`` or ``[Hk, pages, PAGE, D]``."""
    _, heads, length, dim = x.shape
    num_pages, width = pages.numel(), pages.shape[1]
    size = (heads, num_pages, PAGE, dim) if heads_first else (num_pages, PAGE, heads, dim)
    result = torch.empty(size, dtype=dtype, device=x.device)
    by_page = result.transpose(0, 1) if heads_first else result.transpose(1, 2)
    for tokens, index in zip(x, pages.long(), strict=True):
        if length % PAGE:
            tokens = torch.nn.functional.pad(tokens, (0, 0, 0, -length % PAGE))
        by_page[index] = tokens.unflatten(1, (width, PAGE)).transpose(0, 1).to(dtype)
    return result


def flashinfer(
    query: Tensor, key: Tensor, value: Tensor, shape: Shape, query_len: int, dtype: torch.dtype
) -> Run:
    """FlashInfer over 16-token pages in random order."""
    import flashinfer as fi

    table = random_pages(shape)
    pairs = rotation(paged(key, table, dtype), paged(value, table, dtype))
    pages, width = table.flatten(), table.shape[1]
    start = torch.arange(shape.B + 1, dtype=torch.int32, device=gpu.DEVICE)
    last = torch.full((shape.B,), (shape.L - 1) % PAGE + 1, dtype=torch.int32, device=gpu.DEVICE)
    workspace = torch.zeros(256 * 2**20, dtype=torch.uint8, device=gpu.DEVICE)
    heads = (shape.Hk * shape.g, shape.Hk, shape.D, PAGE)
    if query_len == 1:
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=shape.g >= TENSOR_CORES_FROM
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
    num_bytes = shape.bf16_bytes * dtype.itemsize // 2
    return peer_run(num_bytes, calls, "FlashInfer", dtype=ops.dtype_name(dtype), page_size=PAGE)


def _cache_dtypes(query_len: int) -> list[torch.dtype]:
    """Types of the caches that FlashInfer is timed with."""
    return list(PEER_TOLERANCE) if query_len == 1 else [torch.bfloat16]


class FlashInferModule(NamedTuple):
    """A tiny call of FlashInfer that compiles a module as others of its kind use it."""

    shape: Shape
    query_len: int
    dtype: torch.dtype

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"FlashInfer {ops.dtype_name(self.dtype)} D={self.shape.D}"

    def compile(self) -> None:
        """Makes the call; the module stays on disk, where other processes find it."""
        size = (1, self.shape.Hk, self.shape.L, self.shape.D)
        tokens = torch.zeros(size, dtype=torch.bfloat16, device=gpu.DEVICE)
        flashinfer(gpu.make_query(self.shape, self.query_len), tokens, tokens, *self)


def flashinfer_modules(items: Iterable[Item]) -> list[FlashInferModule]:
    """The modules that FlashInfer compiles for a run of ``items``; none where it is missing."""
    if find_spec("flashinfer") is None:
        return []
    modules = [
        FlashInferModule(
            Shape(1, PAGE, 1, TENSOR_CORES_FROM if shape.g >= TENSOR_CORES_FROM else 1, shape.D),
            min(query_len, 2),
            dtype,
        )
        for shape, query_len in dict.fromkeys((i.shape, i.query_len) for i in items)
        for dtype in _cache_dtypes(query_len)
    ]
    return list(dict.fromkeys(modules))


def device_copy(num_bytes: int) -> Run:
    """A copy of ``num_bytes``, read and written: the roof."""
    shape = (copies(2 * num_bytes), num_bytes)
    source = torch.randint(256, shape, dtype=torch.uint8, device=gpu.DEVICE)
    target = torch.empty_like(source)
    calls = [partial(t.copy_, s) for t, s in zip(target, source, strict=True)]
    return peer_run(2 * num_bytes, calls, "device copy", dtype="uint8")


def peers(
    query: Tensor, key: Tensor, value: Tensor, shape: Shape, query_len: int
) -> dict[str, Peer]:
    """What the packed cache is compared with, by name: how to make it, its largest error."""
    arrays = (query, key, value, shape, query_len)
    make: dict[str, Peer] = {}
    for backend, name in SDPA.items():
        make[name] = partial(sdpa, *arrays, backend), PEER_TOLERANCE[torch.bfloat16]
    for dtype in _cache_dtypes(query_len):
        name = f"FlashInfer {ops.dtype_name(dtype)}"
        make[name] = partial(flashinfer, *arrays, dtype), PEER_TOLERANCE[dtype]
    return make
