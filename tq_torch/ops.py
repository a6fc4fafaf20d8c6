"""The custom operators ``torch.ops.tq``: what ``torch.compile`` and ``torch.export`` see.

A layout travels as a string and a codec as its digest, so that graphs hold plain values. The real
implementations check their arguments, choose a backend and run it; the fakes only check.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tq_core.codec import Codec, codec_of
from tq_core.layout import CacheLayout
from tq_core.support import choose_backend
from tq_core.validation import (
    ArraySpec,
    AttentionCall,
    check_attention,
    check_dequantize,
    check_store,
)
from tq_torch import contents, launch, native

_BACKENDS = {"native": native, "triton": launch, "interpret": launch}

torch.library.define(
    "tq::store",
    "(Tensor key, Tensor value, Tensor(a!) cache, Tensor slot_mapping, *, str layout, str codec, "
    "str? backend) -> ()",
)
torch.library.define(
    "tq::attention",
    "(Tensor query, Tensor cache, Tensor block_table, Tensor seq_lens, Tensor? query_start_loc, "
    "Tensor(a!) out, *, str layout, str codec, float? scale, bool causal, int? sliding_window, "
    "float? softcap, Tensor? sinks, Tensor? alibi_slopes, SymInt? max_query_len, "
    "SymInt? max_seq_len, int? num_kv_splits, str plan, str? backend) -> Tensor",
)
torch.library.define(
    "tq::dequantize",
    "(Tensor cache, Tensor block_table, Tensor seq_lens, *, str layout, str codec, "
    "ScalarType dtype, str? backend) -> (Tensor, Tensor)",
)


_layout = lru_cache(maxsize=256)(CacheLayout.from_descriptor)


def plan_key(plan: Mapping[str, int] | None) -> str:
    """Overrides of a launch plan as the operators' argument."""
    return "" if plan is None else ",".join(f"{name}={int(plan[name])}" for name in sorted(plan))


@lru_cache(maxsize=256)
def _plan(key: str) -> dict[str, int] | None:
    if not key:
        return None
    return {name: int(number) for name, number in (item.split("=") for item in key.split(","))}


def spec(x: Tensor) -> ArraySpec:
    """Shape, dtype name, strides and device of a tensor."""
    return ArraySpec(tuple(x.shape), dtype_name(x.dtype), x.stride(), str(x.device))


@lru_cache(maxsize=32)
def dtype_name(dtype: torch.dtype) -> str:
    """``"float16"`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def _specs(**tensors: Tensor | None) -> dict[str, ArraySpec | None]:
    return {name: None if x is None else spec(x) for name, x in tensors.items()}


def _check_memory(name: str, x: Tensor, unit: int = 1) -> None:
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


@lru_cache(maxsize=1024)
def _backend_name(
    layout: CacheLayout, backend: str | None, device_type: str, odd_bytes: bool
) -> str:
    target = "hip" if device_type == "cuda" and torch.version.hip else device_type
    reasons = (
        ("the kernels need a cache whose address and page stride are even",) if odd_bytes else ()
    )
    return choose_backend(layout, backend=backend, target=target, kernel_reasons=reasons)


def _backend(layout: CacheLayout, backend: str | None, cache: Tensor) -> tuple[str, Any]:
    """Name and module of the chosen backend."""
    odd = bool((cache.data_ptr() | cache.stride(0)) % 2)
    name = _backend_name(layout, backend, cache.device.type, odd)
    return name, _BACKENDS[name]


# --- store ----------------------------------------------------------------------------------


def _check_store(
    key: Tensor, value: Tensor, cache: Tensor, slot_mapping: Tensor, layout: str, codec: str
) -> tuple[CacheLayout, Codec]:
    layout_, codec_ = _layout(layout), codec_of(codec)
    check_store(
        spec(key), spec(value), spec(cache), spec(slot_mapping), layout=layout_, codec=codec_
    )
    _check_memory("cache", cache, layout_.page_bytes)
    return layout_, codec_


@torch.library.impl("tq::store", "CompositeExplicitAutograd")
def _store(
    key: Tensor,
    value: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: str,
    codec: str,
    backend: str | None,
) -> None:
    layout_, codec_ = _check_store(key, value, cache, slot_mapping, layout, codec)
    _, module = _backend(layout_, backend, cache)
    if cache.device.type == "cpu":
        contents.check_slots(slot_mapping, cache.shape[0] * layout_.page_size)
    module.store(key, value, cache, slot_mapping, layout=layout_, codec=codec_)


@torch.library.register_fake("tq::store")
def _store_fake(
    key: Tensor,
    value: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: str,
    codec: str,
    backend: str | None,
) -> None:
    _check_store(key, value, cache, slot_mapping, layout, codec)


# --- attention ------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _attention_call(
    layout: CacheLayout,
    codec: Codec,
    specs: tuple[tuple[str, ArraySpec | None], ...],
    options: tuple[tuple[str, Any], ...],
) -> AttentionCall:
    arrays: dict[str, Any] = dict(specs)
    return check_attention(**arrays, layout=layout, codec=codec, **dict(options))


@torch.library.impl("tq::attention", "CompositeExplicitAutograd")
def _attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    out: Tensor,
    *,
    layout: str,
    codec: str,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    plan: str,
    backend: str | None,
    **options: Any,
) -> Tensor:
    layout_, codec_ = _layout(layout), codec_of(codec)
    arrays = _specs(
        query=query,
        cache=cache,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        out=out,
    )
    call = _attention_call(layout_, codec_, tuple(arrays.items()), tuple(options.items()))
    _check_memory("out", out)
    name, module = _backend(layout_, backend, cache)
    overrides = _plan(plan)
    if overrides is not None and name == "native":
        raise ValueError("plan: the native backend launches no kernels and takes no plan")
    if query.device.type == "cpu":
        contents.check_attention(
            cache, block_table, seq_lens, query_start_loc, call, layout_.page_size
        )
    lse: Tensor = module.attention(
        query,
        cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        call=call,
        layout=layout_,
        codec=codec_,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        **({} if overrides is None else {"overrides": overrides}),
    )
    return lse


@torch.library.register_fake("tq::attention")
def _attention_fake(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    out: Tensor,
    *,
    layout: str,
    codec: str,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    plan: str,
    backend: str | None,
    **options: Any,
) -> Tensor:
    arrays: dict[str, Any] = _specs(
        query=query,
        cache=cache,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        out=out,
    )
    options = {**options, "max_query_len": None, "max_seq_len": None}
    check_attention(**arrays, layout=_layout(layout), codec=codec_of(codec), **options)
    return query.new_empty(query.shape[:2], dtype=torch.float32)


# --- dequantize -----------------------------------------------------------------------------


def _check_dequantize(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    layout: str,
    codec: str,
    dtype: torch.dtype,
) -> tuple[CacheLayout, Codec]:
    layout_, codec_ = _layout(layout), codec_of(codec)
    check_dequantize(
        spec(cache),
        spec(block_table),
        spec(seq_lens),
        layout=layout_,
        codec=codec_,
        dtype=dtype_name(dtype),
    )
    return layout_, codec_


@torch.library.impl("tq::dequantize", "CompositeExplicitAutograd")
def _dequantize(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    layout: str,
    codec: str,
    dtype: torch.dtype,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    layout_, codec_ = _check_dequantize(cache, block_table, seq_lens, layout, codec, dtype)
    _, module = _backend(layout_, backend, cache)
    if cache.device.type == "cpu":
        first = torch.zeros_like(seq_lens)
        contents.check_pages(block_table, seq_lens, first, cache.shape[0], layout_.page_size)
    result: tuple[Tensor, Tensor] = module.dequantize(
        cache, block_table, seq_lens, layout=layout_, codec=codec_, dtype=dtype
    )
    return result


@torch.library.register_fake("tq::dequantize")
def _dequantize_fake(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    layout: str,
    codec: str,
    dtype: torch.dtype,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    layout_, _ = _check_dequantize(cache, block_table, seq_lens, layout, codec, dtype)
    shape = (
        block_table.shape[0],
        block_table.shape[1] * layout_.page_size,
        layout_.num_kv_heads,
        layout_.head_dim,
    )
    return cache.new_empty(shape, dtype=dtype), cache.new_empty(shape, dtype=dtype)
