"""jit, donation, control flow, shape evaluation, vmap and derivatives."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import tq_jax
from tests.cases import PRESET_CONFIGS, AttentionCase, assert_close
from tests.jax.helpers import attention_arrays, to_float64
from tq_core import CacheLayout, Codec, reference

LAYOUT = CacheLayout(PRESET_CONFIGS["4bit"], 2, 64, 16)
CODEC = Codec(LAYOUT.config, 64)
OPTIONS = {"layout": LAYOUT, "codec": CODEC}
SPEC = jax.ShapeDtypeStruct


def test_jit_of_everything_traced():
    case = AttentionCase(sliding_window=16, sinks=True)
    call = jax.jit(partial(tq_jax.attention, **case.options, return_lse=True))
    out, lse = call(**attention_arrays(case))
    assert_close(to_float64(out), lse, case)


def test_equal_codecs_and_layouts_do_not_compile_again():
    traces = []

    @partial(jax.jit, static_argnames=("layout", "codec"))
    def count(x, layout, codec):
        traces.append(1)
        return x

    for seed in (0, 0, 1):
        layout = CacheLayout(PRESET_CONFIGS["4bit"], 2, 64, 16)
        count(jnp.ones(1), layout=layout, codec=Codec(layout.config, 64, seed=seed))
    assert len(traces) == 2


def test_eager_calls_do_not_trace_again(rng):
    arrays = attention_arrays(AttentionCase())
    options = AttentionCase().options
    tq_jax.attention(**arrays, **options)
    with jax.log_compiles(False), jax.no_tracing():
        tq_jax.attention(**arrays, **options, max_seq_len=5)


@pytest.mark.parametrize(
    "heads, page_size", [(2, 16), (1, 16), (2, 1), (1, 1)], ids=lambda n: str(n)
)
@pytest.mark.parametrize("tokens", [4, 5000])
def test_a_donated_cache_is_updated_in_place(heads, page_size, tokens):
    layout = CacheLayout(PRESET_CONFIGS["k3v4"], heads, 64, page_size)
    store = partial(tq_jax.store, layout=layout, codec=Codec(layout.config, 64))
    shape = layout.shape((256 << 20) // layout.page_bytes)
    kv = SPEC((tokens, heads, 64), jnp.bfloat16)
    compiled = (
        jax.jit(store, donate_argnums=2)
        .lower(kv, kv, SPEC(shape, jnp.uint8), SPEC((tokens,), jnp.int32))
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == np.prod(shape)
    assert memory.temp_size_in_bytes <= 16 << 20
    text = compiled.as_text()
    assert re.search(r"input_output_alias=\{ \{\}: \(2, \{\}", text)
    flat = f"{shape[0]},{layout.page_bytes}"
    dense = ",".join(map(str, shape))
    assert not re.findall(rf"= u8\[(?:{flat}|{dense})\]\S* copy\(", text)


def steps(rng, count):
    """Keys, values and queries of ``count`` decode steps, and the pages of two sequences."""
    key, value = rng.normal(size=(2, count, 2, 2, 64)).astype(np.float32)
    query = rng.normal(size=(count, 2, 4, 64)).astype(np.float32)
    return key, value, query, np.array([[3, 0], [1, 4]], np.int32)


def decode_step(cache, position, key, value, query, table):
    slots = table[:, position // 16] * 16 + position % 16
    cache = tq_jax.store(key, value, cache, slots, **OPTIONS)
    lengths = jnp.full(2, position + 1, jnp.int32)
    return cache, tq_jax.decode_attention(query, cache, table, lengths, **OPTIONS)


def expected_steps(key, value, query, table):
    cache, outs = np.zeros(LAYOUT.shape(5), np.uint8), []
    for i, (k, v, q) in enumerate(zip(key, value, query, strict=True)):
        reference.store(k, v, cache, table[:, i // 16] * 16 + i % 16, **OPTIONS)
        lengths, starts = np.full(2, i + 1, np.int32), np.arange(3, dtype=np.int32)
        outs.append(reference.attention(q, cache, table, lengths, starts, **OPTIONS))
    return cache, np.stack(outs)


def assert_near(out, want):
    error = np.abs(to_float64(out) - want)
    assert np.linalg.norm(error) <= 1e-3 * np.linalg.norm(want)
    assert error.max() <= 2e-3 * np.abs(want).max()


def test_scan_carries_the_cache(rng):
    key, value, query, table = steps(rng, 20)

    @partial(jax.jit, donate_argnums=0)
    def run(cache, key, value, query):
        def body(cache, step):
            return decode_step(cache, *step, jnp.asarray(table))

        return lax.scan(body, cache, (jnp.arange(len(key)), key, value, query))

    cache, out = run(tq_jax.empty_cache(LAYOUT, 5), key, value, query)
    want_cache, want = expected_steps(key, value, query, table)
    assert np.array_equal(cache, want_cache)
    assert_near(out, want)
    large = SPEC(LAYOUT.shape(100_000), jnp.uint8)
    memory = run.lower(large, key, value, query).compile().memory_analysis()
    assert memory.alias_size_in_bytes == np.prod(large.shape)
    assert memory.temp_size_in_bytes <= 16 << 20


def test_while_loop_carries_the_cache(rng):
    key, value, query, table = steps(rng, 17)

    @jax.jit
    def run(key, value, query, count):
        def body(state):
            i, cache, _ = state
            cache, out = decode_step(cache, i, key[i], value[i], query[i], jnp.asarray(table))
            return i + 1, cache, out

        start = jnp.int32(0), tq_jax.empty_cache(LAYOUT, 5), jnp.zeros((2, 4, 64))
        return lax.while_loop(lambda state: state[0] < count, body, start)[1:]

    cache, out = run(key, value, query, 17)
    want_cache, want = expected_steps(key, value, query, table)
    assert np.array_equal(cache, want_cache)
    assert_near(out, want[-1])


def test_eval_shape():
    case = AttentionCase(dtype="bfloat16")
    arrays = {
        name: None if a is None else SPEC(a.shape, a.dtype)
        for name, a in attention_arrays(case).items()
    }
    call = partial(tq_jax.attention, **case.options, return_lse=True)
    out, lse = jax.eval_shape(call, **arrays)
    rows = arrays["query"].shape[0]
    assert (out.shape, out.dtype) == ((rows, 8, 64), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((rows, 8), jnp.float32)
    kv = SPEC((7, 2, 64), jnp.float16)
    cache = jax.eval_shape(
        partial(tq_jax.store, layout=case.layout, codec=case.codec),
        kv,
        kv,
        arrays["cache"],
        SPEC((7,), jnp.int32),
    )
    assert (cache.shape, cache.dtype) == (arrays["cache"].shape, jnp.uint8)


def test_vmap_over_layers(rng):
    """A cache a layer, one block table for all."""
    key, value = rng.normal(size=(2, 3, 20, 2, 64)).astype(np.float32)
    query = rng.normal(size=(3, 5, 4, 64)).astype(np.float32)
    slots = np.arange(20, dtype=np.int32)
    caches = jax.vmap(partial(tq_jax.store, **OPTIONS), (0, 0, 0, None))(
        key, value, jnp.zeros((3, *LAYOUT.shape(2)), jnp.uint8), slots
    )
    table, lengths = np.array([[0, 1], [1, 0]], np.int32), np.array([20, 9], np.int32)
    starts = np.array([0, 2, 5], np.int32)
    call = jax.vmap(partial(tq_jax.attention, **OPTIONS), (0, 0, None, None, None))
    out = call(query, caches, table, lengths, starts)
    for layer in range(3):
        cache = np.zeros(LAYOUT.shape(2), np.uint8)
        reference.store(key[layer], value[layer], cache, slots, **OPTIONS)
        assert np.array_equal(caches[layer], cache)
        want = reference.attention(query[layer], cache, table, lengths, starts, **OPTIONS)
        assert_near(out[layer], want)


def test_shard_map_over_heads(rng):
    """Loops start from values of the right type, also on a mesh of one device."""
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    key, value = rng.normal(size=(2, 20, 2, 64)).astype(np.float32)
    query = rng.normal(size=(5, 4, 64)).astype(np.float32)
    slots, table = np.arange(20, dtype=np.int32), np.array([[0, 1]], np.int32)
    lengths, starts = np.array([20], np.int32), np.array([0, 5], np.int32)

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(None, "heads"), P(None, "heads"), P(None, "heads"), P("heads")),
        out_specs=(P(None, "heads"), P(None, None, "heads"), P("heads")),
    )
    def run(key, value, query, caches):
        cache = tq_jax.store(key, value, caches[0], slots, **OPTIONS)
        out = tq_jax.attention(query, cache, table, lengths, starts, **OPTIONS)
        keys, _ = tq_jax.dequantize(cache, table, lengths, **OPTIONS, dtype=jnp.float32)
        return out, keys, cache[None]

    caches = jnp.zeros((1, *LAYOUT.shape(2)), jnp.uint8)
    out, keys, caches = run(key, value, query, caches)
    cache = np.zeros(LAYOUT.shape(2), np.uint8)
    reference.store(key, value, cache, slots, **OPTIONS)
    assert np.array_equal(caches[0], cache)
    assert_near(out, reference.attention(query, cache, table, lengths, starts, **OPTIONS))
    assert_near(keys, reference.dequantize(cache, table, lengths, **OPTIONS)[0])


TABLE, LENGTHS = jnp.array([[1]], jnp.int32), jnp.array([5], jnp.int32)
REFUSAL = "inference-only and has no derivative.*stop_gradient"


def loss(query, sinks=None):
    cache = tq_jax.empty_cache(LAYOUT, 2)
    return tq_jax.decode_attention(query, cache, TABLE, LENGTHS, sinks=sinks, **OPTIONS).sum()


QUERY = jnp.ones((1, 4, 64))


@pytest.mark.parametrize(
    "derive",
    [
        lambda: jax.grad(loss)(QUERY),
        lambda: jax.grad(jax.jit(loss))(QUERY),
        lambda: jax.grad(loss, 1)(QUERY, jnp.zeros(4)),
        lambda: jax.vjp(loss, QUERY),
        lambda: jax.jvp(loss, (QUERY,), (QUERY,)),
        lambda: jax.jacfwd(loss)(QUERY),
    ],
    ids=["grad", "grad_of_jit", "grad_of_sinks", "vjp", "jvp", "jacfwd"],
)
def test_derivatives_of_attention_are_refused(derive):
    with pytest.raises(TypeError, match=f"attention over a quantised cache is {REFUSAL}"):
        derive()


def test_derivatives_through_store_are_refused():
    def through_keys(key):
        cache = tq_jax.empty_cache(LAYOUT, 2)
        slots = jnp.arange(16, 21, dtype=jnp.int32)
        cache = tq_jax.store(key, key, cache, slots, **OPTIONS)
        return tq_jax.decode_attention(QUERY, cache, TABLE, LENGTHS, **OPTIONS).sum()

    with pytest.raises(TypeError, match=f"store is {REFUSAL}"):
        jax.grad(through_keys)(jnp.ones((5, 2, 64)))


def test_stop_gradient_lets_the_rest_be_derived():
    def mixed(query):
        return loss(lax.stop_gradient(query)) + (query**2).sum()

    assert np.array_equal(jax.grad(mixed)(QUERY), 2 * QUERY)
