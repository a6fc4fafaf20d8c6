"""What a calibrated codec costs in decode on a GPU, beside the plain codec of the same preset.

Calibration (``tq calibrate``) gives each KV head an offset and a transform for keys, and for values
if these are calibrated too. Readers apply them to queries and outputs alone, so the cost is that of
other matrices there, one a KV head: it does not grow with the length. The codecs here have random
offsets and transforms of condition 4; every output is compared with fp64 attention over its own
dequantised cache before it is timed. What is off is not timed, and the run ends with status 1.
Times are those of ``python -m bench decode``, all codecs of a preset side by side.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from bench import decode, gpu, providers
from bench.timing import print_table
from tq_core import Codec, QuantConfig

HELP = "decode with calibrated codecs on a GPU beside plain ones"
COLUMNS = (
    "date", "commit", "device", "driver", "torch", "triton", "jax", "preset", "codec", "B", "L",
    "Hk", "g", "D", "page_size", "num_splits", "us_median", "us_spread", "cache_bytes",
    "ratio_to_plain",
)  # fmt: skip
PLAIN = "plain"
#: What is calibrated, by the name of the codec.
CODECS = {PLAIN: (), "keys": ("key",), "keys and values": ("key", "value")}
#: Largest over smallest singular value of a transform.
CONDITION = 4.0


class Job(NamedTuple):
    """A decode over a cache of one codec."""

    item: gpu.Item
    codec: str

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.item.label} {self.codec}, {self.item.shape}"


def make_codec(preset: str, shape: gpu.Shape, calibrated: Sequence[str]) -> Codec:
    """With an offset and a transform a KV head for each of ``calibrated``."""
    generator = np.random.default_rng(4)
    arrays: dict[str, np.ndarray] = {}
    for side in calibrated:
        size = (shape.Hk, shape.D, shape.D)
        left, right = (np.linalg.qr(generator.standard_normal(size))[0] for _ in range(2))
        scales = np.geomspace(CONDITION**-0.5, CONDITION**0.5, shape.D)
        arrays[f"{side}_offset"] = generator.standard_normal((shape.Hk, shape.D))
        arrays[f"{side}_transform"] = left * scales @ right
    return Codec(QuantConfig.preset(preset), shape.D, **arrays)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--presets", type=gpu.listed(gpu.preset), default="4bit,3bit,k8v4", help="comma-separated"
    )  # fmt: skip
    add(
        "--shapes", type=gpu.listed(gpu.Shape.parse), help="B:L:Hk:g:D, comma-separated",
        default="64:8192:8:4:128,1:32768:8:4:128,8:32768:8:4:128",
    )  # fmt: skip
    add("--page-size", type=gpu.positive, default=64, help="tokens a page")
    decode.add_common_arguments(parser, "calibrated.csv")


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> int:
    if not gpu.require_gpu():
        return 2
    items = [
        gpu.Item(shape, preset, arguments.page_size, "planes", 1)
        for shape in arguments.shapes
        for preset in arguments.presets
    ]
    jobs = [Job(item, codec) for item in items for codec in CODECS]
    largest = max(s.L * s.Hk * s.D for s in arguments.shapes)
    gpu.in_workers(warm, jobs, arguments.jobs, 24 * largest)
    environment = gpu.environment(arguments.commit)
    failed = False
    for item in items:
        rows, problems = measure(item, arguments.rounds)
        show(item, rows)
        for problem in problems:
            print(f"{problem}: not timed", flush=True)
        failed |= bool(problems)
        gpu.append_csv(arguments.csv, [{**environment, **row} for row in rows], COLUMNS)
        torch.cuda.empty_cache()
    return 1 if failed else 0


@torch.inference_mode()
def warm(job: Job) -> str | None:
    """Compiles what a run needs for ``job``, in a process of its own."""
    try:
        data, query = prepared(job, fill=False)
        providers.tq(query, data, job.item, [data.cache]).calls[0]()
        gpu.dense(data, job.item.shape.L, torch.float32, [0])
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job.label}: {gpu.reason_of(error)}"
    finally:
        torch.cuda.empty_cache()
    return None


def prepared(job: Job, fill: bool) -> tuple[gpu.Cache, torch.Tensor]:
    """A cache of the job's codec, and queries."""
    shape, preset, page_size, order, *_ = job.item
    codec = make_codec(preset, shape, CODECS[job.codec])
    data = gpu.make_cache(shape, preset, page_size, order, fill, codec)
    return data, gpu.make_query(shape)


def measure(item: gpu.Item, rounds: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the codecs, and what was wrong with those that have none."""
    runs: list[gpu.Run] = []
    problems: list[str] = []
    for codec in CODECS:
        job = Job(item, codec)
        try:
            data, query = prepared(job, fill=True)
            made = providers.tq(query, data, item, providers.rotated(data))
            error = decode.gate(made, query, data, 1)
        except decode.REFUSALS as refusal:
            problems.append(f"{job.label}: {gpu.reason_of(refusal)}")
            continue
        print(f"{job.label}: relative error {error:.2e}", flush=True)
        if not error <= decode.TOLERANCE:
            expected = f"expected at most {decode.TOLERANCE:g}"
            problems.append(f"{job.label}: relative error {error:.2e}, {expected}")
            continue
        runs.append(made._replace(provider=codec))
    timings = gpu.time_graphs([gpu.capture(made) for made in runs], rounds)
    medians = {made.provider: timing.median for made, timing in zip(runs, timings, strict=True)}
    plain = medians.get(PLAIN)
    rows = [
        {
            "preset": item.preset, "codec": made.provider, **item.shape._asdict(),
            "page_size": item.page_size, "num_splits": made.fields["num_splits"],
            "us_median": timing.median, "us_spread": timing.spread,
            "cache_bytes": made.cache_bytes,
            "ratio_to_plain": timing.median / plain if plain else "",
        }
        for made, timing in zip(runs, timings, strict=True)
    ]  # fmt: skip
    return rows, problems


def show(item: gpu.Item, rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows of one shape and preset."""
    sizes = ", ".join(f"{name}={size}" for name, size in item.shape._asdict().items())
    print(f"\n{item.preset}, {sizes}")
    print_table(
        ("calibrated", "us", "25-75 %", "of plain", "splits"),
        [
            (
                r["codec"],
                f"{r['us_median']:.1f}",
                f"{r['us_spread']:.1f}",
                f"{r['ratio_to_plain']:.3f}" if r["ratio_to_plain"] != "" else "",
                str(r["num_splits"]),
            )
            for r in rows
        ],
    )
