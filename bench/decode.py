"""Decode on a GPU: the packed cache beside bf16 and fp8 attention, all timed in one run.

Every result is compared with fp64 attention over the dequantised cache before its shape is timed; a
failure ends the run with status 1, and no row of that shape is written. Other providers that are
off, missing or refuse a shape are listed with their reason. Times are those of whole public calls,
with query transform and merge, replayed from a CUDA graph on memory too large for the L2 cache;
those of JAX are the time in kernels of a jitted call, as its profiler has it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from bench import gpu, jax_providers, providers
from bench.timing import print_table
from tq_core.layout import ORDERS

HELP = "decode attention on a GPU beside bf16 attention"
#: Largest relative error: the rounding of a bf16 output is 1.7e-3 of it.
TOLERANCE = 4e-3
FLAGSHIP = gpu.Shape(64, 8192, 8, 4, 128)
#: What a cache is asked to serve, from a chat to a batch of books; ``--grid``.
GRID = [
    gpu.Shape(B, L, 8, g, D)
    for D in (128, 64)
    for g in (1, 4, 8, 16)
    for L in (1024, 8192, 32768, 131072)
    for B in (1, 8, 64)
]
#: Bytes of a bf16 cache from which no shape of the grid may be slower than bf16 attention.
LARGE = 64e6
LEAST_MEAN = 2.7
#: Least ratio to the fastest bf16 attention at the flagship shape, for ``--check``.
LEAST_RATIO = {"4bit": 3.0, "3bit": 3.0, "k3v4": 3.0, "k8v4": 2.2, "2bit": 4.0}
#: What a configuration raises that the library or the device cannot serve.
REFUSALS = (ValueError, NotImplementedError, torch.OutOfMemoryError)


class WrongOutput(Exception):
    """An output of the packed cache is off; the message says by how much."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    presets = "4bit,3bit,k3v4,k8v4,2bit,4bit_hq,3bit_hq,k8v8"
    shapes = add_grid_arguments(parser, presets, "64:8192:8:4:128", page_sizes=None)
    shapes.add_argument(
        "--grid", action="store_true",
        help="all of --presets and of --page-sizes, 64 and 16 if not given, at the shape above, "
        f"and 4bit in 64-token pages at the others of {len(GRID)} shapes",
    )  # fmt: skip
    parser.add_argument(
        "--jax", action="store_true",
        help="time tq_jax and Pallas paged attention too, which takes about twice as long",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="exit 1 below the least ratios")
    add_common_arguments(parser, "decode.csv")


def add_grid_arguments(
    parser: argparse.ArgumentParser, presets: str, shapes: str, page_sizes: str | None = "64"
) -> Any:
    """Returns the group of arguments of which one names the shapes."""
    add, listed, positive = parser.add_argument, gpu.listed, gpu.positive
    add("--presets", type=listed(gpu.preset), default=presets, help="comma-separated")
    shape, group = gpu.Shape.parse, parser.add_mutually_exclusive_group()
    group.add_argument(
        "--shapes", type=listed(shape), default=shapes, help="B:L:Hk:g:D, comma-separated"
    )
    sizes: dict[str, Any] = {"type": listed(positive), "default": page_sizes}
    sizes["help"] = "tokens a page, comma-separated" + ("" if page_sizes else "; 64 if not given")
    add("--page-sizes", "--page-size", metavar="SIZES", **sizes)
    orders: dict[str, Any] = {
        "type": listed(gpu.order),
        "help": "byte orders of a page, comma-separated",
    }
    add("--orders", "--order", default="planes", metavar="ORDERS", **orders)
    add("--all-orders", action="store_true", help="every byte order")
    splits = "KV splits, comma-separated; default: the plan's own"
    add("--splits", type=listed(positive), default=None, help=splits)
    add(
        "--plan", type=gpu.overrides, action="append", default=None, metavar="NAME=NUMBER,...",
        help="overrides of the plan, also several times: each is timed, and not recorded",
    )  # fmt: skip
    return group


def add_common_arguments(parser: argparse.ArgumentParser, csv: str) -> None:
    parser.add_argument(
        "--rounds", type=gpu.replays, default=30, help="replays timed, >= 20; 20 of long ones"
    )
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    parser.add_argument("--csv", type=Path, default=gpu.RESULTS / csv, help="rows go here")
    parser.add_argument("--commit", default=None, help="recorded; default: asked of git")


def alternatives(arguments: argparse.Namespace) -> list[tuple[tuple[str, int | str], ...]]:
    """The overrides that are asked for, one empty one where none are."""
    splits = [(("num_splits", n),) for n in arguments.splits or []]
    return [*splits, *(arguments.plan or [])] or [()]


def grid(arguments: argparse.Namespace, query_lens: Sequence[int]) -> list[gpu.Item]:
    """Every combination that the arguments name."""
    return [
        gpu.Item(shape, preset, page_size, order, query_len, overrides)
        for shape in arguments.shapes
        for query_len in query_lens
        for preset in arguments.presets
        for page_size in arguments.page_sizes or ([64, 16] if arguments.grid else [64])
        for order in (ORDERS if arguments.all_orders else arguments.orders)
        for overrides in alternatives(arguments)
    ]


def items_of(arguments: argparse.Namespace) -> list[gpu.Item]:
    """What the arguments name, then the shapes of ``--grid``."""
    items = grid(arguments, [1])
    if arguments.grid:
        items += [gpu.Item(shape, "4bit", 64, arguments.orders[0], 1) for shape in GRID]
    return list(dict.fromkeys(items))


def run(arguments: argparse.Namespace) -> int:
    if not gpu.require_gpu():
        return 2
    return measure(items_of(arguments), arguments, arguments.check, arguments.jax)


@torch.inference_mode()
def warm(job: gpu.Item | providers.FlashInferModule) -> str | None:
    """Compiles what a run needs for ``job``, in a process of its own."""
    try:
        if isinstance(job, providers.FlashInferModule):
            job.compile()
        else:
            data = gpu.make_cache(job.shape, job.preset, job.page_size, job.order, fill=False)
            query = gpu.make_query(job.shape, job.query_len)
            providers.tq(query, data, job, [data.cache]).calls[0]()
            for dtype in (torch.float32, torch.bfloat16):
                gpu.dense(data, job.shape.L, dtype, [0])
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job.label}: {gpu.reason_of(error)}"
    finally:
        torch.cuda.empty_cache()
    return None


def gate(run: gpu.Run, query: torch.Tensor, data: gpu.Cache, query_len: int) -> float:
    """Relative error of the packed cache's output against its dequantised tokens."""
    out = torch.full_like(query, torch.nan)
    if run.is_jax:
        out = from_dlpack(run.calls[0]())
    else:
        run.calls[0](out=out)

    def tokens(b: int) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = gpu.dense(data, int(data.lens[b]), torch.float32, [b])
        return key[0], value[0]

    return gpu.error_of(out, query, query_len, tokens)


@torch.inference_mode()
def measure(
    items: Sequence[gpu.Item], arguments: argparse.Namespace, check: bool, with_jax: bool = False
) -> int:
    """Checks ``items`` and times them and their peers, shape by shape; writes the rows of each."""
    largest = max(i.shape.L * i.shape.Hk * i.shape.D for i in items)
    # Neighbours in the grid share kernels: those that share none are compiled side by side.
    mixed = sorted(items, key=lambda i: (i.shape.B, i.shape.L))
    jobs = [*providers.flashinfer_modules(items), *mixed]
    gpu.in_workers(warm, jobs, arguments.jobs, 24 * largest)
    print("times of whole public calls; those of tq_torch include query transform and merge")
    environment = gpu.environment(arguments.commit)
    shapes = [i.shape for i in items]
    roof = FLAGSHIP if FLAGSHIP in shapes else shapes[0]
    failed: list[str] = []
    everything: list[dict[str, Any]] = []
    for shape, query_len in dict.fromkeys((i.shape, i.query_len) for i in items):
        here = [i for i in items if (i.shape, i.query_len) == (shape, query_len)]
        skipped: dict[str, str] = {}
        try:
            made = prepare(here, skipped, with_jax=with_jax, with_copy=shape == roof)
        except WrongOutput as problem:
            print(f"{problem}; no row of this shape was written")
            return 1
        captured = [r for r in made if not r.is_jax]
        profiled = [r for r in made if r.is_jax]
        timed = gpu.time_runs(captured, arguments.rounds, skipped)
        timed += jax_providers.time_runs(profiled, arguments.rounds, skipped)
        rows = [
            {
                **environment, "provider": r.provider, **shape._asdict(), **r.fields,
                "query_len": query_len, "us_median": t.median, "us_spread": t.spread,
                "cache_bytes": r.cache_bytes,
            }
            for r, t in timed
        ]  # fmt: skip
        del made, captured, profiled, timed
        show(shape, query_len, gpu.with_ratios(rows))
        for name, reason in skipped.items():
            print(f"{name}: not timed, {reason}")
        # No column tells plans with other overrides than the splits apart.
        told = [{k: v for k, v in r.items() if k != "plan"} for r in rows if not r.get("plan")]
        gpu.append_csv(arguments.csv, told)
        everything += rows
        if check and shape == FLAGSHIP:
            failed += below(rows, [i.preset for i in here])
        gc.collect()  # the next shape may need all the memory
        torch.cuda.empty_cache()
    lines = list(summary(everything))
    for line, _ in lines:
        print(line)
    if check and set(shapes) >= set(GRID):
        failed += [f"--check: {problem}" for _, problem in lines if problem]
    if check and FLAGSHIP not in shapes:
        print(f"--check: this run has no {FLAGSHIP}, so nothing was checked")
    for line in failed:
        print(line)
    return 1 if failed else 0


def prepare(
    items: Sequence[gpu.Item], skipped: dict[str, str], *, with_jax: bool, with_copy: bool
) -> list[gpu.Run]:
    """Checked runs of ``items``, all of one shape, and of their peers, which read the same tokens.

    Reasons of those that cannot run go to ``skipped``.

    Raises:
        WrongOutput: an output of the packed cache is off.
    """
    shape, query_len = items[0].shape, items[0].query_len
    query = gpu.make_query(shape, query_len)

    @lru_cache(maxsize=1)  # neighbours may differ in splits alone
    def filled(preset: str, page_size: int, order: str) -> tuple[gpu.Cache, list[torch.Tensor]]:
        data = gpu.make_cache(shape, preset, page_size, order, fill=True)
        return data, providers.rotated(data)

    ours: dict[str, tuple[Any, Any]] = {"tq_torch": (providers.tq, REFUSALS)}
    if with_jax:
        ours["tq_jax"] = jax_providers.tq, Exception
    runs: list[gpu.Run] = []
    source: gpu.Cache | None = None
    for item in items:
        for name, (make, refusals) in ours.items():
            try:
                data, caches = filled(item.preset, item.page_size, item.order)
                run = make(query, data, item, caches)
                error = gate(run, query, data, query_len)
            except refusals as problem:
                skipped[f"{name} {item.label}"] = gpu.reason_of(problem)
                continue
            if not error <= TOLERANCE:
                raise WrongOutput(
                    f"{name} {item.label}, {shape}, {query_len} rows: relative error {error:.2e}, "
                    f"expected at most {TOLERANCE:g}"
                )
            runs.append(run)
            source = source or data
    if source is None:
        return runs
    try:
        key, value = gpu.dense(source, shape.L, torch.bfloat16, range(shape.B))
    except torch.OutOfMemoryError as problem:
        skipped["16-bit attention"] = gpu.reason_of(problem)
        return runs
    peers = providers.peers(query, key, value, shape, query_len)
    if with_jax:
        tolerance = providers.PEER_TOLERANCE[torch.bfloat16]
        pallas = partial(jax_providers.pallas, query, key, value, shape)
        peers[jax_providers.PALLAS] = pallas, tolerance
    if with_copy:
        copied = min(providers.COPY_BYTES, shape.bf16_bytes)
        peers["device copy"] = partial(providers.device_copy, copied), None
    for name, (make_peer, largest) in peers.items():
        try:
            peer = make_peer()
            if largest is not None:
                out = from_dlpack(peer.calls[0]())
                error = gpu.error_of(out, query, query_len, lambda b: (key[b], value[b]))
                if not error <= largest:
                    skipped[name] = f"relative error {error:.2e}, expected at most {largest:g}"
                    del peer  # the next one may need its memory
                    continue
            runs.append(peer)
        except Exception as problem:
            skipped[name] = gpu.reason_of(problem)
    return runs


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Geometric means over shapes by provider and format, and what is too little of tq_torch."""
    ours: dict[tuple[str, str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["preset"] and row["ratio_to_best_bf16"] != "":
            key = row["provider"], row["preset"], row["order"], row["page_size"]
            ours.setdefault(key, []).append(row)
    for (provider, preset, order, page_size), timed in ours.items():
        if len(timed) < 2:
            continue
        name = f"{provider} {preset} {order} P{page_size}"
        mean = statistics.geometric_mean(r["ratio_to_best_bf16"] for r in timed)
        line = f"{name}: {mean:.2f}x bf16 in the mean of {len(timed)} shapes"
        problem = "" if preset != "4bit" or mean >= LEAST_MEAN else f"{line}, expected {LEAST_MEAN}"
        large = [r for r in timed if gpu.shape_of(r).bf16_bytes >= LARGE]
        if large:
            worst = min(large, key=lambda r: r["ratio_to_best_bf16"])
            where = ":".join(map(str, gpu.shape_of(worst)))
            least = f"{worst['ratio_to_best_bf16']:.2f}x from {LARGE / 1e6:.0f} MB on, at {where}"
            line += f"; at least {least}"
            if worst["ratio_to_best_bf16"] < 1:
                problem = problem or f"{name}: {least}, expected 1.0"
        yield line, problem if provider == "tq_torch" else ""


def below(rows: Sequence[dict[str, Any]], asked: Sequence[str]) -> list[str]:
    """What keeps the flagship shape from passing: by preset, its best row and the least ratio."""
    lines = []
    for preset, least in LEAST_RATIO.items():
        ours = [r for r in rows if (r["provider"], r["preset"]) == ("tq_torch", preset)]
        ratios = [r["ratio_to_best_bf16"] for r in ours]
        if not ratios and preset in asked:
            lines.append(f"--check: {preset} was asked for and not timed")
        elif "" in ratios:
            lines.append(f"--check: {preset} has no bf16 attention to compare with")
        elif ratios and max(ratios) < least:
            lines.append(
                f"--check: {preset} has {max(ratios):.2f}x the speed of the fastest bf16 "
                f"attention, expected at least {least:g}x"
            )
    return lines


def show(shape: gpu.Shape, query_len: int, rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows of one shape."""
    print("\n" + ", ".join(f"{n}={v}" for n, v in {**shape._asdict(), "rows": query_len}.items()))
    print_table(
        ("", "us", "25-75 %", "MB", "TB/s", "x bf16", "splits"),
        [
            (
                gpu.name_of(r),
                f"{r['us_median']:.1f}",
                f"{r['us_spread']:.1f}",
                f"{r['cache_bytes'] / 1e6:.1f}",
                f"{r['tbps']:.2f}",
                f"{r['ratio_to_best_bf16']:.2f}" if r["ratio_to_best_bf16"] != "" else "",
                str(r["num_splits"]),
            )
            for r in rows
        ],
    )
