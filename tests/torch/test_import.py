"""tq_torch runs without the other framework, and its examples run."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

import tq_torch
from tq_torch import api

ROOT = Path(__file__).parents[2]
BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "tq_jax", "jax_triton"):
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Block())
"""
USE = """
import torch, tq_torch
from tq_core import CacheLayout, Codec, QuantConfig
layout = CacheLayout(QuantConfig.preset("4bit"), 1, 8, 4)
kv, slots = torch.ones(2, 1, 8), torch.arange(2)
codec = Codec(layout.config, 8)
tq_torch.store(kv, kv, tq_torch.empty_cache(layout, 1), slots, layout=layout, codec=codec)
"""


def run(code):
    command = [sys.executable, "-W", "error", "-c", BLOCK + code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["jax", "tq_jax"])
def test_the_block_blocks(name):
    result = run(f"import {name}")
    assert f"blocked: {name}" in result.stderr


def test_import_and_use_without_jax():
    result = run(USE)
    assert result.returncode == 0, result.stderr


def test_every_public_function_is_documented_with_an_example():
    for name in tq_torch.__all__:
        assert ">>> " in getattr(tq_torch, name).__doc__, name


def test_examples_run():
    result = doctest.testmod(api)
    assert result.attempted > 10
    assert not result.failed
