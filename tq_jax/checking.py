"""The checking mode: what arrays hold, concrete ones before a call and traced ones in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tq_core import contents
from tq_core.layout import CacheLayout
from tq_core.validation import AttentionCall

#: Of numbers that are not finite: how many, and row, place in the row and value of the first.
_Found = tuple[Any, Any, Any, Any]


def store(key: Any, value: Any, cache: Any, slot_mapping: Any, layout: CacheLayout) -> Any:
    """``slot_mapping``, once slots exist and are distinct, and what is stored to them is finite."""
    rows = slot_mapping >= 0
    found = {"key": _not_finite(key, rows), "value": _not_finite(value, rows)}
    num_slots = cache.shape[0] * layout.page_size
    shapes = {"key": key.shape, "value": value.shape}

    def check(slots: np.ndarray, found: dict[str, _Found]) -> None:
        contents.check_slots(slots, num_slots, strict=True)
        _refuse(found, shapes)

    return _after(check, slot_mapping, slots=slot_mapping, found=found)


def attention(
    query: Any,
    cache: Any,
    block_table: Any,
    seq_lens: Any,
    query_start_loc: Any,
    call: AttentionCall,
    layout: CacheLayout,
) -> Any:
    """``seq_lens``, once rows, lengths, pages and bounds are right, and queries finite."""
    end = call.num_tokens if query_start_loc is None else query_start_loc[-1]
    found = {"query": _not_finite(query, np.arange(call.num_tokens) < end)}

    def check(
        table: np.ndarray, lens: np.ndarray, starts: np.ndarray | None, found: dict[str, _Found]
    ) -> None:
        contents.check_attention(
            table, lens, starts, call, cache.shape[0], layout.page_size, strict=True
        )
        _refuse(found, {"query": query.shape})

    return _after(
        check, seq_lens, table=block_table, lens=seq_lens, starts=query_start_loc, found=found
    )


def dequantize(cache: Any, block_table: Any, seq_lens: Any, layout: CacheLayout) -> Any:
    """``seq_lens``, once lengths and pages are right."""
    check = partial(
        contents.check_pages, first=0, num_pages=cache.shape[0], page_size=layout.page_size,
        strict=True,
    )  # fmt: skip
    return _after(check, seq_lens, block_table=block_table, seq_lens=seq_lens)


def _after(check: Callable[..., None], array: Any, **arrays: Any) -> Any:
    """``array``, which is there once ``check`` of ``arrays`` has returned."""
    leaves, tree = jax.tree.flatten(arrays)
    traced = [i for i, x in enumerate(leaves) if isinstance(x, jax.core.Tracer)]
    # JAX's own arrays are not to be read inside a callback.
    known = [None if i in traced else np.asarray(x) for i, x in enumerate(leaves)]

    def run(*given: Any) -> np.ndarray:
        rest = iter(given)
        whole = [np.asarray(next(rest)) if i in traced else x for i, x in enumerate(known)]
        check(**jax.tree.unflatten(tree, whole))
        return np.zeros((), np.int32)

    if not traced:
        run()
        return array
    zero = jax.pure_callback(
        run, jax.ShapeDtypeStruct((), jnp.int32), *(leaves[i] for i in traced),
        vmap_method="sequential",
    )  # fmt: skip
    # The kernels, which would read what is wrong, wait for the sum.
    return array + zero.astype(array.dtype)


def _not_finite(x: Any, rows: Any) -> _Found:
    """Those of ``rows``; the last three mean nothing where there are none."""
    if 0 in x.shape:
        return 0, 0, 0, 0.0
    wrong = ~jnp.isfinite(x.reshape(len(x), -1)) & jnp.asarray(rows)[:, None]
    row = wrong.any(1).argmax()
    place = wrong[row].argmax()
    value = x.reshape(len(x), -1)[row, place].astype(jnp.float32)
    return wrong.sum(), row, place, value


def _refuse(found: dict[str, _Found], shapes: dict[str, tuple[int, ...]]) -> None:
    for name, (count, row, place, value) in found.items():
        if count:
            index = (int(row), *(int(i) for i in np.unravel_index(int(place), shapes[name][1:])))
            contents.refuse_number(name, float(value), index, int(count))
