"""Inputs that broke others, with the kernels in Triton's interpreter, in both frameworks."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="kernels need triton")

from tests import hard
from tests.engines import Engine
from tests.interpret.speed import patch_the_language_once
from tq_core import kernels

if not kernels.interpreted():
    pytest.skip("needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)

patch_the_language_once()

# Numpy computes both sides of a choice and says so of the side that is not taken.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TORCH, JAX = (Engine(name, "interpret") for name in ("torch", "jax"))


@pytest.mark.parametrize("name", hard.checks_for(TORCH))
def test_hard(name):
    hard.CHECKS[name](TORCH)


#: The bits of the others are those of tq_torch, which tests/parity compares.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bad_tokens", "groups", "narrow_tables", "prefix_hit", "speculative_rows"]
)
def test_hard_in_jax(name):
    hard.CHECKS[name](JAX)
