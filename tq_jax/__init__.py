"""TurboQuant paged attention for JAX.

Every function works on traced arrays, inside ``jax.jit``, ``lax.scan`` and ``lax.while_loop``, and
on concrete arrays, where it is compiled once for each set of shapes and options.
"""

from tq_jax.api import (
    attention,
    decode_attention,
    dequantize,
    empty_cache,
    merge_attention_states,
    store,
)
from tq_jax.snapshot import load_cache, save_cache

__all__ = [
    "attention",
    "decode_attention",
    "dequantize",
    "empty_cache",
    "load_cache",
    "merge_attention_states",
    "save_cache",
    "store",
]
