"""No read or write past the end of any array, by the kernels in Triton's interpreter."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("triton", reason="kernels need triton")

from tests import guarded
from tq_core import kernels

if not kernels.interpreted():
    pytest.skip("needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mprotect")


def test_nothing_past_the_end():
    guarded.check("interpret")
