"""Tables and plots of what ``python -m bench decode`` has measured; needs no GPU.

The rows of one run are used, the last of the file unless ``--commit`` names another: ratios compare
what ran side by side. Without options the table is printed.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from bench import gpu

HELP = "table and plots of recorded decode runs"
FLAGSHIP = "64:8192:8:4:128"
#: What surrounds the table in a document.
START, END = "<!-- begin: python -m bench report -->", "<!-- end: python -m bench report -->"


class Point(NamedTuple):
    """One configuration of tq_torch: where, how, microseconds, times faster than bf16."""

    shape: gpu.Shape
    preset: str
    page_size: int
    order: str
    us: float
    ratio: float
    cache_bytes: int

    @property
    def roofline(self) -> float:
        """Share of the speed that the fastest bf16 attention's bandwidth would give."""
        return self.ratio * self.cache_bytes / self.shape.bf16_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--csv", type=Path, default=gpu.RESULTS / "decode.csv", help="rows to read")
    add("--commit", default=None, help="the run of this commit; default: the last run")
    add("--shape", type=gpu.Shape.parse, default=FLAGSHIP, help="of the table, B:L:Hk:g:D")
    add("--plots", type=Path, default=None, metavar="FOLDER", help="draw plots into it")
    add("--into", type=Path, default=None, metavar="FILE", help="replace the table in a document")


def run(arguments: argparse.Namespace) -> int:
    try:
        points = read(arguments.csv, arguments.commit)
        text = table(points, arguments.shape)
        if arguments.into is None:
            print(text)
        else:
            document = arguments.into.read_text()
            arguments.into.write_text(replaced(document, text))
    except (OSError, ValueError) as error:
        print(f"bench report: {error}", file=sys.stderr)
        return 1
    if arguments.plots is not None:
        for path in plot(points, arguments.plots):
            print(path)
    return 0


def read(path: Path, commit: str | None = None) -> list[Point]:
    """The points of tq_torch of one run, in the order of the file.

    Raises:
        ValueError: the file has other columns, or no such run.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != gpu.COLUMNS:
            raise ValueError(f"{path}: has other columns")
        rows = [r for r in reader if commit in (None, r["commit"])]
    names = ("date", "commit", "device")
    rows = [r for r in rows if all(r[n] == rows[-1][n] for n in names)]
    points = [
        Point(
            gpu.shape_of(r),
            r["preset"],
            int(r["page_size"]),
            r["order"],
            float(r["us_median"]),
            float(r["ratio_to_best_bf16"]),
            int(r["cache_bytes"]),
        )
        for r in rows
        if r["provider"] == "tq_torch" and r["ratio_to_best_bf16"]
    ]
    if not points:
        which = f"the run of {commit}" if commit else "the last run"
        raise ValueError(f"{path}: no rows of tq_torch beside bf16 in {which}")
    return points


def fastest(points: Iterable[Point]) -> dict[tuple[gpu.Shape, str], Point]:
    """Of each shape and preset the best page size and order; the last row where rows repeat."""
    latest = {(p.shape, p.preset, p.page_size, p.order): p for p in points}
    slowest_first = sorted(latest.values(), key=lambda p: -p.us)
    return {(p.shape, p.preset): p for p in slowest_first}


def table(points: list[Point], shape: gpu.Shape) -> str:
    """Markdown of one shape: a preset a row, the fastest first, a column a page size.

    Raises:
        ValueError: the run has no such shape.
    """
    points = [p for p in points if p.shape == shape]
    if not points:
        raise ValueError(f"shape {':'.join(map(str, shape))} is not in the run")
    sizes = sorted({p.page_size for p in points}, reverse=True)
    best = fastest(points)
    by_size = {size: fastest(p for p in points if p.page_size == size) for size in sizes}
    head = ["preset"]
    for size in sizes:
        head += [f"us, {size}-token pages", "against bf16", "of its roofline"]
    lines = [head, ["---"] * len(head)]
    for _, preset in sorted(best, key=lambda key: best[key].us):
        line = [f"`{preset}`"]
        for size in sizes:
            point = by_size[size].get((shape, preset))
            line += (
                [f"{point.us:.0f}", f"{point.ratio:.2f}x", f"{point.roofline:.0%}"]
                if point
                else [""] * 3
            )
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replaced(document: str, text: str) -> str:
    """``document`` with ``text`` between the two marks.

    Raises:
        ValueError: the marks are not there once each, in order.
    """
    before, found, rest = document.partition(START)
    _, closed, after = rest.partition(END)
    if not found or not closed or START in rest or END in after:
        raise ValueError(f"expected {START!r} and {END!r}, once each")
    return f"{before}{START}\n{text}\n{END}{after}"


def plot(points: list[Point], folder: Path) -> list[Path]:
    """Draws speed against bf16 and the share of the roofline over the length; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    best = fastest(points)
    folder.mkdir(parents=True, exist_ok=True)
    what = {
        "ratio": "times faster than the fastest bf16 attention",
        "roofline": "share of what bf16's bandwidth would give",
    }
    paths = []
    for field, label in what.items():
        groups = sorted({(s.B, s.Hk, s.g, s.D) for s, _ in best})
        figure, grid = pyplot.subplots(
            1, len(groups), figsize=(1 + 4 * len(groups), 4), sharey=True, squeeze=False
        )
        for group, axes in zip(groups, grid[0], strict=True):
            for preset in sorted({p for _, p in best}):
                line = sorted(
                    (s.L, getattr(p, field))
                    for (s, name), p in best.items()
                    if name == preset and (s.B, s.Hk, s.g, s.D) == group
                )
                if line:
                    axes.plot(*zip(*line, strict=True), "o-", label=preset)
            axes.axhline(1, color="grey", linewidth=1)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            axes.set_ylim(bottom=0)
            axes.set_xlabel("tokens a sequence")
            axes.set_title("B={}, Hk={}, g={}, D={}".format(*group))
            axes.grid(alpha=0.3)
        grid[0][0].set_ylabel(label)
        grid[0][-1].legend()
        figure.tight_layout()
        paths.append(folder / f"decode-{field}.png")
        figure.savefig(paths[-1], dpi=140)
        pyplot.close(figure)
    return paths
