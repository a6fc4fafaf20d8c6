"""Decodes of very different lengths on a GPU, and of any batch with ``deterministic="batch"``.

One pool of pages is read three ways: by sequences whose lengths are log-uniform from ``--shortest``
to ``--longest``; by as many of one length that have as many tokens; and by those of ``--shape``,
bounded by their length and by ``--longest``. Each is timed with the plan that a call gets, whose
programs share the tokens, with as many equal parts of every sequence (``num_splits``), and
with results that do not depend on the batch. `ratio` is the time of a byte over that of the default
plan of the second or, for the third, of the same sequences with their own bound. Outputs are
compared with fp64 attention before anything is timed; gate and timing are those of `decode`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from bench import decode, gpu, providers
from bench.timing import print_table

HELP = "decodes of very different lengths, and batch-invariant ones, on a GPU"
COLUMNS = (
    "date", "commit", "device", "driver", "torch", "triton", "jax", "what", "plan", "preset",
    "dtype", "B", "tokens", "max_seq_len", "Hk", "g", "D", "page_size", "order", "num_splits",
    "us_median", "us_spread", "cache_bytes", "tbps", "ratio",
)  # fmt: skip
BATCH = (("deterministic", "batch"),)


class Lengths(NamedTuple):
    """Sequences to attend to: lengths, a bound of them, and what they are compared with."""

    what: str
    lens: tuple[int, ...]
    bound: int
    base: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, listed, positive = parser.add_argument, gpu.listed, gpu.positive
    add("--presets", type=listed(gpu.preset), default="4bit", help="comma-separated")
    shape = ":".join(map(str, decode.FLAGSHIP))
    add("--shape", type=gpu.Shape.parse, default=shape, help="B:L:Hk:g:D")
    add("--page-size", type=positive, default=64, help="tokens a page")
    add("--shortest", type=positive, default=16, help="least tokens of a sequence")
    add("--longest", type=positive, default=131072, help="most tokens of a sequence")
    add(
        "--parts", type=listed(positive), default=None,
        help="other numbers of programs that share the tokens to try, comma-separated",
    )  # fmt: skip
    decode.add_common_arguments(parser, "ragged.csv")


def run(arguments: argparse.Namespace) -> int:
    if not gpu.require_gpu():
        return 2
    environment = gpu.environment(arguments.commit)
    for preset in arguments.presets:
        skipped: dict[str, str] = {}
        try:
            rows = measure(preset, arguments, skipped)
        except decode.WrongOutput as problem:
            print(f"{problem}; no row of {preset} was written")
            return 1
        show(preset, rows)
        for name, reason in skipped.items():
            print(f"{name}: not timed, {reason}")
        gpu.append_csv(arguments.csv, [{**environment, **row} for row in rows], COLUMNS)
        torch.cuda.empty_cache()
    return 0


def log_uniform(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Quantiles of lengths whose logarithm is uniform, both ends among them, in random order."""
    lens = np.exp(np.linspace(np.log(shortest), np.log(longest), count)).round().astype(int)
    return tuple(int(n) for n in np.random.default_rng(0).permutation(lens))


def works(shape: gpu.Shape, shortest: int, longest: int) -> list[Lengths]:
    """What is timed."""
    ragged = log_uniform(shape.B, shortest, longest)
    equal = (round(sum(ragged) / shape.B),) * shape.B
    same = (shape.L,) * shape.B
    return [
        Lengths("equal lengths", equal, equal[0], "equal lengths"),
        Lengths("ragged", ragged, longest, "equal lengths"),
        Lengths("equal lengths, loose bound", equal, longest, "equal lengths"),
        Lengths("shape", same, shape.L, "shape"),
        Lengths("shape, loose bound", same, max(shape.L, longest), "shape"),
    ]


def view(pool: gpu.Cache, work: Lengths) -> gpu.Cache:
    """The first tokens of a pool of one sequence, cut into those of ``work``."""
    size = pool.layout.page_size
    counts = [-(-n // size) for n in work.lens]
    table = torch.full((len(counts), -(-work.bound // size)), -1, dtype=torch.int32)
    pages = pool.table[0].cpu().split([*counts, pool.table.shape[1] - sum(counts)])
    for row, own in zip(table, pages, strict=False):
        row[: len(own)] = own
    lens = torch.tensor(work.lens, dtype=torch.int32)
    return pool._replace(table=table.to(gpu.DEVICE), lens=lens.to(gpu.DEVICE))


@torch.inference_mode()
def measure(
    preset: str, arguments: argparse.Namespace, skipped: dict[str, str]
) -> list[dict[str, Any]]:
    """The rows of a preset, all timed in one round.

    Raises:
        WrongOutput: an output is off.
    """
    shape, size = arguments.shape, arguments.page_size
    todo = works(shape, arguments.shortest, arguments.longest)
    most = max(sum(-(-n // size) for n in work.lens) for work in todo) * size
    pool = gpu.make_cache(shape._replace(B=1, L=most), preset, size, None, fill=True)
    caches = providers.rotated(pool)
    query = gpu.make_query(shape)
    runs: list[gpu.Run] = []
    for work in todo:
        data = view(pool, work)
        item = gpu.Item(shape._replace(L=work.bound), preset, size, pool.layout.order, 1)
        splits = providers.plan_of(query, data, item).num_splits
        plans: list[tuple[tuple[str, Any], ...]] = [(), (("num_splits", splits),), BATCH]
        plans += [(("parts", n),) for n in arguments.parts or []]
        for plan in plans:
            name = " ".join(f"{n}={v}" for n, v in plan)
            try:
                run = providers.tq(query, data, item._replace(overrides=plan), caches)
                error = decode.gate(run, query, data, 1)
            except decode.REFUSALS as problem:
                skipped[f"{preset} {work.what} {name}"] = gpu.reason_of(problem)
                continue
            if not error <= decode.TOLERANCE:
                raise decode.WrongOutput(f"{preset} {work.what} {name}: relative error {error:.2e}")
            fields = {
                **run.fields, "what": work.what, "plan": name, "base": work.base, "B": shape.B,
                "tokens": sum(work.lens), "max_seq_len": work.bound, "Hk": shape.Hk, "g": shape.g,
                "D": shape.D,
            }  # fmt: skip
            num_bytes = sum(work.lens) * pool.layout.bytes_per_token
            runs.append(run._replace(fields=fields, cache_bytes=num_bytes))
    rows = [
        {
            **run.fields, "us_median": t.median, "us_spread": t.spread,
            "cache_bytes": run.cache_bytes, "tbps": run.cache_bytes / t.median / 1e6,
        }
        for run, t in gpu.time_runs(runs, arguments.rounds, skipped)
    ]  # fmt: skip
    return with_ratios(rows)


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds the time of a byte over that of a byte of what a row is compared with."""
    base = {r["what"]: r["us_median"] / r["cache_bytes"] for r in rows if not r["plan"]}
    return [
        {
            **{name: value for name, value in row.items() if name != "base"},
            "ratio": row["us_median"] / row["cache_bytes"] / base[row["base"]],
        }
        for row in rows
    ]


def show(preset: str, rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows of a preset."""
    print(f"\n{preset}")
    print_table(
        ("", "plan", "us", "25-75 %", "MB", "TB/s", "ratio"),
        [
            (
                r["what"],
                r["plan"],
                f"{r['us_median']:.1f}",
                f"{r['us_spread']:.1f}",
                f"{r['cache_bytes'] / 1e6:.1f}",
                f"{r['tbps']:.2f}",
                f"{r['ratio']:.3f}",
            )
            for r in rows
        ],
    )
