"""tq_jax through jax-triton for an H200, without one: traced, compiled to PTX, lowered.

``make test-lowering`` runs this with a Python, a JAX and the releases of jax-triton of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tq_jax import launch, triton_call

try:
    JAX_TRITON = triton_call.jax_triton()
except ImportError:
    pytest.skip("lowering needs jax-triton", allow_module_level=True)

from jax_triton import triton_lib

from tests.cases import ATTENTION_CASES, STORE_CASES, make_attention_inputs, make_store_inputs
from tests.kernels.compiling import compile_launch, input_dtypes
from tests.kernels.plans import DEVICES
from tq_core import kernels
from tq_core.validation import ArraySpec, check_attention

if kernels.interpreted():
    pytest.skip("the kernels are interpreted", allow_module_level=True)

H200 = DEVICES["sm_90"]
KERNELS = launch.Kernels(H200)
ATTENTION = [c for c in ATTENTION_CASES if c.head_dim % 8 == 0]
STORE = [c for c in STORE_CASES if c.head_dim % 8 == 0]
#: Fewer cases of a release that the GPU suites run on.
IS_OLD = JAX_TRITON.__version_info__ < (0, 4)
CALL = "@triton_kernel_call" if IS_OLD else "@triton_kernel_call_ffi"
STEP = 7 if IS_OLD else 1
#: Stores in the default run; the others are slow for their number.
QUICK = STORE[:: 3 * STEP]


def lower(function, *arrays, **jit_options):
    """The module that XLA would get on a CUDA device."""
    traced = jax.jit(function, **jit_options).trace(*arrays)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def shape(array, dtype=None):
    dtype = dtype or array.dtype
    return jax.ShapeDtypeStruct(array.shape, jnp.int32 if dtype == np.int64 else jnp.dtype(dtype))


def attention_arguments(case):
    """Shapes of a case's arrays by name, and the checked call."""
    arrays = make_attention_inputs(case)
    given = {
        name: shape(x, case.dtype if name == "query" else None)
        for name, x in arrays.items()
        if x is not None
    }
    specs = {name: ArraySpec(x.shape, x.dtype.name) for name, x in given.items()}
    specs = dict.fromkeys(arrays) | specs
    return given, check_attention(**specs, **case.options)


def store_arguments(case):
    inputs = make_store_inputs(case)
    return [
        shape(inputs.key, case.dtype),
        shape(inputs.value, case.dtype),
        shape(inputs.cache),
        shape(inputs.slot_mapping),
    ]


@pytest.mark.parametrize("case", ATTENTION[::STEP], ids=str)
def test_attention(case):
    given, call = attention_arguments(case)
    plan = launch.attention_plan(given, H200, call, case.layout, case.codec)

    def attention(arrays):
        return KERNELS.attention(
            **{**dict.fromkeys(("sinks", "alibi_slopes")), **arrays},
            call=call,
            layout=case.layout,
            codec=case.codec,
        )

    text = lower(attention, given)
    assert len(re.findall(rf"custom_call {CALL}\(", text)) == len(plan.launches)


@pytest.mark.parametrize(
    "case",
    [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in STORE[::STEP]],
    ids=str,
)
def test_store_writes_the_donated_cache(case):
    write = partial(KERNELS.store, layout=case.layout, codec=case.codec)
    text = lower(write, *store_arguments(case), donate_argnums=2)
    shape = "x".join(map(str, make_store_inputs(case).cache.shape))
    (main,) = re.findall(r"func\.func public @main\((.*)\) ->", text)
    arguments = re.findall(r"%arg\d+: tensor<\S+>(?: \{[^}]*\})?", main)
    (cache,) = (a for a in arguments if f"tensor<{shape}xui8>" in a)
    assert "tf.aliasing_output = 0" in cache
    (call,) = (line for line in text.splitlines() if f"custom_call {CALL}(" in line)
    operands = re.search(rf"{re.escape(CALL)}\(([^)]*)\)", call).group(1).split(", ")
    alias = re.search(r"output_operand_alias<.*?operand_index = (\d+)", call)
    (inside,) = re.findall(rf"(%arg\d+): tensor<{shape}xui8>", text.partition("private")[2])
    assert operands[int(alias.group(1))] == inside
    assert text.count("stablehlo.copy") == 0


@pytest.mark.parametrize("case", ATTENTION[:: 8 * STEP], ids=str)
def test_dequantize(case):
    given, _ = attention_arguments(case)
    arrays = [given[n] for n in ("cache", "block_table", "seq_lens")]
    what = {"layout": case.layout, "codec": case.codec, "dtype": case.dtype}
    assert f"custom_call {CALL}(" in lower(partial(KERNELS.dequantize, **what), *arrays)


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_a_cache_carried_by_a_loop(loop):
    case = STORE[0]
    write = partial(KERNELS.store, layout=case.layout, codec=case.codec)

    def scan(cache, key, value, slots):
        return jax.lax.scan(
            lambda cache, i: (write(key, value, cache, slots + i), None), cache, jnp.arange(3)
        )[0]

    def repeat(cache, key, value, slots):
        def body(state):
            i, cache = state
            return i + 1, write(key, value, cache, slots + i)

        return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, cache))[1]

    key, value, cache, slots = store_arguments(case)
    function = {"scan": scan, "while": repeat}[loop]
    text = lower(function, cache, key, value, slots, donate_argnums=0)
    assert text.count("output_operand_alias<") == 1
    assert text.count("tf.aliasing_output") == 1


@pytest.mark.parametrize("case", ATTENTION[::24], ids=str)
def test_the_code_is_that_of_the_other_framework(case, monkeypatch):
    """jax-triton makes the PTX that Triton makes for torch, which it launches the same way."""
    given, call = attention_arguments(case)
    plan = launch.attention_plan(given, H200, call, case.layout, case.codec)
    made = []
    compiled = triton_lib.compile_ttir_inplace

    def compile_(*args, **kwargs):
        made.append(compiled(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(triton_lib, "compile_ttir_inplace", compile_)
    monkeypatch.setattr(triton_lib, "_COMPILED_KERNEL_CACHE", {}, raising=False)
    for step in plan.launches:
        function = getattr(kernels.load(), step.kernel)
        monkeypatch.setattr(function, "_jT_kernel_cache", {}, raising=False)
        shapes = {o.name: o.shape for o in step.outputs}  # of what is written in place
        dtypes = zip(step.inputs, input_dtypes(step, case.dtype), strict=True)
        arrays = [jax.ShapeDtypeStruct(shapes.get(name, (1,)), d) for name, d in dtypes]
        names = list(dict.fromkeys(step.inputs))
        first = [arrays[step.inputs.index(n)] for n in names]

        def run(*given, step=step, names=names):
            return triton_call.call(step, dict(zip(names, given, strict=True)), H200.capability)

        lower(run, *first)
        assert code(made[-1].binary) == code(compile_launch(step, "sm_90", case.dtype).asm["ptx"])


def code(ptx):
    """The instructions: without comments, lines of the sources, and sections for debuggers.

    Those sections hold the directory that Python found the sources in, relative or not.
    """
    lines = (line.partition("//")[0].rstrip() for line in ptx.partition(".section")[0].splitlines())
    return [x for x in lines if x and not re.match(r"\s*(\.loc|\.file|\$L__tmp)", x)]


def test_export():
    case = STORE[0]
    checks = [jax.export.DisabledSafetyCheck.custom_call(CALL.removeprefix("@"))]
    write = jax.jit(partial(KERNELS.store, layout=case.layout, codec=case.codec))
    exported = jax.export.export(write, platforms=["cuda"], disabled_checks=checks)(
        *store_arguments(case)
    )
    again = jax.export.deserialize(exported.serialize())
    assert again.out_avals[0].shape == make_store_inputs(case).cache.shape


@pytest.mark.parametrize("before", ["/somewhere", None])
def test_the_cache_of_triton_stays_where_it_was(before):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_CACHE_DIR"}
    if before:
        environment["TRITON_CACHE_DIR"] = before
    program = (
        "import os\nfrom tq_jax import triton_call\ntriton_call.jax_triton()\n"
        "print(os.environ.get('TRITON_CACHE_DIR'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(before)
