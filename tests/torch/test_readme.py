"""The README's examples for PyTorch run, and agree with the reference."""

from __future__ import annotations

import numpy as np
import torch

from tests.readme import run_examples
from tq_core import reference


def test_the_examples_run():
    torch.manual_seed(0)
    names = run_examples("PyTorch")
    out, lse = reference.attention(
        names["q"].numpy(), names["cache"].numpy(), names["table"].numpy(),
        names["lens"].numpy() + 24, names["starts"].numpy(), layout=names["layout"],
        codec=names["codec"], sliding_window=256, return_lse=True,
    )  # fmt: skip
    assert np.linalg.norm(names["out"].numpy() - out) <= 1e-3 * np.linalg.norm(out)
    np.testing.assert_allclose(names["lse"], lse, rtol=1e-3)
