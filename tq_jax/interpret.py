"""The shared kernels on the CPU, in Triton's interpreter, behind ``jax.pure_callback``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from threading import Lock
from typing import Any

import jax
import numpy as np

from tq_core import kernels
from tq_core.dispatch import Buffer, Launch

#: The interpreter keeps the current program in a global.
_LOCK = Lock()


class _Memory:
    """What Triton's interpreter asks of a tensor, over a numpy array: its address and dtype."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = array.dtype.name

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _Memory:
        return self

    def cpu(self) -> _Memory:
        return self

    def new_empty(self, *args: Any, **kwargs: Any) -> _Memory:
        return self

    def set_(self, *args: Any) -> None:
        """The interpreter's view of the host's memory, which this is."""

    def copy_(self, other: _Memory) -> None:
        """Back from the host's memory: nothing was copied."""

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides


def call(launch: Launch, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Runs a kernel; arguments and results as in :func:`tq_jax.triton_call.call`."""
    shapes = [jax.ShapeDtypeStruct(o.shape, jax.numpy.dtype(o.dtype)) for o in launch.outputs]
    results = jax.pure_callback(
        partial(_run, launch), shapes, *(arrays[name] for name in launch.inputs)
    )
    return {o.name: x for o, x in zip(launch.outputs, results, strict=True)}


def _unwritten(buffer: Buffer) -> np.ndarray:
    """Bytes that are seen where a kernel writes nothing: NaN."""
    dtype = jax.numpy.dtype(buffer.dtype)
    size = math.prod(buffer.shape) * dtype.itemsize
    return np.full(size, 255, np.uint8).view(dtype).reshape(buffer.shape)


def _run(launch: Launch, *inputs: Any) -> list[np.ndarray]:
    named = {name: np.ascontiguousarray(x) for name, x in zip(launch.inputs, inputs, strict=True)}
    outputs = [
        np.array(named[o.name]) if o.name in named else _unwritten(o) for o in launch.outputs
    ]
    if launch.grid:
        kernel = getattr(kernels.load(), launch.kernel)[(launch.grid,)]
        with _LOCK, np.errstate(all="ignore"):
            kernel(
                *(_Memory(named[name]) for name in launch.inputs),
                *launch.integers,
                *map(_Memory, outputs),
                **dict(launch.constexprs),
            )
    return outputs
