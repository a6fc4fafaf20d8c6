"""Calls of tq_jax with a case's arrays, their results as numpy arrays of the very same bits.

``device`` is JAX's default one, and only here so that these calls look like those of torch.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import tq_jax
from tests.cases import AttentionCase, StoreCase, make_store_inputs
from tests.jax.helpers import attention_arrays


def store(case: StoreCase, backend: str, device: str = "cpu") -> dict[str, np.ndarray]:
    """The cache after a store."""
    inputs = make_store_inputs(case)
    key, value = (jnp.asarray(x, case.dtype) for x in (inputs.key, inputs.value))
    cache = tq_jax.store(
        key,
        value,
        jnp.asarray(inputs.cache),
        inputs.slot_mapping,
        layout=case.layout,
        codec=case.codec,
        backend=backend,
    )
    return {"cache": np.asarray(cache)}


def attention(
    case: AttentionCase, backend: str, device: str = "cpu", **options: Any
) -> dict[str, np.ndarray]:
    """Output and LSE."""
    options |= {**case.options, "return_lse": True, "backend": backend}
    out, lse = tq_jax.attention(**attention_arrays(case), **options)
    return {"out": np.asarray(out), "lse": np.asarray(lse)}


def decode(
    case: AttentionCase, backend: str, device: str = "cpu", **options: Any
) -> dict[str, np.ndarray]:
    """Output and LSE of a case with one row a sequence."""
    arrays = attention_arrays(case)
    del arrays["query_start_loc"]
    options |= {**case.options, "return_lse": True, "backend": backend}
    out, lse = tq_jax.decode_attention(**arrays, **options)
    return {"out": np.asarray(out), "lse": np.asarray(lse)}


def dequantize(case: AttentionCase, backend: str, device: str = "cpu") -> dict[str, np.ndarray]:
    """Keys and values in the dtype of the case."""
    arrays = attention_arrays(case)
    keys, values = tq_jax.dequantize(
        *(arrays[n] for n in ("cache", "block_table", "seq_lens")),
        layout=case.layout,
        codec=case.codec,
        dtype=case.dtype,
        backend=backend,
    )
    return {"keys": np.asarray(keys), "values": np.asarray(values)}
