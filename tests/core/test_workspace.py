"""Scratch of a planned call is bounded, however long its sequences are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.kernels.plans import DEVICES, attention_plan
from tq_core.dispatch import MAX_SCRATCH_BYTES

LENGTHS = (1000, 40_000, 185_000, 1_000_000)


def scratch_bytes(plan) -> int:
    """Of all that the launches write besides the call's results."""
    buffers = {b.name: b for launch in plan.launches for b in launch.outputs}
    return sum(
        math.prod(b.shape) * (2 if b.dtype == "bfloat16" else np.dtype(b.dtype).itemsize)
        for name, b in buffers.items()
        if name not in ("out", "lse")
    )


@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("num_seqs, query_len, overrides", [
    (1, 1, {}), (64, 1, {}), (4, 8, {}), (1, 2048, {}), (4, 8, {"unpack": 1}),
    (1, 2048, {"unpack": 1}),
], ids=str)  # fmt: skip
def test_scratch_does_not_grow_with_the_prefix(target, num_seqs, query_len, overrides):
    shape = {"num_seqs": num_seqs, "query_len": query_len, "overrides": overrides}
    sizes = [scratch_bytes(attention_plan("4bit", target, seq_len=n, **shape)) for n in LENGTHS]
    # Partial sums or pieces of tokens; query and output in the codec's basis.
    rows = 4 * 128 * 32 * num_seqs * query_len
    assert max(sizes) <= 1.1 * MAX_SCRATCH_BYTES + 2 * rows


@pytest.mark.parametrize("target", DEVICES)
def test_splits_that_are_asked_for_do_not_grow_either(target):
    sizes = {
        scratch_bytes(attention_plan("4bit", target, seq_len=n, overrides={"num_splits": 128}))
        for n in LENGTHS
    }
    assert len(sizes) == 1


def test_the_sum_counts_partial_results():
    plan = attention_plan("4bit", overrides={"num_splits": 4})
    assert scratch_bytes(plan) >= 4 * 64 * 32 * 128 * 4
