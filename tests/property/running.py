"""Runs a property on drawn examples, the same ones for the same seed."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import replace

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.cases import config_id
from tests.engines import Engine
from tests.property.checks import PROPERTIES
from tests.property.examples import POOL, Example, examples, pooled


def run(
    name: str,
    engine: Engine,
    count: int,
    *,
    seed: int = 0,
    shapes: int = len(POOL),
    size: str = "medium",
    tried: Counter[tuple[str, str]] | None = None,
) -> None:
    """Checks ``count`` examples of a property; the first that fails is shrunk and raised.

    Args:
        name: one of ``PROPERTIES``.
        engine: what runs.
        count: examples.
        seed: of the draws.
        shapes: with JAX, how many shapes of the pool are compiled.
        size: of the examples, ``"small"``, ``"medium"`` or ``"large"``.
        tried: counts what was checked by property and format.
    """
    check = PROPERTIES[name].check
    if engine.framework == "jax":
        pool = tuple(e for e in POOL if engine.serves(e.head_dim))
        step = max(1, len(pool) // shapes)
        chosen = pool[::step]
        if name == "other pages":
            chosen = tuple(replace(e, page_size=16) for e in chosen)
        strategy = pooled(chosen[:shapes])
    else:
        strategy = examples(kernels=engine.has_kernels, size=size)

    @hypothesis.seed(zlib.crc32(f"{name} {seed}".encode()))
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(strategy)
    def holds(example: Example) -> None:
        check(example, engine)
        if tried is not None:
            tried[name, config_id(example.config)] += 1

    holds()
