"""Measures decode plans on this GPU and writes them as package data.

For each shape and preset, plans of a few tile sizes, depths of the pipeline and KV splits are timed
beside the one that is planned from numbers alone. The best is written, where it saves 2 % of that
one's time, or else that one: to ``tq_core/plans``, under the name of the device, where the next
calls find them. Every shape's best time and that of the plan from numbers go to a CSV file.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import tq_core.plans
from bench import decode, gpu, providers
from tq_core import QuantConfig
from tq_core.dispatch import SPLITS

HELP = "measure decode plans on this GPU"
#: What is tried besides the number of splits, one at a time.
VARIANTS: tuple[dict[str, int], ...] = (
    {},
    {"block_t": 32},
    {"num_stages": 2},
    {"num_stages": 7},
)
#: The default, named: where a call overrides anything, no plan on file is looked at.
FROM_NUMBERS = (("asm", 1),)
#: Share of the planned time that a measured plan saves at least.
WORTH = 0.02
FOLDER = Path(tq_core.plans.__file__).parent
COLUMNS = (
    "date", "commit", "device", "driver", "torch", "triton", "jax", "preset", "B", "L", "Hk", "g",
    "D", "us_planned", "us_measured", "plan",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    decode.add_grid_arguments(parser, "4bit", "64:8192:8:4:128")
    parser.add_argument(
        "--grid", dest="shapes", action="store_const", const=decode.GRID, default=argparse.SUPPRESS,
        help=f"the {len(decode.GRID)} shapes of bench decode in place of --shapes",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, default=FOLDER, help="plans go here")
    decode.add_common_arguments(parser, "tune.csv")


def run(arguments: argparse.Namespace) -> int:
    if not gpu.require_gpu():
        return 2
    environment = gpu.environment(arguments.commit)
    plans = Plans(arguments.folder / tq_core.plans.file_name(environment["device"]))
    rows = list(measure(arguments, plans))
    plans.write(environment)
    gpu.append_csv(arguments.csv, [{**environment, **row} for row in rows], COLUMNS)
    worst = max((r["us_planned"] / r["us_measured"] for r in rows), default=1.0)
    print(f"{len(rows)} shapes; a plan from numbers takes at most {worst:.2f} times the best one's")
    return 0


class Plans:
    """The file of one kind of device."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        if path.is_file():
            self.entries = json.loads(path.read_text())["plans"]

    def put(self, item: gpu.Item, plan: dict[str, int]) -> None:
        """Replaces the entry of an item; an empty plan is the one from numbers."""
        shape, config = item.shape, QuantConfig.preset(item.preset)
        kind = tq_core.plans.Kind(config.key, config.value, shape.D, shape.g)
        where = {**kind._asdict(), "programs": shape.B * shape.Hk, "tokens": shape.L}
        self.entries = [e for e in self.entries if any(e[n] != v for n, v in where.items())]
        self.entries.append({**where, "plan": plan})

    def write(self, environment: dict[str, str]) -> None:
        """Writes the file, an entry a line."""
        names = ("date", "commit", "device", "driver", "torch", "triton")
        head = json.dumps({name: environment[name] for name in names})
        fields = [*tq_core.plans.Kind._fields, "programs", "tokens"]
        self.entries.sort(key=lambda entry: [entry[name] for name in fields])
        lines = ",\n".join(f"  {json.dumps(entry)}" for entry in self.entries)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(f'{{"measured": {head},\n "plans": [\n{lines}\n]}}\n')


def candidates(item: gpu.Item, planned: int) -> list[gpu.Item]:
    """``item`` as it is, and variants with as many splits as planned, some more and some fewer."""
    place = SPLITS.index(planned)
    near = SPLITS[max(0, place - 2) : place + 3]
    tried = [
        {**variant, "num_splits": splits}
        for variant, splits in itertools.product(VARIANTS, near)
        # As many as there are tiles, of 64 tokens where nothing else is tried.
        if splits <= max(1, -(-item.shape.L // variant.get("block_t", 64)))
    ]
    return [item, *(item._replace(overrides=tuple(plan.items())) for plan in tried)]


@torch.inference_mode()
def measure(arguments: argparse.Namespace, plans: Plans) -> Iterator[dict[str, Any]]:
    """Times everything, shape by shape; gives the rows of the CSV file."""
    items = [i._replace(overrides=FROM_NUMBERS) for i in decode.grid(arguments, [1])]
    # Kernels do not depend on lengths and numbers of sequences, so one of each compiles them all.
    kernels = {(i.preset, i.page_size, i.order, i.shape.g, i.shape.D): i for i in items}
    small = [
        i._replace(
            shape=i.shape._replace(B=1, L=4096), overrides=(*variant.items(), ("num_splits", n))
        )
        for i in kernels.values()
        for variant in VARIANTS
        for n in (1, 2)
    ]  # fmt: skip
    gpu.in_workers(decode.warm, small, arguments.jobs, 2**26)
    for item in items:
        shape = item.shape
        query = gpu.make_query(shape)
        data = gpu.make_cache(shape, item.preset, item.page_size, item.order, fill=True)
        copies = providers.rotated(data)
        planned = providers.plan_of(query, data, item).num_splits
        runs, tried, skipped = [], [], {}
        for candidate in candidates(item, planned):
            try:
                runs.append(providers.tq(query, data, candidate, copies))
                tried.append(candidate)
            except decode.REFUSALS as problem:
                skipped[candidate.label] = gpu.reason_of(problem)
        timed = gpu.time_runs(runs, arguments.rounds, skipped)
        index = {id(run): candidate for run, candidate in zip(runs, tried, strict=True)}
        times = [(t.median, index[id(run)]) for run, t in timed]
        base = times[0][0]
        fastest = sorted(times, key=lambda pair: pair[0])[:4]
        us, best = fastest[0]
        plan = dict(best.overrides) if us < (1 - WORTH) * base else {}
        plans.put(item, plan)
        text = "; ".join(
            f"{t:.1f} {'planned' if c is item else dict(c.overrides)}" for t, c in fastest
        )
        where = f"{item.preset} {':'.join(map(str, shape))}"
        print(f"{where}: planned {planned} splits, {base:.1f} us; {text}", flush=True)
        yield {
            "preset": item.preset, **shape._asdict(), "us_planned": base,
            "us_measured": us if plan else base, "plan": json.dumps(plan),
        }  # fmt: skip
        del runs, data, timed, copies
        torch.cuda.empty_cache()
