"""Properties of tq_torch's native backend, on a fixed set of examples."""

from __future__ import annotations

import pytest

from tests.engines import Engine
from tests.property.checks import PROPERTIES
from tests.property.running import run

ENGINE = Engine("torch", "native")


@pytest.mark.parametrize("name", [n for n, p in PROPERTIES.items() if p.applies(ENGINE)])
def test_property(name):
    run(name, ENGINE, 15 * PROPERTIES[name].share)
