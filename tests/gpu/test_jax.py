"""The Triton backend of tq_jax on a GPU, inside what models are made of."""

from __future__ import annotations

import os
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tq_jax
from tests.cases import STORE_CASES, AttentionCase, assert_close, make_store_inputs
from tests.jax.helpers import attention_arrays, to_float64
from tq_core import CacheLayout, Codec, QuantConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CONFIG = QuantConfig.preset("4bit")
LAYOUT = CacheLayout(CONFIG, 4, 128, 16)
CODEC = Codec(CONFIG, 128)
WHAT = {"layout": LAYOUT, "codec": CODEC}
TRITON = {**WHAT, "backend": "triton"}


def kv(num_tokens, seed=0):
    return jax.random.normal(jax.random.key(seed), (2, num_tokens, 4, 128), jnp.bfloat16)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_default_backend_is_triton(dtype):
    case = AttentionCase(CONFIG, 128, dtype=dtype)
    arrays = attention_arrays(case)
    out, lse = tq_jax.attention(**arrays, **case.options, return_lse=True)
    named = tq_jax.attention(**arrays, **case.options, backend="triton")
    assert np.array_equal(np.asarray(out), np.asarray(named))
    assert_close(to_float64(out), np.asarray(lse), case)


def test_a_donated_cache_is_written_in_place():
    key, value = kv(40)
    slots = jnp.arange(40, dtype=jnp.int32)
    write = jax.jit(partial(tq_jax.store, **TRITON), donate_argnums=2)
    cache = tq_jax.empty_cache(LAYOUT, 1000)
    compiled = write.lower(key, value, cache, slots).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20
    shape = ",".join(map(str, LAYOUT.shape(1000)))
    assert not re.findall(rf"u8\[{shape}\]\S* (copy|dynamic-update-slice)\(", compiled.as_text())
    address = cache.unsafe_buffer_pointer()
    new = write(key, value, cache, slots)
    assert new.unsafe_buffer_pointer() == address
    assert cache.is_deleted()


def test_without_donation_the_old_cache_stays():
    key, value = kv(40)
    slots = jnp.arange(40, dtype=jnp.int32)
    cache = tq_jax.empty_cache(LAYOUT, 10)
    new = tq_jax.store(key, value, cache, slots, **TRITON)
    assert not np.asarray(cache).any()
    again = jax.jit(partial(tq_jax.store, **TRITON))(key, value, cache, slots)
    assert np.array_equal(np.asarray(new), np.asarray(again))
    assert not np.asarray(cache).any()
    assert np.asarray(new).any()


def generate(loop, backend):
    """Twenty tokens, each stored and attending to those before it."""
    keys, values = kv(20, seed=1)
    queries = jax.random.normal(jax.random.key(2), (20, 1, 8, 128), jnp.float32)
    table = jnp.array([[3, 1]], jnp.int32)
    what = {**WHAT, "backend": backend}

    def step(i, cache):
        slots = table[0, i // 16][None] * 16 + i % 16
        key, value = (jax.lax.dynamic_slice_in_dim(x, i, 1) for x in (keys, values))
        cache = tq_jax.store(key, value, cache, slots, **what)
        query = jax.lax.dynamic_index_in_dim(queries, i, keepdims=False)
        return cache, tq_jax.decode_attention(query, cache, table, (i + 1)[None], **what)

    def with_scan(cache):
        count = jnp.arange(20, dtype=jnp.int32)
        return jax.lax.scan(lambda c, i: step(i, c), cache, count)

    def with_while(cache):
        def body(state):
            i, cache, outs = state
            cache, out = step(i, cache)
            return i + 1, cache, outs.at[i].set(out)

        start = (jnp.int32(0), cache, jnp.zeros((20, 1, 8, 128)))
        return jax.lax.while_loop(lambda state: state[0] < 20, body, start)[1:]

    def with_python(cache):
        outs = []
        for i in range(20):
            cache, out = step(jnp.int32(i), cache)
            outs.append(out)
        return cache, jnp.stack(outs)

    run = {"scan": with_scan, "while": with_while, "python": with_python}[loop]
    cache = tq_jax.empty_cache(LAYOUT, 4)
    if loop != "python":
        run = jax.jit(run, donate_argnums=0)
    return tuple(map(np.asarray, run(cache)))


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_a_cache_carried_by_a_loop(loop):
    cache, outs = generate(loop, "triton")
    want_cache, want = generate("python", "triton")
    assert np.array_equal(cache, want_cache)
    assert np.array_equal(outs, want)
    _, native = generate(loop, "native")
    assert np.linalg.norm(outs - native) <= 2e-3 * np.linalg.norm(native)


@pytest.mark.parametrize("enable_x64", [False, True])
def test_slots_outside_the_cache_are_skipped(enable_x64):
    with jax.enable_x64(enable_x64):
        key, value = kv(6)
        wide = jnp.int64 if enable_x64 else jnp.int32
        slots = jnp.array([0, -1, 160, 2**31 - 1, -(2**31), 7], wide)
        if enable_x64:
            slots = slots.at[3].set(2**40).at[4].set(-(2**40))
        cache = jnp.full(LAYOUT.shape(10), 255, jnp.uint8)
        new = tq_jax.store(key, value, cache, slots, **TRITON)
        good = jnp.array([0, 5])
        want = tq_jax.store(key[good], value[good], cache, slots[good], **TRITON)
        assert np.array_equal(np.asarray(new), np.asarray(want))


def test_nothing_to_do():
    cache = tq_jax.empty_cache(LAYOUT, 2)
    none = jnp.zeros((0, 4, 128))
    slots = jnp.zeros(0, jnp.int32)
    assert np.array_equal(tq_jax.store(none, none, cache, slots, **TRITON), cache)
    table, lens = jnp.zeros((0, 3), jnp.int32), jnp.zeros(0, jnp.int32)
    query = jnp.zeros((0, 8, 128))
    assert tq_jax.decode_attention(query, cache, table, lens, **TRITON).shape == (0, 8, 128)
    rows, starts = jnp.ones((3, 8, 128)), jnp.zeros(1, jnp.int32)
    out, lse = tq_jax.attention(rows, cache, table, lens, starts, return_lse=True, **TRITON)
    assert not np.asarray(out).any()
    assert np.isneginf(np.asarray(lse)).all()
    keys, _ = tq_jax.dequantize(cache, table, lens, dtype="float16", **TRITON)
    assert keys.shape == (0, 48, 4, 128)


def test_export():
    """A serialised function gives the same bits; whoever exports accepts the custom call."""
    from jax import export

    arrays = attention_arrays(AttentionCase(CONFIG, 128, dtype="bfloat16"))
    names = ("query", "cache", "block_table", "seq_lens", "query_start_loc")
    arrays = [jnp.asarray(arrays[n]) for n in names]
    case = AttentionCase(CONFIG, 128, dtype="bfloat16")
    call = jax.jit(partial(tq_jax.attention, layout=case.layout, codec=case.codec))
    checks = [
        export.DisabledSafetyCheck.custom_call(name)
        for name in ("triton_kernel_call", "triton_kernel_call_ffi")
    ]
    exported = export.export(call, platforms=["cuda"], disabled_checks=checks)(*arrays)
    again = export.deserialize(exported.serialize())
    assert np.array_equal(np.asarray(again.call(*arrays)), np.asarray(call(*arrays)))


def test_shapes_alone():
    case = AttentionCase(CONFIG, 128)
    arrays = attention_arrays(case)
    call = partial(tq_jax.attention, **case.options, backend="triton")
    assert jax.eval_shape(lambda a: call(**a), arrays).shape == arrays["query"].shape


def test_the_cache_of_triton_stays_where_it_was(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    from tq_jax import triton_call

    triton_call.jax_triton.cache_clear()
    assert triton_call.jax_triton().triton_call
    assert os.environ["TRITON_CACHE_DIR"] == "/somewhere"


@pytest.mark.parametrize("case", STORE_CASES[:1], ids=str)
def test_derivatives_and_batches_are_refused(case):
    inputs = make_store_inputs(case)
    what = {"layout": case.layout, "codec": case.codec, "backend": "triton"}

    def call(key):
        cache = tq_jax.store(key, inputs.value, inputs.cache, inputs.slot_mapping, **what)
        return cache.astype(jnp.float32).sum()

    with pytest.raises(TypeError, match="inference-only"):
        jax.grad(call)(jnp.asarray(inputs.key))
    with pytest.raises(NotImplementedError, match=r"no jax\.vmap axis"):
        jax.vmap(call)(jnp.stack([inputs.key] * 2))
