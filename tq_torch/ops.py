"""The custom operators ``torch.ops.tq``: what ``torch.compile`` and ``torch.export`` see.

A layout travels as a string and a codec as its digest, so that graphs hold plain values, and all
options of a call as one string, because the dispatcher takes most of a microsecond for each
argument. The real implementations check their arguments, choose a backend and run it; the fakes
only check. What arrays hold is checked in the real ones, so that graphs check it when they run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tq_core.codec import Codec, codec_of
from tq_core.contents import is_checked
from tq_core.layout import CacheLayout
from tq_core.support import choose_backend
from tq_core.validation import (
    ArraySpec,
    AttentionCall,
    check_attention,
    check_dequantize,
    check_plan,
    check_store,
)
from tq_torch import contents, launch, native

_MODULES = {"native": native, "triton": launch, "interpret": launch}
#: Tensors of an attention call, as the checks name them.
_ATTENTION = (
    "query", "cache", "block_table", "seq_lens", "query_start_loc", "sinks", "alibi_slopes", "out",
)  # fmt: skip
_TAGS = (torch.Tag.pt2_compliant_tag,)

#: All of a tensor that checks and plans depend on, but for its address.
Signature = tuple[torch.Size, torch.dtype, tuple[int, ...], torch.device]

torch.library.define(
    "tq::store",
    "(Tensor key, Tensor value, Tensor(a!) cache, Tensor slot_mapping, str options) -> ()",
    tags=_TAGS,
)
torch.library.define(
    "tq::attention",
    "(Tensor query, Tensor cache, Tensor block_table, Tensor seq_lens, Tensor? query_start_loc, "
    "Tensor(a!) out, Tensor? sinks, Tensor? alibi_slopes, float? scale, SymInt? max_query_len, "
    "SymInt? max_seq_len, str options) -> Tensor",
    tags=_TAGS,
)
torch.library.define(
    "tq::dequantize",
    "(Tensor cache, Tensor block_table, Tensor seq_lens, ScalarType dtype, str options) -> "
    "(Tensor, Tensor)",
    tags=_TAGS,
)


_layout = lru_cache(maxsize=256)(CacheLayout.from_descriptor)


def plan_key(plan: Mapping[str, int | str] | None, num_kv_splits: int | None = None) -> str:
    """Overrides of a launch plan as the operators' argument.

    Raises:
        TypeError: ``plan`` is not a mapping of names to ints.
        ValueError: it cannot be had, or says what ``num_kv_splits`` says.
    """
    return ",".join(f"{name}={value}" for name, value in check_plan(plan, num_kv_splits))


@lru_cache(maxsize=256)
def _plan(key: str) -> dict[str, int | str] | None:
    if not key:
        return None
    items = (item.split("=") for item in key.split(","))
    return {name: value if name == "deterministic" else int(value) for name, value in items}


def common_options(layout: str, codec: str, backend: str | None, check: bool | None) -> str:
    """The argument ``options`` of ``store`` and ``dequantize``.

    Args:
        layout: a descriptor.
        codec: a digest.
        backend: as given.
        check: as given: what None means is looked up when the operator runs.
    """
    return f"{layout}|{codec}|{backend or ''}|{check}"


def attention_options(
    *,
    layout: str,
    codec: str,
    causal: bool,
    sliding_window: int | None,
    softcap: float | None,
    num_kv_splits: int | None,
    plan: str,
    backend: str | None,
    check: bool | None = None,
) -> str:
    """The argument ``options`` of ``attention``; the rest as in ``common_options``."""
    # Symbols of a dynamic graph become numbers here.
    window = None if sliding_window is None else int(sliding_window)
    splits = None if num_kv_splits is None else int(num_kv_splits)
    return f"{layout}|{codec}|{backend or ''}|{check}|{causal}|{window}|{softcap}|{splits}|{plan}"


class _Common(NamedTuple):
    """What ``common_options`` was made of."""

    layout: CacheLayout
    codec: str
    backend: str | None
    check: bool | None


_CHECKS = {"None": None, "True": True, "False": False}


@lru_cache(maxsize=1024)
def _common(text: str) -> _Common:
    layout, codec, backend, check = text.split("|")
    return _Common(_layout(layout), codec, backend or None, _CHECKS[check])


class _Options(NamedTuple):
    """What ``attention_options`` was made of."""

    common: _Common
    plan: dict[str, int | str] | None
    call: dict[str, Any]


@lru_cache(maxsize=1024)
def _options(text: str) -> _Options:
    *common, causal, window, softcap, splits, plan = text.split("|", 8)
    call = {
        "causal": causal == "True",
        "sliding_window": None if window == "None" else int(window),
        "softcap": None if softcap == "None" else float(softcap),
        "num_kv_splits": None if splits == "None" else int(splits),
    }
    return _Options(_common("|".join(common)), _plan(plan), call)


def _signature(x: Tensor) -> Signature:
    return x.shape, x.dtype, x.stride(), x.device


def _spec(signature: Signature) -> ArraySpec:
    shape, dtype, strides, device = signature
    return ArraySpec(tuple(shape), dtype_name(dtype), strides, str(device))


def spec(x: Tensor) -> ArraySpec:
    """Shape, dtype name, strides and device of a tensor."""
    return _spec(_signature(x))


def dtype_name(dtype: torch.dtype) -> str:
    """``"float16"`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def _check_memory(name: str, array: ArraySpec, unit: int = 1) -> None:
    """The elements written to are distinct; ``unit`` elements of the first dimension are dense."""
    assert array.strides is not None
    if 0 in array.shape:
        return
    dims = list(zip(array.strides, array.shape, strict=True))
    extent = unit
    for stride, size in sorted(d for d in (dims[:1] if unit > 1 else dims) if d[1] > 1):
        if stride < extent:
            raise ValueError(
                f"{name}: expected memory of its own for every element, since it is written to, "
                f"got shape {array.shape} with strides {array.strides}"
            )
        extent = stride * (size - 1) + extent


def _choose(layout: CacheLayout, backend: str | None, cache: Signature, align: int) -> ModuleType:
    """The module of the backend to run, ``native`` or ``launch``."""
    _, _, strides, device = cache
    target = "hip" if device.type == "cuda" and torch.version.hip else device.type
    reasons = ()
    if align % 2 or strides[0] % 2:
        reasons = ("the kernels need a cache whose address and page stride are even",)
    return _MODULES[choose_backend(layout, backend=backend, target=target, kernel_reasons=reasons)]


# --- store ----------------------------------------------------------------------------------


class _Small(NamedTuple):
    """What a call of ``store`` or ``dequantize`` needs that depends on nothing but signatures."""

    layout: CacheLayout
    codec: str
    check: bool | None
    module: ModuleType
    prepared: dict[str, Any]


def _check_store(
    arrays: tuple[ArraySpec, ArraySpec, ArraySpec, ArraySpec], common: _Common
) -> Codec:
    codec = codec_of(common.codec)
    check_store(*arrays, layout=common.layout, codec=codec)
    _check_memory("cache", arrays[2], common.layout.page_bytes)
    return codec


@lru_cache(maxsize=4096)
def _prepare_store(
    arrays: tuple[Signature, Signature, Signature, Signature], align: int, options: str
) -> _Small:
    """Prepares a call; codecs are not kept alive."""
    common = _common(options)
    layout, digest, backend, check = common
    key, value, cache, slot_mapping = (_spec(x) for x in arrays)
    codec = _check_store((key, value, cache, slot_mapping), common)
    module = _choose(layout, backend, arrays[2], align)
    if module is native:
        return _Small(layout, digest, check, module, {})
    prepared = launch.prepare_store(
        key, value, cache, slot_mapping, layout, codec, arrays[2][-1], cache_align=align
    )
    return _Small(layout, digest, check, module, {"prepared": prepared})


@torch.library.impl("tq::store", "CompositeExplicitAutograd")
def _store(key: Tensor, value: Tensor, cache: Tensor, slot_mapping: Tensor, options: str) -> None:
    arrays = _signature(key), _signature(value), _signature(cache), _signature(slot_mapping)
    layout, codec, check, module, prepared = _prepare_store(arrays, launch.align(cache), options)
    strict = is_checked(check)
    if strict or cache.device.type == "cpu":
        num_slots = cache.shape[0] * layout.page_size
        contents.check_store(key, value, slot_mapping, num_slots, strict=strict)
    module.store(key, value, cache, slot_mapping, layout=layout, codec=codec_of(codec), **prepared)


@torch.library.register_fake("tq::store")
def _store_fake(
    key: Tensor, value: Tensor, cache: Tensor, slot_mapping: Tensor, options: str
) -> None:
    _check_store((spec(key), spec(value), spec(cache), spec(slot_mapping)), _common(options))


# --- attention ------------------------------------------------------------------------------


class _Call(NamedTuple):
    """What a call of attention needs that depends on nothing but signatures and numbers."""

    call: AttentionCall
    layout: CacheLayout
    codec: str
    check: bool | None
    module: ModuleType
    prepared: dict[str, Any]


@lru_cache(maxsize=4096)
def _prepare_attention(
    arrays: tuple[Signature | None, ...],
    align: int,
    scale: float | None,
    max_query_len: int | None,
    max_seq_len: int | None,
    options: str,
) -> _Call:
    """Prepares a call; codecs are not kept alive."""
    (layout, digest, backend, check), overrides, numbers = _options(options)
    codec = codec_of(digest)
    specs: dict[str, Any] = {
        name: None if x is None else _spec(x) for name, x in zip(_ATTENTION, arrays, strict=True)
    }
    call = check_attention(
        **specs,
        layout=layout,
        codec=codec,
        scale=scale,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        **numbers,
    )
    _check_memory("out", specs["out"])
    cache = arrays[1]
    assert cache is not None
    module = _choose(layout, backend, cache, align)
    if module is native:
        if overrides is not None:
            raise ValueError("plan: the native backend launches no kernels and takes no plan")
        return _Call(call, layout, digest, check, module, {})
    prepared = launch.prepare_attention(
        call, specs, layout, codec, cache[-1], cache_align=align, overrides=overrides
    )
    return _Call(call, layout, digest, check, module, {"prepared": prepared})


@torch.library.impl("tq::attention", "CompositeExplicitAutograd")
def _attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    out: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    scale: float | None,
    max_query_len: int | None,
    max_seq_len: int | None,
    options: str,
) -> Tensor:
    tensors = (
        query, cache, block_table, seq_lens, query_start_loc, sinks, alibi_slopes, out,
    )  # fmt: skip
    arrays = tuple([None if x is None else _signature(x) for x in tensors])
    call, layout, codec, check, module, prepared = _prepare_attention(
        arrays, launch.align(cache), scale, max_query_len, max_seq_len, options
    )
    strict = is_checked(check)
    if strict or query.device.type == "cpu":
        contents.check_attention(
            query,
            block_table,
            seq_lens,
            query_start_loc,
            call,
            cache.shape[0],
            layout.page_size,
            strict=strict,
        )
    lse: Tensor = module.attention(
        query,
        cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        call=call,
        layout=layout,
        codec=codec_of(codec),
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        **prepared,
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
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    scale: float | None,
    max_query_len: int | None,
    max_seq_len: int | None,
    options: str,
) -> Tensor:
    tensors = (
        query, cache, block_table, seq_lens, query_start_loc, sinks, alibi_slopes, out,
    )  # fmt: skip
    arrays: dict[str, Any] = {
        name: None if x is None else spec(x) for name, x in zip(_ATTENTION, tensors, strict=True)
    }
    (layout, codec, _, _), _, numbers = _options(options)
    # Bounds may be symbols here; the public functions and the real operator check them.
    check_attention(**arrays, layout=layout, codec=codec_of(codec), **numbers)
    return query.new_empty(query.shape[:2], dtype=torch.float32)


# --- dequantize -----------------------------------------------------------------------------


def _check_dequantize(
    arrays: tuple[ArraySpec, ArraySpec, ArraySpec], dtype: torch.dtype, common: _Common
) -> Codec:
    codec = codec_of(common.codec)
    check_dequantize(*arrays, layout=common.layout, codec=codec, dtype=dtype_name(dtype))
    return codec


@lru_cache(maxsize=1024)
def _prepare_dequantize(
    arrays: tuple[Signature, Signature, Signature], align: int, dtype: torch.dtype, options: str
) -> _Small:
    """Prepares a call; codecs are not kept alive."""
    common = _common(options)
    layout, digest, backend, check = common
    cache, block_table, seq_lens = (_spec(x) for x in arrays)
    codec = _check_dequantize((cache, block_table, seq_lens), dtype, common)
    module = _choose(layout, backend, arrays[0], align)
    if module is native:
        return _Small(layout, digest, check, module, {})
    prepared = launch.prepare_dequantize(
        cache,
        block_table,
        layout,
        codec,
        arrays[0][-1],
        dtype=dtype_name(dtype),
        cache_align=align,
    )
    return _Small(layout, digest, check, module, {"prepared": prepared})


@torch.library.impl("tq::dequantize", "CompositeExplicitAutograd")
def _dequantize(
    cache: Tensor, block_table: Tensor, seq_lens: Tensor, dtype: torch.dtype, options: str
) -> tuple[Tensor, Tensor]:
    arrays = _signature(cache), _signature(block_table), _signature(seq_lens)
    layout, codec, check, module, prepared = _prepare_dequantize(
        arrays, launch.align(cache), dtype, options
    )
    strict = is_checked(check)
    if strict or cache.device.type == "cpu":
        contents.check_dequantize(
            block_table, seq_lens, cache.shape[0], layout.page_size, strict=strict
        )
    result: tuple[Tensor, Tensor] = module.dequantize(
        cache, block_table, seq_lens, layout=layout, codec=codec_of(codec), dtype=dtype, **prepared
    )
    return result


@torch.library.register_fake("tq::dequantize")
def _dequantize_fake(
    cache: Tensor, block_table: Tensor, seq_lens: Tensor, dtype: torch.dtype, options: str
) -> tuple[Tensor, Tensor]:
    common = _common(options)
    _check_dequantize((spec(cache), spec(block_table), spec(seq_lens)), dtype, common)
    layout = common.layout
    shape = (
        block_table.shape[0],
        block_table.shape[1] * layout.page_size,
        layout.num_kv_heads,
        layout.head_dim,
    )
    return cache.new_empty(shape, dtype=dtype), cache.new_empty(shape, dtype=dtype)
