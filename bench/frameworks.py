"""tq_jax beside tq_torch on a GPU: the same kernels, launched by XLA and from CUDA graphs.

Each task is a function jitted once and a CUDA graph captured once, which do the same. Both are
called several times in a row without waiting. `kernels` is the time that the device spends in
kernels, as its profiler has it, the median of the calls; `elapsed` is the wall clock of the whole
row, gaps included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tq_torch
from bench import gpu
from bench.decode import FLAGSHIP
from bench.jax_providers import import_jax, kernel_times, shared, wait
from bench.timing import print_table
from tq_core import Codec

HELP = "tq_jax beside tq_torch on a GPU"
COLUMNS = (
    "date", "commit", "device", "driver", "torch", "triton", "jax", "jax_triton", "preset",
    "page_size", "shape", "what", "us_torch", "us_jax", "ratio",
)  # fmt: skip


class Task(NamedTuple):
    """One thing to time in both frameworks, each a call that does it ``units`` times."""

    name: str
    units: int
    torch: Callable[[], object]
    jax: Callable[[], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", type=gpu.preset, default="4bit")
    parser.add_argument("--shape", type=gpu.Shape.parse, default=FLAGSHIP, help="B:L:Hk:g:D")
    parser.add_argument("--page-size", type=gpu.positive, default=64)
    parser.add_argument("--layers", type=gpu.positive, default=32)
    parser.add_argument("--store-gib", type=gpu.positive, default=8, help="cache of the store")
    parser.add_argument("--rounds", type=gpu.positive, default=9, help="rows timed")
    parser.add_argument("--calls", type=gpu.positive, default=10, help="calls in a row")
    parser.add_argument("--csv", type=Path, default=gpu.RESULTS / "frameworks.csv")
    parser.add_argument("--commit", default=None, help="recorded; default: asked of git")


def run(arguments: argparse.Namespace) -> int:
    if not gpu.require_gpu():
        return 2
    jax = import_jax()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, jax {jax.__version__}")
    with torch.inference_mode():
        tasks = [store_task(arguments), decode_task(arguments), layers_task(arguments)]
        table = [line for task in tasks for line in rows(task, arguments)]
    print_table(("microseconds of", "torch", "jax", "jax / torch"), table)
    record(arguments, table)
    return 0


def record(arguments: argparse.Namespace, table: list[tuple[str, ...]]) -> None:
    """Appends the lines to the CSV file."""
    environment = {**gpu.environment(arguments.commit), "jax_triton": version("jax-triton")}
    shape = ":".join(map(str, arguments.shape))
    fields = {"preset": arguments.preset, "page_size": arguments.page_size, "shape": shape}
    measured = [dict(zip(COLUMNS[-4:], line, strict=True)) for line in table]
    gpu.append_csv(arguments.csv, [{**environment, **fields, **row} for row in measured], COLUMNS)


def rows(task: Task, arguments: argparse.Namespace) -> list[tuple[str, ...]]:
    """Lines of the table."""
    calls = {"torch": task.torch, "jax": task.jax}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-2, arguments.rounds):
        for name, call in calls.items():
            seconds = elapsed(call, arguments.calls)
            if number >= 0:
                samples[name].append(1e6 * seconds / task.units)
    medians = {name: statistics.median(sample) for name, sample in samples.items()}
    busy = {
        name: statistics.median(kernel_times([call] * arguments.calls)) / task.units
        for name, call in calls.items()
    }
    return [
        (f"{task.name}, {what}", *(f"{t:.1f}" for t in times.values()), ratio(**times))
        for what, times in (("kernels", busy), ("elapsed", medians))
    ]


def ratio(torch: float, jax: float) -> str:
    """The second time in units of the first."""
    return f"{jax / torch:.3f}"


def elapsed(call: Callable[[], object], calls: int) -> float:
    """Seconds of one of several calls in a row."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        result = call()
    wait(result)
    return (time.perf_counter() - start) / calls


def captured(function: Callable[[], object]) -> Callable[[], object]:
    """Replays a CUDA graph of ``function``, whose memory must live as long."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()

    def replay() -> object:
        graph.replay()
        return function

    return replay


def to_jax(tensor: torch.Tensor) -> Any:
    """A copy that JAX owns."""
    import jax.numpy as jnp

    return jnp.copy(shared(tensor))


def store_task(arguments: argparse.Namespace) -> Task:
    """64 tokens into a large cache, donated; says how much memory a jitted call takes at most."""
    import jax

    import tq_jax

    shape, units = arguments.shape, 20
    data = gpu.make_cache(shape, arguments.preset, arguments.page_size, None, fill=False)
    layout, codec = data.layout, data.codec
    num_pages = arguments.store_gib * 2**30 // layout.page_bytes
    new = torch.randn((2, 64, shape.Hk, shape.D), device="cuda").bfloat16()
    slots = torch.randperm(num_pages * layout.page_size, device="cuda")[:64].int()
    what = {"layout": layout, "codec": codec, "backend": "triton"}
    cache = tq_torch.empty_cache(layout, num_pages, device="cuda")

    def stores() -> None:
        for _ in range(units):
            tq_torch.store(new[0], new[1], cache, slots, **what)

    replay = captured(stores)
    want = cache.view(-1, layout.page_bytes)[slots.long() // layout.page_size].cpu()
    key, value, where = to_jax(new[0]), to_jax(new[1]), to_jax(slots)

    def body(_: int, cache: Any) -> Any:
        return tq_jax.store(key, value, cache, where, **what)

    many = jax.jit(lambda c: jax.lax.fori_loop(0, units, body, c), donate_argnums=0)
    state = [to_jax(cache)]
    device = jax.devices()[0]
    before = device.memory_stats()["bytes_in_use"]

    def call() -> Any:
        state[0] = many(state[0])
        return state[0]

    jax.block_until_ready(call())
    print(
        f"store: a cache of {layout.page_bytes * num_pages / 2**30:.2f} GiB, donated; "
        f"{(device.memory_stats()['peak_bytes_in_use'] - before) / 2**20:.1f} MiB more at the peak"
    )
    have = torch.from_dlpack(state[0]).view(-1, layout.page_bytes)
    have = have[slots.long() // layout.page_size].cpu()
    print(f"store: bytes of the pages equal: {torch.equal(want, have)}")
    return Task("store of 64 tokens", units, replay, call)


def decode_task(arguments: argparse.Namespace) -> Task:
    """Decode calls with queries of their own over one cache."""
    import jax

    import tq_jax

    shape, units = arguments.shape, 10
    data = gpu.make_cache(shape, arguments.preset, arguments.page_size, None, fill=True)
    queries = list(torch.randn_like(gpu.make_query(shape).expand(units, -1, -1, -1)))
    what = {"layout": data.layout, "codec": data.codec, "backend": "triton"}
    what["max_seq_len"] = shape.L

    def decodes() -> list[torch.Tensor]:
        arrays = (data.cache, data.table, data.lens)
        return [tq_torch.decode_attention(q, *arrays, **what) for q in queries]

    outs: list[torch.Tensor] = []
    replay = captured(lambda: outs.extend(decodes()))
    replay()
    arrays = [to_jax(x) for x in (data.cache, data.table, data.lens)]
    jax_queries = [to_jax(q) for q in queries]

    @jax.jit
    def decode_all(queries: Any, cache: Any, table: Any, lens: Any) -> Any:
        return [tq_jax.decode_attention(q, cache, table, lens, **what) for q in queries]

    results = decode_all(jax_queries, *arrays)
    pairs = zip(outs[-units:], results, strict=True)
    equal = all(torch.equal(ours, torch.from_dlpack(theirs)) for ours, theirs in pairs)
    print(f"decode: bits of {len(results)} outputs equal: {equal}")
    return Task("decode", units, replay, lambda: decode_all(jax_queries, *arrays))


def layers_task(arguments: argparse.Namespace) -> Task:
    """One step of a model's caches: a store and a decode a layer."""
    import jax

    import tq_jax

    shape, layers = arguments.shape, arguments.layers
    data = gpu.make_cache(shape, arguments.preset, arguments.page_size, None, fill=True)
    codecs = [Codec(data.layout.config, shape.D, seed=i) for i in range(layers)]
    caches = [data.cache.clone() for _ in range(layers)]
    inputs = [
        (
            gpu.make_query(shape),
            *torch.randn((2, shape.B, shape.Hk, shape.D), device="cuda").bfloat16(),
        )
        for _ in range(layers)
    ]
    last = data.lens.long() - 1
    rows = torch.arange(shape.B, device="cuda")
    page = data.table[rows, last // data.layout.page_size].long()
    slots = (page * data.layout.page_size + last % data.layout.page_size).int()
    what = {"layout": data.layout, "backend": "triton"}

    def step() -> None:
        for (query, key, value), cache, codec in zip(inputs, caches, codecs, strict=True):
            tq_torch.store(key, value, cache, slots, codec=codec, **what)
            tq_torch.decode_attention(
                query, cache, data.table, data.lens, codec=codec, max_seq_len=shape.L, **what
            )

    replay = captured(step)
    jax_inputs = [tuple(map(to_jax, x)) for x in inputs]
    table, lens, where = map(to_jax, (data.table, data.lens, slots))
    state = [[to_jax(c) for c in caches]]

    @partial(jax.jit, donate_argnums=0)
    def jax_step(caches: Any, inputs: Any, table: Any, lens: Any, slots: Any) -> Any:
        outs, new = [], []
        for (query, key, value), cache, codec in zip(inputs, caches, codecs, strict=True):
            cache = tq_jax.store(key, value, cache, slots, codec=codec, **what)
            new.append(cache)
            outs.append(
                tq_jax.decode_attention(
                    query, cache, table, lens, codec=codec, max_seq_len=shape.L, **what
                )
            )
        return new, outs

    def call() -> Any:
        state[0], outs = jax_step(state[0], jax_inputs, table, lens, where)
        return outs

    return Task(f"step of {layers} layers", 1, replay, call)
