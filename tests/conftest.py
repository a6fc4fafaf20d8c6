"""Fixtures of every suite; no framework is imported here.

Triton interprets kernels in the whole process or not at all: where ``TRITON_INTERPRET=1`` is set,
only ``tests/interpret`` and ``tests/parity/test_interpret.py`` run.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers of the test's own, the same in every run and order."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


# Several processes share a GPU, and so do two frameworks.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

HERE = Path(__file__).parent
INTERPRET = (HERE / "interpret", HERE / "parity/test_interpret.py")


def _runs_here(path: Path) -> bool:
    return os.environ.get("TRITON_INTERPRET") != "1" or any(
        path.is_relative_to(p) for p in INTERPRET
    )


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out what another process runs; None lets pytest decide."""
    inside = any(p.is_relative_to(collection_path) for p in INTERPRET)
    return None if inside or _runs_here(collection_path) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The same for files named on the command line, which pytest always collects."""
    others = [item for item in items if not _runs_here(item.path)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if _runs_here(item.path)]
