"""Storing tokens on a GPU: the packed cache beside a bf16 paged cache and a plain copy.

`L` is the number of tokens of the call. Bytes are those read and written. Calls repeat
on the same memory, so that small ones are served by the L2 cache. The stored bytes are
dequantised and compared with the input before anything is timed.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import tq_torch
from bench import gpu
from bench.decode import add_common_arguments, show
from tq_core import CacheLayout, Codec, QuantConfig

HELP = "storing tokens on a GPU"
#: Largest relative error of stored keys by bits of a code.
LARGEST_ERROR = {2: 0.4, 3: 0.22, 4: 0.12, 8: 0.04}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--presets", default="4bit,3bit,k8v4", help="comma-separated")
    parser.add_argument("--tokens", default="64,16384", help="tokens a call, comma-separated")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=64)
    add_common_arguments(parser, "store.csv")


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> int:
    if not gpu.require_gpu():
        return 2
    environment = gpu.environment(arguments.commit)
    for tokens in map(int, arguments.tokens.split(",")):
        shape = gpu.Shape(1, tokens, arguments.kv_heads, 1, arguments.head_dim)
        size = (tokens, shape.Hk, shape.D)
        key, value = torch.randn((2, *size), device="cuda").bfloat16()
        runs = [_bf16(key, value, shape), _copy(shape)]
        for preset in arguments.presets.split(","):
            made = _packed(key, value, shape, preset, arguments.page_size)
            if made is None:
                return 1
            runs.append(made)
        rows: list[dict[str, Any]] = [
            {
                **environment, "provider": r.provider, **shape._asdict(), **r.fields,
                "query_len": "", "num_splits": "", "us_median": t.median, "us_spread": t.spread,
                "cache_bytes": r.cache_bytes,
            }
            for r, t in zip(runs, gpu.time_runs(runs, arguments.rounds), strict=True)
        ]  # fmt: skip
        show(shape, tokens, gpu.with_ratios(rows))
        gpu.append_csv(arguments.csv, rows)
    return 0


def _fields(**given: Any) -> dict[str, Any]:
    return {"preset": "", "dtype": "bfloat16", "page_size": "", "order": "", **given}


def _packed(key: Any, value: Any, shape: gpu.Shape, preset: str, page_size: int) -> gpu.Run | None:
    layout = CacheLayout(QuantConfig.preset(preset), shape.Hk, shape.D, page_size)
    codec = Codec(layout.config, shape.D)
    pages = -(-shape.L // page_size)
    cache = tq_torch.empty_cache(layout, pages, device="cuda")
    table = torch.randperm(pages, device="cuda").int()[None]
    token = torch.arange(shape.L, device="cuda")
    slots = table[0, token // page_size].long() * page_size + token % page_size
    what = {"layout": layout, "codec": codec}

    def store() -> None:
        tq_torch.store(key, value, cache, slots, backend="triton", **what)

    store()
    lens = torch.tensor([shape.L], dtype=torch.int32, device="cuda")
    stored, _ = tq_torch.dequantize(cache, table, lens, dtype=torch.float32, **what)
    error = gpu.relative_error(stored[0, : shape.L], key)
    if not error <= LARGEST_ERROR[layout.config.key_bits]:
        print(f"{preset}: stored keys are {error:.3f} off; nothing was written")
        return None
    moved = 4 * key.numel() + shape.L * layout.bytes_per_token
    fields = _fields(preset=preset, page_size=page_size, order=layout.order)
    return gpu.Run("tq_torch store", [store], moved, fields)


def _bf16(key: Any, value: Any, shape: gpu.Shape) -> gpu.Run:
    caches = [torch.empty_like(key) for _ in range(2)]
    slots = torch.randperm(shape.L, device="cuda")

    def store() -> None:
        for cache, x in zip(caches, (key, value), strict=True):
            cache.index_copy_(0, slots, x)

    return gpu.Run("bf16 index_copy", [store], 8 * key.numel(), _fields())


def _copy(shape: gpu.Shape) -> gpu.Run:
    source = torch.empty(4 * shape.L * shape.Hk * shape.D, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    fields = _fields(dtype="uint8")
    return gpu.Run("device copy", [lambda: target.copy_(source)], 2 * source.numel(), fields)
