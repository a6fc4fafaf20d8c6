"""Properties of tq_jax's native backend, on a fixed set of examples."""

from __future__ import annotations

import pytest

from tests.engines import Engine
from tests.property.checks import PROPERTIES
from tests.property.running import run
from tests.server import serve

ENGINE = Engine("jax", "native")


@pytest.mark.parametrize("name", [n for n, p in PROPERTIES.items() if p.applies(ENGINE)])
def test_property(name):
    run(name, ENGINE, 10, shapes=1)


def test_server():
    done = serve(ENGINE, 40, servers=1)
    assert done["rows attended"]
    assert done["tokens stored"]
