"""Storing tokens on a GPU: the packed cache beside a bf16 paged cache and plain copies.

`L` is the number of tokens of the call, and bytes are those read and written: each provider has a
copy that moves as many. The stored tokens are dequantised and compared with the input before
anything is timed. Inputs and caches rotate, so that none is in the L2 cache.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tq_torch
from bench import gpu, providers
from bench.decode import REFUSALS, add_common_arguments, show
from tq_core import CacheLayout, Codec, QuantConfig

HELP = "storing tokens on a GPU"
#: Largest relative error of stored normal keys and values by bits of a code: a little above what
#: the formats lose. Affine values lose more in larger heads; these are for a head_dim of 576.
LARGEST_KEY_ERROR = {2: 0.37, 3: 0.2, 4: 0.105, 8: 0.03}
LARGEST_VALUE_ERROR = {2: 0.63, 3: 0.27, 4: 0.125, 8: 0.01}


class Job(NamedTuple):
    """One call to time."""

    shape: gpu.Shape
    preset: str
    page_size: int


class Stored(NamedTuple):
    """A packed cache with its tokens in it, and the call that stores them."""

    layout: CacheLayout
    run: gpu.Run
    num_coordinates: int
    key_error: float
    value_error: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    presets = {"type": gpu.listed(gpu.preset), "help": "comma-separated"}
    parser.add_argument("--presets", default="4bit,3bit,k8v4", **presets)
    tokens = {"type": gpu.listed(gpu.positive), "help": "tokens a call, comma-separated"}
    parser.add_argument("--tokens", default="64,16384", **tokens)
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads")
    parser.add_argument("--head-dim", type=int, default=128, help="size of a head")
    parser.add_argument("--page-size", type=int, default=64, help="tokens a page")
    add_common_arguments(parser, "store.csv")


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> int:
    if not gpu.require_gpu():
        return 2
    shapes = [
        gpu.Shape(1, tokens, arguments.kv_heads, 1, arguments.head_dim)
        for tokens in arguments.tokens
    ]
    jobs = [Job(s, preset, arguments.page_size) for s in shapes for preset in arguments.presets]
    largest = max(s.L * s.Hk * s.D for s in shapes)
    gpu.in_workers(warm, jobs, arguments.jobs, 32 * largest)
    refused: dict[Job, str] = {}
    for job in jobs:
        try:
            stored = packed(job, make_inputs(job.shape, 1), make_slots(job))
        except REFUSALS as problem:
            refused[job] = gpu.reason_of(problem)
            continue
        if problem := off(stored):
            print(f"{job.preset}, {job.shape.L} tokens: {problem}; nothing was timed or written")
            return 1
    environment = gpu.environment(arguments.commit)
    for shape in shapes:
        here = [job for job in jobs if job.shape == shape]
        skipped = {f"tq_torch store {j.preset}": refused[j] for j in here if j in refused}
        slots = make_slots(here[0])
        inputs = make_inputs(shape, gpu.copies(shape.bf16_bytes))
        runs = [packed(j, inputs, slots).run for j in here if j not in refused]
        runs.append(scatter(inputs, slots, shape, arguments.page_size))
        sizes = sorted({r.cache_bytes for r in runs})
        runs += [providers.device_copy(size // 2) for size in sizes]
        rows: list[dict[str, Any]] = [
            {
                **environment, "provider": r.provider, **shape._asdict(), **r.fields,
                "query_len": "", "num_splits": "", "us_median": t.median, "us_spread": t.spread,
                "cache_bytes": r.cache_bytes,
            }
            for r, t in gpu.time_runs(runs, arguments.rounds, skipped)
        ]  # fmt: skip
        del runs, inputs
        show(shape, shape.L, gpu.with_ratios(rows))
        for line in of_copy(rows):
            print(line)
        for name, reason in skipped.items():
            print(f"{name}: not timed, {reason}")
        gpu.append_csv(arguments.csv, rows)
        torch.cuda.empty_cache()
    return 0


@torch.inference_mode()
def warm(job: Job) -> str | None:
    """Compiles what a run of ``job`` needs, in a process of its own."""
    try:
        packed(job, make_inputs(job.shape, 1), make_slots(job))
    except Exception as error:
        return f"{job.preset}: {gpu.reason_of(error)}"
    return None


def make_inputs(shape: gpu.Shape, count: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs of bf16 ``[L, Hk, D]``."""
    size = (2, shape.L, shape.Hk, shape.D)
    generator = torch.Generator(device=gpu.DEVICE).manual_seed(0)
    return [
        tuple(torch.randn(size, device=gpu.DEVICE, generator=generator).bfloat16())
        for _ in range(count)
    ]


def make_slots(job: Job) -> Tensor:
    """Slots of the tokens, in pages in random order."""
    page_size = job.page_size
    pages = torch.randperm(-(-job.shape.L // page_size), device=gpu.DEVICE)
    token = torch.arange(job.shape.L, device=gpu.DEVICE)
    return pages[token // page_size] * page_size + token % page_size


def packed(job: Job, inputs: list[tuple[Tensor, Tensor]], slots: Tensor) -> Stored:
    """The public function, with the errors of its first call."""
    shape, page_size = job.shape, job.page_size
    layout = CacheLayout(QuantConfig.preset(job.preset), shape.Hk, shape.D, page_size)
    what: dict[str, Any] = {"layout": layout, "codec": Codec(layout.config, shape.D)}
    num_pages = -(-shape.L // page_size)
    caches = [tq_torch.empty_cache(layout, num_pages, device=gpu.DEVICE).fill_(255) for _ in inputs]
    calls = [
        partial(tq_torch.store, key, value, cache, slots, backend=gpu.BACKEND, **what)
        for (key, value), cache in zip(inputs, caches, strict=True)
    ]
    calls[0]()
    table = torch.arange(num_pages, dtype=torch.int32, device=gpu.DEVICE)[None]
    lens = torch.tensor([num_pages * page_size], dtype=torch.int32, device=gpu.DEVICE)
    read = tq_torch.dequantize(caches[0], table, lens, dtype=torch.float32, **what)
    errors = [gpu.relative_error(x[0, slots], y) for x, y in zip(read, inputs[0], strict=True)]
    moved = shape.bf16_bytes + shape.L * layout.bytes_per_token
    fields = _fields(preset=job.preset, page_size=page_size, order=layout.order)
    return Stored(
        layout, gpu.Run("tq_torch store", calls, moved, fields), inputs[0][0].numel(), *errors
    )


def off(stored: Stored) -> str | None:
    """What is wrong with the stored tokens, if anything is."""
    config = stored.layout.config
    # The error of few coordinates scatters by about 0.7 / sqrt(their number) of itself.
    chance = 1 + 3 / stored.num_coordinates**0.5
    for name, error, largest in (
        ("keys", stored.key_error, LARGEST_KEY_ERROR[config.key_bits] * chance),
        ("values", stored.value_error, LARGEST_VALUE_ERROR[config.value_bits] * chance),
    ):
        if not error <= largest:
            return f"stored {name} are {error:.3f} off, expected at most {largest:.3g}"
    return None


def scatter(
    inputs: list[tuple[Tensor, Tensor]], slots: Tensor, shape: gpu.Shape, page_size: int
) -> gpu.Run:
    """Keys and values written as they are into a paged bf16 cache."""
    size = (-(-shape.L // page_size) * page_size, shape.Hk, shape.D)

    def store(pair: tuple[Tensor, Tensor], caches: tuple[Tensor, Tensor]) -> None:
        for cache, x in zip(caches, pair, strict=True):
            cache.index_copy_(0, slots, x)

    calls = []
    for pair in inputs:
        caches = tuple(torch.empty(size, dtype=x.dtype, device=x.device) for x in pair)
        calls.append(partial(store, pair, caches))
    return gpu.Run("bf16 index_copy", calls, 2 * shape.bf16_bytes, _fields(page_size=page_size))


def of_copy(rows: list[dict[str, Any]]) -> list[str]:
    """The part of a copy's speed that each provider has, the copy moving as many bytes."""
    copies = {r["cache_bytes"] // 2: r for r in rows if r["provider"] == "device copy"}
    return [
        f"{gpu.name_of(r)}: {copy['us_median'] / r['us_median']:.0%} of the speed of a copy"
        for r in rows
        if r["provider"] != "device copy" and (copy := copies.get(r["cache_bytes"] // 2))
    ]


def _fields(**given: Any) -> dict[str, Any]:
    return {"preset": "", "dtype": "bfloat16", "page_size": "", "order": "", **given}
