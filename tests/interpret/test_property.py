"""Properties of the kernels in Triton's interpreter, on a fixed set of examples."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="kernels need triton")

from tests.engines import Engine
from tests.interpret.speed import patch_the_language_once
from tests.property.checks import PROPERTIES
from tests.property.running import run
from tests.server import serve
from tq_core import kernels

if not kernels.interpreted():
    pytest.skip("needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)

patch_the_language_once()

# Numpy computes both sides of a choice and says so of the side that is not taken.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ENGINE = Engine("torch", "interpret")


@pytest.mark.parametrize("name", [n for n, p in PROPERTIES.items() if p.applies(ENGINE)])
def test_property(name):
    run(name, ENGINE, {"attention": 3, "store": 3}.get(name, 1), size="small")


def test_server():
    assert serve(ENGINE, 5, seed=2)["rows attended"]
