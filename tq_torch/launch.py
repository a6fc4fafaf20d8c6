"""Binds torch tensors to the launch plans of ``tq_core.dispatch``; nothing is decided here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial, wraps
from threading import Lock
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from tq_core import dispatch, kernels
from tq_core.codec import Codec, codec_of
from tq_core.layout import CacheLayout
from tq_core.validation import ArraySpec, AttentionCall

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
        properties.name,
    )


#: A codec's arrays by its digest and a device. They stay as long as an equal codec lives, since a
#: captured graph may read them.
_CODECS: dict[tuple[str, torch.device], dict[str, torch.Tensor]] = {}
_LOCK = Lock()


def _is_alive(digest: str) -> bool:
    try:
        codec_of(digest)
    except LookupError:
        return False
    return True


def _codec_tensors(codec: Codec, device: torch.device) -> dict[str, torch.Tensor]:
    """``dispatch.codec_arrays`` on a device."""
    tensors = _CODECS.get((codec.digest, device))
    if tensors is not None:
        return tensors
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"codec: its constants are not on {device} yet and cannot be copied there while a CUDA "
            "graph is captured; make one call with this codec before the capture"
        )
    with _LOCK:
        tensors = _CODECS.get((codec.digest, device))
        if tensors is None:
            for key in [k for k in _CODECS if not _is_alive(k[0])]:
                del _CODECS[key]
            # Not inference tensors, which a later call outside inference mode could not use.
            with torch.inference_mode(False):
                arrays = dispatch.codec_arrays(codec)
                tensors = {name: torch.tensor(x, device=device) for name, x in arrays.items()}
            _CODECS[codec.digest, device] = tensors
    return tensors


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


class _Kernel:
    """A kernel with its grid and constants, called with arrays and integers.

    Triton looks at every argument, constants included, before it finds what it has compiled. That
    takes longer than many a launch, and only the alignment of arrays can differ here: so what it
    has found is kept by that.
    """

    def __init__(self, launch: dispatch.Launch) -> None:
        function = getattr(kernels.load(), launch.kernel)
        constants = dict(launch.constexprs)
        self._grid = (launch.grid, 1, 1)
        self._find = partial(
            function[self._grid],
            **constants,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            enable_fp_fusion=launch.fp_fusion,
            **({"launch_pdl": True} if launch.pdl else {}),
        )
        self._constants = tuple(constants[n] for n in function.arg_names if n in constants)
        self._found: dict[tuple[bool, ...], Callable[..., Any]] = {}

    def __call__(self, arrays: list[torch.Tensor], integers: tuple[int, ...], num_in: int) -> None:
        """Launches; the first ``num_in`` of ``arrays`` are inputs, before the integers."""
        key = tuple([x.data_ptr() & 15 == 0 for x in arrays])
        arguments = (*arrays[:num_in], *integers, *arrays[num_in:])
        launch = self._found.get(key)
        if launch is not None:
            launch(*arguments, *self._constants)
            return
        compiled = self._find(*arguments)
        # The interpreter compiles nothing.
        if compiled is not None:
            self._found[key] = compiled[self._grid]


class _Step(NamedTuple):
    """A launch, ready to be called with its arrays; no kernel where it has no programs."""

    kernel: _Kernel | None
    inputs: tuple[str, ...]
    integers: tuple[int, ...]
    outputs: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def _step(launch: dispatch.Launch) -> _Step:
    kernel = _Kernel(launch) if launch.grid else None
    outputs = tuple((o.name, o.shape, getattr(torch, o.dtype)) for o in launch.outputs)
    return _Step(kernel, launch.inputs, launch.integers, outputs)


def _run(steps: tuple[_Step, ...], arrays: dict[str, torch.Tensor], device: torch.device) -> None:
    """Launches ``steps`` on ``arrays`` by name; outputs that are not there are allocated."""
    for step in steps:
        for name, shape, dtype in step.outputs:
            if name not in arrays:
                arrays[name] = torch.empty(shape, dtype=dtype, device=device)
        if step.kernel is not None:
            given = [arrays[name] for name in step.inputs]
            outputs = [arrays[name] for name, _, _ in step.outputs]
            step.kernel(given + outputs, step.integers, len(given))


def align(tensor: torch.Tensor) -> int:
    """The largest power of two up to 16 that divides the tensor's address."""
    return min(16, tensor.data_ptr() & -tensor.data_ptr() or 16)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A small array with its last dimension dense; never for the cache."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _table_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Entries from a row of the block table to the next, once it is dense."""
    return strides[0] if strides[1] == 1 else shape[1]


def attention_plan(
    call: AttentionCall,
    arrays: Mapping[str, ArraySpec | None],
    layout: CacheLayout,
    codec: Codec,
    device: torch.device,
    *,
    cache_align: int,
    overrides: Mapping[str, int | str] | None = None,
) -> dispatch.AttentionPlan:
    """The plan of a checked call with ``arrays`` by name, all with strides."""

    def strides(name: str) -> Any:
        array = arrays[name]
        return array.strides

    table = arrays["block_table"]
    return dispatch.plan_attention(
        call,
        layout,
        dispatch.codec_traits(codec),
        device_of(device),
        decode=arrays["query_start_loc"] is None,
        page_stride=strides("cache")[0],
        table_stride=_table_stride(table.shape, strides("block_table")),
        query_strides=strides("query"),
        out_strides=strides("out"),
        cache_align=cache_align,
        has_sinks=arrays["sinks"] is not None,
        has_alibi=arrays["alibi_slopes"] is not None,
        overrides=overrides,
    )


def prepare_attention(*args: Any, **kwargs: Any) -> tuple[_Step, ...]:
    """The launches of a checked call; arguments as ``attention_plan`` takes them."""
    return tuple(map(_step, attention_plan(*args, **kwargs).launches))


def prepare_store(
    key: ArraySpec,
    value: ArraySpec,
    cache: ArraySpec,
    slot_mapping: ArraySpec,
    layout: CacheLayout,
    codec: Codec,
    device: torch.device,
    *,
    cache_align: int,
) -> tuple[_Step, ...]:
    """The launch of a checked call with these arrays."""
    plan = dispatch.plan_store(
        key.shape[0],
        cache.shape[0],
        layout,
        dispatch.codec_traits(codec),
        device_of(device),
        page_stride=cache.strides[0],
        key_strides=key.strides,
        value_strides=value.strides,
        slot_stride=slot_mapping.strides[0],
        cache_align=cache_align,
    )
    return (_step(plan),)


def prepare_dequantize(
    cache: ArraySpec,
    block_table: ArraySpec,
    layout: CacheLayout,
    codec: Codec,
    device: torch.device,
    *,
    dtype: str,
    cache_align: int,
) -> tuple[_Step, ...]:
    """The launch of a checked call with these arrays."""
    plan = dispatch.plan_dequantize(
        block_table.shape[0],
        block_table.shape[1] * layout.page_size,
        layout,
        dispatch.codec_traits(codec),
        device_of(device),
        dtype=dtype,
        page_stride=cache.strides[0],
        table_stride=_table_stride(block_table.shape, block_table.strides),
        cache_align=cache_align,
    )
    return (_step(plan),)


@_on_its_device
def store(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: CacheLayout,
    codec: Codec,
    steps: tuple[_Step, ...],
) -> None:
    """Launches what ``prepare_store`` made; arguments are checked already."""
    arrays = {
        **_codec_tensors(codec, cache.device),
        "key": key,
        "value": value,
        "cache": cache,
        "slot_mapping": slot_mapping,
    }
    _run(steps, arrays, cache.device)


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
    steps: tuple[_Step, ...],
) -> torch.Tensor:
    """Launches what ``prepare_attention`` made into ``out``; returns the LSE fp32 ``[N, Hq]``."""
    arrays = {
        **_codec_tensors(codec, query.device),
        "query": query,
        "cache": cache,
        "block_table": _dense(block_table),
        "seq_lens": _dense(seq_lens),
        "out": out,
    }
    if query_start_loc is not None:
        arrays["query_start_loc"] = _dense(query_start_loc)
    if sinks is not None:
        arrays["sinks"] = _dense(sinks)
    if alibi_slopes is not None:
        arrays["alibi_slopes"] = _dense(alibi_slopes)
    _run(steps, arrays, query.device)
    return arrays["lse"]


@_on_its_device
def dequantize(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    layout: CacheLayout,
    codec: Codec,
    dtype: torch.dtype,
    steps: tuple[_Step, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches what ``prepare_dequantize`` made; keys and values ``[B, S, Hk, D]``."""
    arrays = {
        **_codec_tensors(codec, cache.device),
        "cache": cache,
        "block_table": _dense(block_table),
        "seq_lens": _dense(seq_lens),
    }
    _run(steps, arrays, cache.device)
    return arrays["keys"], arrays["values"]
