"""tq_torch and tq_jax in the frameworks' own operations: the same up to rounding."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cases import TOLERANCE, assert_same_bytes, make_store_inputs
from tests.jax.helpers import attention_arrays
from tests.parity.calls import ATTENTION, FRAMEWORKS, STORE, cover


def as_float(array, dtype):
    if array.dtype == np.int16:
        array = (array.astype(np.int32) << 16).view(np.float32)
    return array.astype(np.float64)


@pytest.mark.parametrize("case", cover(ATTENTION), ids=str)
def test_attention(case):
    first, second = (calls.attention(case, "native") for calls in FRAMEWORKS.values())
    for name in ("out", "lse"):
        a, b = (as_float(x[name], case.dtype) for x in (first, second))
        seen = np.isfinite(a)
        assert np.array_equal(seen, np.isfinite(b))
        assert np.linalg.norm(a[seen] - b[seen]) <= TOLERANCE[case.dtype] * np.linalg.norm(a[seen])


@pytest.mark.parametrize("case", cover(ATTENTION), ids=str)
def test_dequantize(case):
    if case.sliding_window is not None:
        pytest.skip("its block table lacks the pages before the window")
    first, second = (calls.dequantize(case, "native") for calls in FRAMEWORKS.values())
    assert attention_arrays(case)["cache"].any()
    for name in ("keys", "values"):
        a, b = (as_float(x[name], case.dtype) for x in (first, second))
        assert np.abs(a - b).max() <= TOLERANCE[case.dtype] * np.abs(a).max()


@pytest.mark.parametrize("case", cover(STORE), ids=str)
def test_store(case):
    inputs = make_store_inputs(case)
    first, second = (calls.store(case, "native")["cache"] for calls in FRAMEWORKS.values())
    same = float((first == second).mean())
    assert same > 0.99, f"{same:.2%} of the bytes are the same"
    for cache in (first, second):
        assert_same_bytes(cache, inputs, layout=case.layout, codec=case.codec)
