"""What a call costs the host, and what a captured graph of it costs when lengths grow.

The host's time is that of eager public calls made in a row without waiting, on work so small that
the device keeps up. A graph is captured with every sequence one token long and ``max_seq_len`` of
the last length, then replayed at both lengths beside one that was captured at the last; an eager
call must then give the same bits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import tq_torch
from bench import decode, gpu
from bench.timing import print_table

HELP = "host time of a call, and a graph replayed at other lengths"
COLUMNS = (
    "date", "commit", "device", "driver", "torch", "triton", "jax", "what", "preset", "B", "L",
    "Hk", "g", "D", "page_size", "us_median", "us_spread", "ratio",
)  # fmt: skip
SMALL = gpu.Shape(1, 64, 8, 4, 128)
GROWING = gpu.Shape(4, 40960, 8, 4, 128)
#: Calls of a sample of the host's time: less than the device's queue holds.
CALLS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--preset", type=gpu.preset, default="4bit", help="format")
    add("--page-size", type=gpu.positive, default=64, help="tokens a page")
    add("--shape", type=gpu.Shape.parse, default=":".join(map(str, GROWING)), help="B:L:Hk:g:D")
    decode.add_common_arguments(parser, "launch.csv")


def run(arguments: argparse.Namespace) -> int:
    if not gpu.require_gpu():
        return 2
    rows, problem = measure(arguments)
    print_table(
        ("", "us", "25-75 %", "ratio"),
        [
            (r["what"], f"{r['us_median']:.1f}", f"{r['us_spread']:.1f}", f"{r['ratio']:.2f}")
            for r in rows
        ],
    )
    if problem:
        print(problem)
        return 1
    environment = gpu.environment(arguments.commit)
    gpu.append_csv(arguments.csv, [{**environment, **row} for row in rows], COLUMNS)
    return 0


def host_times(call: Callable[[], object], rounds: int) -> gpu.Timing:
    """Microseconds of the host for a call, the device waited for between samples only."""
    samples = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        samples.append(1e6 * (time.perf_counter() - start) / CALLS)
    # The first sample compiles and allocates.
    return gpu.timing_of(samples[1:])


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """The rows, and what was wrong with an output, if anything was."""
    preset, page_size, rounds = arguments.preset, arguments.page_size, arguments.rounds
    rows: list[dict[str, Any]] = []

    def note(what: str, shape: gpu.Shape, timing: gpu.Timing, of: float | None = None) -> None:
        shown = {"preset": preset, **shape._asdict(), "page_size": page_size}
        times = {"us_median": timing.median, "us_spread": timing.spread}
        rows.append(
            {"what": what, **shown, **times, "ratio": timing.median / (of or timing.median)}
        )

    def prepared(shape: gpu.Shape) -> tuple[gpu.Cache, Callable[..., Any], torch.Tensor]:
        data = gpu.make_cache(shape, preset, page_size, None, fill=True)
        query = gpu.make_query(shape)
        out = torch.empty_like(query)
        attend = partial(
            tq_torch.decode_attention, query, data.cache, data.table, data.lens,
            layout=data.layout, codec=data.codec, max_seq_len=shape.L, backend=gpu.BACKEND,
        )  # fmt: skip
        return data, attend, out

    data, attend, out = prepared(SMALL)
    note("eager call, host", SMALL, host_times(partial(attend, out=out), rounds))
    key, value = torch.randn((2, 1, SMALL.Hk, SMALL.D), device=gpu.DEVICE).bfloat16()
    slot = torch.zeros(1, dtype=torch.int64, device=gpu.DEVICE)
    keep = partial(
        tq_torch.store, key, value, data.cache, slot, layout=data.layout, codec=data.codec,
        backend=gpu.BACKEND,
    )  # fmt: skip
    note("eager store, host", SMALL, host_times(keep, rounds))
    small = gpu.capture(gpu.Run("", [partial(attend, out=out)], 1, {}))
    note("graph of three calls, host", SMALL, host_times(small.graph.replay, rounds))

    shape = arguments.shape
    data, attend, out = prepared(shape)
    eager = gpu.capture(gpu.Run("", [partial(attend, out=out)], 1, {}))
    data.lens.fill_(1)
    grown = gpu.capture(gpu.Run("", [partial(attend, out=out)], 1, {}))
    (short,) = gpu.time_graphs([grown], rounds)
    data.lens.fill_(shape.L)
    captured_long, replayed = gpu.time_graphs([eager, grown], rounds)
    note("graph captured and replayed at L, device", shape, captured_long)
    note("graph captured at 1, replayed at L, device", shape, replayed, captured_long.median)
    note("graph captured and replayed at 1, device", shape, short, captured_long.median)
    have = out.clone()
    out.fill_(torch.nan)
    attend(out=out)
    equal = torch.equal(have, out)
    return rows, "" if equal else "a graph captured at length 1 gives other bits at length L"
