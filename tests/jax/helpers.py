"""What the suites of the JAX package share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.cases import AttentionCase, make_attention_inputs

#: For tables of many shapes: the same HLO, less time in LLVM. Other tests run with the defaults.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


def float_dtype(case: Any) -> Any:
    return jnp.dtype(case.dtype)


def attention_arrays(case: AttentionCase) -> dict[str, Any]:
    """``make_attention_inputs`` with the query in the case's dtype."""
    arrays: dict[str, Any] = make_attention_inputs(case)
    arrays["query"] = jnp.asarray(arrays["query"], float_dtype(case))
    return arrays


def to_float64(array: jax.Array) -> np.ndarray:
    return np.asarray(array.astype(jnp.float32), np.float64)


def temp_bytes(function: Any, *arrays: Any, **jit_options: Any) -> int:
    """Bytes of scratch that the compiled function allocates; nothing is run."""
    compiled = jax.jit(function, **jit_options).lower(*arrays).compile()
    return compiled.memory_analysis().temp_size_in_bytes
