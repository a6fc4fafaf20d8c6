"""Properties of tq_jax's native backend, on a fixed set of examples."""

from __future__ import annotations

import pytest

from tests.engines import Engine
from tests.property.checks import PROPERTIES
from tests.property.examples import Example
from tests.property.running import run
from tests.server import serve
from tq_core import QuantConfig

ENGINE = Engine("jax", "native")


@pytest.mark.parametrize("name", [n for n, p in PROPERTIES.items() if p.applies(ENGINE)])
def test_property(name):
    run(name, ENGINE, 10, shapes=1)


def test_store_of_coordinates_that_are_exactly_zero():
    """Found by a long run: four of 3840 codes at an edge are one more than chance gives."""
    config = QuantConfig(key="mse4", value="int8")
    example = Example(
        config, 20, 3, num_kv_heads=3, group=1, dtype="bfloat16", batch=((5, 0), (0, 29), (3, 3)),
        causal=False, sliding_window=40, softcap=5.0, alibi=True, keys="offset", values="mixed",
        sharpness=1.0, spare=0, at_least=(16, 40, 130),
    )  # fmt: skip
    PROPERTIES["store"].check(example, ENGINE)


def test_server():
    done = serve(ENGINE, 40, servers=1)
    assert done["rows attended"]
    assert done["tokens stored"]
