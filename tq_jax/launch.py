"""Binds JAX arrays to the launch plans of ``tq_core.dispatch``; nothing is decided here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tq_core import dispatch
from tq_core.codec import Codec
from tq_core.dispatch import Device, Launch
from tq_core.layout import CacheLayout
from tq_core.validation import AttentionCall
from tq_jax import interpret, triton_call
from tq_jax.transforms import kernel_inputs

#: XLA allocates arrays at addresses that this divides.
_ALIGN = 16


def device_of(device: jax.Device) -> Device:
    """The description of a JAX device that plans are made for."""
    if device.platform != "gpu":
        return Device("interpret", num_sms=1)
    if "rocm" in device.client.platform_version:
        return Device("hip", 0, device.core_count, 65536)
    major, minor = map(int, device.compute_capability.split("."))
    return Device(
        "cuda",
        10 * major + minor,
        device.core_count,
        device.shared_memory_per_block_optin,
        device.device_kind,
    )


@dataclass(frozen=True)
class Kernels:
    """The shared kernels on a device; its methods have the arguments of ``tq_jax.native``.

    All of a call's arrays are traced; what else there is makes the trace, overrides of the launch
    plan of ``attention`` included.
    """

    device: Device
    plan: tuple[tuple[str, int | str], ...] = ()

    def store(
        self,
        key: jax.Array,
        value: jax.Array,
        cache: jax.Array,
        slot_mapping: jax.Array,
        *,
        layout: CacheLayout,
        codec: Codec,
    ) -> jax.Array:
        """The cache with ``key`` and ``value`` written."""
        return _store(
            key, value, cache, slot_mapping, device=self.device, layout=layout, codec=codec
        )

    def attention(
        self,
        query: jax.Array,
        cache: jax.Array,
        block_table: jax.Array,
        seq_lens: jax.Array,
        query_start_loc: jax.Array | None,
        sinks: jax.Array | None,
        alibi_slopes: jax.Array | None,
        *,
        call: AttentionCall,
        layout: CacheLayout,
        codec: Codec,
    ) -> tuple[jax.Array, jax.Array]:
        """Output ``[N, Hq, D]`` and LSE ``[N, Hq]``; no ``query_start_loc``: one row a sequence."""
        arrays = {
            "query": query,
            "cache": cache,
            "block_table": block_table,
            "seq_lens": seq_lens,
            "query_start_loc": query_start_loc,
            "sinks": sinks,
            "alibi_slopes": alibi_slopes,
        }
        given = {name: x for name, x in arrays.items() if x is not None}
        return _attention(
            given, device=self.device, call=call, layout=layout, codec=codec, plan=self.plan
        )

    def dequantize(
        self,
        cache: jax.Array,
        block_table: jax.Array,
        seq_lens: jax.Array,
        *,
        layout: CacheLayout,
        codec: Codec,
        dtype: str,
    ) -> tuple[jax.Array, jax.Array]:
        """Dense keys and values."""
        return _dequantize(
            cache,
            block_table,
            seq_lens,
            device=self.device,
            layout=layout,
            codec=codec,
            dtype=dtype,
        )


def store_plan(
    key: jax.Array, cache: jax.Array, device: Device, layout: CacheLayout, codec: Codec
) -> Launch:
    """The launch of a store of ``key`` and its values."""
    strides = _strides(key.shape)
    return dispatch.plan_store(
        key.shape[0],
        cache.shape[0],
        layout,
        dispatch.codec_traits(codec),
        device,
        page_stride=layout.page_bytes,
        key_strides=strides,
        value_strides=strides,
        slot_stride=1,
        cache_align=_ALIGN,
    )


def attention_plan(
    arrays: dict[str, jax.Array],
    device: Device,
    call: AttentionCall,
    layout: CacheLayout,
    codec: Codec,
    overrides: Mapping[str, int | str] | None = None,
) -> dispatch.AttentionPlan:
    """The plan of an attention call with these arrays."""
    strides = _strides(arrays["query"].shape)
    return dispatch.plan_attention(
        call,
        layout,
        dispatch.codec_traits(codec),
        device,
        decode="query_start_loc" not in arrays,
        page_stride=layout.page_bytes,
        table_stride=call.max_pages,
        query_strides=strides,
        out_strides=strides,
        cache_align=_ALIGN,
        has_sinks="sinks" in arrays,
        has_alibi="alibi_slopes" in arrays,
        overrides=overrides,
    )


def dequantize_plan(
    block_table: jax.Array, device: Device, layout: CacheLayout, codec: Codec, dtype: str
) -> Launch:
    """The launch of a dequantize of the sequences of ``block_table``."""
    num_seqs, max_pages = block_table.shape
    return dispatch.plan_dequantize(
        num_seqs,
        max_pages * layout.page_size,
        layout,
        dispatch.codec_traits(codec),
        device,
        dtype=dtype,
        page_stride=layout.page_bytes,
        table_stride=max_pages,
        cache_align=_ALIGN,
    )


@partial(jax.jit, static_argnames=("device", "layout", "codec"))
def _store(key, value, cache, slot_mapping, *, device, layout, codec):
    plan = store_plan(key, cache, device, layout, codec)
    arrays = {"key": key, "value": value, "cache": cache, "slot_mapping": slot_mapping}
    return _run((plan,), kernel_inputs(arrays, "tq_jax.store"), device, codec)["cache"]


@partial(jax.jit, static_argnames=("device", "call", "layout", "codec", "plan"))
def _attention(arrays, *, device, call, layout, codec, plan):
    launches = attention_plan(arrays, device, call, layout, codec, dict(plan)).launches
    arrays = _run(launches, kernel_inputs(arrays, "tq_jax.attention"), device, codec)
    return arrays["out"], arrays["lse"]


@partial(jax.jit, static_argnames=("device", "layout", "codec", "dtype"))
def _dequantize(cache, block_table, seq_lens, *, device, layout, codec, dtype):
    plan = dequantize_plan(block_table, device, layout, codec, dtype)
    arrays = {"cache": cache, "block_table": block_table, "seq_lens": seq_lens}
    arrays = _run((plan,), kernel_inputs(arrays, "tq_jax.dequantize"), device, codec)
    return arrays["keys"], arrays["values"]


def _run(
    launches: tuple[Launch, ...], arrays: dict[str, Any], device: Device, codec: Codec
) -> dict[str, Any]:
    """All arrays by name after ``launches``."""
    constants = dispatch.codec_arrays(codec)
    arrays = dict(arrays)
    for launch in launches:
        for name in launch.inputs:
            if name not in arrays:
                arrays[name] = jnp.asarray(constants[name])
        if device.kind == "interpret":
            arrays |= interpret.call(launch, arrays)
        else:
            arrays |= triton_call.call(launch, arrays, device.capability)
    return arrays


def _strides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Of a row-major array, as all of XLA's are here."""
    _, heads, dim = shape
    return heads * dim, dim, 1
