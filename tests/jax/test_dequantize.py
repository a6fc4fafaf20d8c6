from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tq_jax
from tests.cases import ATTENTION_CASES, CONFIGS, PRESET_CONFIGS, TOLERANCE, AttentionCase
from tests.jax.helpers import attention_arrays, temp_bytes, to_float64
from tq_core import CacheLayout, Codec, reference

#: Every pair of formats, and every codec with offsets, transforms or scales. No window: the
#: entries before it are -1.
CASES = [
    replace(case, sliding_window=None)
    for i, case in enumerate(ATTENTION_CASES)
    if i < len(CONFIGS) or str(case.extras)
]
CASE = AttentionCase()


def pages(case):
    arrays = attention_arrays(case)
    return arrays["cache"], arrays["block_table"], arrays["seq_lens"]


def assert_dense(actual, want, tolerance):
    for name, have, right in zip(("keys", "values"), actual, want, strict=True):
        have = to_float64(have)
        assert have.shape == right.shape
        assert np.isfinite(have).all(), name
        error = np.abs(have - right)
        assert np.linalg.norm(error) <= tolerance * np.linalg.norm(right), name
        assert error.max() <= 2 * tolerance * np.abs(right).max(), name
        assert not have[~right.any((2, 3))].any(), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dequantize(case):
    arguments = pages(case)
    options = {"layout": case.layout, "codec": case.codec}
    actual = tq_jax.dequantize(*arguments, **options, dtype=case.dtype)
    assert {a.dtype.name for a in actual} == {case.dtype}
    assert_dense(actual, reference.dequantize(*arguments, **options), TOLERANCE[case.dtype])


def test_lengths_beyond_the_table_and_below_zero():
    cache, table, lengths = pages(CASE)
    table = np.maximum(table, 0)
    lengths = np.array([-3, 10**6, 2**31 - 1, -(2**31), 5, 0, 17], np.int32)
    options = {"layout": CASE.layout, "codec": CASE.codec}
    actual = tq_jax.dequantize(cache, table, lengths, **options, dtype=jnp.float32)
    capacity = table.shape[1] * CASE.page_size
    cut = np.clip(lengths, 0, capacity).astype(np.int32)
    want = tq_jax.dequantize(cache, table, cut, **options, dtype=jnp.float32)
    for have, right in zip(actual, want, strict=True):
        assert np.array_equal(have, right, equal_nan=True)
        assert not np.asarray(have)[[0, 3, 5]].any()


def test_tiles_that_do_not_divide_the_table(rng):
    """One page of 1000 tokens: the last tile overlaps the one before it."""
    layout = CacheLayout(PRESET_CONFIGS["3bit"], 2, 64, 1000)
    options = {"layout": layout, "codec": Codec(layout.config, 64)}
    cache = np.full(layout.shape(2), 0xFF, np.uint8)
    key, value = rng.normal(size=(2, 987, 2, 64)).astype(np.float32)
    reference.store(key, value, cache, np.arange(1000, 1987), **options)
    arguments = cache, np.array([[1]], np.int32), np.array([987], np.int32)
    actual = tq_jax.dequantize(*arguments, **options, dtype=np.float32)
    assert_dense(actual, reference.dequantize(*arguments, **options), 1e-3)


@pytest.mark.parametrize("empty", ["sequences", "table", "pages"])
def test_empty_inputs(empty):
    layout = CASE.layout
    seqs, width = (0 if empty == "sequences" else 2), (0 if empty == "table" else 3)
    keys, values = tq_jax.dequantize(
        tq_jax.empty_cache(layout, 0 if empty == "pages" else 2),
        jnp.full((seqs, width), -1, jnp.int32),
        jnp.full(seqs, 5 if empty == "pages" else 0, jnp.int32),
        layout=layout,
        codec=CASE.codec,
        dtype=jnp.float16,
    )
    assert keys.shape == values.shape == (seqs, width * 16, 2, 64)
    assert not keys.any()
    assert not values.any()


@pytest.mark.parametrize("page_size", [16, 1 << 15])
def test_scratch_does_not_grow_with_the_result(page_size):
    layout = CacheLayout(PRESET_CONFIGS["4bit"], 8, 128, page_size)
    codec = Codec(layout.config, 128)
    call = partial(tq_jax.dequantize, layout=layout, codec=codec, dtype=jnp.bfloat16)
    spec = jax.ShapeDtypeStruct

    def scratch(seqs, tokens):
        width = tokens // page_size
        return temp_bytes(
            call,
            spec(layout.shape(seqs * width), np.uint8),
            spec((seqs, width), np.int32),
            spec((seqs,), np.int32),
        )

    short, long = scratch(1, 1 << 15), scratch(4, 1 << 17)
    assert long <= short + 4096
    assert long <= 16 << 20
