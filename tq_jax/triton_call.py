"""The one place that knows jax-triton: its releases order, alias and name arguments differently.

===============  ==========================================  ==================================
                 0.3.1                                       0.4.1
===============  ==========================================  ==================================
in place         input_output_aliases, and the output has    a ``jax.Ref`` as the parameter
                 a parameter of its own
outputs          after all inputs                            parameters that nobody supplied
names            out_shape, enable_fp_fusion                 out_type, backend_options
===============  ==========================================  ==================================

Both take arrays as aligned to 16 bytes and integers as they are, but for 1, which they compile in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any

import jax

from tq_core import kernels
from tq_core.dispatch import Buffer, Launch


class _Integer(int):
    """A run-time integer: jax-triton makes whatever equals 1 a constant, a kernel of its own."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Integer) and int(self) == int(other)

    __hash__ = int.__hash__


@cache
def jax_triton() -> ModuleType:
    """The module, imported once; ``TRITON_CACHE_DIR``, which it empties or deletes, stays."""
    before = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton
    finally:
        if before is not None:
            os.environ["TRITON_CACHE_DIR"] = before
        else:
            os.environ.pop("TRITON_CACHE_DIR", None)
    return jax_triton


def call(launch: Launch, arrays: Mapping[str, Any], capability: int) -> dict[str, jax.Array]:
    """Launches a kernel inside a trace.

    Args:
        launch: what to launch; one that has no programs is not launched, and what it would write
            is zero.
        arrays: at least the inputs by name.
        capability: compute capability as major * 10 + minor; 0 asks the device.

    Returns:
        The outputs by name.
    """
    if not launch.grid:
        return {
            o.name: arrays.get(o.name, jax.numpy.zeros(o.shape, o.dtype)) for o in launch.outputs
        }
    options = {
        "kernel": getattr(kernels.load(), launch.kernel),
        "grid": (launch.grid,),
        "name": f"tq_{launch.kernel}",
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "compute_capability": capability or None,
        **dict(launch.constexprs),
    }
    inputs = [arrays[name] for name in launch.inputs]
    integers = [_Integer(n) for n in launch.integers]
    run = _call_0_3 if jax_triton().__version_info__ < (0, 4) else _call_0_4
    return run(launch, inputs, integers, options)


def _shape(buffer: Buffer) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(buffer.shape, jax.numpy.dtype(buffer.dtype))


def _call_0_3(
    launch: Launch, inputs: list[Any], integers: list[int], options: dict[str, Any]
) -> dict[str, jax.Array]:
    in_place = {
        launch.inputs.index(o.name): i
        for i, o in enumerate(launch.outputs)
        if o.name in launch.inputs
    }
    results = jax_triton().triton_call(
        *inputs,
        *integers,
        out_shape=[_shape(o) for o in launch.outputs],
        input_output_aliases=in_place,
        enable_fp_fusion=launch.fp_fusion,
        **options,
    )
    return {o.name: x for o, x in zip(launch.outputs, results, strict=True)}


def _call_0_4(
    launch: Launch, inputs: list[Any], integers: list[int], options: dict[str, Any]
) -> dict[str, jax.Array]:
    refs = {
        o.name: jax.new_ref(inputs[launch.inputs.index(o.name)])
        for o in launch.outputs
        if o.name in launch.inputs
    }
    # The parameter that 0.3 aliases is not read: any other array will do.
    inputs = [inputs[0] if n in refs else x for n, x in zip(launch.inputs, inputs, strict=True)]
    first = len(inputs) + len(integers)
    names = options["kernel"].arg_names[first : first + len(launch.outputs)]
    parameters = zip(names, launch.outputs, strict=True)
    given = {name: refs[o.name] for name, o in parameters if o.name in refs}
    new = [o for o in launch.outputs if o.name not in refs]
    results = jax_triton().triton_call(
        *inputs,
        *integers,
        out_type=[_shape(o) for o in new],
        backend_options={"enable_fp_fusion": launch.fp_fusion},
        **given,
        **options,
    )
    outputs = {o.name: x for o, x in zip(new, results, strict=True)}
    return outputs | {name: jax.freeze(ref) for name, ref in refs.items()}
