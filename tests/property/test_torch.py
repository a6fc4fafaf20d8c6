"""Properties of tq_torch's native backend, on a fixed set of examples."""

from __future__ import annotations

import pytest

from tests.engines import Engine
from tests.property.checks import PROPERTIES
from tests.property.running import run
from tests.server import serve

ENGINE = Engine("torch", "native")


@pytest.mark.parametrize("name", [n for n, p in PROPERTIES.items() if p.applies(ENGINE)])
def test_property(name):
    run(name, ENGINE, 10 * PROPERTIES[name].share)


def test_server():
    done = serve(ENGINE, 100, servers=4)
    assert done["rows attended"]
    assert done["tokens stored"]
