"""Properties of the kernels and simulated servers on a GPU, in both frameworks."""

from __future__ import annotations

import pytest
import torch

from tests.engines import Engine
from tests.property.checks import PROPERTIES
from tests.property.running import run
from tests.server import serve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TORCH, JAX = (Engine(name, "triton", "cuda") for name in ("torch", "jax"))


@pytest.mark.parametrize("name", [n for n, p in PROPERTIES.items() if p.applies(TORCH)])
def test_property(name):
    run(name, TORCH, 10)


@pytest.mark.parametrize("name", [n for n, p in PROPERTIES.items() if p.applies(JAX)])
def test_property_of_jax(name):
    run(name, JAX, 10, shapes=1)


@pytest.mark.parametrize("engine", [TORCH, JAX], ids=str)
def test_server(engine):
    assert serve(engine, 100, servers=2)["rows attended"]
