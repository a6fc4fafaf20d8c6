"""What the benchmarks on a GPU share: shapes, inputs, timing by graph replay, results as CSV."""

from __future__ import annotations

import csv
import datetime
import multiprocessing
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tq_torch
from tq_core import CacheLayout, Codec, QuantConfig

RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    "date", "commit", "device", "driver", "torch", "triton", "jax", "provider", "preset", "dtype",
    "B", "L", "Hk", "g", "D", "page_size", "order", "query_len", "num_splits", "us_median",
    "us_spread", "cache_bytes", "tbps", "ratio_to_best_bf16",
)  # fmt: skip


class Shape(NamedTuple):
    """Sequences, cached tokens of each, KV heads, query heads a KV head, head_dim."""

    B: int
    L: int
    Hk: int
    g: int
    D: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``"64:8192:8:4:128"``."""
        if not re.fullmatch(r"\d+(:\d+){4}", text):
            raise ValueError(f"shape: expected B:L:Hk:g:D, got {text!r}")
        return cls(*map(int, text.split(":")))

    @property
    def bf16_bytes(self) -> int:
        """Keys and values of an uncompressed cache."""
        return 4 * self.B * self.L * self.Hk * self.D


class Run(NamedTuple):
    """One thing to time: ``calls`` do the same on different memory."""

    provider: str
    calls: Sequence[Callable[[], Any]]
    cache_bytes: int
    fields: Mapping[str, Any]


def require_gpu() -> bool:
    """Whether there is a CUDA device; says so where there is none."""
    if torch.cuda.is_available():
        return True
    print("this benchmark needs a CUDA device, and torch finds none", file=sys.stderr)
    return False


def copies(num_bytes: int) -> int:
    """How many copies of a working set make it too large for the L2 cache, twice over."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return copies_needed(num_bytes, l2)


def copies_needed(num_bytes: int, l2_bytes: int) -> int:
    """Copies of ``num_bytes`` whose sum exceeds the L2 cache at least twice."""
    return 1 if num_bytes >= 2 * l2_bytes else 1 + -(-2 * l2_bytes // num_bytes)


class Cache(NamedTuple):
    """A filled paged cache and what reads it."""

    layout: CacheLayout
    codec: Codec
    cache: Tensor
    table: Tensor
    lens: Tensor


def make_cache(shape: Shape, preset: str, page_size: int, order: str | None, fill: bool) -> Cache:
    """Random tokens in random pages; without ``fill`` the bytes are whatever they were."""
    layout = CacheLayout(QuantConfig.preset(preset), shape.Hk, shape.D, page_size, order)
    codec = Codec(layout.config, shape.D)
    width = -(-shape.L // page_size)
    generator = torch.Generator(device="cuda").manual_seed(0)
    cache = tq_torch.empty_cache(layout, shape.B * width, device="cuda")
    table = torch.randperm(shape.B * width, device="cuda", generator=generator).int()
    table = table.view(shape.B, width)
    step = max(1, min(shape.L, 2**27 // (shape.Hk * shape.D)))
    for b in range(shape.B if fill else 1):
        for first in range(0, shape.L if fill else 1, step):
            token = torch.arange(first, min(first + step, shape.L), device="cuda")
            slots = table[b, token // page_size].long() * page_size + token % page_size
            size = (2, len(token), shape.Hk, shape.D)
            key, value = torch.randn(size, device="cuda", generator=generator).bfloat16()
            tq_torch.store(key, value, cache, slots, layout=layout, codec=codec)
    lens = torch.full((shape.B,), shape.L, dtype=torch.int32, device="cuda")
    return Cache(layout, codec, cache, table, lens)


def make_query(shape: Shape, query_len: int = 1) -> Tensor:
    """bf16 ``[B * query_len, Hq, D]``."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    size = (shape.B * query_len, shape.Hk * shape.g, shape.D)
    return torch.randn(size, device="cuda", generator=generator).bfloat16()


def dense(data: Cache, shape: Shape) -> tuple[Tensor, Tensor]:
    """Dequantised bf16 keys and values ``[B, Hk, L, D]``, contiguous."""
    pair = tq_torch.dequantize(
        data.cache, data.table, data.lens, layout=data.layout, codec=data.codec,
        dtype=torch.bfloat16,
    )  # fmt: skip
    key, value = (x[:, : shape.L].transpose(1, 2).contiguous() for x in pair)
    return key, value


def checked_rows(query_len: int) -> list[int]:
    """Rows of a chunk that the gate looks at: the first and the last ones."""
    return sorted({*range(min(8, query_len)), *range(max(0, query_len - 8), query_len)})


def expected(query: Tensor, data: Cache, num_seqs: int, rows: Sequence[int]) -> Tensor:
    """fp64 attention of some rows of the first sequences over their dequantised tokens.

    Args:
        query: ``[B * query_len, Hq, D]``, the last tokens of each sequence.
        data: the cache.
        num_seqs: sequences to compute.
        rows: rows of each.

    Returns:
        ``[num_seqs, len(rows), Hq, D]``.
    """
    key, value = (
        x.double()
        for x in tq_torch.dequantize(
            data.cache, data.table[:num_seqs], data.lens[:num_seqs], layout=data.layout,
            codec=data.codec, dtype=torch.float32,
        )
    )  # fmt: skip
    queries = query.view(len(data.lens), -1, *query.shape[1:])
    length, query_len = int(data.lens[0]), queries.shape[1]
    group = query.shape[1] // key.shape[2]
    position = length - query_len + torch.tensor(rows, device=query.device)
    hidden = torch.arange(length, device=query.device)[None] > position[:, None]
    out = []
    for b in range(num_seqs):
        k, v = (x[b, :length].repeat_interleave(group, 1) for x in (key, value))
        q = queries[b, rows].double()
        scores = torch.einsum("qhd,khd->hqk", q, k) / query.shape[-1] ** 0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.stack(out)


def relative_error(have: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of ``want``."""
    return float((have.double() - want.double()).norm() / want.double().norm())


class Timing(NamedTuple):
    """Microseconds of a call: median, and the distance of the quartiles."""

    median: float
    spread: float


def time_runs(runs: Sequence[Run], rounds: int) -> list[Timing]:
    """Times all runs by graph replay, once each a round, so that clocks treat them alike."""
    graphs = []
    for run in runs:
        calls = list(run.calls) * max(1, 3 // len(run.calls))
        for call in run.calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        graphs.append((graph, len(calls)))
    samples: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for (graph, count), sample in zip(graphs, samples, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            sample.append(1e3 * start.elapsed_time(end) / count)
    result = []
    for sample in samples:
        low, median, high = statistics.quantiles(sample, n=4)
        result.append(Timing(median, high - low))
    return result


def environment(commit: str | None) -> dict[str, str]:
    """Who measured: the columns up to ``jax``."""

    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return ""

    def output(*command: str) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except OSError:
            return ""
        return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""

    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit or output("git", "rev-parse", "--short", "HEAD") or "unknown",
        "device": torch.cuda.get_device_name(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": version("triton"),
        "jax": version("jax"),
    }


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds TB/s of cache bytes and the ratio to the fastest bf16 provider of the same rows."""
    best = min(
        (r["us_median"] for r in rows if r["dtype"] == "bfloat16" and not r["preset"]), default=None
    )
    for row in rows:
        row["tbps"] = row["cache_bytes"] / row["us_median"] / 1e6
        row["ratio_to_best_bf16"] = "" if best is None else best / row["us_median"]
    return rows


def append_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends rows, with a header where the file is new; another header is refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    if not new and path.read_text().splitlines()[:1] != [",".join(COLUMNS)]:
        raise ValueError(f"{path}: has other columns")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})


def in_workers(function: Callable[[Any], str | None], items: Sequence[Any], jobs: int) -> None:
    """Calls ``function`` in processes of their own, so that compilers run side by side."""
    if not items or jobs < 2:
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(jobs, len(items)), maxtasksperchild=4) as pool:
        for problem in pool.imap_unordered(function, items):
            if problem:
                print(problem, flush=True)
