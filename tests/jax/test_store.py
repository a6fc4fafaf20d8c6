from __future__ import annotations

from functools import partial
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tq_jax
from tests.cases import (
    PRESET_CONFIGS,
    STORE_CASES,
    Extras,
    StoreCase,
    StoreInputs,
    assert_same_bytes,
    make_store_inputs,
)
from tests.jax.helpers import FAST_COMPILE, float_dtype
from tq_core import CacheLayout, Codec, QuantConfig, packing, reference


def stored(case: StoreCase, inputs: StoreInputs, slots=None, store=tq_jax.store) -> np.ndarray:
    """The cache of ``inputs`` after one call."""
    slots = inputs.slot_mapping.astype(np.int32) if slots is None else slots
    key, value = (jnp.asarray(a, float_dtype(case)) for a in (inputs.key, inputs.value))
    cache = store(key, value, inputs.cache, slots, layout=case.layout, codec=case.codec)
    assert cache.shape == inputs.cache.shape
    return np.asarray(cache)


def _table():
    """All cases; slow are those of which every two of key, value and head_dim are met in others.

    Keys and values are packed by themselves, so that three at once prove little more.
    """
    tables = [list(dict.fromkeys(values)) for values in zip(*map(_three, STORE_CASES), strict=True)]
    for case in STORE_CASES:
        place = sum(map(list.index, tables, _three(case)))
        plain = not str(case.extras) and not case.seed
        yield pytest.param(case, marks=[pytest.mark.slow] if plain and place % 3 != 1 else [])


def _three(case):
    config = case.config
    return (config.key, config.key_packing), config.value, case.head_dim


@pytest.mark.parametrize("case", list(_table()), ids=str)
def test_store(case):
    inputs = make_store_inputs(case)
    store = partial(jax.jit, static_argnames=("layout", "codec"), compiler_options=FAST_COMPILE)(
        tq_jax.store
    )
    actual = stored(case, inputs, store=store)
    assert_same_bytes(actual, inputs, layout=case.layout, codec=case.codec)


@pytest.mark.parametrize("preset", PRESET_CONFIGS)
def test_store_eagerly_with_default_compilation(preset):
    case = StoreCase(PRESET_CONFIGS[preset], 64, page_size=3)
    inputs = make_store_inputs(case)
    before = inputs.cache.copy()
    assert_same_bytes(stored(case, inputs), inputs, layout=case.layout, codec=case.codec)
    assert np.array_equal(inputs.cache, before)


@pytest.mark.parametrize("heads", [2, 1])
def test_store_more_tokens_than_a_chunk(heads):
    case = StoreCase(PRESET_CONFIGS["k3v4"], 72, num_kv_heads=heads, num_tokens=4001)
    inputs = make_store_inputs(case)
    assert_same_bytes(stored(case, inputs), inputs, layout=case.layout, codec=case.codec)


def store_both(config, key, value, codec=None):
    """Bytes of a new cache, written by the package and by the reference."""
    n, heads, dim = key.shape
    layout = CacheLayout(config, heads, dim, 16)
    codec = codec or Codec(config, dim)
    arguments = key.astype(np.float32), value.astype(np.float32)
    slots = np.arange(n, dtype=np.int32)
    want = np.zeros(layout.shape(-(-n // 16)), np.uint8)
    have = tq_jax.store(*arguments, want.copy(), slots, layout=layout, codec=codec)
    reference.store(*arguments, want, slots, layout=layout, codec=codec)
    return np.asarray(have), want


@pytest.mark.parametrize("key_scale", [1.0, 0.3])
def test_fp8_keys_round_like_the_reference(key_scale):
    """Every e4m3 number and midpoint, their neighbours, zeros of both signs, and beyond."""
    values = packing.e4m3_values()[:127]
    middles = (values[1:] + values[:-1]) / 2
    points = np.concatenate([values, middles, [1e-9, 1e-30, 449, 464, 465, 1e4, 1e30]])
    points = points.astype(np.float32) * np.float32(key_scale)
    points = np.concatenate([np.nextafter(points, -np.inf), points, np.nextafter(points, np.inf)])
    points = np.concatenate([points, -points])
    key = np.resize(points, (-(-len(points) // 64), 1, 64))
    config = PRESET_CONFIGS["k8v4"]
    codec = Codec(config, 64, key_scale=key_scale)
    assert np.array_equal(*store_both(config, key, np.zeros_like(key), codec))


@pytest.mark.parametrize("value_format", ["int2", "int3", "int4", "int8"])
def test_affine_values_that_lie_between_two_codes_round_up(value_format, rng):
    """A reciprocal instead of a division, or a fused multiply-add, would miss some of them."""
    config = QuantConfig("fp8", value_format)
    levels = 2**config.value_bits - 1
    scale = rng.uniform(0.01, 30, (1000, 1, 1)).astype(np.float16).astype(np.float32)
    steps = np.minimum(rng.integers(0, levels + 1, (1000, 1, 64)) + 0.5, levels)
    steps[..., 0], steps[..., 1] = 0, levels
    value = steps * scale
    assert np.array_equal(*store_both(config, np.zeros_like(value), value))


def test_fast_cases_have_all_pairs():
    def pairs(cases):
        return {pair for case in cases for pair in combinations(enumerate(_three(case)), 2)}

    def places(cases):
        return {(c.order, c.page_size, c.dtype, c.num_kv_heads) for c in cases}

    fast = [param.values[0] for param in _table() if not param.marks]
    assert pairs(fast) == pairs(STORE_CASES)
    assert places(fast) == places(STORE_CASES)


BASE = StoreCase(PRESET_CONFIGS["4bit"], 64)


def test_slots_out_of_range_are_dropped():
    inputs = make_store_inputs(BASE)
    slots = inputs.slot_mapping.copy()
    end = inputs.cache.shape[0] * BASE.page_size
    outside = [-1, -2, -(2**31), end, end + 1, 2**31 - 1]
    slots[:6] = outside
    inputs = inputs._replace(slot_mapping=np.where(np.isin(slots, outside), -1, slots))
    actual = stored(BASE, inputs, slots.astype(np.int32))
    assert_same_bytes(actual, inputs, layout=BASE.layout, codec=BASE.codec)


@pytest.mark.parametrize("x64", [False, True], ids=["numpy", "x64"])
def test_int64_slots_do_not_wrap(x64):
    inputs = make_store_inputs(BASE)
    slots = inputs.slot_mapping.copy()
    slots[:3] = [2**32 + 1, -(2**32) + 2, 2**63 - 1]
    wanted = inputs._replace(slot_mapping=np.where(np.arange(len(slots)) < 3, -1, slots))
    with jax.enable_x64(x64):
        actual = stored(BASE, inputs, jnp.asarray(slots) if x64 else slots)
    assert_same_bytes(actual, wanted, layout=BASE.layout, codec=BASE.codec)


def test_store_nothing():
    inputs = make_store_inputs(BASE)
    empty = inputs._replace(key=inputs.key[:0], value=inputs.value[:0])
    actual = stored(BASE, empty, np.zeros(0, np.int32))
    assert np.array_equal(actual, inputs.cache)
    actual = stored(BASE, inputs._replace(cache=inputs.cache[:0]))
    assert actual.shape == (0, *inputs.cache.shape[1:])


def test_two_runs_give_equal_bytes():
    inputs = make_store_inputs(BASE)
    assert np.array_equal(stored(BASE, inputs), stored(BASE, inputs))


def test_a_bad_token_does_not_reach_its_neighbours():
    case = StoreCase(PRESET_CONFIGS["4bit"], 64, extras=Extras("heads", "heads"))
    inputs = make_store_inputs(case)
    clean = inputs._replace(key=np.ones_like(inputs.key), value=np.ones_like(inputs.value))
    key, value = clean.key.copy(), clean.value.copy()
    key[3], value[3] = np.nan, np.inf
    value[3, 0, :5] = -np.inf
    pages = [
        stored(case, clean._replace(key=k, value=v))
        for k, v in [(clean.key, clean.value), (key, value)]
    ]
    page, slot = divmod(int(clean.slot_mapping[3]), case.page_size)
    differ = np.argwhere(pages[0].reshape(len(pages[0]), -1) != pages[1].reshape(len(pages[1]), -1))
    layout = case.layout
    own = np.concatenate(
        [i[slot].ravel() for i in (layout.key_index(), layout.value_index(), layout.meta_index())]
        + [layout.meta_index()[slot].ravel() + 1]
    )
    assert len(differ)
    assert (differ[:, 0] == page).all()
    assert np.isin(differ[:, 1], own).all()


@pytest.mark.slow
def test_pages_beyond_two_gib(rng):
    layout = CacheLayout(PRESET_CONFIGS["4bit"], 8, 128, 16)
    options = {"layout": layout, "codec": Codec(layout.config, 128)}
    num_pages = 2**31 // layout.page_bytes + 10
    slots = np.array([5, 16 * num_pages - 3, 16 * (num_pages - 4)], np.int32)
    key, value = rng.normal(size=(2, 3, 8, 128)).astype(np.float32)
    store = jax.jit(partial(tq_jax.store, **options), donate_argnums=2)
    cache = store(key, value, tq_jax.empty_cache(layout, num_pages), slots)
    want = np.zeros(layout.shape(3), np.uint8)
    reference.store(key, value, want, slots % 16 + [0, 16, 32], **options)
    table = np.array([[0, num_pages - 1, num_pages - 4]], np.int32)
    assert np.array_equal(cache[table[0]], want)
    query, lengths = rng.normal(size=(1, 8, 128)).astype(np.float32), np.array([48], np.int32)
    out = tq_jax.decode_attention(query, cache, table, lengths, **options)
    near = tq_jax.decode_attention(query, want, np.array([[0, 1, 2]], np.int32), lengths, **options)
    assert np.array_equal(out, near)
