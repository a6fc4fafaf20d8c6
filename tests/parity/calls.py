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


def cover(cases: Iterable[_Case], rounds: int = 1) -> list[_Case]:
    """Few cases in which every value of every field is met, ``rounds`` times if it is there."""
    chosen: list[_Case] = []
    left = list(cases)
    for _ in range(rounds):
        missing = {trait for case in left for trait in _traits(case)}
        while missing:
            best = max(left, key=lambda c: len(missing & _traits(c)))
            missing -= _traits(best)
            chosen.append(best)
            left.remove(best)
            missing &= {trait for case in left for trait in _traits(case)} | missing
            if not any(missing & _traits(c) for c in left):
                break
    return chosen


def shorter(case: AttentionCase) -> AttentionCase:
    """The case with few rows and tokens: interpreters are slow."""
    batch = ((1, 70), (1, 0), (1, 17)) if case.is_decode else ((1, 17), (4, 3), (0, 16), (3, 80))
    return replace(case, batch=batch, group=min(case.group, 4))


def _traits(case: AttentionCase | StoreCase) -> frozenset[Any]:
    config = case.config
    names = ("page_size", "order", "dtype", "head_dim", "extras", "sliding_window", "softcap")
    names += ("sinks", "alibi", "causal", "scale", "is_decode", "padding_rows")
    traits = {(name, getattr(case, name)) for name in names if hasattr(case, name)}
    traits |= {("key", config.key, config.key_packing), ("value", config.value)}
    return frozenset(traits | {("norm", config.norm_correction)})
