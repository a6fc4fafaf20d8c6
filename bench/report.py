"""Tables and plots of what ``python -m bench decode`` has measured; needs no GPU.

The rows of one run are used, the last of the file unless ``--commit`` names another: ratios compare
what ran side by side. Without options the table is printed.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from bench import gpu

HELP = "table and plots of recorded decode runs"
FLAGSHIP = "64:8192:8:4:128"
#: What surrounds a table in a document: that of one shape, and that of the 4-bit grid.
MARKS = {
    name: tuple(f"<!-- {word}: python -m bench report{name} -->" for word in ("begin", "end"))
    for name in ("", ", grid")
}


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
    add("--into", type=Path, default=None, metavar="FILE", help="replace tables in a document")


def run(arguments: argparse.Namespace) -> int:
    try:
        points = read(arguments.csv, arguments.commit)
        tables = {"": table(points, arguments.shape), ", grid": grid(points)}
        if arguments.into is None:
            print(*filter(None, tables.values()), sep="\n\n")
        else:
            document = arguments.into.read_text()
            arguments.into.write_text(replaced(document, tables))
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


def grid(points: list[Point], preset: str = "4bit") -> str:
    """Markdown of ratios to bf16 of one preset: batches and lengths across, the rest down."""
    best = {s: p for (s, name), p in fastest(points).items() if name == preset}
    across = sorted({(s.B, s.L) for s in best})
    down = sorted({(-s.D, s.Hk, s.g) for s in best})
    names = [f"{B} x {L // 1024}k" if L % 1024 == 0 else f"{B} x {L}" for B, L in across]
    lines = [["D", "KV heads", "query heads of each", *names], ["---"] * (3 + len(across))]
    for minus_d, heads, group in down:
        shapes = [gpu.Shape(B, L, heads, group, -minus_d) for B, L in across]
        ratios = [f"{best[s].ratio:.2f}" if s in best else "" for s in shapes]
        lines.append([str(-minus_d), str(heads), str(group), *ratios])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if best else ""


def replaced(document: str, tables: Mapping[str, str]) -> str:
    """``document`` with each of ``tables`` between its marks, where it has those.

    Raises:
        ValueError: there are no marks at all, or not both of a pair once each, in order.
    """
    found_any = False
    for name, text in tables.items():
        start, end = MARKS[name]
        if start not in document and end not in document:
            continue
        before, found, rest = document.partition(start)
        _, closed, after = rest.partition(end)
        if not found or not closed or start in rest or end in after:
            raise ValueError(f"expected {start!r} and {end!r}, once each")
        document = f"{before}{start}\n{text}\n{end}{after}"
        found_any = True
    if not found_any:
        raise ValueError(f"expected {' and '.join(map(repr, MARKS['']))}, once each")
    return document


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
        groups = sorted(
            {(s.B, s.Hk, s.g, s.D) for s, _ in best}, key=lambda g: (-g[3], *g[1:3], g[0])
        )
        across = min(len(groups), 3)
        down = -(-len(groups) // across)
        figure, panels = pyplot.subplots(
            down, across, figsize=(1 + 4 * across, 3.6 * down), sharey=True, squeeze=False
        )
        for axes in panels.flat[len(groups) :]:
            axes.set_visible(False)
        for group, axes in zip(groups, panels.flat[: len(groups)], strict=True):
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
        for axes in panels[:, 0]:
            axes.set_ylabel(label)
        panels[0][0].legend()
        figure.tight_layout()
        paths.append(folder / f"decode-{field}.png")
        figure.savefig(paths[-1], dpi=140)
        pyplot.close(figure)
    return paths
