"""Inputs that broke others, with the kernels on a GPU, in both frameworks."""

from __future__ import annotations

import pytest
import torch

from tests import hard
from tests.engines import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TORCH, JAX = (Engine(name, "triton", "cuda") for name in ("torch", "jax"))


@pytest.mark.parametrize("name", hard.checks_for(TORCH))
def test_hard(name):
    hard.CHECKS[name](TORCH)


@pytest.mark.parametrize("name", hard.checks_for(JAX))
def test_hard_in_jax(name):
    hard.CHECKS[name](JAX)


def test_every_format_at_every_head_dim():
    hard.formats(TORCH, step=1)
