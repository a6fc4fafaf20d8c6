"""Fixtures of every suite; no framework is imported here."""

from __future__ import annotations

import zlib

import numpy as np
import pytest


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers of the test's own, the same in every run and order."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
