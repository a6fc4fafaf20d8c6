"""Arrays that end where the process's memory does: a read of one byte more is a crash.

``python -m tests.guarded native`` (or ``interpret``, with ``TRITON_INTERPRET=1``) runs calls of
tq_torch on them; a test starts it as a process of its own. Linux, CPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.cases import PRESET_CONFIGS, Extras, assert_near, judge, make_codec
from tests.engines import Engine
from tests.hard import FEATURES, normal
from tq_core import CacheLayout, reference
from tq_core.layout import ORDERS

_kept: list[mmap.mmap] = []


def guarded(x: np.ndarray) -> np.ndarray:
    """A copy whose last byte is followed by memory that nobody may touch."""
    size = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    room = mmap.mmap(-1, size + mmap.PAGESIZE)
    _kept.append(room)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = np.frombuffer(room, x.dtype, x.size, size - x.nbytes).reshape(x.shape)
    copy[...] = x
    return copy


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(guarded(x)) for name, x in arrays.items()}


def presets(backend: str) -> list[str]:
    """All; the interpreter takes seconds for each, and has three."""
    return list(PRESET_CONFIGS) if backend == "native" else ["k8v4", "k3v4", "2bit_hq"]


def run(backend: str) -> None:
    """Stores, attention and dequantisation of presets, on arrays with guards."""
    engine = Engine("torch", backend)
    if engine.has_kernels:
        from tests.interpret.speed import patch_the_language_once

        patch_the_language_once()
    n, heads = 11, 2
    for name in presets(backend):
        i, config = list(PRESET_CONFIGS).index(name), PRESET_CONFIGS[name]
        dim, page_size = (72, 64, 24)[i % 3], (1, 3, 16)[i // 3 % 3]
        layout = CacheLayout(config, heads, dim, page_size, ORDERS[(i + i // 3) % 3])
        extras = Extras("heads", "heads") if i % 2 else Extras()
        what: dict[str, Any] = {
            "layout": layout, "codec": make_codec(config, dim, heads, extras),
        }  # fmt: skip
        pages = -(-n // page_size)
        key, value = normal(n, heads, dim).astype(np.float32)
        empty = np.full(layout.shape(pages), 0xFF, np.uint8)
        stored = _tensors({
            "key": key, "value": value, "cache": empty, "slots": np.arange(n)[::-1].copy(),
        })  # fmt: skip
        engine.store(*stored.values(), **what)
        cache = np.full_like(empty, 0xFF)
        reference.store(key, value, cache, np.arange(n)[::-1], **what)
        tables = np.arange(pages, dtype=np.int32)[None].repeat(2, 0)
        arrays: dict[str, Any] = {
            "query": normal(5, 2 * heads, dim, 1)[0].astype(np.float32),
            "cache": cache,
            "block_table": tables,
            "seq_lens": np.array([n - 4, n], np.int32),
            "query_start_loc": np.array([0, 3, 5], np.int32),
            "sinks": np.zeros(2 * heads, np.float32),
            "alibi_slopes": np.full(2 * heads, 0.1, np.float32),
        }
        wanted = judge(arrays, **FEATURES, **what)
        for splits in (1, 3) if engine.has_kernels else (1,):
            call = _tensors({**arrays, "out": np.full_like(arrays["query"], np.nan)})
            result = engine.attention(call, **FEATURES, **what, num_kv_splits=splits)
            assert_near(*map(engine.numbers, result), wanted, "float32")
        names = ("cache", "block_table", "seq_lens")
        call = _tensors({x: arrays[x] for x in names})
        engine.dequantize(*call.values(), **what)
        print(f"{backend} {name}: head_dim {dim}, pages of {page_size}", flush=True)


def check(backend: str) -> None:
    """Runs the calls in a process of its own; its crash is a failure here."""
    environment = {**os.environ, "TRITON_INTERPRET": "1" if backend == "interpret" else "0"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-X", "faulthandler", "-m", "tests.guarded", backend],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    assert result.stdout.count("head_dim") == len(presets(backend))


if __name__ == "__main__":
    if sys.argv[1] == "crash":
        x = guarded(np.zeros(5, np.uint8))
        ctypes.string_at(x.ctypes.data, 6)
    run(sys.argv[1])
