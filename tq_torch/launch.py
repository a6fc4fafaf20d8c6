"""Binds torch tensors to the launch plans of ``tq_core.dispatch``; nothing is decided here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial, wraps
from threading import Lock
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from tq_core import dispatch, kernels
from tq_core.codebook import midpoints
from tq_core.codec import Codec, codec_of
from tq_core.layout import CacheLayout
from tq_core.validation import AttentionCall

_P = ParamSpec("_P")
_R = TypeVar("_R")


@lru_cache(maxsize=16)
def device_of(device: torch.device) -> dispatch.Device:
    """The description of a torch device that plans are made for."""
    if device.type != "cuda":
        return dispatch.Device("interpret", num_sms=1)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return dispatch.Device("hip", 0, properties.multi_processor_count, 65536)
    return dispatch.Device(
        "cuda",
        properties.major * 10 + properties.minor,
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
    )


class _Buffers:
    """A codec's numbers on a device, in the form the kernels read."""

    def __init__(self, codec: Codec, device: torch.device) -> None:
        def put(array: Any) -> torch.Tensor:
            return torch.tensor(array, device=device)

        dim = codec.head_dim
        self.traits = dispatch.codec_traits(codec)
        nothing = torch.zeros(1, dtype=torch.float32, device=device)
        self.key_matrix = put(codec.key_matrix)
        self.query_matrix = put(dispatch.query_matrix_array(codec))
        self.reader_key_matrix = put(codec.query_matrix)
        self.value_matrix = put(codec.value_matrix)
        self.output_matrix = put(codec.output_matrix)
        self.reader_value_matrix = put(codec.output_matrix.swapaxes(1, 2).copy())
        self.factor = put(dispatch.factor_array(codec))
        self.key_factor = put(dispatch.key_factor_array(codec))
        self.key_scale = put(codec.key_scale)
        self.key_offset = nothing if codec.key_offset is None else put(codec.key_offset)
        self.value_offset = nothing if codec.value_offset is None else put(codec.value_offset)
        shift = dispatch.value_shift_array(codec)
        self.value_shift = nothing if shift is None else put(shift)
        self.key_table = put(dispatch.table_array(codec.centroids, dim))
        self.value_table = put(dispatch.table_array(codec.value_centroids, dim))
        self.phase = put(dispatch.phase_array())
        self.key_levels = self.key_edges = self.value_levels = self.value_edges = nothing
        if codec.centroids is not None:
            self.key_levels = put(codec.centroids)
            self.key_edges = put(midpoints(codec.centroids))
        if codec.value_centroids is not None:
            self.value_levels = put(codec.value_centroids)
            self.value_edges = put(midpoints(codec.value_centroids))


#: Buffers by a codec's digest and a device. They stay as long as an equal codec lives, since a
#: captured graph may read them.
_BUFFERS: dict[tuple[str, torch.device], _Buffers] = {}
_LOCK = Lock()


def _is_alive(digest: str) -> bool:
    try:
        codec_of(digest)
    except LookupError:
        return False
    return True


def _buffers(codec: Codec, device: torch.device) -> _Buffers:
    buffers = _BUFFERS.get((codec.digest, device))
    if buffers is not None:
        return buffers
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"codec: its constants are not on {device} yet and cannot be copied there while a CUDA "
            "graph is captured; make one call with this codec before the capture"
        )
    with _LOCK:
        buffers = _BUFFERS.get((codec.digest, device))
        if buffers is None:
            for key in [k for k in _BUFFERS if not _is_alive(k[0])]:
                del _BUFFERS[key]
            # Not inference tensors, which a later call outside inference mode could not use.
            with torch.inference_mode(False):
                buffers = _Buffers(codec, device)
            _BUFFERS[codec.digest, device] = buffers
    return buffers


def _on_its_device(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes the device of the first argument the current one: that is where launches go."""

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        device = args[0].device  # type: ignore[attr-defined]
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return function(*args, **kwargs)
        with torch.cuda.device(device):
            return function(*args, **kwargs)

    return run


def _nothing(*args: Any) -> None:
    """The launch of a kernel with an empty grid."""


def _step(launch: dispatch.Launch) -> Callable[..., Any]:
    """Launches a kernel with its constants, given its buffers and run-time integers."""
    if not launch.grid:
        return _nothing
    kernel = getattr(kernels.load(), launch.kernel)
    return partial(
        kernel[(launch.grid,)],
        **dict(launch.constexprs),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def align(tensor: torch.Tensor) -> int:
    """The largest power of two up to 16 that divides the tensor's address."""
    return min(16, tensor.data_ptr() & -tensor.data_ptr() or 16)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A small array with its last dimension dense; never for the cache."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def attention_plan(
    query: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    *,
    call: AttentionCall,
    layout: CacheLayout,
    codec: Codec,
    decode: bool,
    has_sinks: bool = False,
    has_alibi: bool = False,
    overrides: Mapping[str, int] | None = None,
) -> dispatch.AttentionPlan:
    """The plan that ``attention`` launches."""
    return dispatch.plan_attention(
        call,
        layout,
        dispatch.codec_traits(codec),
        device_of(query.device),
        decode=decode,
        page_stride=cache.stride(0),
        query_strides=query.stride(),
        out_strides=out.stride(),
        cache_align=align(cache),
        has_sinks=has_sinks,
        has_alibi=has_alibi,
        overrides=overrides,
    )


class AttentionSteps(NamedTuple):
    """The launches of a plan, ready to be called with their buffers."""

    plan: dispatch.AttentionPlan
    query: Callable[..., Any]
    attention: Callable[..., Any]
    merge: Callable[..., Any] | None
    output: Callable[..., Any] | None


def prepare_attention(
    call: AttentionCall,
    layout: CacheLayout,
    codec: Codec,
    device: torch.device,
    **kwargs: Any,
) -> AttentionSteps:
    """The launches of a checked call; ``kwargs`` as ``dispatch.plan_attention`` takes them."""
    traits = dispatch.codec_traits(codec)
    plan = dispatch.plan_attention(call, layout, traits, device_of(device), **kwargs)
    merge, output = (None if x is None else _step(x) for x in (plan.merge, plan.output))
    return AttentionSteps(plan, _step(plan.query), _step(plan.attention), merge, output)


def prepare_store(
    num_tokens: int, layout: CacheLayout, codec: Codec, **kwargs: Any
) -> Callable[..., Any]:
    """The launch of a store; ``kwargs`` as ``dispatch.plan_store`` takes them."""
    return _step(
        dispatch.plan_store(num_tokens, layout, dispatch.codec_traits(codec), **kwargs).store
    )


def prepare_dequantize(
    num_seqs: int,
    capacity: int,
    layout: CacheLayout,
    codec: Codec,
    device: torch.device,
    **kwargs: Any,
) -> Callable[..., Any]:
    """The launch of a dequantize; ``kwargs`` as ``dispatch.plan_dequantize`` takes them."""
    traits = dispatch.codec_traits(codec)
    return _step(
        dispatch.plan_dequantize(num_seqs, capacity, layout, traits, device_of(device), **kwargs)
    )


@_on_its_device
def store(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: CacheLayout,
    codec: Codec,
    steps: Callable[..., Any],
) -> None:
    """Launches what ``prepare_store`` made; arguments are checked already."""
    b = _buffers(codec, cache.device)
    steps(
        key,
        value,
        slot_mapping,
        b.key_matrix,
        b.value_matrix,
        b.key_offset,
        b.value_offset,
        b.key_scale,
        b.key_edges,
        b.key_levels,
        b.value_edges,
        b.value_levels,
        cache,
        key.shape[0],
    )


@_on_its_device
def attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    out: torch.Tensor,
    *,
    call: AttentionCall,
    layout: CacheLayout,
    codec: Codec,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    steps: AttentionSteps,
) -> torch.Tensor:
    """Launches what ``prepare_attention`` made into ``out``; returns the LSE fp32 ``[N, Hq]``."""
    device = query.device
    b = _buffers(codec, device)
    plan = steps.plan
    block_table, seq_lens = _dense(block_table), _dense(seq_lens)
    query_start_loc, sinks, alibi_slopes = (
        None if x is None else _dense(x) for x in (query_start_loc, sinks, alibi_slopes)
    )
    rows = (call.num_tokens, call.num_query_heads)
    lse = torch.empty(rows, dtype=torch.float32, device=device)
    if not call.num_tokens:
        return lse

    def scratch(shape: tuple[int, ...] | None, fallback: torch.Tensor) -> torch.Tensor:
        if shape is None:
            return fallback
        return torch.empty(shape, dtype=torch.float32, device=device)

    rotated = torch.empty(query.shape, dtype=torch.float16, device=device)
    row_scale = torch.empty(rows, dtype=torch.float32, device=device)
    row_const = torch.empty_like(row_scale) if b.traits.has_key_offset else row_scale
    steps.query(
        query,
        b.query_matrix,
        b.factor,
        b.key_offset,
        rotated,
        row_scale,
        row_const,
        call.num_tokens,
    )
    coded = scratch(plan.coded_shape, out)
    parts = scratch(plan.partial_shape, coded)
    state = scratch(plan.state_shape, lse)
    sink_ptr = row_scale if sinks is None else sinks
    steps.attention(
        rotated,
        row_scale,
        row_const,
        cache,
        block_table,
        seq_lens,
        seq_lens if query_start_loc is None else query_start_loc,
        b.key_table,
        b.value_table,
        b.phase,
        b.value_shift,
        sink_ptr,
        row_scale if alibi_slopes is None else alibi_slopes,
        parts,
        state,
        call.num_tokens,
        call.num_seqs,
        plan.num_blocks,
        block_table.stride(0),
    )
    if steps.merge is not None:
        steps.merge(parts, state, sink_ptr, coded, lse)
    if steps.output is not None:
        steps.output(coded, b.output_matrix, out, call.num_tokens)
    return lse


@_on_its_device
def dequantize(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    layout: CacheLayout,
    codec: Codec,
    dtype: torch.dtype,
    steps: Callable[..., Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches what ``prepare_dequantize`` made; keys and values ``[B, S, Hk, D]``."""
    b = _buffers(codec, cache.device)
    num_seqs, capacity = block_table.shape[0], block_table.shape[1] * layout.page_size
    block_table, seq_lens = _dense(block_table), _dense(seq_lens)
    shape = (num_seqs, capacity, layout.num_kv_heads, layout.head_dim)
    keys, values = (torch.empty(shape, dtype=dtype, device=cache.device) for _ in range(2))
    steps(
        cache,
        block_table,
        seq_lens,
        b.key_table,
        b.value_table,
        b.key_factor,
        b.reader_key_matrix,
        b.reader_value_matrix,
        b.key_offset,
        b.value_offset,
        keys,
        values,
        capacity,
        block_table.stride(0),
    )
    return keys, values
