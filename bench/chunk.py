"""Chunks of new tokens over a cached prefix on a GPU, beside bf16 attention over raw keys.

A sequence's tokens include its chunk. Bottom-right causal masks: torch's FlashAttention takes
``causal_lower_right``, cuDNN a bf16 tensor of 0 and -inf, FlashInfer its own flag, with 16-token
pages. All read each KV head once for its group. Gate and timing are those of `decode`.
"""

from __future__ import annotations

import argparse

from bench import gpu
from bench.decode import add_common_arguments, add_grid_arguments, grid, measure

HELP = "chunked prefill over a packed prefix on a GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_grid_arguments(parser, "4bit", "1:32768:8:4:128")
    lens = {"type": gpu.listed(gpu.positive), "help": "new tokens, comma-separated"}
    parser.add_argument("--query-lens", default="64,2048", **lens)
    add_common_arguments(parser, "chunk.csv")


def run(arguments: argparse.Namespace) -> int:
    if not gpu.require_gpu():
        return 2
    return measure(grid(arguments, arguments.query_lens), arguments, check=False)
