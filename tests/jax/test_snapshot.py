"""Files of caches from and to JAX arrays; tests/core has what they refuse."""

from __future__ import annotations

import doctest
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("safetensors")

import tq_jax
from tq_core import CacheLayout, Codec, QuantConfig, files
from tq_jax import snapshot

LAYOUT = CacheLayout(QuantConfig.preset("4bit"), 2, 64, 4)
CODEC = Codec(LAYOUT.config, 64)
WHAT = {"layout": LAYOUT, "codec": CODEC}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def cache(rng):
    return jnp.asarray(rng.integers(0, 256, LAYOUT.shape(9), np.uint8))


@pytest.mark.parametrize("given", [jnp.asarray, np.asarray])
def test_a_whole_cache_comes_back(given, cache, path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 2 * LAYOUT.page_bytes)
    tq_jax.save_cache(path, given(cache), **WHAT)
    file = tq_jax.load_cache(path, **WHAT)
    assert isinstance(file.cache, jax.Array)
    assert np.array_equal(file.cache, cache)
    assert (file.layout, file.codec_digest) == (LAYOUT, CODEC.digest)
    assert file.block_table is None


@pytest.mark.parametrize("pages", [[8, 1, 2], jnp.array([8, 1, 2])])
def test_pages_with_their_table(pages, cache, path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 2 * LAYOUT.page_bytes)
    table, lens = jnp.array([[2, 8], [1, 0]], jnp.int32), jnp.array([7, 3], jnp.int32)
    tq_jax.save_cache(path, cache, **WHAT, pages=pages, block_table=table, seq_lens=lens)
    file = tq_jax.load_cache(path, **WHAT, device=jax.devices()[0])
    assert np.array_equal(file.cache, np.asarray(cache)[[8, 1, 2]])
    assert file.block_table.tolist() == [[2, 0], [1, -1]]
    assert file.seq_lens.tolist() == [7, 3]
    assert isinstance(file.block_table, jax.Array)
    again = tq_jax.load_cache(path, pages=jnp.array([1, 2, 0]))
    assert np.array_equal(again.cache, np.asarray(cache)[[1, 2, 8]])


def test_what_was_loaded_can_be_donated(cache, path):
    """And what it was loaded into is nobody else's."""
    tq_jax.save_cache(path, cache, **WHAT)
    store = jax.jit(partial(tq_jax.store, **WHAT), donate_argnums=2)
    key = jnp.ones((1, 2, 64))
    loaded = tq_jax.load_cache(path).cache
    stored = store(key, key, loaded, jnp.array([5], jnp.int32))
    want = tq_jax.store(key, key, cache, jnp.array([5], jnp.int32), **WHAT)
    assert loaded.is_deleted()
    assert np.array_equal(stored, want)


def test_a_sharding(cache, path):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("heads",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "heads"))
    table, lens = jnp.zeros((1, 1), jnp.int32), jnp.array([3], jnp.int32)
    tq_jax.save_cache(
        path, jax.device_put(cache, sharding), **WHAT, block_table=table, seq_lens=lens
    )
    file = tq_jax.load_cache(path, device=sharding)
    assert file.cache.sharding == sharding
    assert np.array_equal(file.cache, cache)
    keys, _ = tq_jax.dequantize(
        file.cache, file.block_table, file.seq_lens, **WHAT, dtype="float32"
    )
    assert keys.shape == (1, 4, 2, 64)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"cache": [0]}, TypeError, "^cache: expected a concrete jax.Array, got list"),
        ({"seq_lens": [0]}, TypeError, "^seq_lens: expected a concrete jax.Array, got list"),
        ({"pages": [9]}, ValueError, "^pages: expected numbers from 0 to 8, got 9"),
        ({"cache": jnp.zeros(LAYOUT.shape(9))}, ValueError, "^cache: expected uint8"),
    ],
)
def test_refusals(changes, error, message, cache, path):
    with pytest.raises(error, match=message):
        tq_jax.save_cache(path, **{"cache": cache, **WHAT, **changes})
    assert not os.listdir(path.parent)


def test_traced_arrays_are_refused(cache, path):
    with pytest.raises(TypeError, match=r"^cache: expected a concrete jax.Array, got .*Tracer"):
        jax.jit(lambda x: tq_jax.save_cache(path, x, **WHAT))(cache)


def test_a_device_by_name(cache, path):
    tq_jax.save_cache(path, cache, **WHAT)
    with pytest.raises(TypeError, match=r"^device: expected a jax.Device, a sharding or None"):
        tq_jax.load_cache(path, device="cpu")


def test_examples_run():
    result = doctest.testmod(snapshot)
    assert result.attempted > 10
    assert not result.failed
