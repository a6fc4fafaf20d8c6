"""Random calls: what is drawn of them, and the arrays that follow from it.

An `Example` is small and printable: one that failed is a plain case as it stands.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.cases import (
    CONFIGS,
    DTYPES,
    GARBAGE,
    PLAIN,
    AttentionCase,
    Extras,
    StoreInputs,
    Wanted,
    judge,
    make_codec,
    reach,
    rounded,
)
from tq_core import Codec, reference
from tq_core.layout import ORDERS

#: What vectors hold; every one with 0, inf and NaN in some tokens where ``dirty``.
KINDS = (
    "normal", "offset", "constant", "one-hot", "channel", "zero", "subnormal", "1e-6", "1e4",
    "7e4", "mixed",
)  # fmt: skip
#: Kinds whose coordinates lie on bucket edges by construction: their codes are anybody's choice.
ON_EDGES = {"constant", "one-hot", "channel", "zero", "subnormal", "1e-6", "7e4"}

_fresh_codec = lru_cache(256)(make_codec.__wrapped__)


@dataclass(frozen=True)
class Example(AttentionCase):
    """A store and an attention over what it stored."""

    batch: tuple[tuple[int, int], ...] = ((1, 5),)
    keys: str = "normal"
    values: str = "normal"
    dirty: bool = False
    #: Largest scale * ||q|| * ||k||: the sharpness of the softmax.
    sharpness: float = 8.0
    #: Columns of the block table, pages and rows of the store beyond what is needed.
    spare: int = 1
    #: Shapes of arrays are at least for so many (query rows, tokens of a sequence, stored rows).
    at_least: tuple[int, int, int] = (0, 0, 0)

    @property
    def codec(self) -> Codec:
        return _fresh_codec(
            self.config, self.head_dim, self.num_kv_heads, self.extras, self.seed % 3
        )

    @property
    def most(self) -> float:
        """Share of codes that may differ, each at its edge."""
        # 10 + x has so few bits left in bf16 that sums of a rotation may be exactly 0, an edge.
        edges = ON_EDGES | ({"offset"} if self.dtype == "bfloat16" else set())
        return 1.0 if self.dirty or {self.keys, self.values} & edges else 1e-3

    def __repr__(self) -> str:
        given = ", ".join(
            f"{name}={getattr(self, name)!r}"
            for name, field in self.__dataclass_fields__.items()
            if getattr(self, name) != field.default
        )
        return f"Example({given})"

    __str__ = __repr__


@dataclass(frozen=True)
class Arrays:
    """An example's arrays. The cache holds what the reference stores into ``stored.cache``."""

    stored: StoreInputs
    call: dict[str, np.ndarray | None]  # arguments of attention
    table: np.ndarray  # the block table before entries were replaced by -1
    used: np.ndarray  # bool, bytes of the cache that a sequence sees
    wanted: Wanted


def vectors(
    kind: str, shape: tuple[int, int, int], dtype: str, dirty: bool, rng: np.random.Generator
) -> np.ndarray:
    """``[N, Hk, D]`` of a kind, rounded to ``dtype``."""
    n, heads, dim = shape
    x = rng.normal(size=shape)
    if kind == "offset":
        x += 10
    elif kind == "constant":
        x = np.broadcast_to(x[..., :1], shape).copy()
    elif kind == "one-hot":
        x = np.where(np.arange(dim) == rng.integers(dim, size=(n, heads, 1)), 3.0, 0.0)
    elif kind == "channel":
        x[..., dim // 3] += 1000
    elif kind == "zero":
        x[:] = 0
    elif kind == "subnormal":
        x *= {"float16": 1e-7, "bfloat16": 1e-39, "float32": 1e-42}[dtype]
    elif kind in ("1e-6", "1e4"):
        x *= float(kind)
    elif kind == "7e4":
        x[np.arange(n), :, rng.integers(dim, size=n)] = rng.choice([-7e4, 7e4], (n, 1))
    elif kind == "mixed":
        x *= 10.0 ** rng.integers(-3, 3, (n, heads, 1))
    if dirty:
        bad = rng.choice([np.nan, np.inf, -np.inf, 0.0], n)
        rows = np.flatnonzero(rng.random(n) < 0.3)
        x[rows, rng.integers(heads, size=len(rows)), rng.integers(dim, size=len(rows))] = bad[rows]
    with np.errstate(over="ignore"):
        return rounded(x, dtype)


@lru_cache(4)
def build(example: Example) -> Arrays:
    """The arrays of an example."""
    rng = np.random.default_rng(zlib.crc32(repr(example).encode()))
    layout, codec, size = example.layout, example.codec, example.page_size
    heads, dim = example.num_kv_heads, example.head_dim
    rows, lengths = np.array(example.batch, np.int32).reshape(-1, 2).T
    row_floor, sequence_floor, token_floor = example.at_least
    width_floor = -(-sequence_floor // size)

    # Pages in any order; the whole pages of a common prefix are shared.
    needed = -(-lengths // size)
    num_pages = max(int(needed.sum()) + example.spare, len(rows) * width_floor)
    free = list(rng.permutation(num_pages))
    width = max(int(needed.max(initial=0)) + example.spare % 2, width_floor)
    table = rng.integers(0, max(1, num_pages), (len(rows), width)).astype(np.int32)
    longest = int(np.argmax(lengths)) if len(lengths) else 0
    order = sorted(range(len(rows)), key=lambda b: b != longest)
    for b in order:
        common = 0
        if example.shared_pages and b != longest:
            common = max(0, int(lengths[b]) // size)
            table[b, :common] = table[longest, :common]
        for i in range(common, needed[b]):
            table[b, i] = free.pop()

    position = [np.arange(n) for n in lengths]
    slots = [table[b, p // size].astype(np.int64) * size + p % size for b, p in enumerate(position)]
    mapping = rng.permutation(np.unique(np.concatenate([np.zeros(0, np.int64), *slots])))
    skipped = np.full(max(example.spare, token_floor - len(mapping)), -1, np.int64)
    mapping = rng.permutation(np.concatenate([mapping, skipped]))
    shape = (len(mapping), heads, dim)
    key = vectors(example.keys, shape, example.dtype, example.dirty, rng)
    value = vectors(example.values, shape, example.dtype, example.dirty, rng)
    empty = np.full(layout.shape(num_pages), GARBAGE, np.uint8)
    cache = empty.copy()
    reference.store(key, value, cache, mapping, layout=layout, codec=codec)
    used = np.zeros((num_pages, layout.page_bytes), bool)

    window = example.sliding_window
    masked = table.copy()
    for b, (count, tokens) in enumerate(example.batch):
        masked[b, needed[b] :] = -1
        first = 0 if window is None else max(0, tokens - count - window + 1)
        masked[b, : min(first, tokens) // size] = -1
        if count == 0:
            masked[b] = rng.integers(-(2**31), 2**31, width)
            continue
        at = position[b][first:]
        pages = table[b, at // size][:, None, None]
        for index in (layout.key_index(), layout.value_index(), layout.meta_index()):
            used[pages, index[at % size]] = True
        used[pages, layout.meta_index()[at % size] + 1] = True

    # The query's size is chosen by what it may see.
    what = {"layout": layout, "codec": codec}
    _, length = reach(cache, masked, example.batch, window, **what)
    length = np.repeat(length, example.group, 1)
    total = max(int(rows.sum()) + example.padding_rows, row_floor)
    scale = dim**-0.5 if example.scale is None else example.scale
    query = rng.normal(size=(total, example.num_query_heads, dim))
    score = scale * np.linalg.norm(query[: len(length)], axis=-1) * length
    factor = example.sharpness / max(float(score.max(initial=0)), 1e-30)
    sinks = rng.choice([-np.inf, -100.0, 0.0, 2.0, 30.0], example.num_query_heads)
    slopes = 2.0 ** -rng.uniform(1, 8, example.num_query_heads)
    call: dict[str, np.ndarray | None] = {
        "query": rounded(query * min(factor, 1e3), example.dtype),
        "cache": cache,
        "block_table": masked,
        "seq_lens": lengths.astype(np.int32),
        "query_start_loc": np.concatenate([[0], rows.cumsum()]).astype(np.int32),
        "sinks": sinks.astype(np.float32) if example.sinks else None,
        "alibi_slopes": slopes.astype(np.float32) if example.alibi else None,
    }
    inputs = StoreInputs(key, value, empty, mapping)
    wanted = judge(call, **example.options)
    return Arrays(inputs, call, table, used.reshape(cache.shape), wanted)


# --- strategies -----------------------------------------------------------------------------

_EXTRAS = (
    PLAIN,
    PLAIN,
    PLAIN,
    Extras(key_offset="heads"),
    Extras(value_offset="shared"),
    Extras(key_transform="heads"),
    Extras(value_transform="shared"),
    Extras("shared", "heads", "heads", "shared"),
)


def _usable(example: Example, kernels: bool) -> bool:
    """What the formats allow, and what docs/kernels.md does not list as a weakness."""
    if not kernels:
        return True
    wide = {"7e4", "mixed", "channel"} & {example.values} or example.dirty
    return not (example.extras.value_offset and wide)


#: Most sequences, rows and tokens of each, KV heads; head_dims.
_SIZES = {
    "small": (2, 4, 20, 2, (8, 16, 24, 40, 64)),
    "medium": (4, 6, 35, 3, (8, 16, 24, 40, 64, 72, 80, 96, 128, 160)),
    "large": (4, 20, 90, 3, (8, 24, 64, 72, 80, 96, 112, 128, 160, 192, 256)),
}


@st.composite
def examples(draw: Any, *, kernels: bool = False, size: str = "medium") -> Example:
    """Any call, or what ``kernels`` serve."""
    most_seqs, most_rows, most_tokens, most_heads, head_dims = _SIZES[size]
    page_sizes = [1, 2, 3, 5, 16] if size == "small" else [1, 2, 3, 5, 16, 17, 32, 64]
    any_dim = st.sampled_from(head_dims)
    if not kernels:
        any_dim = any_dim | st.integers(8, max(head_dims))
    head_dim = draw(any_dim)
    config = draw(st.sampled_from(CONFIGS))
    config = replace(config, norm_correction=draw(st.sampled_from([True, True, False])))
    extras = draw(st.sampled_from(_EXTRAS))
    if config.key == "fp8" and draw(st.booleans()):
        extras = replace(extras, key_scale=draw(st.sampled_from(["shared", "heads"])))
    tokens, rows = st.integers(0, most_tokens), st.integers(0, most_rows)
    example = Example(
        config=config,
        head_dim=head_dim,
        page_size=draw(st.sampled_from(page_sizes)),
        order=draw(st.sampled_from(ORDERS)),
        num_kv_heads=draw(st.integers(1, most_heads)),
        group=draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12, 17])),
        dtype=draw(st.sampled_from(DTYPES)),
        batch=tuple(draw(st.lists(st.tuples(rows, tokens), min_size=1, max_size=most_seqs))),
        scale=draw(st.sampled_from([None, None, 0.21, 1.0])),
        causal=draw(st.sampled_from([True, True, False])),
        sliding_window=draw(st.sampled_from([None, None, 1, 2, 7, 16, 17, 40, 100_000])),
        softcap=draw(st.sampled_from([None, None, 0.5, 5.0, 30.0])),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        extras=extras,
        shared_pages=draw(st.booleans()),
        padding_rows=draw(st.integers(0, 2)),
        keys=draw(st.sampled_from(KINDS)),
        values=draw(st.sampled_from(KINDS)),
        dirty=draw(st.booleans()),
        sharpness=draw(st.sampled_from([1.0, 8.0] if kernels else [1.0, 8.0, 50.0])),
        spare=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 2**16)),
    )
    if not _usable(example, kernels):
        example = replace(example, extras=replace(example.extras, value_offset=None))
    return example


def _pool() -> tuple[Example, ...]:
    """Shapes and options that are compiled once: a format each, features in turn."""
    pool = []
    sizes = [1, 3, 16, 64]
    for i, config in enumerate(CONFIGS):
        pool.append(
            Example(
                config,
                (64, 72, 20, 128, 9)[i % 5],
                sizes[i % 4],
                ORDERS[i % 3],
                num_kv_heads=1 + i % 3,
                group=(1, 3, 4, 7)[i // 2 % 4],
                dtype=DTYPES[i // 3 % 3],
                causal=i % 7 != 3,
                sliding_window=(None, 7, None, 40)[i // 5 % 4],
                softcap=(None, None, 5.0)[i // 2 % 3],
                sinks=i % 3 == 0,
                alibi=i % 4 == 1,
                extras=_EXTRAS[i % len(_EXTRAS)],
                at_least=(16, 40, 130),
            )
        )
    return tuple(pool)


#: For JAX, which compiles every shape: other lengths, values and pages compile nothing.
POOL = _pool()


@st.composite
def pooled(draw: Any, pool: tuple[Example, ...] = POOL) -> Example:
    """A shape of the pool with other contents."""
    base = draw(st.sampled_from(pool))
    batch = st.tuples(st.integers(0, 5), st.integers(0, 40))
    return replace(
        base,
        batch=tuple(draw(st.lists(batch, min_size=3, max_size=3))),
        shared_pages=draw(st.booleans()),
        keys=draw(st.sampled_from(KINDS)),
        values=draw(st.sampled_from(KINDS)),
        dirty=draw(st.booleans()),
        sharpness=draw(st.sampled_from([1.0, 8.0, 50.0])),
        spare=0,
        seed=3 * draw(st.integers(0, 2**14)),
    )
