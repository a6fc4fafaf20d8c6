from __future__ import annotations

import numpy as np
import pytest
import torch

import tq_torch
from tests.torch.helpers import DTYPES, to_float64
from tq_core import reference


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float16", 1e-3)])
def test_merge_attention_states(rng, dtype, tolerance):
    out = [torch.from_numpy(rng.normal(size=(5, 3, 16))).to(DTYPES[dtype]) for _ in range(2)]
    lse = [torch.from_numpy(rng.normal(0, 20, (5, 3))).float() for _ in range(2)]
    lse[0][1] = -torch.inf
    lse[1][2] = -torch.inf
    lse[0][3], lse[1][3] = -torch.inf, -torch.inf
    out[0][1], out[1][2], out[0][3], out[1][3] = 0, 0, 0, 0
    merged, total = tq_torch.merge_attention_states(out[0], lse[0], out[1], lse[1])
    want, want_lse = reference.merge_attention_states(
        to_float64(out[0]), to_float64(lse[0]), to_float64(out[1]), to_float64(lse[1])
    )
    assert merged.dtype == DTYPES[dtype]
    assert np.abs(to_float64(merged) - want).max() <= tolerance * np.abs(want).max()
    assert np.array_equal(np.isneginf(total.numpy()), np.isneginf(want_lse))
    finite = np.isfinite(want_lse)
    assert np.abs(total.numpy()[finite] - want_lse[finite]).max() < 1e-4
    assert not merged[3].any()
