"""Runs code in a fresh interpreter where some packages cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Block())
"""


def run_without(
    blocked: Iterable[str], code: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` with the packages ``blocked`` out of reach and every warning an error."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", _BLOCK.format(blocked=list(blocked)) + code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
