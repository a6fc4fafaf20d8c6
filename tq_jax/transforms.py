"""What JAX's transformations find: sentences where codes in a cache have no answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def inference_only(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """``function`` of arrays, with a sentence instead of a derivative."""
    wrapped = jax.custom_jvp(function)

    @wrapped.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise TypeError(
            f"{what} is inference-only and has no derivative: codes in a quantised cache are "
            "integers. Keep it out of jax.grad, jax.vjp and jax.jvp, or pass the inputs through "
            "jax.lax.stop_gradient"
        )

    return wrapped


def kernel_inputs(arrays: dict[str, jax.Array], what: str) -> dict[str, jax.Array]:
    """``arrays`` for kernels, with sentences instead of a derivative and of a batching rule.

    The identity is what refuses, not a function around the launches: references, which jax-triton
    writes through, must not be inside a custom rule.
    """
    identity = jax.custom_batching.custom_vmap(lambda arrays: arrays)

    @identity.def_vmap
    def refuse(axis_size: int, in_batched: Any, arrays: Any) -> Any:
        raise NotImplementedError(
            f"{what}: the kernels take no jax.vmap axis. Make the axis a part of the tokens and "
            "sequences of one call, or name backend='native', which takes any"
        )

    return inference_only(identity, what)(arrays)
