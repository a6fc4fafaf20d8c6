"""What docs/api.md tells servers: a call without tokens compiles all that later ones need."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import tq_jax
from tq_core import CacheLayout, Codec, QuantConfig

LAYOUT = CacheLayout(QuantConfig.preset("4bit"), 2, 64, 4)
WHAT = {"layout": LAYOUT, "codec": Codec(LAYOUT.config, 64)}


@partial(jax.jit, donate_argnums=0)
def step(cache, query, key, slots, table, lens):
    cache = tq_jax.store(key, key, cache, slots, **WHAT)
    return cache, tq_jax.decode_attention(query, cache, table, lens, **WHAT)


def compiled_by(call):
    """What ``call`` returns, and how many programs were compiled for it."""
    seen = []

    def note(event, *_, **__):
        seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        result = jax.block_until_ready(call())
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    return result, sum("backend_compile" in event for event in seen)


def test_a_call_without_tokens_compiles_all_and_writes_nothing(rng):
    before = rng.integers(0, 256, LAYOUT.shape(6), np.uint8)
    query, key = jnp.ones((3, 4, 64)), jnp.ones((3, 2, 64))
    nothing = {
        "slots": jnp.full(3, -1, jnp.int32), "table": jnp.zeros((3, 2), jnp.int32),
        "lens": jnp.zeros(3, jnp.int32),
    }  # fmt: skip
    arrays = [
        {"slots": jnp.array(slots), "table": jnp.array(table), "lens": jnp.array(lens)}
        for slots, table, lens in (
            ([4, 8, -1], [[1, -1], [2, -1], [0, 0]], [1, 1, 0]),
            ([5, 12, 17], [[1, 3], [2, 3], [4, -1]], [2, 5, 2]),
        )
    ]
    cache = jnp.asarray(before)
    (cache, out), compiled = compiled_by(lambda: step(cache, query, key, **nothing))
    assert compiled
    assert np.array_equal(cache, before)
    assert not out.any()
    for request in arrays:
        (cache, out), compiled = compiled_by(partial(step, cache, query, key, **request))
        assert not compiled
        assert out.any()
