"""The public functions of a framework and backend, from numpy arrays to numpy arrays.

So that one body of a test serves both frameworks and every backend. A framework is imported when
its engine is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tq_core import CacheLayout, Codec

#: What arrays besides the query an ``attention`` takes.
INDICES = ("block_table", "seq_lens", "query_start_loc", "sinks", "alibi_slopes")


@dataclass(frozen=True)
class Engine:
    """A backend of a framework on a device."""

    framework: str
    backend: str
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.framework}-{self.backend}"

    @property
    def has_kernels(self) -> bool:
        return self.backend != "native"

    @property
    def has_strides(self) -> bool:
        return self.framework == "torch"

    def serves(self, head_dim: int) -> bool:
        return not self.has_kernels or head_dim % 8 == 0

    def array(self, x: np.ndarray, dtype: str | None = None) -> Any:
        """An array of the framework on the device."""
        if self.framework == "jax":
            import jax.numpy as jnp

            return jnp.asarray(x, dtype)
        import torch

        tensor = torch.from_numpy(np.array(x))
        return tensor.to(self.device, None if dtype is None else getattr(torch, dtype))

    @staticmethod
    def numbers(x: Any) -> np.ndarray:
        """Floats as float64, others as they are."""
        if hasattr(x, "data_ptr"):
            x = x.cpu()
            return x.double().numpy() if x.is_floating_point() else x.numpy()
        x = np.asarray(x.astype("float32") if x.dtype.name in ("bfloat16", "float16") else x)
        return x.astype(np.float64) if x.dtype.kind == "f" else x

    def _package(self) -> Any:
        if self.framework == "jax":
            import tq_jax

            return tq_jax
        import tq_torch

        return tq_torch

    def store(
        self,
        key: Any,
        value: Any,
        cache: Any,
        slots: Any,
        *,
        layout: CacheLayout,
        codec: Codec,
        dtype: str = "float32",
    ) -> Any:
        """The cache after a store, an array of the framework; numpy arrays become some first."""
        key, value = (self.array(x, dtype) if _is_numpy(x) else x for x in (key, value))
        if _is_numpy(slots):
            slots = slots.astype(np.int32) if self.framework == "jax" else slots
            slots = self.array(slots)
        cache = self.array(cache) if _is_numpy(cache) else cache
        result = self._package().store(
            key, value, cache, slots, layout=layout, codec=codec, backend=self.backend
        )
        return cache if result is None else result

    def attention(
        self, arrays: Mapping[str, Any], dtype: str = "float32", **options: Any
    ) -> tuple[Any, Any]:
        """Output and LSE; ``decode_attention`` where there is no ``query_start_loc``."""
        given = {
            name: self.array(x, dtype if name == "query" else None) if _is_numpy(x) else x
            for name, x in arrays.items()
            if x is not None
        }
        package = self._package()
        function = package.attention if "query_start_loc" in given else package.decode_attention
        if self.framework == "torch" and "out" not in given:
            given["out"] = self.array(np.full(given["query"].shape, np.nan), dtype)
        out, lse = function(**given, **options, return_lse=True, backend=self.backend)
        return out, lse

    def dequantize(
        self, cache: Any, block_table: Any, seq_lens: Any, *, dtype: str = "float32", **what: Any
    ) -> tuple[Any, Any]:
        """Keys and values."""
        arrays = [self.array(x) if _is_numpy(x) else x for x in (cache, block_table, seq_lens)]
        if self.framework == "torch":
            import torch

            dtype = getattr(torch, dtype)
        keys, values = self._package().dequantize(
            *arrays, **what, dtype=dtype, backend=self.backend
        )
        return keys, values


def _is_numpy(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def bits(x: Any) -> bytes:
    """The bytes of an array of either framework."""
    if hasattr(x, "data_ptr"):
        import torch

        flat = x.cpu().clone(memory_format=torch.contiguous_format).flatten()
        return flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
    return np.asarray(x).tobytes()
