"""tq_jax runs without the other framework, and its examples run."""

from __future__ import annotations

import doctest

import pytest

import tq_jax
from tests.isolation import run_without
from tq_jax import api

OTHERS = ("torch", "tq_torch", "triton", "jax_triton")
USE = """
import jax.numpy as jnp, tq_jax
from tq_core import CacheLayout, Codec, QuantConfig
layout = CacheLayout(QuantConfig.preset("4bit"), 1, 8, 4)
kv, slots = jnp.ones((2, 1, 8)), jnp.arange(2, dtype=jnp.int32)
codec = Codec(layout.config, 8)
tq_jax.store(kv, kv, tq_jax.empty_cache(layout, 1), slots, layout=layout, codec=codec)
"""


@pytest.mark.parametrize("name", ["torch", "tq_torch"])
def test_the_block_blocks(name):
    result = run_without(OTHERS, f"import {name}")
    assert f"blocked: {name}" in result.stderr


def test_import_and_use_without_torch():
    result = run_without(OTHERS, USE)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("code, fails", [("import tq_jax", False), (USE, True)])
def test_import_starts_no_device(code, fails):
    """JAX has no such platform, and says so when it starts one."""
    result = run_without(OTHERS, code, JAX_PLATFORMS="nowhere")
    assert bool(result.returncode) == fails, result.stderr
    assert ("nowhere" in result.stderr) == fails


def test_every_public_function_is_documented_with_an_example():
    for name in tq_jax.__all__:
        assert ">>> " in getattr(tq_jax, name).__doc__, name


def test_examples_run():
    result = doctest.testmod(api)
    assert result.attempted > 20
    assert not result.failed
