"""Decode on a GPU: the packed cache beside bf16 and fp8 attention, all timed in one run.

Every result is compared with fp64 attention over the dequantised cache before anything is timed;
a failure ends the run with status 1, and nothing is written. Other providers that are off, missing
or refuse a shape are listed with their reason. Times are those of whole public calls, with query
transform and merge, replayed from a CUDA graph on memory too large for the L2 cache.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import gpu, providers
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    presets = "4bit,3bit,k3v4,k8v4,2bit,4bit_hq,3bit_hq,k8v8"
    add_grid_arguments(parser, presets, "64:8192:8:4:128")
    parser.add_argument(
        "--grid", dest="shapes", action="store_const", const=GRID, default=argparse.SUPPRESS,
        help=f"{len(GRID)} shapes in place of --shapes",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="exit 1 below the least ratios")
    add_common_arguments(parser, "decode.csv")


def add_grid_arguments(parser: argparse.ArgumentParser, presets: str, shapes: str) -> None:
    add, listed, positive = parser.add_argument, gpu.listed, gpu.positive
    add("--presets", type=listed(gpu.preset), default=presets, help="comma-separated")
    shape = gpu.Shape.parse
    add("--shapes", type=listed(shape), default=shapes, help="B:L:Hk:g:D, comma-separated")
    sizes = {"type": listed(positive), "help": "tokens a page, comma-separated"}
    add("--page-sizes", "--page-size", default="64", metavar="SIZES", **sizes)
    orders = {"type": listed(gpu.order), "help": "byte orders of a page, comma-separated"}
    add("--orders", "--order", default="planes", metavar="ORDERS", **orders)
    add("--all-orders", action="store_true", help="every byte order")
    splits = "KV splits, comma-separated; default: the plan's own"
    add("--splits", type=listed(positive), default=None, help=splits)


def add_common_arguments(parser: argparse.ArgumentParser, csv: str) -> None:
    parser.add_argument("--rounds", type=gpu.replays, default=30, help="replays timed, >= 20")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    parser.add_argument("--csv", type=Path, default=gpu.RESULTS / csv, help="rows go here")
    parser.add_argument("--commit", default=None, help="recorded; default: asked of git")


def grid(arguments: argparse.Namespace, query_lens: Sequence[int]) -> list[gpu.Item]:
    """Every combination that the arguments name."""
    return [
        gpu.Item(shape, preset, page_size, order, query_len, num_splits)
        for shape in arguments.shapes
        for query_len in query_lens
        for preset in arguments.presets
        for page_size in arguments.page_sizes
        for order in (ORDERS if arguments.all_orders else arguments.orders)
        for num_splits in arguments.splits or [None]
    ]


def run(arguments: argparse.Namespace) -> int:
    if not gpu.require_gpu():
        return 2
    return measure(grid(arguments, [1]), arguments, arguments.check)


@torch.inference_mode()
def warm(item: gpu.Item) -> str | None:
    """Compiles what a run of ``item`` needs, in a process of its own."""
    try:
        shape = item.shape
        data = gpu.make_cache(shape, item.preset, item.page_size, item.order, fill=False)
        providers.tq(gpu.make_query(shape, item.query_len), data, item, count=1).calls[0]()
        for dtype in (torch.float32, torch.bfloat16):
            gpu.dense(data, shape.L, dtype, [0])
        torch.cuda.synchronize()
    except Exception as error:
        return f"{item.label}: {gpu.reason_of(error)}"
    return None


def gate(item: gpu.Item) -> float:
    """Relative error of the packed cache's output against its dequantised tokens."""
    shape = item.shape
    data = gpu.make_cache(shape, item.preset, item.page_size, item.order, fill=True)
    query = gpu.make_query(shape, item.query_len)
    out = torch.full_like(query, torch.nan)
    providers.tq(query, data, item, count=1).calls[0](out=out)

    def tokens(b: int) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = gpu.dense(data, shape.L, torch.float32, [b])
        return key[0], value[0]

    return gpu.error_of(out, query, item.query_len, tokens)


@torch.inference_mode()
def measure(items: Sequence[gpu.Item], arguments: argparse.Namespace, check: bool) -> int:
    """Checks all ``items``, then times them and their peers shape by shape; writes the rows."""
    largest = max(i.shape.L * i.shape.Hk * i.shape.D for i in items)
    gpu.in_workers(warm, items, arguments.jobs, 24 * largest)
    refused: dict[gpu.Item, str] = {}
    for item in items:
        try:
            error = gate(item)
        except REFUSALS as problem:
            refused[item] = gpu.reason_of(problem)
            continue
        if not error <= TOLERANCE:
            print(
                f"{item.label}, {item.shape}, {item.query_len} rows: relative error {error:.2e}, "
                f"expected at most {TOLERANCE:g}; nothing was timed or written"
            )
            return 1
    torch.cuda.empty_cache()
    print("times of whole public calls; those of tq_torch include query transform and merge")
    environment = gpu.environment(arguments.commit)
    failed: list[str] = []
    everything: list[dict[str, Any]] = []
    for shape, query_len in dict.fromkeys((i.shape, i.query_len) for i in items):
        here = [i for i in items if (i.shape, i.query_len) == (shape, query_len)]
        skipped = {f"tq_torch {i.label}": refused[i] for i in here if i in refused}
        made = prepare([i for i in here if i not in refused], shape, query_len, skipped)
        rows = [
            {
                **environment, "provider": r.provider, **shape._asdict(), **r.fields,
                "query_len": query_len, "us_median": t.median, "us_spread": t.spread,
                "cache_bytes": r.cache_bytes,
            }
            for r, t in gpu.time_runs(made, arguments.rounds, skipped)
        ]  # fmt: skip
        del made
        show(shape, query_len, gpu.with_ratios(rows))
        for name, reason in skipped.items():
            print(f"{name}: not timed, {reason}")
        gpu.append_csv(arguments.csv, rows)
        everything += rows
        if check and shape == FLAGSHIP:
            failed += below(rows, [i.preset for i in here])
        torch.cuda.empty_cache()
    lines = list(summary(everything))
    for line, _ in lines:
        print(line)
    if check and {i.shape for i in items} >= set(GRID):
        failed += [f"--check: {problem}" for _, problem in lines if problem]
    if check and FLAGSHIP not in [i.shape for i in items]:
        print(f"--check: this run has no {FLAGSHIP}, so nothing was checked")
    for line in failed:
        print(line)
    return 1 if failed else 0


def prepare(
    items: Sequence[gpu.Item], shape: gpu.Shape, query_len: int, skipped: dict[str, str]
) -> list[gpu.Run]:
    """Runs of ``items`` and of their peers; reasons of those that cannot run go to ``skipped``."""
    query = gpu.make_query(shape, query_len)
    runs: list[gpu.Run] = []
    pair = None
    for item in items:
        try:
            data = gpu.make_cache(shape, item.preset, item.page_size, item.order, fill=True)
            runs.append(providers.tq(query, data, item))
            pair = pair or gpu.dense(data, shape.L, torch.bfloat16, range(shape.B))
        except REFUSALS as problem:
            skipped[f"tq_torch {item.label}"] = gpu.reason_of(problem)
    if pair is None:
        return runs
    for name, (make, tolerance) in providers.peers(query, *pair, shape, query_len).items():
        try:
            peer = make()
            if tolerance is not None:
                error = gpu.error_of(
                    peer.calls[0](), query, query_len, lambda b: (pair[0][b], pair[1][b])
                )
                if not error <= tolerance:
                    skipped[name] = f"relative error {error:.2e}, expected at most {tolerance:g}"
                    continue
            runs.append(peer)
        except Exception as problem:
            skipped[name] = gpu.reason_of(problem)
    return runs


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Geometric means over shapes by preset, page size and order, and what is too little."""
    ours: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["preset"] and row["ratio_to_best_bf16"] != "":
            key = row["preset"], row["page_size"], row["order"]
            ours.setdefault(key, []).append(row)
    for (preset, page_size, order), timed in ours.items():
        if len(timed) < 2:
            continue
        mean = statistics.geometric_mean(r["ratio_to_best_bf16"] for r in timed)
        line = f"{preset} {order} P{page_size}: {mean:.2f}x bf16 in the mean of {len(timed)} shapes"
        problem = "" if preset != "4bit" or mean >= LEAST_MEAN else f"{line}, expected {LEAST_MEAN}"
        large = [r for r in timed if gpu.shape_of(r).bf16_bytes >= LARGE]
        if large:
            worst = min(large, key=lambda r: r["ratio_to_best_bf16"])
            where = ":".join(map(str, gpu.shape_of(worst)))
            least = f"{worst['ratio_to_best_bf16']:.2f}x from {LARGE / 1e6:.0f} MB on, at {where}"
            line += f"; at least {least}"
            if worst["ratio_to_best_bf16"] < 1:
                problem = problem or f"{preset} {order} P{page_size}: {least}, expected 1.0"
        yield line, problem


def below(rows: Sequence[dict[str, Any]], asked: Sequence[str]) -> list[str]:
    """What keeps the flagship shape from passing: by preset, its best row and the least ratio."""
    lines = []
    for preset, least in LEAST_RATIO.items():
        ratios = [r["ratio_to_best_bf16"] for r in rows if r["preset"] == preset]
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
