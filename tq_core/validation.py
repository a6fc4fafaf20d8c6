"""Checks of public arguments, shared by both frameworks: one place, one wording.

The frameworks describe each array by an :class:`ArraySpec`; nothing here touches data.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tq_core.codec import Codec
from tq_core.layout import CacheLayout

FLOAT_DTYPES = ("float16", "bfloat16", "float32")
MAX_GROUP = 128
MAX_KV_SPLITS = 256


class ArraySpec(NamedTuple):
    """Shape, dtype name, and where the framework has them, element strides and device name."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    device: str | None = None

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class AttentionCall:
    """A checked attention call in plain numbers.

    Attributes:
        num_tokens: N, query rows.
        num_seqs: B.
        num_query_heads: Hq.
        dtype: of query and output.
        group: query heads a KV head, g.
        max_pages: width of the block table.
        scale: factor of the scores, never None.
        causal, sliding_window, softcap: as given.
        max_query_len: upper bound of a sequence's query rows.
        max_seq_len: upper bound of a sequence's tokens.
        num_kv_splits: as given, None where the backend may choose.
    """

    num_tokens: int
    num_seqs: int
    num_query_heads: int
    dtype: str
    group: int
    max_pages: int
    scale: float
    causal: bool
    sliding_window: int | None
    softcap: float | None
    max_query_len: int
    max_seq_len: int
    num_kv_splits: int | None


def check_layout(layout: Any) -> None:
    """It is one."""
    if not isinstance(layout, CacheLayout):
        raise TypeError(f"layout: expected a CacheLayout, got {type(layout).__name__}")


def check_codec(layout: CacheLayout, codec: Codec) -> None:
    """Layout and codec describe the same bytes."""
    check_layout(layout)
    if not isinstance(codec, Codec):
        raise TypeError(f"codec: expected a Codec, got {type(codec).__name__}")
    if codec.config != layout.config:
        raise ValueError(f"codec: expected the layout's {layout.config}, got {codec.config}")
    if codec.head_dim != layout.head_dim:
        raise ValueError(
            f"codec: expected the layout's head_dim {layout.head_dim}, got {codec.head_dim}"
        )
    if codec.num_kv_heads not in (None, layout.num_kv_heads):
        raise ValueError(
            f"codec: expected arrays of the layout's {layout.num_kv_heads} KV heads or one for "
            f"all, got {codec.num_kv_heads}"
        )


def check_store(
    key: ArraySpec,
    value: ArraySpec,
    cache: ArraySpec,
    slot_mapping: ArraySpec,
    *,
    layout: CacheLayout,
    codec: Codec,
) -> None:
    """Arguments of ``store``."""
    check_codec(layout, codec)
    _dtype("key", key, FLOAT_DTYPES)
    _dtype("value", value, FLOAT_DTYPES)
    heads, dim = layout.num_kv_heads, layout.head_dim
    _shape("key", key, (None, heads, dim), "[N, num_kv_heads, head_dim]")
    _shape("value", value, (key.shape[0], heads, dim), "[N, num_kv_heads, head_dim] as key")
    check_cache(cache, layout)
    _dtype("slot_mapping", slot_mapping, ("int32", "int64"))
    _shape("slot_mapping", slot_mapping, (key.shape[0],), "[N], one slot for each row of key")
    _devices(key=key, value=value, cache=cache, slot_mapping=slot_mapping)


def check_attention(
    query: ArraySpec,
    cache: ArraySpec,
    block_table: ArraySpec,
    seq_lens: ArraySpec,
    query_start_loc: ArraySpec | None,
    *,
    layout: CacheLayout,
    codec: Codec,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: ArraySpec | None = None,
    alibi_slopes: ArraySpec | None = None,
    out: ArraySpec | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    num_kv_splits: int | None = None,
) -> AttentionCall:
    """Arguments of ``attention``, or of ``decode_attention`` where ``query_start_loc`` is None."""
    check_codec(layout, codec)
    _dtype("query", query, FLOAT_DTYPES)
    decode = query_start_loc is None
    what = "[B, num_query_heads, head_dim]" if decode else "[N, num_query_heads, head_dim]"
    _shape("query", query, (None, None, layout.head_dim), what)
    num_tokens, num_heads, _ = query.shape
    group = num_heads // layout.num_kv_heads
    if num_heads % layout.num_kv_heads or not 1 <= group <= MAX_GROUP:
        raise ValueError(
            f"query: expected {layout.num_kv_heads} KV heads times a group of 1 to {MAX_GROUP} "
            f"query heads, got {num_heads} query heads"
        )
    num_seqs, max_pages = check_table(cache, block_table, seq_lens, layout=layout)
    if decode:
        if num_tokens != num_seqs:
            raise ValueError(
                f"query: decode_attention expects one row for each of the {num_seqs} sequences of "
                f"seq_lens, got {num_tokens} rows; use attention() with query_start_loc otherwise"
            )
    else:
        assert query_start_loc is not None
        _dtype("query_start_loc", query_start_loc, ("int32",))
        _shape("query_start_loc", query_start_loc, (num_seqs + 1,), "[B + 1]")
    for name, array in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if array is not None:
            _dtype(name, array, ("float32",))
            _shape(name, array, (num_heads,), "[num_query_heads]")
    if out is not None:
        _dtype("out", out, (query.dtype,))
        _shape("out", out, query.shape, "that of query")
    check_options(
        decode=decode,
        scale=scale,
        causal=causal,
        sliding_window=sliding_window,
        softcap=softcap,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        num_kv_splits=num_kv_splits,
    )
    _devices(
        query=query,
        cache=cache,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        out=out,
    )
    capacity = max_pages * layout.page_size
    rows = 1 if decode else num_tokens
    return AttentionCall(
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_query_heads=num_heads,
        dtype=query.dtype,
        group=group,
        max_pages=max_pages,
        scale=layout.head_dim**-0.5 if scale is None else float(scale),
        causal=causal,
        # More than any sequence has, and small enough to be added to.
        sliding_window=None if sliding_window is None else min(int(sliding_window), 2**30),
        softcap=None if softcap is None else float(softcap),
        max_query_len=rows if max_query_len is None else min(int(max_query_len), rows),
        max_seq_len=capacity if max_seq_len is None else min(int(max_seq_len), capacity),
        num_kv_splits=None if num_kv_splits is None else int(num_kv_splits),
    )


def check_options(
    *,
    decode: bool,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    num_kv_splits: int | None = None,
) -> None:
    """Arguments of ``attention`` that are no arrays."""
    _flag("causal", causal)
    if scale is not None:
        _number("scale", scale)
    if sliding_window is not None:
        _integer("sliding_window", sliding_window, 1, hint="None means no window")
    if softcap is not None:
        _number("softcap", softcap, positive=True)
    if max_query_len is not None:
        _integer("max_query_len", max_query_len, 0)
    if max_seq_len is not None:
        _integer("max_seq_len", max_seq_len, 0)
    if num_kv_splits is not None:
        _integer("num_kv_splits", num_kv_splits, 1, MAX_KV_SPLITS)
    if decode and max_query_len not in (None, 1):
        raise ValueError(
            f"max_query_len: decode_attention has one query row a sequence, got {max_query_len}"
        )


def check_plan(
    plan: Mapping[str, int | str] | None, num_kv_splits: int | None = None
) -> tuple[tuple[str, int | str], ...]:
    """Overrides of a launch plan by name; what a plan cannot have is refused when it is made."""
    if plan is None:
        return ()
    if not isinstance(plan, Mapping):
        raise TypeError(f"plan: expected a mapping of names to ints or None, got {plan!r}")
    for name, value in plan.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise TypeError(f"plan: expected names of overrides, got {name!r}")
        if name == "deterministic":
            if value != "batch":
                raise ValueError(f"plan: expected deterministic to be 'batch', got {value!r}")
        elif isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"plan: expected {name} to be an int, got {value!r}")
    if "num_splits" in plan and num_kv_splits is not None:
        raise ValueError(
            f"plan: num_splits={plan['num_splits']} and num_kv_splits={num_kv_splits} say the same "
            "thing; give one"
        )
    return tuple((name, plan[name]) for name in sorted(plan))


def check_table(
    cache: ArraySpec, block_table: ArraySpec, seq_lens: ArraySpec, *, layout: CacheLayout
) -> tuple[int, int]:
    """Cache and page table; returns the number of sequences and the width of the table."""
    check_cache(cache, layout)
    _dtype("seq_lens", seq_lens, ("int32",))
    _shape("seq_lens", seq_lens, (None,), "[B]")
    _dtype("block_table", block_table, ("int32",))
    _shape("block_table", block_table, (seq_lens.shape[0], None), "[B, max_pages]")
    return block_table.shape[0], block_table.shape[1]


def check_dequantize(
    cache: ArraySpec,
    block_table: ArraySpec,
    seq_lens: ArraySpec,
    *,
    layout: CacheLayout,
    codec: Codec,
    dtype: str,
) -> None:
    """Arguments of ``dequantize``."""
    check_codec(layout, codec)
    check_table(cache, block_table, seq_lens, layout=layout)
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype: expected one of {list(FLOAT_DTYPES)}, got {dtype}")
    _devices(cache=cache, block_table=block_table, seq_lens=seq_lens)


def check_merge(out_a: ArraySpec, lse_a: ArraySpec, out_b: ArraySpec, lse_b: ArraySpec) -> None:
    """Arguments of ``merge_attention_states``."""
    _dtype("out_a", out_a, FLOAT_DTYPES)
    _shape("out_a", out_a, (None, None, None), "[N, num_query_heads, head_dim]")
    _dtype("out_b", out_b, (out_a.dtype,))
    _shape("out_b", out_b, out_a.shape, "that of out_a")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _dtype(name, lse, ("float32",))
        _shape(name, lse, out_a.shape[:2], "[N, num_query_heads]")
    _devices(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)


def check_cache(cache: ArraySpec, layout: CacheLayout) -> None:
    """The cache has the layout's shape, and pages that are dense inside."""
    inner = layout.shape(0)[1:]
    wanted = f"uint8[num_pages, {', '.join(map(str, inner))}]"
    if cache.dtype != "uint8" or len(cache.shape) != 4 or cache.shape[1:] != inner:
        raise ValueError(
            f"cache: expected {wanted} (page_size, num_kv_heads, slot_bytes of the layout), "
            f"got {cache}; allocate it with empty_cache(layout, num_pages)"
        )
    if cache.strides is not None and 0 not in cache.shape:
        dense = (inner[1] * inner[2], inner[2], 1)
        if any(n > 1 and s != d for n, s, d in zip(inner, cache.strides[1:], dense, strict=True)):
            raise ValueError(
                f"cache: expected pages that are dense inside, strides (any, {dense[0]}, "
                f"{dense[1]}, {dense[2]}), got {cache.strides}; only the page dimension may be "
                "strided"
            )


def _dtype(name: str, array: ArraySpec, allowed: tuple[str, ...]) -> None:
    if array.dtype not in allowed:
        raise TypeError(f"{name}: expected dtype {' or '.join(allowed)}, got {array.dtype}")


def _shape(name: str, array: ArraySpec, shape: tuple[int | None, ...], words: str) -> None:
    fits = len(array.shape) == len(shape) and all(
        want is None or have == want for have, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        numbers_ = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name}: expected shape {words} = ({numbers_}), got {array.shape}")


def _devices(**arrays: ArraySpec | None) -> None:
    devices: Mapping[str, str] = {
        name: array.device for name, array in arrays.items() if array is not None and array.device
    }
    if len(set(devices.values())) > 1:
        raise ValueError(f"device: expected all arrays on one device, got {dict(devices)}")


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {value!r}")


def _number(name: str, value: Any, positive: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    number: Any = value
    # Comparisons, unlike math.isfinite, can be traced.
    if not -math.inf < number < math.inf or (positive and number <= 0):
        wanted = "a positive finite number or None" if positive else "a finite number"
        raise ValueError(f"{name}: expected {wanted}, got {value!r}")


def _integer(name: str, value: Any, low: int, high: int | None = None, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}: expected an int or None, got {value!r}")
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"{name}: expected {wanted}, got {value}" + (f" ({hint})" if hint else ""))
