"""Decode on a GPU: the packed cache beside bf16 and fp8 attention, all timed in one run.

Every result of a shape is compared with fp64 attention over the dequantised cache before that shape
is timed; a failure ends the run, and rows of earlier shapes stay. Times are those of whole public
calls, replayed from a CUDA graph on memory too large for the L2 cache.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from bench import gpu, providers
from bench.timing import print_table
from tq_core import PRESETS
from tq_core.layout import ORDERS

HELP = "decode attention on a GPU beside bf16 attention"
TOLERANCE = 4e-3
FLAGSHIP = gpu.Shape(64, 8192, 8, 4, 128)
#: Least ratio to the fastest bf16 attention at the flagship shape, for ``--check``.
LEAST_RATIO = {"4bit": 2.7, "3bit": 1.0, "k8v4": 1.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    presets = "4bit,3bit,k3v4,k8v4,2bit,4bit_hq,3bit_hq,k8v8"
    parser.add_argument("--presets", default=presets, help="comma-separated")
    parser.add_argument("--shapes", default="64:8192:8:4:128", help="B:L:Hk:g:D, comma-separated")
    parser.add_argument("--page-sizes", default="64", help="comma-separated")
    parser.add_argument("--orders", default="planes", help="byte orders, comma-separated")
    parser.add_argument("--splits", type=int, default=None, help="KV splits; default: the plan's")
    parser.add_argument("--check", action="store_true", help="exit 1 below the least ratios")
    add_common_arguments(parser, "decode.csv")


def add_common_arguments(parser: argparse.ArgumentParser, csv: str) -> None:
    parser.add_argument("--rounds", type=int, default=30, help="replays timed")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    parser.add_argument("--csv", type=Path, default=gpu.RESULTS / csv, help="rows go here")
    parser.add_argument("--commit", default=None, help="recorded; default: asked of git")


def warm(item: tuple[gpu.Shape, str, int, str, int, dict[str, int]]) -> str | None:
    """Compiles what a run needs, in a process of its own."""
    shape, preset, page_size, order, query_len, plan = item
    try:
        data = gpu.make_cache(shape, preset, page_size, order, fill=False)
        run = providers.tq(gpu.make_query(shape, query_len), data, shape, preset, query_len, plan)
        run.calls[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{item}: {type(error).__name__}: {error}"
    return None


def run(arguments: argparse.Namespace) -> int:
    if not gpu.require_gpu():
        return 2
    presets = arguments.presets.split(",")
    if unknown := [p for p in presets if p not in PRESETS]:
        raise SystemExit(f"--presets: unknown {unknown}, expected some of {sorted(PRESETS)}")
    orders = arguments.orders.split(",")
    if unknown := [o for o in orders if o not in ORDERS]:
        raise SystemExit(f"--orders: unknown {unknown}, expected some of {list(ORDERS)}")
    shapes = [gpu.Shape.parse(text) for text in arguments.shapes.split(",")]
    sizes = [int(p) for p in arguments.page_sizes.split(",")]
    plan = {} if arguments.splits is None else {"num_splits": arguments.splits}
    items = [
        (shape, preset, size, order, 1, plan)
        for shape in shapes
        for preset in presets
        for size in sizes
        for order in orders
    ]
    return measure(items, arguments, arguments.check)


@torch.inference_mode()
def measure(items: list[Any], arguments: argparse.Namespace, check: bool) -> int:
    """Times ``items`` and their peers shape by shape, prints and appends the rows."""
    gpu.in_workers(warm, items, arguments.jobs)
    environment = gpu.environment(arguments.commit)
    failed = []
    for shape, query_len in dict.fromkeys((item[0], item[4]) for item in items):
        query = gpu.make_query(shape, query_len)
        runs: list[gpu.Run] = []
        pair = None
        for _, preset, size, order, _, plan in (
            i for i in items if i[0] == shape and i[4] == query_len
        ):
            data = gpu.make_cache(shape, preset, size, order, fill=True)
            run = providers.tq(query, data, shape, preset, query_len, plan)
            num_seqs, lines = min(shape.B, 2), gpu.checked_rows(query_len)
            want = gpu.expected(query, data, num_seqs, lines)
            have = run.calls[0]().view(shape.B, query_len, *query.shape[1:])[:num_seqs, lines]
            error = gpu.relative_error(have, want)
            if not error <= TOLERANCE:
                print(
                    f"{preset}: relative error {error:.2e} exceeds {TOLERANCE:g}; shape not timed"
                )
                return 1
            runs.append(run)
            pair = pair or gpu.dense(data, shape)
        assert pair is not None
        for name, make in peers(query, *pair, shape, query_len).items():
            try:
                runs.append(make())
            except Exception as error:
                reason = str(error).strip().splitlines() or [""]
                print(f"{name}: not timed, {type(error).__name__}: {reason[0][:120]}")
        rows = []
        for made, timing in zip(runs, gpu.time_runs(runs, arguments.rounds), strict=True):
            rows.append(
                {
                    **environment, "provider": made.provider, **shape._asdict(), **made.fields,
                    "query_len": query_len, "us_median": timing.median,
                    "us_spread": timing.spread, "cache_bytes": made.cache_bytes,
                }
            )  # fmt: skip
        show(shape, query_len, gpu.with_ratios(rows))
        gpu.append_csv(arguments.csv, rows)
        if check and shape == FLAGSHIP:
            failed += below(rows)
        del runs, pair
        torch.cuda.empty_cache()
    for line in failed:
        print(line)
    return 1 if failed else 0


def peers(query: Any, key: Any, value: Any, shape: gpu.Shape, query_len: int) -> dict[str, Any]:
    """What the packed cache is compared with, by name."""
    backends = [torch.nn.attention.SDPBackend.FLASH_ATTENTION]
    if query_len == 1:
        backends.insert(0, torch.nn.attention.SDPBackend.CUDNN_ATTENTION)
    make: dict[str, Any] = {
        f"SDPA {b.name}": lambda b=b: providers.sdpa(query, key, value, shape, query_len, b)
        for b in backends
    }
    types = [torch.bfloat16, torch.float8_e4m3fn] if query_len == 1 else [torch.bfloat16]
    for dtype in types:
        make[f"FlashInfer {dtype}"] = lambda dtype=dtype: providers.flashinfer(
            query, key, value, shape, query_len, dtype
        )
    make["device copy"] = lambda: providers.device_copy(min(2**29, shape.bf16_bytes))
    return make


def below(rows: list[dict[str, Any]]) -> list[str]:
    """Presets whose best row misses its least ratio."""
    lines = []
    for preset, least in LEAST_RATIO.items():
        ratios = [r["ratio_to_best_bf16"] for r in rows if r["preset"] == preset]
        if ratios and (ratios[0] == "" or max(ratios) < least):
            lines.append(f"{preset}: {max(ratios)} of the fastest bf16 attention, expected {least}")
    return lines


def show(shape: gpu.Shape, query_len: int, rows: list[dict[str, Any]]) -> None:
    """Prints the rows of one shape."""
    print("\n" + ", ".join(f"{n}={v}" for n, v in {**shape._asdict(), "rows": query_len}.items()))
    print_table(
        ("", "us", "spread", "TB/s", "x bf16", "splits"),
        [
            (
                " ".join(str(r[n]) for n in ("provider", "preset", "order") if r[n])
                + (f" P{r['page_size']}" if r["page_size"] else "")
                + (f" {r['dtype']}" if not r["preset"] else ""),
                f"{r['us_median']:.1f}",
                f"{r['us_spread']:.1f}",
                f"{r['tbps']:.2f}",
                f"{r['ratio_to_best_bf16']:.2f}" if r["ratio_to_best_bf16"] != "" else "",
                str(r["num_splits"]),
            )
            for r in rows
        ],
    )
