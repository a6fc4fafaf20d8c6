"""Binds torch tensors to the launch plans of ``tq_core.dispatch``; nothing is decided here."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
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


#: What the parts of a call's scratch are aligned to.
_ALIGN = 256


class _Constants(NamedTuple):
    """A codec's arrays on a device, by name, and where they are."""

    tensors: dict[str, torch.Tensor]
    addresses: dict[str, int]


#: By a codec's digest and a device. They stay as long as an equal codec lives, since a captured
#: graph may read them.
_CODECS: dict[tuple[str, torch.device], _Constants] = {}
_LOCK = Lock()


def _is_alive(digest: str) -> bool:
    try:
        codec_of(digest)
    except LookupError:
        return False
    return True


def _constants(codec: Codec, device: torch.device) -> _Constants:
    """``dispatch.codec_arrays`` on a device."""
    constants = _CODECS.get((codec.digest, device))
    if constants is not None:
        return constants
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"codec: its constants are not on {device} yet and cannot be copied there while a CUDA "
            "graph is captured; make one call with this codec before the capture"
        )
    with _LOCK:
        constants = _CODECS.get((codec.digest, device))
        if constants is None:
            for key in [k for k in _CODECS if not _is_alive(k[0])]:
                del _CODECS[key]
            # Not inference tensors, which a later call outside inference mode could not use.
            with torch.inference_mode(False):
                arrays = dispatch.codec_arrays(codec)
                tensors = {name: torch.tensor(x, device=device) for name, x in arrays.items()}
            addresses = {name: x.data_ptr() for name, x in tensors.items()}
            constants = _CODECS[codec.digest, device] = _Constants(tensors, addresses)
    return constants


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


class _Step:
    """A launch with its grid and constants, called with addresses.

    Triton looks at every argument, constants included, before it finds what it has compiled. That
    takes longer than many a launch, and only the alignment of arrays can differ here: so what it
    has found is kept by that, and is given addresses, which it need not ask tensors for.
    """

    def __init__(self, launch: dispatch.Launch) -> None:
        function = getattr(kernels.load(), launch.kernel)
        constants = dict(launch.constexprs)
        self.inputs = launch.inputs
        self.integers = launch.integers
        self.outputs = tuple(output.name for output in launch.outputs)
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

    def is_found(self, aligned: tuple[bool, ...]) -> bool:
        """Whether it is compiled for arrays that are or are not aligned to 16 bytes."""
        return aligned in self._found

    def first(self, arrays: Mapping[str, torch.Tensor], aligned: tuple[bool, ...]) -> None:
        """Compiles what is not compiled yet, and launches it."""
        compiled = self._find(*self._arguments(arrays))
        # The interpreter compiles nothing.
        if compiled is not None:
            self._found[aligned] = compiled[self._grid]

    def __call__(
        self, addresses: Mapping[str, int], aligned: tuple[bool, ...], stream: int
    ) -> None:
        """Launches what is compiled."""
        arguments = self._arguments(addresses)
        self._found[aligned](*arguments, *self._constants, stream=stream)

    def _arguments(self, named: Mapping[str, Any]) -> tuple[Any, ...]:
        inputs = map(named.__getitem__, self.inputs)
        return (*inputs, *self.integers, *map(named.__getitem__, self.outputs))


class Prepared(NamedTuple):
    """The launches of a call, ready to be made with its arrays.

    Attributes:
        steps: those that have programs, in order.
        results: name, shape and dtype of the arrays that a call allocates and returns.
        scratch: name, place in bytes, shape and dtype of the others that it needs.
        scratch_bytes: of all of them.
    """

    steps: tuple[_Step, ...]
    results: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    scratch: tuple[tuple[str, int, tuple[int, ...], torch.dtype], ...]
    scratch_bytes: int


def _prepared(
    launches: Iterable[dispatch.Launch], given: Collection[str], results: Collection[str]
) -> Prepared:
    """Prepares ``launches``, whose call has the arrays ``given`` and returns ``results``."""
    launches = tuple(launches)
    outputs = {output.name: output for launch in launches for output in launch.outputs}
    returned, scratch, end = [], [], 0
    for output in outputs.values():
        dtype = getattr(torch, output.dtype)
        if output.name in results:
            returned.append((output.name, output.shape, dtype))
        elif output.name not in given:
            scratch.append((output.name, end, output.shape, dtype))
            end += -(-math.prod(output.shape) * dtype.itemsize // _ALIGN) * _ALIGN
    steps = tuple(_Step(launch) for launch in launches if launch.grid)
    return Prepared(steps, tuple(returned), tuple(scratch), end)


def _run(
    prepared: Prepared, constants: _Constants, arrays: dict[str, torch.Tensor], device: torch.device
) -> None:
    """Launches what is prepared on ``arrays`` by name, to which results are added."""
    for name, shape, dtype in prepared.results:
        arrays[name] = torch.empty(shape, dtype=dtype, device=device)
    addresses = {name: array.data_ptr() for name, array in arrays.items()}
    aligned = tuple([address % 16 == 0 for address in addresses.values()])
    addresses |= constants.addresses
    memory = torch.empty(prepared.scratch_bytes, dtype=torch.uint8, device=device)
    start = memory.data_ptr()
    for name, place, _, _ in prepared.scratch:
        addresses[name] = start + place
    if all(step.is_found(aligned) for step in prepared.steps):
        stream = kernels.current_stream(device.index) if prepared.steps else 0
        for step in prepared.steps:
            step(addresses, aligned, stream)
        return
    tensors = constants.tensors | arrays
    for name, place, shape, dtype in prepared.scratch:
        size = math.prod(shape) * dtype.itemsize
        tensors[name] = memory[place : place + size].view(dtype).view(shape)
    for step in prepared.steps:
        step.first(tensors, aligned)


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


def prepare_attention(*args: Any, **kwargs: Any) -> Prepared:
    """The launches of a checked call; arguments as ``attention_plan`` takes them."""
    return _prepared(attention_plan(*args, **kwargs).launches, given=("out",), results=("lse",))


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
) -> Prepared:
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
    return _prepared((plan,), given=("cache",), results=())


def prepare_dequantize(
    cache: ArraySpec,
    block_table: ArraySpec,
    layout: CacheLayout,
    codec: Codec,
    device: torch.device,
    *,
    dtype: str,
    cache_align: int,
) -> Prepared:
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
    return _prepared((plan,), given=(), results=("keys", "values"))


@_on_its_device
def store(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: CacheLayout,
    codec: Codec,
    prepared: Prepared,
) -> None:
    """Launches what ``prepare_store`` made; arguments are checked already."""
    arrays = {
        "key": key,
        "value": value,
        "cache": cache,
        "slot_mapping": slot_mapping,
    }
    _run(prepared, _constants(codec, cache.device), arrays, cache.device)


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
    prepared: Prepared,
) -> torch.Tensor:
    """Launches what ``prepare_attention`` made into ``out``; returns the LSE fp32 ``[N, Hq]``."""
    arrays = {
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
    _run(prepared, _constants(codec, query.device), arrays, query.device)
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
    prepared: Prepared,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches what ``prepare_dequantize`` made; keys and values ``[B, S, Hk, D]``."""
    arrays = {
        "cache": cache,
        "block_table": _dense(block_table),
        "seq_lens": _dense(seq_lens),
    }
    _run(prepared, _constants(codec, cache.device), arrays, cache.device)
    return arrays["keys"], arrays["values"]
