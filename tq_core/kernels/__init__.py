"""The Triton sources, shared by every framework.

Whether Triton compiles or interprets them is Triton's own choice, made when ``triton`` is first
imported: with ``TRITON_INTERPRET=1`` they run on the CPU in numpy, else on a GPU.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import SimpleNamespace

#: Kernel name -> module that defines it.
KERNELS = {
    "attention": "attention",
    "attention_unpacked": "unpacked",
    "dequantize": "dequantize",
    "merge": "attention",
    "store": "store",
    "transform_output": "query",
    "transform_query": "query",
    "unpack": "unpacked",
}


@cache
def load() -> SimpleNamespace:
    """The kernels by name.

    Raises:
        ImportError: triton is missing.
    """
    return SimpleNamespace(
        **{
            kernel: getattr(importlib.import_module(f"{__name__}.{module}"), kernel)
            for kernel, module in KERNELS.items()
        }
    )


def current_stream(device: int) -> int:
    """The stream that Triton launches on by default, of a device by its index."""
    from triton.runtime import driver

    stream: int = driver.active.get_current_stream(device)
    return stream


def interpreted() -> bool:
    """Whether the loaded kernels run in Triton's interpreter.

    Raises:
        ImportError: triton is missing.
    """
    from triton.runtime.jit import JITFunction

    return not isinstance(load().attention, JITFunction)
