"""The shared kernels in Triton's interpreter: the same bits from torch and from JAX."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

pytest.importorskip("triton", reason="kernels need triton")

import jax

import tq_jax
from tests.cases import TOLERANCE
from tests.interpret.speed import patch_the_language_once
from tests.jax.helpers import attention_arrays
from tests.parity.calls import ATTENTION, FRAMEWORKS, STORE, assert_same_bits, cover, shorter
from tq_core import kernels
from tq_torch import ops

if not kernels.interpreted():
    pytest.skip("needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)

patch_the_language_once()

# Numpy computes both sides of a choice and says so of the side that is not taken.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SHORT = list(map(shorter, ATTENTION))


@pytest.mark.parametrize("case", cover(SHORT), ids=str)
def test_attention(case):
    splits = (None, 3)[SHORT.index(case) % 2]
    assert_same_bits("attention", case, "interpret", num_kv_splits=splits)


@pytest.mark.parametrize("case", cover(SHORT)[::4], ids=str)
def test_batch_deterministic(case):
    plan = {"deterministic": "batch", "split_tokens": 64}
    assert_same_bits("attention", case, "interpret", plan=plan)


@pytest.mark.parametrize("case", [c for c in cover(SHORT) if c.is_decode][:4], ids=str)
def test_decode(case):
    assert_same_bits("decode", case, "interpret")


@pytest.mark.parametrize("case", [c for c in cover(SHORT) if c.is_decode][:3], ids=str)
def test_decode_in_shares(case):
    assert_same_bits("decode", case, "interpret", plan={"parts": 5, "block_t": 16})


@pytest.mark.parametrize(
    "case",
    [c for c in cover(SHORT) if c.sliding_window is None and c.page_size <= 16][::4],
    ids=str,
)
def test_dequantize(case):
    assert_same_bits("dequantize", case, "interpret")


@pytest.mark.parametrize("case", cover(STORE), ids=str)
def test_store(case):
    assert_same_bits("store", case, "interpret")


PREPARED = (ops._prepare_store, ops._prepare_attention, ops._prepare_dequantize)


class Recorder:
    """Stands for the kernels: notes what is launched and launches nothing."""

    def __init__(self, monkeypatch):
        self.launches = []
        for prepared in PREPARED:
            prepared.cache_clear()
        for name, kernel in vars(kernels.load()).items():
            monkeypatch.setattr(kernels.load(), name, self._recorded(kernel))

    def _recorded(self, kernel):
        recorder = self

        class Kernel:
            arg_names = tuple(inspect.signature(kernel.fn).parameters)

            def __getitem__(self, grid):
                def run(*args, **constexprs):
                    names = inspect.signature(kernel.fn).parameters
                    given = dict(zip(names, args, strict=False)) | {
                        name: value for name, value in constexprs.items() if name in names
                    }
                    whole = (*grid, 1, 1)[:3]
                    recorder.launches.append((kernel.fn, whole, recorder.described(given)))

                return run

        return Kernel()

    @staticmethod
    def described(arguments):
        """Arrays as their dtype, everything else as it is."""
        return {
            name: str(x.dtype).removeprefix("torch.") if hasattr(x, "data_ptr") else x
            for name, x in arguments.items()
        }

    def take(self):
        taken, self.launches = self.launches, []
        return taken


@pytest.fixture
def recorder(monkeypatch):
    yield Recorder(monkeypatch)
    for prepared in PREPARED:
        prepared.cache_clear()


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_both_launch_the_same_functions_with_the_same_plan(case, recorder):
    seen = []
    for calls in FRAMEWORKS.values():
        calls.attention(case, "interpret")
        if case.is_decode:
            calls.decode(case, "interpret")
        if case.sliding_window is None:
            calls.dequantize(case, "interpret")
        # XLA orders launches that need nothing of each other as it likes.
        seen.append(sorted(recorder.take(), key=repr))
        assert seen[-1]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("case", STORE[::3], ids=str)
def test_both_store_by_the_same_function_with_the_same_plan(case, recorder):
    seen = []
    for calls in FRAMEWORKS.values():
        calls.store(case, "interpret")
        seen.append(recorder.take())
        assert len(seen[-1]) == 1
    # JAX has no int64 unless it is asked to.
    ((_, _, ours),), ((_, _, theirs),) = seen
    assert (ours.pop("slot_ptr"), theirs.pop("slot_ptr")) == ("int64", "int32")
    assert seen[0] == seen[1]


def test_inside_a_loop():
    """The cache is carried by a scan; every step stores and attends."""
    case = next(c for c in SHORT if c.is_decode and not c.sliding_window)
    arrays = attention_arrays(case)
    layout, codec = case.layout, case.codec
    cache, table = arrays["cache"], arrays["block_table"]
    query = arrays["query"][:1]
    kv = jax.random.normal(jax.random.key(0), (3, 2, 1, case.num_kv_heads, case.head_dim))

    def step(backend, cache, inputs):
        i, (key, value) = inputs
        slots = table[0, :1] * layout.page_size + i
        cache = tq_jax.store(key, value, cache, slots, layout=layout, codec=codec, backend=backend)
        lens = (i + 1)[None]
        out = tq_jax.decode_attention(
            query, cache, table[:1], lens, layout=layout, codec=codec, backend=backend
        )
        return cache, out

    count = jax.numpy.arange(3, dtype=jax.numpy.int32)
    results = {
        name: jax.jit(lambda c, x, n=name: jax.lax.scan(lambda s, i: step(n, s, i), c, x))(
            cache, (count, kv)
        )
        for name in ("interpret", "native")
    }
    (_, ours), (_, native) = results["interpret"], results["native"]
    a, b = (np.asarray(x.astype("float32"), np.float64) for x in (ours, native))
    assert np.linalg.norm(a - b) <= TOLERANCE[case.dtype] * np.linalg.norm(b)


def test_transformations_are_refused_with_the_way_out():
    case = SHORT[0]
    arrays = attention_arrays(case)
    rest = {name: x for name, x in arrays.items() if name != "query"}

    def call(query):
        return tq_jax.attention(query, **rest, **case.options, backend="interpret")

    query = arrays["query"]
    assert jax.eval_shape(call, query).shape == query.shape
    with pytest.raises(NotImplementedError, match=r"no jax\.vmap axis.*backend='native'"):
        jax.vmap(call)(jax.numpy.stack([query, query]))
    with pytest.raises(TypeError, match="inference-only"):
        jax.grad(lambda q: call(q).astype("float32").sum())(query)
