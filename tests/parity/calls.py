"""The cases that both frameworks run, and the comparison of their results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from tests.cases import ATTENTION_CASES, STORE_CASES, AttentionCase, StoreCase
from tests.parity import jax_calls, torch_calls

FRAMEWORKS = {"torch": torch_calls, "jax": jax_calls}
_Case = TypeVar("_Case", AttentionCase, StoreCase)

#: What the kernels serve of the shared tables.
ATTENTION = [c for c in ATTENTION_CASES if c.head_dim % 8 == 0]
STORE = [c for c in STORE_CASES if c.head_dim % 8 == 0]


def assert_same_bits(function: str, *args: Any, **kwargs: Any) -> None:
    """A function of the modules of calls gives the same bits in both frameworks."""
    first, second = (getattr(calls, function)(*args, **kwargs) for calls in FRAMEWORKS.values())
    for name, array in first.items():
        have, want = (np.ascontiguousarray(x) for x in (second[name], array))
        assert have.shape == want.shape
        differ = int((have.view(np.uint8) != want.view(np.uint8)).sum())
        assert not differ, f"{name}: {differ} of {want.nbytes} bytes differ"


def cover(cases: Iterable[_Case]) -> list[_Case]:
    """Few cases in which every value of every field is met."""
    left, chosen = list(cases), []
    missing = frozenset[Any]().union(*map(_traits, left))
    while missing:
        best = max(left, key=lambda case: len(missing & _traits(case)))
        missing -= _traits(best)
        chosen.append(best)
    return chosen


def shorter(case: AttentionCase) -> AttentionCase:
    """The case with few rows and tokens: interpreters are slow."""
    batch = ((1, 70), (1, 0), (1, 17)) if case.is_decode else ((1, 17), (4, 3), (0, 9), (2, 70))
    return replace(case, batch=batch, group=min(case.group, 4))


def _traits(case: AttentionCase | StoreCase) -> frozenset[Any]:
    names = ("page_size", "order", "dtype", "head_dim", "sliding_window", "softcap", "sinks")
    names += ("alibi", "causal", "scale", "is_decode", "padding_rows")
    config = case.config
    return frozenset(
        {(name, getattr(case, name)) for name in names if hasattr(case, name)}
        | {(name, getattr(case.extras, name)) for name in vars(case.extras)}
        | {("key", config.key, config.key_packing), ("value", config.value)}
        | {("norm_correction", config.norm_correction)}
    )
