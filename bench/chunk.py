"""Chunks of new tokens over a cached prefix on a GPU, beside bf16 attention over raw keys.

The prefix includes the chunk. SDPA gets keys and values repeated to the query heads, and FlashInfer
16-token pages. Gate and timing are those of `decode`.
"""

from __future__ import annotations

import argparse

from bench import gpu
from bench.decode import add_common_arguments, measure

HELP = "chunked prefill over a packed prefix on a GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--presets", default="4bit", help="comma-separated")
    parser.add_argument("--shapes", default="1:32768:8:4:128", help="B:L:Hk:g:D, comma-separated")
    parser.add_argument("--query-lens", default="64,2048", help="new tokens, comma-separated")
    parser.add_argument("--page-size", type=int, default=64, help="tokens a page")
    add_common_arguments(parser, "chunk.csv")


def run(arguments: argparse.Namespace) -> int:
    if not gpu.require_gpu():
        return 2
    items = [
        (gpu.Shape.parse(text), preset, arguments.page_size, "planes", int(rows), {})
        for text in arguments.shapes.split(",")
        for preset in arguments.presets.split(",")
        for rows in arguments.query_lens.split(",")
    ]
    return measure(items, arguments, check=False)
