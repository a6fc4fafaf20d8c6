"""Batches of one long sequence of new rows beside many that decode, on a GPU.

The batch is one call of ``tq_torch.attention``; beside it its two kinds are timed alone, the
decodes by ``decode_attention`` and the chunk by a call of its own. All read the same pages and must
give what the batch gives.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

import tq_torch
from bench import decode, gpu
from bench.timing import print_table

HELP = "a chunk and decodes in one batch, beside the two alone"
COLUMNS = (
    "date", "commit", "device", "driver", "torch", "triton", "jax", "what", "preset", "B", "L",
    "Hk", "g", "D", "page_size", "query_len", "us_median", "us_spread", "ratio",
)  # fmt: skip
#: Largest relative difference of a batch's outputs from those alone: roundings of bf16.
TOLERANCE = 1e-2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--preset", type=gpu.preset, default="4bit", help="format")
    add("--page-size", type=gpu.positive, default=64, help="tokens a page")
    add("--query-len", type=gpu.positive, default=2048, help="rows of the chunk")
    add(
        "--shape", type=gpu.Shape.parse, default="64:32768:8:4:128",
        help="B:L:Hk:g:D of the batch; its last sequence has the chunk",
    )  # fmt: skip
    decode.add_common_arguments(parser, "mixed.csv")


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> int:
    if not gpu.require_gpu():
        return 2
    shape, rows = arguments.shape, arguments.query_len
    data = gpu.make_cache(shape, arguments.preset, arguments.page_size, None, fill=True)
    last = shape.B - 1
    query = gpu.make_query(shape._replace(B=1), last + rows)
    starts = torch.arange(shape.B + 1, dtype=torch.int32, device=gpu.DEVICE)
    starts[-1] = last + rows
    options: dict[str, Any] = {
        "layout": data.layout, "codec": data.codec, "max_seq_len": shape.L, "backend": gpu.BACKEND,
    }  # fmt: skip
    both = partial(
        tq_torch.attention, query, data.cache, data.table, data.lens, starts, max_query_len=rows,
        **options,
    )  # fmt: skip
    decodes = partial(
        tq_torch.decode_attention, query[:last], data.cache, data.table[:last], data.lens[:last],
        **options,
    )  # fmt: skip
    one = torch.tensor([0, rows], dtype=torch.int32, device=gpu.DEVICE)
    chunk = partial(
        tq_torch.attention, query[last:], data.cache, data.table[last:], data.lens[last:], one,
        max_query_len=rows, **options,
    )  # fmt: skip
    error = gpu.relative_error(both(), torch.cat([decodes(), chunk()]))
    if not error < TOLERANCE:
        print(f"the batch differs from its parts by {error:.1e}")
        return 1
    graphs = [gpu.capture(gpu.Run("", [call], 1, {})) for call in (both, decodes, chunk)]
    together, *alone = gpu.time_graphs(graphs, arguments.rounds)
    total = sum(timing.median for timing in alone)
    shapes = (shape, shape._replace(B=last), shape._replace(B=1))
    names = ("chunk and decodes in one call", "decodes alone", "chunk alone")
    lens = (rows, 1, rows)
    records = [
        {
            "what": name, "preset": arguments.preset, **s._asdict(),
            "page_size": arguments.page_size, "query_len": n, "us_median": timing.median,
            "us_spread": timing.spread, "ratio": timing.median / total,
        }
        for name, s, n, timing in zip(names, shapes, lens, (together, *alone), strict=True)
    ]  # fmt: skip
    print_table(
        ("", "us", "25-75 %", "of the sum"),
        [
            (r["what"], f"{r['us_median']:.1f}", f"{r['us_spread']:.1f}", f"{r['ratio']:.2f}")
            for r in records
        ],
    )
    environment = gpu.environment(arguments.commit)
    gpu.append_csv(arguments.csv, [{**environment, **r} for r in records], COLUMNS)
    return 0
