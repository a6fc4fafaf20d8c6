"""What the benchmarks on a GPU share: shapes, inputs, timing by graph replay, results as CSV."""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import multiprocessing
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tq_torch
from tq_core import PRESETS, CacheLayout, Codec, QuantConfig
from tq_core.layout import ORDERS

#: Where everything runs; tests put other names here.
DEVICE = "cuda"
BACKEND = "triton"
RESULTS = Path(__file__).parent / "results"
#: Copies of a working set at most: each is a launch in the graph.
MOST_COPIES = 1024
#: Tokens of a cache that are stored one by one; further pages are copies of theirs.
DISTINCT_TOKENS = 2**20
#: Rounds that are enough where a call takes more than so many microseconds.
FEW_ROUNDS, LONG_CALL = 20, 2000.0
#: Device memory of a process that compiles, next to its tensors: context, libraries, kernels.
WORKER_BYTES = 3 * 2**29
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
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*){4}", text):
            raise ValueError(f"shape: expected B:L:Hk:g:D, five positive ints, got {text!r}")
        return cls(*map(int, text.split(":")))

    @property
    def bf16_bytes(self) -> int:
        """Keys and values of an uncompressed cache."""
        return 4 * self.B * self.L * self.Hk * self.D


def shape_of(row: Mapping[str, Any]) -> Shape:
    """The shape that a row was measured at."""
    return Shape(*(int(row[name]) for name in Shape._fields))


class Item(NamedTuple):
    """One configuration of the packed cache to time, with overrides of its launch plan."""

    shape: Shape
    preset: str
    page_size: int
    order: str
    query_len: int
    overrides: tuple[tuple[str, int | str], ...] = ()

    @property
    def plan(self) -> dict[str, int | str] | None:
        """Overrides of the launch plan."""
        return dict(self.overrides) or None

    @property
    def label(self) -> str:
        """Its name in messages."""
        words = [f" {name} {value}" for name, value in self.overrides]
        return f"{self.preset} {self.order} P{self.page_size}{''.join(words)}"


class Run(NamedTuple):
    """One thing to time: ``calls`` do the same on different memory.

    Calls of attention return something that can be viewed as ``[B * query_len, Hq, D]``: a torch
    tensor, or where ``is_jax`` an array of JAX, whose calls no CUDA graph can capture.
    """

    provider: str
    calls: Sequence[Callable[..., Any]]
    cache_bytes: int
    fields: Mapping[str, Any]
    is_jax: bool = False


def listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """The type of an argument that is a comma-separated list."""

    def split(text: str) -> list[Any]:
        try:
            return list(dict.fromkeys(parse(part.strip()) for part in text.split(",")))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return split


def positive(text: str) -> int:
    """A count."""
    if not re.fullmatch(r"[1-9]\d*", text):
        raise ValueError(f"expected a positive int, got {text!r}")
    return int(text)


def preset(text: str) -> str:
    """The name of a preset."""
    if text not in PRESETS:
        raise ValueError(f"preset: expected one of {sorted(PRESETS)}, got {text!r}")
    return text


def order(text: str) -> str:
    """A byte order."""
    if text not in ORDERS:
        raise ValueError(f"order: expected one of {list(ORDERS)}, got {text!r}")
    return text


def overrides(text: str) -> tuple[tuple[str, int | str], ...]:
    """``"block_n=128,num_warps=8"``, ``"deterministic=batch"``.

    What a plan cannot have is refused when it is made.
    """
    one = r"(\w+=\d+|deterministic=batch)"
    if not re.fullmatch(f"{one}(,{one})*", text):
        raise argparse.ArgumentTypeError(f"expected name=number,..., got {text!r}")
    pairs = (part.split("=") for part in text.split(","))
    return tuple((name, int(value) if value.isdecimal() else value) for name, value in pairs)


def replays(text: str) -> int:
    """How often a graph is timed: enough for a median and quartiles."""
    if not text.isdecimal() or int(text) < 20:
        raise argparse.ArgumentTypeError(f"expected at least 20, got {text!r}")
    return int(text)


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
    """Copies of ``num_bytes``, so many that between two uses of one, twice the L2 is touched."""
    if num_bytes >= 2 * l2_bytes:
        return 1
    return min(MOST_COPIES, 1 + -(-2 * l2_bytes // num_bytes))


def rotation(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """``tensors`` and so many clones of them that none is in the L2 cache when its turn comes."""
    count = copies(sum(x.nbytes for x in tensors))
    return [tensors, *(tuple(x.clone() for x in tensors) for _ in range(count - 1))]


class Cache(NamedTuple):
    """A filled paged cache and what reads it."""

    layout: CacheLayout
    codec: Codec
    cache: Tensor
    table: Tensor
    lens: Tensor


def make_cache(
    shape: Shape,
    preset: str,
    page_size: int,
    order: str | None,
    fill: bool,
    codec: Codec | None = None,
) -> Cache:
    """Random tokens in random pages, at most ``DISTINCT_TOKENS`` different ones.

    Without ``fill`` all sequences share the pages of one, whose bytes are whatever they were: the
    kernels that run are the same, since none depends on the number of pages.
    """
    layout = CacheLayout(QuantConfig.preset(preset), shape.Hk, shape.D, page_size, order)
    codec = codec or Codec(layout.config, shape.D)
    width = -(-shape.L // page_size)
    num_pages = shape.B * width if fill else width
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    cache = tq_torch.empty_cache(layout, num_pages, device=DEVICE)
    table = torch.randperm(num_pages, device=DEVICE, generator=generator).int()
    table = table.view(-1, width).expand(shape.B, width).contiguous()
    stored = min(num_pages, -(-DISTINCT_TOKENS // page_size))
    step = max(1, 2**27 // (shape.Hk * shape.D * page_size))
    for first in range(0, stored if fill else 1, step):
        slots = torch.arange(
            first * page_size, min(first + step, stored) * page_size, device=DEVICE
        )
        size = (2, len(slots), shape.Hk, shape.D)
        key, value = torch.randn(size, device=DEVICE, generator=generator).bfloat16()
        tq_torch.store(key, value, cache, slots, layout=layout, codec=codec, backend=BACKEND)
    if fill and stored < num_pages:
        index = torch.randint(stored, (num_pages - stored,), device=DEVICE, generator=generator)
        pages = cache.flatten(1)
        torch.index_select(pages[:stored], 0, index, out=pages[stored:])
    lens = torch.full((shape.B,), shape.L, dtype=torch.int32, device=DEVICE)
    return Cache(layout, codec, cache, table, lens)


def make_query(shape: Shape, query_len: int = 1) -> Tensor:
    """bf16 ``[B * query_len, Hq, D]``."""
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    size = (shape.B * query_len, shape.Hk * shape.g, shape.D)
    return torch.randn(size, device=DEVICE, generator=generator).bfloat16()


def dense(data: Cache, length: int, dtype: torch.dtype, seqs: Sequence[int]) -> list[Tensor]:
    """Dequantised keys and values ``[len(seqs), Hk, length, D]`` of some sequences, contiguous."""
    size = (len(seqs), data.layout.num_kv_heads, length, data.layout.head_dim)
    pair = [torch.empty(size, dtype=dtype, device=DEVICE) for _ in range(2)]
    for i, b in enumerate(seqs):  # one at a time: all at once would need the memory twice
        index = torch.tensor([b], device=DEVICE)
        tokens = tq_torch.dequantize(
            data.cache, data.table[index], data.lens[index], layout=data.layout, codec=data.codec,
            dtype=dtype,
        )  # fmt: skip
        for x, y in zip(pair, tokens, strict=True):
            x[i] = y[0, :length].transpose(0, 1)
    return pair


def checked_rows(query_len: int) -> list[int]:
    """Rows of a chunk that the gate looks at: the first and the last ones."""
    return sorted({*range(min(8, query_len)), *range(max(0, query_len - 8), query_len)})


def checked_seqs(num_seqs: int) -> list[int]:
    """Sequences that the gate looks at: the first, one in the middle, the last."""
    return sorted({0, num_seqs // 2, num_seqs - 1})


def expected(
    query: Tensor, key: Tensor, value: Tensor, rows: Sequence[int], query_len: int
) -> Tensor:
    """fp64 causal attention of some rows of one sequence.

    Args:
        query: ``[len(rows), Hq, D]``.
        key: ``[Hk, L, D]``.
        value: likewise.
        rows: of the last ``query_len`` tokens of the sequence.
        query_len: rows of the chunk.

    Returns:
        ``[len(rows), Hq, D]``.
    """
    heads, length, dim = key.shape
    position = length - query_len + torch.tensor(rows, device=query.device)
    hidden = torch.arange(length, device=query.device)[None] > position[:, None]
    q = query.double().unflatten(1, (heads, -1))
    scores = torch.einsum("rhgd,hkd->hgrk", q, key.double()) / dim**0.5
    weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hgrk,hkd->rhgd", weights, value.double()).flatten(1, 2)


def error_of(
    out: Tensor,
    query: Tensor,
    query_len: int,
    tokens: Callable[[int], tuple[Tensor, Tensor]],
) -> float:
    """Largest relative error of the checked sequences; NaN if anything in ``out`` is.

    Args:
        out: viewable as ``query``.
        query: ``[B * query_len, Hq, D]``.
        query_len: rows of each sequence.
        tokens: gives keys and values ``[Hk, L, D]`` of a sequence.
    """
    if not bool(out.isfinite().all()):
        return math.nan
    rows = checked_rows(query_len)
    outs, queries = (x.reshape(-1, query_len, *query.shape[1:]) for x in (out, query))
    errors = []
    for b in checked_seqs(len(queries)):
        want = expected(queries[b, rows], *tokens(b), rows, query_len)
        errors.append(relative_error(outs[b, rows], want))
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def relative_error(have: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of ``want``."""
    return float((have.double() - want.double()).norm() / want.double().norm())


class Timing(NamedTuple):
    """Microseconds of a call: median, and the distance of the quartiles."""

    median: float
    spread: float


class Graph(NamedTuple):
    """A captured run."""

    graph: torch.cuda.CUDAGraph
    num_calls: int


def capture(run: Run) -> Graph:
    """Captures all calls of a run, at least three, after each has run once."""
    calls = list(run.calls) * -(-3 // len(run.calls))
    for call in run.calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return Graph(graph, len(calls))


def time_graphs(graphs: Sequence[Graph], rounds: int, warmup: int = 3) -> list[Timing]:
    """Times all graphs once a round, so that clocks treat them alike.

    Each is replayed twice in a row and the second replay is timed: the device is then never idle
    between the two events, waiting for the host to launch. ``FEW_ROUNDS`` where calls are long.
    """

    def once(graph: torch.cuda.CUDAGraph, num_calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * float(start.elapsed_time(end)) / num_calls

    samples = [[once(*graph) for graph in graphs] for _ in range(warmup)]
    if any(us > LONG_CALL for us in samples[-1]):
        rounds = min(rounds, FEW_ROUNDS)
    samples = [[once(*graph) for graph in graphs] for _ in range(rounds)]
    return [timing_of(sample) for sample in zip(*samples, strict=True)]


def timing_of(sample: Sequence[float]) -> Timing:
    """Median and distance of the quartiles."""
    low, median, high = statistics.quantiles(sample, n=4)
    return Timing(median, high - low)


def time_runs(
    runs: Sequence[Run], rounds: int, skipped: dict[str, str]
) -> list[tuple[Run, Timing]]:
    """Times what can be captured; the reason of what cannot goes to ``skipped``."""
    captured = []
    for run in runs:
        try:
            captured.append((run, capture(run)))
        except Exception as error:
            skipped[name_of({"provider": run.provider, **run.fields})] = reason_of(error)
    timings = time_graphs([graph for _, graph in captured], rounds)
    return [(run, timing) for (run, _), timing in zip(captured, timings, strict=True)]


def name_of(row: Mapping[str, Any]) -> str:
    """What a row is about, for people."""
    names = [row["provider"], row["preset"] or row["dtype"], row["order"]]
    names += [f"P{row['page_size']}"] if row["page_size"] else []
    names.append(row.get("plan", ""))
    return " ".join(filter(None, names))


def reason_of(error: Exception) -> str:
    """One line on why a provider was not timed."""
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error.name}"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def environment(commit: str | None) -> dict[str, str]:
    """Who measured: the columns up to ``jax``."""

    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return ""

    def output(*command: str) -> str:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=60, cwd=RESULTS.parent
            )
        except (OSError, subprocess.TimeoutExpired):
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


def append_csv(
    path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str] = COLUMNS
) -> None:
    """Appends rows, with a header where the file is new; another header is refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    if not new and path.read_text().splitlines()[:1] != [",".join(columns)]:
        raise ValueError(f"{path}: has other columns")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def jobs_that_fit(jobs: int, num_items: int, item_bytes: int, free_bytes: int) -> int:
    """Processes to start, so that all fit in 80 % of the free device memory."""
    room = int(0.8 * free_bytes) // (item_bytes + WORKER_BYTES)
    return max(1, min(jobs, num_items, room))


def in_workers(
    function: Callable[[Any], str | None], items: Sequence[Any], jobs: int, item_bytes: int
) -> None:
    """Calls ``function`` in processes of their own, so that compilers run side by side.

    What they compile is found on disk afterwards. A problem is printed and otherwise left to the
    run itself, which meets it again.
    """
    jobs = jobs_that_fit(jobs, len(items), item_bytes, torch.cuda.mem_get_info()[0])
    if len(items) < 2 or jobs < 2:
        return
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, maxtasksperchild=16) as pool:
        for problem in pool.imap_unordered(function, items):
            if problem:
                print(problem, flush=True)
    seconds = time.monotonic() - start
    print(f"compiled for {len(items)} jobs in {jobs} processes, {seconds:.0f} s", flush=True)
