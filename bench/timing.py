"""Times functions side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch


class Timing(NamedTuple):
    """Milliseconds of one call: median, and the quarter and three-quarter points."""

    median: float
    low: float
    high: float


def side_by_side(
    functions: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 3
) -> dict[str, Timing]:
    """Times each function once a round, so that a disturbance meets all of them alike."""
    names = list(functions)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            functions[name]()
            elapsed = time.perf_counter() - start
            if number >= 0:
                samples[name].append(1e3 * elapsed)
    return {
        name: Timing(*(float(np.quantile(s, q)) for q in (0.5, 0.25, 0.75)))
        for name, s in samples.items()
    }


def fork_join(rounds: int = 40) -> float:
    """Median milliseconds of about the shortest operation that torch gives to all its threads."""
    x = torch.full((2**16,), -1.0)
    return side_by_side({"": x.exp_}, rounds)[""].median


def print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Prints columns, the first to the left and the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, tuple("-" * width for width in widths), *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
