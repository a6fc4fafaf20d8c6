from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tq_jax
from tests.cases import (
    ATTENTION_CASES,
    DECODE,
    PREFIX_HIT,
    PRESET_CONFIGS,
    AttentionCase,
    assert_close,
    expected,
)
from tests.jax.helpers import FAST_COMPILE, attention_arrays, temp_bytes, to_float64
from tq_core import CacheLayout, Codec, reference
from tq_jax import native

#: A window, so that some block-table entries of longer sequences are -1 at both ends.
CASE = AttentionCase(sliding_window=16, sinks=True)


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention(case):
    arrays = attention_arrays(case)
    call = partial(tq_jax.attention, **case.options, return_lse=True)
    out, lse = jax.jit(call, compiler_options=FAST_COMPILE)(**arrays)
    assert out.dtype == arrays["query"].dtype
    assert lse.dtype == jnp.float32
    assert_close(to_float64(out), lse, case)


@pytest.mark.parametrize("preset", PRESET_CONFIGS)
def test_attention_eagerly_with_default_compilation(preset):
    case = AttentionCase(PRESET_CONFIGS[preset], dtype="bfloat16", sinks=True, page_size=3)
    out, lse = tq_jax.attention(**attention_arrays(case), **case.options, return_lse=True)
    assert_close(to_float64(out), lse, case)


@pytest.mark.parametrize("case", [c for c in ATTENTION_CASES if c.is_decode], ids=str)
def test_decode_attention(case):
    arrays = attention_arrays(case)
    del arrays["query_start_loc"]
    out, lse = tq_jax.decode_attention(**arrays, **case.options, return_lse=True)
    assert out.dtype == arrays["query"].dtype
    assert_close(to_float64(out), lse, case)


def test_lse_is_returned_on_request_only():
    arrays = attention_arrays(CASE)
    out = tq_jax.attention(**arrays, **CASE.options)
    assert_close(to_float64(out), None, CASE)


@pytest.mark.parametrize("max_query_len", [0, 1, 3, 10**6])
def test_max_query_len_does_not_change_the_result(max_query_len):
    out, lse = tq_jax.attention(
        **attention_arrays(CASE), **CASE.options, max_query_len=max_query_len, return_lse=True
    )
    assert_close(to_float64(out), lse, CASE)


@pytest.mark.parametrize("hint", [{"max_seq_len": 1}, {"num_kv_splits": 7}], ids=str)
def test_other_hints_do_not_change_a_bit(hint):
    call = partial(tq_jax.attention, **attention_arrays(CASE), **CASE.options, return_lse=True)
    for plain, hinted in zip(call(), call(**hint), strict=True):
        assert np.array_equal(plain, hinted)


def test_two_runs_are_bit_equal():
    case = ATTENTION_CASES[0]
    call = partial(tq_jax.attention, **attention_arrays(case), **case.options, return_lse=True)
    for first, second in zip(call(), call(), strict=True):
        assert np.array_equal(first, second)


@pytest.mark.parametrize("work_bytes", [1, 1 << 20])
def test_blocks_one_by_one_and_several_at_a_time(monkeypatch, work_bytes):
    """Batches of every size run the same blocks; the last group here is not full."""
    case = replace(
        ATTENTION_CASES[0], batch=(*DECODE, *PREFIX_HIT), num_kv_heads=1, seed=work_bytes
    )
    monkeypatch.setattr(native, "_WORK_BYTES", work_bytes)
    out, lse = tq_jax.attention(**attention_arrays(case), **case.options, return_lse=True)
    assert_close(to_float64(out), lse, case)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_a_query_that_is_not_finite_spoils_its_own_row_and_head(bad):
    arrays = attention_arrays(CASE)
    options = {**CASE.options, "return_lse": True}
    out, lse = tq_jax.attention(**arrays, **options)
    row, head = 7, 5
    assert np.abs(expected(CASE)[0][row, head]).max() > 0
    arrays["query"] = arrays["query"].at[row, head, 3].set(bad)
    spoilt, spoilt_lse = tq_jax.attention(**arrays, **options)
    assert np.isnan(spoilt[row, head]).all()
    others = np.ones(lse.shape, bool)
    others[row, head] = False
    assert np.array_equal(np.asarray(out)[others], np.asarray(spoilt)[others])
    assert np.array_equal(np.asarray(lse)[others], np.asarray(spoilt_lse)[others])


@pytest.mark.parametrize("preset", ["4bit", "k8v8", "3bit_hq"])
@pytest.mark.parametrize("unused", [-1, -(2**31), 2**31 - 1])
def test_unused_bytes_and_entries_do_not_change_a_bit(preset, unused, rng):
    case = AttentionCase(PRESET_CONFIGS[preset], sliding_window=16)
    arrays = attention_arrays(case)
    out, lse = tq_jax.attention(**arrays, **case.options, return_lse=True)
    cache, table, layout = arrays["cache"], arrays["block_table"], case.layout
    used = np.zeros((len(cache), layout.page_bytes), bool)
    for row, (rows, length) in zip(table, case.batch, strict=True):
        for token in range(max(0, length - rows - 15), length):
            page, slot = row[token // 16], token % 16
            for index in (layout.key_index(), layout.value_index(), layout.meta_index()):
                used[page, index[slot]] = True
            used[page, layout.meta_index()[slot] + 1] = True
    noise = rng.integers(0, 256, cache.shape, dtype=np.uint8)
    arrays["cache"] = np.where(used.reshape(cache.shape), cache, noise)
    assert (arrays["cache"] != cache).any()
    arrays["block_table"] = np.where(table < 0, unused, table).astype(np.int32)
    other, other_lse = tq_jax.attention(**arrays, **case.options, return_lse=True)
    assert np.array_equal(out, other)
    assert np.array_equal(lse, other_lse)


def test_rows_that_no_sequence_owns_are_zero():
    arrays = attention_arrays(CASE)
    query = jnp.pad(arrays["query"], ((3, 2), (0, 0), (0, 0)), constant_values=jnp.nan)
    arrays["query"], arrays["query_start_loc"] = query, arrays["query_start_loc"] + 3
    out, lse = tq_jax.attention(**arrays, **CASE.options, return_lse=True)
    assert_close(to_float64(out[3:-2]), lse[3:-2], CASE)
    around = np.r_[0:3, len(query) - 2 : len(query)]
    assert not np.asarray(out)[around].any()
    assert np.array_equal(
        np.asarray(lse)[around], np.broadcast_to(arrays["sinks"], (5, len(arrays["sinks"])))
    )


@pytest.mark.parametrize("empty", ["rows", "sequences", "table", "pages"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_empty_inputs(empty, sinks):
    case = AttentionCase()
    layout, rows = case.layout, 0 if empty == "rows" else 2
    seqs = 0 if empty == "sequences" else 1
    sink = jnp.arange(8, dtype=jnp.float32) if sinks else None
    out, lse = tq_jax.attention(
        jnp.ones((rows, 8, 64)),
        tq_jax.empty_cache(layout, 0 if empty == "pages" else 2),
        jnp.zeros((seqs, 0 if empty == "table" else 1), jnp.int32),
        jnp.full(seqs, 5, jnp.int32),
        jnp.arange(seqs + 1, dtype=jnp.int32) * rows,
        layout=layout,
        codec=case.codec,
        sinks=sink,
        return_lse=True,
    )
    assert out.shape == (rows, 8, 64)
    assert not out.any()
    nothing = np.arange(8.0) if sinks else np.full(8, -np.inf)
    assert np.array_equal(lse, np.broadcast_to(nothing, (rows, 8)))


def test_one_large_page(rng):
    """A page larger than a tile: tiles are made of tokens, not of pages."""
    layout = CacheLayout(PRESET_CONFIGS["4bit"], 2, 64, 1000)
    codec = Codec(layout.config, 64)
    cache = np.full(layout.shape(2), 0xFF, np.uint8)
    key, value = rng.normal(size=(2, 900, 2, 64)).astype(np.float32)
    reference.store(key, value, cache, np.arange(1000, 1900), layout=layout, codec=codec)
    arguments = (
        rng.normal(size=(5, 4, 64)).astype(np.float32),
        cache,
        np.array([[1]], np.int32),
        np.array([900], np.int32),
        np.array([0, 5], np.int32),
    )
    want = reference.attention(*arguments, layout=layout, codec=codec)
    out = tq_jax.attention(*arguments, layout=layout, codec=codec)
    error = np.abs(to_float64(out) - want)
    assert np.linalg.norm(error) <= 1e-3 * np.linalg.norm(want)
    assert error.max() <= 2e-3 * np.abs(want).max()


@pytest.mark.parametrize("rows", [1, 512])
@pytest.mark.parametrize("page_size", [16, 1 << 16])
def test_scratch_does_not_grow_with_the_sequence(rows, page_size):
    layout = CacheLayout(PRESET_CONFIGS["4bit"], 8, 128, page_size)
    spec = jax.ShapeDtypeStruct
    call = partial(tq_jax.attention, layout=layout, codec=Codec(layout.config, 128))

    def scratch(max_tokens):
        pages = max_tokens // page_size
        return temp_bytes(
            call,
            spec((rows, 32, 128), np.float32),
            spec(layout.shape(pages), np.uint8),
            spec((1, pages), np.int32),
            spec((1,), np.int32),
            spec((2,), np.int32),
        )

    short, long = scratch(1 << 16), scratch(1 << 20)
    assert long <= short + 4096
    assert long <= 16 << 20


def test_x64_mode_gives_the_same_result():
    with jax.enable_x64(True):
        out, lse = tq_jax.attention(**attention_arrays(CASE), **CASE.options, return_lse=True)
        assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)
    assert_close(to_float64(out), lse, CASE)
