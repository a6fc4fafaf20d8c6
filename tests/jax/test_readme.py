"""The README's example for JAX runs, with layout and codec as static arguments too."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

import tq_jax
from tests.readme import run_examples


def test_the_example_runs():
    names = run_examples("JAX")
    assert names["out"].shape == (1, 32, 128)
    # One token is all that is seen.
    np.testing.assert_allclose(names["out"], 1, atol=0.1)

    @partial(jax.jit, static_argnames=("layout", "codec", "sliding_window"))
    def attend(q, cache, table, lens, *, layout, codec, sliding_window):
        what = {"layout": layout, "codec": codec, "sliding_window": sliding_window}
        return tq_jax.decode_attention(q, cache, table, lens, **what)

    arrays = [names[name] for name in ("q", "cache", "table", "lens")]
    out = attend(*arrays, layout=names["layout"], codec=names["codec"], sliding_window=4)
    np.testing.assert_allclose(out, names["out"], atol=1e-3)
