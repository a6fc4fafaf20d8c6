"""Inputs that broke others, with tq_jax's own operations."""

from __future__ import annotations

import pytest

from tests import hard
from tests.engines import Engine

ENGINE = Engine("jax", "native")


@pytest.mark.parametrize("name", hard.checks_for(ENGINE))
def test_hard(name):
    hard.CHECKS[name](ENGINE)


@pytest.mark.slow
def test_every_format_at_every_head_dim():
    hard.formats(ENGINE, step=1)
