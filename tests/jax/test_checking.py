"""The checking mode of tq_jax, of concrete and of traced arrays."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tq_jax
from tests.cases import PRESET_CONFIGS
from tq_core import CacheLayout, Codec

LAYOUT = CacheLayout(PRESET_CONFIGS["4bit"], 2, 64, 16)
WHAT = {"layout": LAYOUT, "codec": Codec(LAYOUT.config, 64)}
NAN, I32 = float("nan"), jnp.int32
CACHE = jnp.zeros(LAYOUT.shape(4), jnp.uint8)
KEY, QUERY = jnp.ones((3, 2, 64)), jnp.ones((3, 8, 64))
TABLE, LENS = jnp.zeros((2, 2), I32), jnp.full(2, 5, I32)
ARGUMENTS = {
    "store": {"key": KEY, "value": KEY, "cache": CACHE, "slot_mapping": jnp.arange(3)},
    "attention": {
        "query": QUERY, "cache": CACHE, "block_table": TABLE, "seq_lens": LENS,
        "query_start_loc": jnp.array([0, 1, 3], I32),
    },
    "decode_attention": {
        "query": QUERY[:2], "cache": CACHE, "block_table": TABLE, "seq_lens": LENS
    },
    "dequantize": {"cache": CACHE, "block_table": TABLE, "seq_lens": LENS},
}  # fmt: skip
WRONG = [
    ("store", {"key": KEY.at[1, 0, 5].set(NAN)}, r"key: .* got nan at \[1, 0, 5\] and 1 such"),
    (
        "store",
        {"value": KEY.at[2, 1].set(-jnp.inf).astype(jnp.bfloat16)},
        r"value: .* got -inf at \[2, 1, 0\] and 64 such",
    ),
    ("store", {"slot_mapping": jnp.array([5, 2, 5])}, "slot_mapping: .* got 5 at index 2 and 0"),
    ("store", {"slot_mapping": jnp.array([5, 64, 0])}, "slot_mapping: .* got 64 at index 1"),
    ("attention", {"query": QUERY.at[2, 7, 9].set(NAN)}, r"query: .* got nan at \[2, 7, 9\]"),
    ("attention", {"query_start_loc": jnp.array([0, 2, 1], I32)}, "query_start_loc: .*ascending"),
    ("attention", {"query_start_loc": jnp.array([0, 2, 4], I32)}, "query_start_loc: expected rows"),
    ("attention", {"seq_lens": jnp.array([5, 33], I32)}, "seq_lens: .* got 33 for sequence 1"),
    ("attention", {"block_table": TABLE.at[1, 0].set(4)}, "block_table: .* sequence 1, .* got 4"),
    ("decode_attention", {"block_table": TABLE - 1}, "block_table: .* sequence 0, .* got -1"),
    ("dequantize", {"seq_lens": jnp.array([-3, 5], I32)}, "seq_lens: .* -3 for sequence 0"),
    ("dequantize", {"block_table": TABLE + 4}, "block_table: .* got 4"),
]


def function(name, **options):
    options |= WHAT | ({"dtype": "float32"} if name == "dequantize" else {})
    return partial(getattr(tq_jax, name), **options)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_is_right_passes(name):
    arguments = ARGUMENTS[name]
    want = jax.tree.leaves(function(name)(**arguments))
    for run in (function(name, check=True), jax.jit(function(name, check=True))):
        for have, array in zip(jax.tree.leaves(run(**arguments)), want, strict=True):
            assert np.array_equal(have, array)


@pytest.mark.parametrize("name, changes, message", WRONG)
def test_concrete_arrays(name, changes, message, monkeypatch):
    arguments = ARGUMENTS[name] | changes
    jax.block_until_ready(function(name)(**arguments))
    with pytest.raises(ValueError, match=f"^{message}"):
        function(name, check=True)(**arguments)
    monkeypatch.setenv("TQ_CHECK", "1")
    with pytest.raises(ValueError, match=f"^{message}"):
        function(name)(**arguments)
    jax.block_until_ready(function(name, check=False)(**arguments))


@pytest.mark.parametrize("name, changes, message", WRONG)
def test_traced_arrays(name, changes, message):
    run = jax.jit(function(name, check=True))
    jax.block_until_ready(run(**ARGUMENTS[name]))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=f"ValueError: {message}"):
        jax.block_until_ready(run(**ARGUMENTS[name] | changes))
    jax.block_until_ready(run(**ARGUMENTS[name]))


def test_bounds():
    for name, bound in (("max_seq_len", 4), ("max_query_len", 1)):
        with pytest.raises(ValueError, match=f"^{name}: expected an upper bound"):
            function("attention", check=True, **{name: bound})(**ARGUMENTS["attention"])


def test_the_environment_counts_when_a_function_is_traced(monkeypatch):
    wrong = ARGUMENTS["store"] | {"key": KEY * NAN}
    before = jax.jit(function("store"))
    jax.block_until_ready(before(**wrong))
    monkeypatch.setenv("TQ_CHECK", "1")
    jax.block_until_ready(before(**wrong))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="key: expected finite"):
        jax.block_until_ready(jax.jit(function("store"))(**wrong))


def test_some_arrays_are_traced():
    run = jax.jit(lambda key: function("store", check=True)(**ARGUMENTS["store"] | {"key": key}))
    jax.block_until_ready(run(KEY))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="key: expected finite"):
        jax.block_until_ready(run(KEY * NAN))
    slots = np.array([0, 1, 2**32 + 2])
    with pytest.raises(ValueError, match=r"^slot_mapping: expected slots below 64"):
        function("store", check=True)(**ARGUMENTS["store"] | {"slot_mapping": slots})


def test_a_loop_with_a_donated_cache():
    @partial(jax.jit, donate_argnums=0)
    def fill(cache, keys, slots):
        def step(cache, x):
            return function("store", check=True)(x[0], 2 * x[0], cache, x[1]), None

        return jax.lax.scan(step, cache, (keys, slots))[0]

    keys, slots = jnp.ones((4, 3, 2, 64)), jnp.arange(12).reshape(4, 3)
    rows = keys.reshape(12, 2, 64)
    want = function("store")(rows, 2 * rows, CACHE, jnp.arange(12))
    assert np.array_equal(fill(CACHE.copy(), keys, slots), want)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="got 9 at index 2 and 0"):
        jax.block_until_ready(fill(CACHE.copy(), keys, slots.at[3, 2].set(9)))


def test_rows_that_are_skipped_or_pad_may_hold_anything():
    key = KEY.at[1].set(NAN)
    slots = jnp.array([4, -1, 2])
    store = {"key": key, "value": key, "cache": CACHE, "slot_mapping": slots}
    jax.block_until_ready(jax.jit(function("store", check=True))(**store))
    starts = jnp.array([0, 1, 2], I32)
    padded = ARGUMENTS["attention"] | {"query": QUERY.at[2].set(NAN), "query_start_loc": starts}
    jax.block_until_ready(jax.jit(function("attention", check=True))(**padded))


def test_calls_without_rows():
    none = {"key": KEY[:0], "value": KEY[:0], "cache": CACHE, "slot_mapping": jnp.arange(0)}
    jax.block_until_ready(jax.jit(function("store", check=True))(**none))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_argument_is_a_bool(name):
    with pytest.raises(TypeError, match=r"^check: expected a bool or None, got 1"):
        function(name, check=1)(**ARGUMENTS[name])
