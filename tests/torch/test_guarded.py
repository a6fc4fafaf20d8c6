"""No read or write past the end of any array, by tq_torch's own operations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import guarded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mprotect")


def test_nothing_past_the_end():
    guarded.check("native")


def test_a_read_past_the_end_is_a_crash():
    command = [sys.executable, "-m", "tests.guarded", "crash"]
    root = Path(__file__).parents[2]
    assert subprocess.run(command, cwd=root, capture_output=True, check=False).returncode == -11
