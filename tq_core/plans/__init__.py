"""Decode plans that were measured on a kind of device: package data, ``python -m bench tune``.

A file a kind of device, named like it: ``nvidia-h200.json`` for ``"NVIDIA H200"``. Its ``plans``
are measured points: the formats, ``head_dim`` and query heads a KV head; how many ``programs``
(sequences x KV heads) of how many ``tokens`` each; and the overrides of a launch plan that were
fastest there. A call takes the nearest point of its formats and shape, so what a file does not
cover, and every device without one, is planned from numbers alone (docs/kernels.md).
"""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

#: Largest distance to a measured point, in powers of two of programs and of tokens.
NEAR = 1.6


class Kind(NamedTuple):
    """What a plan is measured for: formats, head_dim, query heads of a KV head."""

    key: str
    value: str
    head_dim: int
    group: int


class Point(NamedTuple):
    """The best overrides measured for ``programs`` of ``tokens`` each."""

    programs: int
    tokens: int
    plan: dict[str, int]


def file_name(device: str) -> str:
    """The name of the file for a kind of device."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


@lru_cache(maxsize=8)
def load(device: str) -> dict[Kind, tuple[Point, ...]]:
    """The measured points of a kind of device, none where there is no file for it."""
    file = resources.files(__name__) / file_name(device)
    if not file.is_file():
        return {}
    points: dict[Kind, list[Point]] = {}
    for entry in json.loads(file.read_text())["plans"]:
        kind = Kind(*(entry[name] for name in Kind._fields))
        points.setdefault(kind, []).append(Point(*(entry[name] for name in Point._fields)))
    return {kind: tuple(found) for kind, found in points.items()}


@lru_cache(maxsize=1024)
def nearest(device: str, kind: Kind, programs: int, tokens: int) -> Point | None:
    """The measured point nearest to ``programs`` of ``tokens`` each, None where none is near."""

    def distance(point: Point) -> float:
        return max(
            abs(math.log2(point.programs / max(programs, 1))),
            abs(math.log2(point.tokens / max(tokens, 1))),
        )

    point = min(load(device).get(kind, ()), key=distance, default=None)
    return point if point is not None and distance(point) <= NEAR else None
