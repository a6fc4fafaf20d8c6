from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import tq_jax
from tests.cases import TOLERANCE, AttentionCase, assert_close
from tests.jax.helpers import attention_arrays, to_float64
from tq_core import reference

NOTHING = -np.inf


def states(rng, dtype):
    """Two states of 40 rows; row 0 saw nothing in a, row 1 nothing in b, row 2 nothing at all."""
    out = rng.normal(size=(2, 40, 6, 24)).astype(np.float32)
    lse = rng.normal(0, 5, size=(2, 40, 6)).astype(np.float32)
    lse[0, [0, 2]] = lse[1, [1, 2]] = NOTHING
    lse[0, 3], lse[1, 3] = 200, -200
    out[~np.isfinite(lse)] = 0
    out = jnp.asarray(out, dtype)
    return out[0], jnp.asarray(lse[0]), out[1], jnp.asarray(lse[1])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_merge_attention_states(rng, dtype):
    a, lse_a, b, lse_b = states(rng, dtype)
    out, lse = tq_jax.merge_attention_states(a, lse_a, b, lse_b)
    want, want_lse = reference.merge_attention_states(
        to_float64(a), np.asarray(lse_a), to_float64(b), np.asarray(lse_b)
    )
    assert (out.dtype, lse.dtype) == (a.dtype, jnp.float32)
    error = np.abs(to_float64(out) - want)
    assert np.linalg.norm(error) <= TOLERANCE[dtype] * np.linalg.norm(want)
    assert error.max() <= 2 * TOLERANCE[dtype] * np.abs(want).max()
    seen = np.isfinite(want_lse)
    assert np.array_equal(lse == NOTHING, ~seen)
    lse, want_lse = np.asarray(lse)[seen], want_lse[seen]
    assert np.abs(lse - want_lse).max() <= 1e-6 * np.abs(want_lse).max()
    assert np.array_equal(out[0], b[0])
    assert np.array_equal(out[1], a[1])
    assert not out[2].any()


def test_two_halves_of_a_sequence_make_the_whole():
    """The sink and the later tokens in one call, the earlier ones in the other."""
    case = AttentionCase(batch=((1, 130), (1, 47), (1, 90)), causal=False, sinks=True)
    arrays = attention_arrays(case)
    table, lengths, sinks = (arrays.pop(n) for n in ("block_table", "seq_lens", "sinks"))
    split = np.minimum(lengths, 48)
    halves = [
        tq_jax.attention(
            **arrays, block_table=t, seq_lens=n, sinks=s, **case.options, return_lse=True
        )
        for t, n, s in [(table, split, None), (table[:, 3:], lengths - split, sinks)]
    ]
    out, lse = tq_jax.merge_attention_states(*halves[0], *halves[1])
    assert_close(to_float64(out), lse, case)
