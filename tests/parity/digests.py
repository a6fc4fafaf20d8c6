"""Prints digests of what one framework computes in a process of its own.

``python -m tests.parity.digests torch|jax FIRST STEP``: every STEP-th case from FIRST on, as JSON.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys

import numpy as np

from tests.cases import AttentionCase
from tests.gpu.cases import ATTENTION, STORE


def main(framework: str, first: str, step: str) -> None:
    # Triton may import torch by itself.
    other = {"torch": "tq_jax", "jax": "tq_torch"}[framework]
    calls = importlib.import_module(f"tests.parity.{framework}_calls")
    digests = {}
    for case in [*ATTENTION, *STORE][int(first) :: int(step)]:
        function = calls.attention if isinstance(case, AttentionCase) else calls.store
        results = function(case, "triton", "cuda")
        data = b"".join(np.ascontiguousarray(x).tobytes() for x in results.values())
        digests[str(case)] = hashlib.sha256(data).hexdigest()
    assert other not in sys.modules, f"{other} is not to be in this process"
    json.dump(digests, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
