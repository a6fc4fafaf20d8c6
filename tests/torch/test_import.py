"""tq_torch runs without the other framework, and its examples run."""

from __future__ import annotations

import doctest

import pytest

import tq_torch
from tests.isolation import run_without
from tq_torch import api

OTHERS = ("jax", "jaxlib", "tq_jax", "jax_triton")
USE = """
import torch, tq_torch
from tq_core import CacheLayout, Codec, QuantConfig
layout = CacheLayout(QuantConfig.preset("4bit"), 1, 8, 4)
kv, slots = torch.ones(2, 1, 8), torch.arange(2)
codec = Codec(layout.config, 8)
tq_torch.store(kv, kv, tq_torch.empty_cache(layout, 1), slots, layout=layout, codec=codec)
"""


@pytest.mark.parametrize("name", ["jax", "tq_jax"])
def test_the_block_blocks(name):
    result = run_without(OTHERS, f"import {name}")
    assert f"blocked: {name}" in result.stderr


def test_import_and_use_without_jax():
    result = run_without(OTHERS, USE)
    assert result.returncode == 0, result.stderr


def test_every_public_function_is_documented_with_an_example():
    for name in tq_torch.__all__:
        assert ">>> " in getattr(tq_torch, name).__doc__, name


def test_examples_run():
    result = doctest.testmod(api)
    assert result.attempted > 10
    assert not result.failed
