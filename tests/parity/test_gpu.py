"""The shared kernels on a GPU: the same bits from torch and from JAX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.cases import ATTENTION, LONG, STORE
from tests.parity.calls import assert_same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention(case):
    assert_same_bits("attention", case, "triton", "cuda")


@pytest.mark.parametrize("case", LONG, ids=str)
def test_long_sequences(case):
    assert_same_bits("attention", case, "triton", "cuda")


@pytest.mark.parametrize("case", ATTENTION[::6], ids=str)
def test_attention_in_three_splits(case):
    assert_same_bits("attention", case, "triton", "cuda", num_kv_splits=3)


@pytest.mark.parametrize("case", ATTENTION[::6], ids=str)
def test_batch_deterministic(case):
    plan = {"deterministic": "batch", "split_tokens": 64}
    assert_same_bits("attention", case, "triton", "cuda", plan=plan)


@pytest.mark.parametrize("case", [c for c in ATTENTION if c.is_decode], ids=str)
def test_decode(case):
    assert_same_bits("decode", case, "triton", "cuda")


@pytest.mark.parametrize("case", [c for c in ATTENTION if c.is_decode][::2], ids=str)
def test_decode_in_shares(case):
    assert_same_bits("decode", case, "triton", "cuda", plan={"parts": 40})


@pytest.mark.parametrize("case", [c for c in ATTENTION if c.sliding_window is None][::3], ids=str)
def test_dequantize(case):
    assert_same_bits("dequantize", case, "triton", "cuda")


@pytest.mark.parametrize("case", STORE, ids=str)
def test_store(case):
    assert_same_bits("store", case, "triton", "cuda")


SHARDS = 24


@pytest.mark.parametrize("shard", range(0, SHARDS, 4))
def test_two_processes(shard):
    """A quarter of the table, each framework in a process that has never seen the other."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.parity.digests", framework, str(shard), str(SHARDS)],
            stdout=subprocess.PIPE,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        for framework in ("torch", "jax")
    ]
    first, second = (json.loads(process.communicate(timeout=500)[0]) for process in running)
    assert len(first) > 5
    assert first == second
