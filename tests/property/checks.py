"""What holds for every call: a function each, of an example and an engine."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.cases import Wanted, assert_near, assert_same_bytes
from tests.engines import INDICES, Engine, bits
from tests.property.examples import Arrays, Example, build
from tq_core import CacheLayout, reference
from tq_core.layout import ORDERS


def _rng(example: Example, what: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32((what + repr(example)).encode()))


def _near(
    engine: Engine, result: tuple[Any, Any], wanted: Wanted, example: Example, rows: Any = ...
) -> None:
    out, lse = map(engine.numbers, result)
    if engine.backend == "interpret" and example.dtype == "bfloat16":
        # The interpreter cuts off what bf16 cannot hold: half of the last bit in the mean.
        out = out * (1 + 2.0**-9)
    if rows is not ...:
        out, lse = out[: len(rows)], lse[: len(rows)]
    out_, lse_, blind, nothing, peak, score = wanted
    if rows is not ...:
        out_, lse_, blind, peak, score = (a[rows] for a in (out_, lse_, blind, peak, score))
    assert_near(out, lse, Wanted(out_, lse_, blind, nothing, peak, score), example.dtype)


def _same(first: tuple[Any, Any], second: tuple[Any, Any]) -> None:
    for name, a, b in zip(("out", "lse"), first, second, strict=True):
        assert bits(a) == bits(b), f"bits of {name} differ"


def _call(engine: Engine, example: Example, arrays: dict[str, Any], **more: Any) -> tuple[Any, Any]:
    return engine.attention(arrays, example.dtype, **{**example.options, **more})


def attention(example: Example, engine: Engine) -> None:
    """The reference's results, twice the same bits."""
    made = build(example)
    first, second = (_call(engine, example, made.call) for _ in range(2))
    _near(engine, first, made.wanted, example)
    _same(first, second)


def store(example: Example, engine: Engine) -> None:
    """The reference's bytes in the slots that were named, and no other byte changed."""
    made = build(example)
    what = {"layout": example.layout, "codec": example.codec}
    cache = engine.store(*made.stored, **what, dtype=example.dtype)
    assert_same_bytes(engine.numbers(cache), made.stored, **what, most=example.most)


def round_trip(example: Example, engine: Engine) -> None:
    """Attention and `dequantize` of what the engine stored itself."""
    made = build(example)
    what = {"layout": example.layout, "codec": example.codec}
    cache = engine.store(*made.stored, **what, dtype=example.dtype)
    lens = np.array([n for _, n in example.batch], np.int32)
    if not (engine.has_kernels and example.extras.key_transform == "heads"):  # known, see tests
        dense = engine.dequantize(cache, made.table, lens, **what)
        want = reference.dequantize(engine.numbers(cache), made.table, lens, **what)
        for have, right in zip(dense, want, strict=True):
            have = engine.numbers(have)
            assert np.isfinite(have).all()
            error, size = np.abs(have - right), np.abs(right).max((1, 3), initial=0)
            assert (error <= 1e-4 * size[:, None, :, None] + 1e-30).all()
    call = {**made.call, "cache": engine.numbers(cache)}
    out, lse = reference.attention(**call, **example.options, return_lse=True)
    wanted = made.wanted._replace(out=out, lse=lse, peak=1.01 * made.wanted.peak)
    _near(engine, _call(engine, example, call), wanted, example)


def moved_pages(example: Example, engine: Engine) -> None:
    """Where pages lie makes no difference, not of a bit."""
    made = build(example)
    pages = len(made.call["cache"])
    order = _rng(example, "pages").permutation(pages)
    cache = np.empty_like(made.call["cache"])
    cache[order] = made.call["cache"]
    table = made.call["block_table"]
    inside = (table >= 0) & (table < pages)
    table = np.where(inside, order[np.where(inside, table, 0)] if pages else table, table)
    moved = {**made.call, "cache": cache, "block_table": table.astype(np.int32)}
    _same(_call(engine, example, made.call), _call(engine, example, moved))


def repacked(
    example: Example, page_size: int, order: str
) -> tuple[CacheLayout, dict[str, np.ndarray | None]]:
    """The same tokens in a layout with other pages, none shared."""
    made = build(example)
    old, size = example.layout, example.page_size
    layout = CacheLayout(old.config, old.num_kv_heads, old.head_dim, page_size, order)
    rng = _rng(example, "repacked")
    row_of = {int(slot): row for row, slot in enumerate(made.stored.slot_mapping)}
    lengths = [n for _, n in example.batch]
    width = max([-(-max(*lengths, example.at_least[1]) // page_size), 1])
    pages = rng.permutation(len(lengths) * width).astype(np.int32).reshape(-1, width)
    cache = np.full(layout.shape(pages.size), 0xFF, np.uint8)
    table = np.full_like(pages, -1)
    for b, (count, length) in enumerate(example.batch):
        first = 0
        if example.sliding_window is not None:
            first = max(0, length - count - example.sliding_window + 1)
        j = np.arange(length)
        olds = made.table[b, j // size].astype(np.int64) * size + j % size
        rows = np.array([row_of[int(s)] for s in olds], int)
        slots = pages[b, j // page_size].astype(np.int64) * page_size + j % page_size
        reference.store(
            made.stored.key[rows], made.stored.value[rows], cache, slots,
            layout=layout, codec=example.codec,
        )  # fmt: skip
        span = slice(first // page_size, -(-length // page_size))
        table[b, span] = pages[b, span]
    return layout, {**made.call, "cache": cache, "block_table": table}


def other_pages(example: Example, engine: Engine) -> None:
    """Another page size and order of bytes: the same results."""
    sizes = [16, 64] if engine.framework == "jax" else [1, 3, 16, 32, 64, 128]
    size = sizes[(sizes.index(example.page_size) + 1) % len(sizes)
                 if example.page_size in sizes else 0]  # fmt: skip
    order = ORDERS[(ORDERS.index(example.order) + 1) % 3]
    layout, call = repacked(example, size, order)
    result = _call(engine, example, call, layout=layout)
    _near(engine, result, build(example).wanted, example)


def unused_bytes(example: Example, engine: Engine) -> None:
    """Whatever a sequence does not see may be anything."""
    made = build(example)
    rng = _rng(example, "unused")
    first = _call(engine, example, made.call)
    cache = made.call["cache"]
    noise = rng.choice([np.zeros_like(cache), rng.integers(0, 256, cache.shape, dtype=np.uint8)])
    call = {**made.call, "cache": np.where(made.used, cache, noise)}
    if example.at_least == (0, 0, 0):
        # Pages that nothing refers to, and columns of the table that nobody reads.
        call["cache"] = np.concatenate([call["cache"], noise[:1]])
        wide = rng.integers(-(2**31), 2**31, (len(example.batch), 2)).astype(np.int32)
        call["block_table"] = np.concatenate([call["block_table"], wide], 1)
        _near(engine, _call(engine, example, call), made.wanted, example)
    else:
        _same(first, _call(engine, example, call))


def _part(
    made: Arrays, example: Example, parts: Iterable[tuple[int, int, int]]
) -> tuple[dict[str, Any], np.ndarray]:
    """Arguments with rows ``[first, last)`` of some sequences, and those rows' numbers.

    Rows are padded up to the example's floor, so that JAX compiles one shape.
    """
    starts = made.call["query_start_loc"]
    parts = list(parts)
    rows = [np.arange(starts[b] + first, starts[b] + last) for b, first, last in parts]
    index = np.concatenate([np.zeros(0, int), *rows]).astype(int)
    lens = [
        max(0, example.batch[b][1] - example.batch[b][0] + last) if last else example.batch[b][1]
        for b, _, last in parts
    ]
    counts = [0, *(last - first for _, first, last in parts)]
    seqs = [b for b, _, _ in parts]
    query = made.call["query"][index]
    padding = max(0, example.at_least[0] - len(index))
    return {
        **made.call,
        "query": np.pad(query, ((0, padding), (0, 0), (0, 0))),
        "block_table": made.call["block_table"][seqs],
        "seq_lens": np.array(lens, np.int32),
        "query_start_loc": np.cumsum(counts).astype(np.int32),
    }, index


def chunks(example: Example, engine: Engine) -> None:
    """Rows of a prefill in chunks of any size, against the whole; later tokens are there."""
    example = replace(example, causal=True)
    made = build(example)
    step = int(_rng(example, "chunks").integers(1, 8))
    most = max(rows for rows, _ in example.batch)
    for first in range(0, most, step):
        parts = [
            (b, min(first, rows), min(first + step, rows))
            for b, (rows, _) in enumerate(example.batch)
        ]
        call, index = _part(made, example, parts)
        _near(engine, _call(engine, example, call), made.wanted, example, index)


def batch_order(example: Example, engine: Engine) -> None:
    """Sequences in another order, one left out, one twice."""
    made = build(example)
    rng = _rng(example, "batch")
    seqs = list(rng.permutation(len(example.batch)))
    seqs = [*seqs[1:], seqs[-1]]
    parts = [(b, 0, example.batch[b][0]) for b in seqs]
    call, index = _part(made, example, parts)
    _near(engine, _call(engine, example, call), made.wanted, example, index)
    if engine.has_kernels and len(index):
        # Whose bits do not depend on the batch must not change a bit either.
        plan = {"deterministic": "batch", "split_tokens": 64}
        whole = _call(engine, example, made.call, plan=plan)
        again = _call(engine, example, call, plan=plan)
        for a, b in zip(whole, again, strict=True):
            assert np.array_equal(engine.numbers(a)[index], engine.numbers(b)[: len(index)])


def one_row_each(example: Example, engine: Engine) -> None:
    """`decode_attention`, with and without tight bounds."""
    example = replace(
        example,
        batch=tuple((1, n) for _, n in example.batch),
        padding_rows=0,
        at_least=(0, *example.at_least[1:]),
    )
    made = build(example)
    call = {name: x for name, x in made.call.items() if name != "query_start_loc"}
    _near(engine, _call(engine, example, call), made.wanted, example)
    longest = example.at_least[1] or max(n for _, n in example.batch)
    _near(engine, _call(engine, example, call, max_seq_len=longest), made.wanted, example)


def hints(example: Example, engine: Engine) -> None:
    """Bounds, tight and loose, and splits change nothing but rounding."""
    made = build(example)
    rows, tokens = (max(x) for x in zip(*example.batch, strict=True))
    if engine.framework == "jax":  # which compiles every bound
        rows, tokens = example.at_least[:2]
    for bounds in ({"max_query_len": rows, "max_seq_len": tokens}, {"max_query_len": 2**40}):
        _near(engine, _call(engine, example, made.call, **bounds), made.wanted, example)


def plans(example: Example, engine: Engine) -> None:
    """Splits and tiles of any size."""
    made = build(example)
    rng = _rng(example, "plans")
    splits = int(rng.choice([1, 2, 3, 5, 16, 100]))
    tiles = {"block_t": int(rng.choice([16, 32, 64])), "block_n": int(rng.choice([16, 64]))}
    for more in ({"num_kv_splits": splits}, {"num_kv_splits": splits, "plan": tiles}):
        _near(engine, _call(engine, example, made.call, **more), made.wanted, example)


def merged(example: Example, engine: Engine) -> None:
    """A prefix and the rest, merged by their LSE, are the whole."""
    example = replace(example, causal=True, sliding_window=None, alibi=False)
    if example.values in ("1e-6", "subnormal"):
        # Rounded to fp16 twice, such a number is off by a unit instead of half of one.
        example = replace(example, dtype="float32")
    made = build(example)
    size = example.page_size
    # The same number of pages of each sequence, before any of its rows.
    cut = min(max(0, n - rows) for rows, n in example.batch) // size
    if not cut:
        return
    head = {**made.call, "seq_lens": np.full(len(example.batch), cut * size, np.int32)}
    head["sinks"] = None
    tail = {**made.call, "block_table": np.roll(made.call["block_table"], -cut, 1)}
    tail["seq_lens"] = made.call["seq_lens"] - cut * size
    first = _call(engine, example, head, causal=False)
    second = _call(engine, example, tail)
    outs = [engine.numbers(out) for out, _ in (first, second)]
    if example.dtype == "float16" and np.isfinite(made.wanted[0]).all() > np.isfinite(outs).all():
        # Parts of opposite signs may be too large for fp16 where their mean is not.
        return merged(replace(example, dtype="float32"), engine)
    package = engine._package()
    result = package.merge_attention_states(*first, *second)
    _near(engine, result, made.wanted, example)


def strides(example: Example, engine: Engine) -> None:
    """Any strides of any array, and pages any distance apart: the same bits, no others touched."""
    import torch

    made = build(example)
    rng = _rng(example, "strides")

    def spread(x: Any) -> Any:
        """The same numbers, axes in another order in memory, with gaps."""
        axes = [int(a) for a in rng.permutation(x.ndim)]
        step = int(rng.integers(1, 4))
        shape = [x.shape[a] for a in axes]
        wide = torch.full((*shape[:-1], step * shape[-1] + 1), 99, dtype=x.dtype, device=x.device)
        view = wide[..., 1::step][..., : shape[-1]]
        view = view.permute(*[axes.index(a) for a in range(x.ndim)])
        return view.copy_(x)

    layout, what = example.layout, {"layout": example.layout, "codec": example.codec}
    gap = 2 * int(rng.integers(0, 20))
    shape = made.call["cache"].shape
    room = torch.full(
        (shape[0] * (layout.page_bytes + gap) + 4,), 0xA5, dtype=torch.uint8, device=engine.device
    )
    inner = (layout.num_kv_heads * layout.slot_bytes, layout.slot_bytes, 1)

    def placed(memory: Any) -> Any:
        return memory.as_strided(shape, (layout.page_bytes + gap, *inner), 4)

    cache = placed(room)
    cache.copy_(torch.from_numpy(made.call["cache"]))
    call = {n: None if x is None else engine.array(x) for n, x in made.call.items()}
    call["query"] = engine.array(made.call["query"], example.dtype)
    dense = _call(engine, example, call)
    moved = {n: spread(call[n]) for n in ("query", *INDICES) if call[n] is not None}
    moved["out"] = spread(torch.full_like(dense[0], float("nan")))
    _same(dense, _call(engine, example, {**moved, "cache": cache}))

    arrays = [engine.array(x, example.dtype) for x in made.stored[:2]]
    slots = engine.array(made.stored.slot_mapping)
    cache.copy_(torch.from_numpy(made.stored.cache))
    engine.store(*map(spread, arrays), cache, spread(slots), **what)
    plain = engine.store(*arrays, engine.array(made.stored.cache), slots, **what)
    assert torch.equal(plain, cache)
    placed(room).fill_(0xA5)
    assert bool((room == 0xA5).all())


@dataclass(frozen=True)
class Property:
    """A check, for whom it is, and its share of a long run."""

    check: Callable[[Example, Engine], None]
    share: int = 1
    kernels_only: bool = False
    torch_only: bool = False

    def applies(self, engine: Engine) -> bool:
        return (engine.has_kernels or not self.kernels_only) and (
            engine.has_strides or not self.torch_only
        )


PROPERTIES = {
    "attention": Property(attention, 5),
    "store": Property(store, 5),
    "round trip": Property(round_trip, 2),
    "moved pages": Property(moved_pages),
    "other pages": Property(other_pages, 2),
    "unused bytes": Property(unused_bytes, 2),
    "chunks": Property(chunks),
    "batch order": Property(batch_order),
    "one row each": Property(one_row_each, 2),
    "hints": Property(hints),
    "plans": Property(plans, 2, kernels_only=True),
    "merged": Property(merged),
    "strides": Property(strides, torch_only=True),
}
