"""tq_core runs where numpy is all there is."""

from __future__ import annotations

from pathlib import Path

import pytest

import tq_core
from tests.isolation import run_without

FRAMEWORKS = ["torch", "jax", "jaxlib", "triton", "ml_dtypes", "scipy", "tq_torch", "tq_jax"]
MODULES = sorted(
    f"tq_core.{p.stem}" for p in Path(tq_core.__file__).parent.glob("*.py") if p.stem != "__init__"
)


def test_the_block_blocks():
    result = run_without(["triton"], "import triton")
    assert result.returncode
    assert "blocked: triton" in result.stderr


def test_import_without_any_framework():
    code = f"import tq_core, {', '.join(MODULES)}"
    result = run_without([*FRAMEWORKS, "safetensors"], code)
    assert result.returncode == 0, result.stderr


def test_importing_the_package_loads_no_kernels_and_no_optional_package():
    code = """
import tq_core
loaded = {m for m in sys.modules if m.startswith("tq_core.kernels")}
loaded |= {m for m in ("torch", "jax", "triton", "safetensors") if m in sys.modules}
assert not loaded, loaded
"""
    result = run_without([], code)
    assert result.returncode == 0, result.stderr


def test_a_round_trip_without_any_framework():
    code = """
import numpy as np
from tq_core import CacheLayout, Codec, QuantConfig, reference

layout = CacheLayout(QuantConfig.preset("3bit"), num_kv_heads=2, head_dim=72, page_size=4)
codec = Codec(layout.config, head_dim=72)
x = np.random.default_rng(0).normal(size=(6, 2, 72)).astype(np.float32)
cache = np.zeros(layout.shape(2), np.uint8)
reference.store(x, x, cache, np.arange(6), layout=layout, codec=codec)
out = reference.attention(
    x, cache, np.int32([[0, 1]]), np.int32([6]), np.int32([0, 6]), layout=layout, codec=codec
)
assert out.shape == (6, 2, 72) and np.isfinite(out).all()
"""
    result = run_without([*FRAMEWORKS, "safetensors"], code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", tq_core.__all__)
def test_public_names(name):
    assert getattr(tq_core, name) is not None
