"""Inputs that broke others, one body for every framework and backend.

Each function takes an `Engine`. What is stored is compared with the reference's bytes, what is
attended with the reference on the bytes that the engine wrote. `tests/faults.py` says which kind
of fault is whose.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.cases import (
    CONFIGS,
    PRESET_CONFIGS,
    StoreInputs,
    assert_near,
    assert_same_bytes,
    config_id,
    hard_keys,
    judge,
    rounded,
)
from tests.engines import Engine, bits
from tq_core import CacheLayout, Codec, QuantConfig, reference

FEATURES = {"scale": None, "causal": True, "sliding_window": None, "softcap": None}


def normal(n: int, heads: int, dim: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(2, n, heads, dim))


def attend(
    engine: Engine,
    key: np.ndarray,
    value: np.ndarray,
    batch: Sequence[tuple[int, int]],
    *,
    config: QuantConfig | str = "4bit",
    page_size: int = 16,
    order: str = "planes",
    group: int = 2,
    dtype: str = "float32",
    query: np.ndarray | None = None,
    most: float = 1.0,
    size: float = 1.0,
    **features: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Stores the tokens of all sequences, one after the other, and attends; both are checked.

    Args:
        engine: what runs.
        key: ``[N, Hk, D]``, tokens of the sequences of ``batch`` in their order.
        value: likewise.
        batch: query rows and tokens of each sequence.
        config, page_size, order, group, dtype: of the layout and the query.
        query: ``[rows, Hq, D]``. Default: normal, of ``size``.
        most: share of codes that may differ at their edges.
        size: of the default query.
        **features: options of ``attention``, and of the plan.

    Returns:
        Output and LSE in float64.
    """
    config = PRESET_CONFIGS[config] if isinstance(config, str) else config
    n, heads, dim = key.shape
    rng = np.random.default_rng(n + dim)
    layout = CacheLayout(config, heads, dim, page_size, order)
    what = {"layout": layout, "codec": Codec(config, dim)}
    rows, lengths = np.array(batch, np.int32).T
    needed = -(-lengths // page_size)
    pages = rng.permutation(int(needed.sum()) + 1).astype(np.int32)
    table = np.full((len(batch), max(1, needed.max())), -1, np.int32)
    slots = np.zeros(0, np.int64)
    for b, length in enumerate(lengths):
        table[b, : needed[b]], pages = pages[: needed[b]], pages[needed[b] :]
        j = np.arange(length)
        slots = np.append(slots, table[b, j // page_size].astype(np.int64) * page_size
                          + j % page_size)  # fmt: skip
    with np.errstate(over="ignore"):
        key, value = rounded(key, dtype), rounded(value, dtype)
    empty = np.full(layout.shape(int(needed.sum()) + 1), 0xFF, np.uint8)
    stored = StoreInputs(key, value, empty, slots)
    cache = engine.numbers(engine.store(*stored, **what, dtype=dtype))
    assert_same_bytes(cache, stored, **what, most=most)
    if query is None:
        query = normal(int(rows.sum()), heads * group, dim, 1)[0] * size
    call: dict[str, Any] = {
        "query": rounded(query, dtype),
        "cache": cache,
        "block_table": table,
        "seq_lens": lengths,
        "query_start_loc": np.concatenate([[0], rows.cumsum()]).astype(np.int32),
    }
    hints = {n: features.pop(n) for n in ("plan", "num_kv_splits") if n in features}
    arrays = {n: features.pop(n) for n in ("sinks", "alibi_slopes") if n in features}
    options = {**FEATURES, **what, **features}
    wanted = judge({**call, **arrays}, **options)
    out, lse = map(engine.numbers, engine.attention({**call, **arrays}, dtype, **options, **hints))
    have = out * (1 + 2.0**-9) if (engine.backend, dtype) == ("interpret", "bfloat16") else out
    assert_near(have, lse, wanted, dtype)
    return out, lse


def _attends(engine: Engine, batch: Sequence[tuple[int, int]], dim: int = 64, **more: Any) -> Any:
    heads = more.pop("heads", 1)
    tokens = sum(n for _, n in batch)
    return attend(engine, *normal(tokens, heads, dim), batch, **more)


# --- shapes ---------------------------------------------------------------------------------


def head_dims(engine: Engine) -> None:
    """Not powers of two, and large."""
    formats = list(PRESET_CONFIGS)
    for i, dim in enumerate((80, 96, 112, 160, 192, 576)):
        _attends(engine, ((1, 20), (2, 3)), dim, config=formats[i % len(formats)], heads=2)


def every_head_dim(engine: Engine, step: int = 31) -> None:
    """From 8 to 576 each is right, or refused by name."""
    formats = list(PRESET_CONFIGS.values())
    for dim in range(8, 577, step):
        config = formats[dim % len(formats)]
        if engine.serves(dim):
            _attends(engine, ((1, 3),), dim, config=config, page_size=2)
        else:
            with pytest.raises(ValueError, match=f"multiple of 8, not {dim}"):
                _attends(engine, ((1, 3),), dim, config=config, page_size=2)


def formats(engine: Engine, step: int = 5) -> None:
    """Every pair of formats at more than one head_dim."""
    for i, config in enumerate(CONFIGS[::step]):
        for dim in (64, 72, 128)[i % 2 :: 2]:
            try:
                _attends(engine, ((2, 19),), dim, config=config, page_size=(16, 4)[i % 2])
            except AssertionError as error:
                error.add_note(f"{config_id(config)}, head_dim {dim}")
                raise


def groups(engine: Engine) -> None:
    """Query heads a KV head that are no power of two, and more than 16."""
    for group in (3, 5, 6, 7, 12, 17, 24, 71):
        _attends(engine, ((1, 20), (3, 18)), 16, heads=2, group=group)


def page_sizes(engine: Engine) -> None:
    """The same tokens in pages of any size."""
    results = [
        _attends(engine, ((3, 130), (1, 17)), 16, page_size=size, order=order)
        for size, order in ((1, "token"), (16, "head"), (32, "planes"), (64, "planes"),
                            (128, "token"))
    ]  # fmt: skip
    for out, lse in results[1:]:
        assert np.abs(out - results[0][0]).max() <= 2e-3 * np.abs(out).max()
        assert np.abs(lse - results[0][1]).max() <= 2e-3


def lengths(engine: Engine) -> None:
    """At the ends of pages, tiles and splits, in one batch with a sequence 1000 times as long."""
    near = {n + d for n in (0, 16, 32, 64, 128) for d in (-1, 0, 1)} - {-1}
    batch = [(1, n) for n in (1000, *sorted(near))]
    _attends(engine, batch, 16, group=1)
    if engine.has_kernels:
        for splits in (2, 7):
            _attends(engine, batch, 16, group=1, num_kv_splits=splits)


# --- values ---------------------------------------------------------------------------------


def keys(engine: Engine) -> None:
    """With an offset, constant, one-hot, with one huge channel, zero, of large norms."""
    dim = 64
    kinds = {
        **{name: np.resize(x, (20, 1, dim)) for name, x in hard_keys(dim).items()},
        "zero": np.zeros((20, 1, dim)),
    }
    value, plain = normal(20, 1, dim)
    for norm in (300, 800, 7e4):
        kinds[f"norm {norm:g}"] = norm * plain / np.linalg.norm(plain, axis=-1, keepdims=True)
    for name, key in kinds.items():
        # A shorter query where keys are long, so that the softmax is no choice of one.
        size = 1 / max(1.0, float(np.linalg.norm(key, axis=-1).max()) / 8)
        for config in ("4bit", "k8v4", "3bit"):
            try:
                attend(engine, key, value, ((3, 20),), config=config, size=size)
            except AssertionError as error:
                error.add_note(f"keys: {name}, {config}")
                raise


def hard_keys_come_back(engine: Engine) -> None:
    """Through `store` and `dequantize` their direction survives 4 bit."""
    for dim in (64, 96, 128):
        layout = CacheLayout(PRESET_CONFIGS["4bit"], 1, dim, 16)
        what = {"layout": layout, "codec": Codec(layout.config, dim)}
        for name, key in hard_keys(dim).items():
            key = key[:16, None]
            slots = np.arange(len(key))
            cache = engine.store(key, key, np.zeros(layout.shape(1), np.uint8), slots, **what)
            lens = np.array([len(key)], np.int32)
            dense, _ = engine.dequantize(cache, np.zeros((1, 1), np.int32), lens, **what)
            dense = engine.numbers(dense)[0, : len(key)]
            cosine = (dense * key).sum(-1)
            cosine /= np.linalg.norm(dense, axis=-1) * np.linalg.norm(key, axis=-1)
            assert cosine.min() >= 0.99, f"{name}: {cosine.min()}"


def values(engine: Engine) -> None:
    """With an offset of 1000, constant, of 1e-6, with outliers that fp16 has no room for."""
    key, plain = normal(20, 2, 64)
    outlier = plain.copy()
    outlier[::3, :, 5] = 7e4
    outlier[1::3, :, 9] = -7e4
    kinds = {"offset": 1000 + plain, "constant": plain[..., :1] + 0 * plain, "1e-6": 1e-6 * plain,
             "outlier": outlier, "zero": 0 * plain}  # fmt: skip
    for name, value in kinds.items():
        for config in ("4bit", "k8v8", "3bit_hq", "2bit"):
            for dtype in ("bfloat16",) if name == "outlier" else ("float16",):
                try:
                    attend(engine, key, value, ((2, 20),), config=config, dtype=dtype)
                except AssertionError as error:
                    error.add_note(f"values: {name}, {config}")
                    raise


def bad_tokens(engine: Engine) -> None:
    """NaN and infinities of some tokens reach no other, masked ones least of all."""
    key, value = normal(40, 1, 64)
    batch = ((3, 20), (4, 20))
    features = {"sliding_window": 6, "causal": True}
    for config in ("4bit", "k8v8", "2bit_hq"):
        clean, clean_lse = attend(engine, key, value, batch, config=config, **features)
        dirty = [key.copy(), value.copy()]
        for x in dirty:
            x[3], x[25, 0, 7] = np.nan, np.inf  # before every window
        out, lse = attend(engine, *dirty, batch, config=config, **features)
        assert np.array_equal(out, clean)
        assert np.array_equal(lse, clean_lse)
        for x in dirty:
            x[18, 0, 1], x[38, 0, 2] = -np.inf, np.nan
        # Infinite keys are 6e17 long: a query of 1e-17 keeps scores in bounds.
        attend(engine, *dirty, batch, config=config, **features, size=1e-17)


def fp8_range(engine: Engine) -> None:
    """Keys at every end of the range of e4m3, in every dtype."""
    exact = np.array([448, 447, 464, 465, 1e4, 1.75, 1.76, 2**-6, 2**-9, 2**-10, 1.5 * 2**-9])
    key = np.resize(np.concatenate([exact, -exact]), (22, 1, 64))
    for dtype in ("float32", "bfloat16", "float16"):
        attend(engine, key, normal(22, 1, 64)[0], ((1, 22),), config="k8v4", dtype=dtype, most=0,
               scale=1e-5)  # fmt: skip


def needle(engine: Engine) -> None:
    """A key that equals the query is found at every position of pages and splits."""
    n, dim = 150, 64
    key, value = normal(n, 1, dim)
    query = 4 * np.repeat(key, 1, 1)
    for more in ({}, {"num_kv_splits": 5}) if engine.has_kernels else ({},):
        out, _ = attend(
            engine, key, value, ((n, n),), config="k8v8", group=1, query=query, causal=False, **more
        )
        likeness = out[:, 0] @ value[:, 0].T
        assert np.array_equal(likeness.argmax(1), np.arange(n))


# --- batches --------------------------------------------------------------------------------


def speculative_rows(engine: Engine) -> None:
    """Two to eight rows a sequence, some with fewer tokens than rows, beside decodes."""
    batch = ((8, 3), (2, 1), (5, 0), (4, 40), (1, 17), (0, 9), (8, 8), (3, 64))
    _attends(engine, batch, 16, group=3)


def prefix_hit(engine: Engine) -> None:
    """The last third of a prompt is new, next to a whole short one."""
    _attends(engine, ((50, 150), (10, 10)), 16, dtype="float16")


# --- addressing -----------------------------------------------------------------------------


def narrow_tables(engine: Engine) -> None:
    """A block table exactly as wide as needed: what lies behind it in memory is never followed.

    Behind it are the numbers of pages full of NaN; in the table, past the end of each sequence and
    before its window, -1.
    """
    size, dim, lens = 16, 64, (31, 48, 1)
    layout = CacheLayout(PRESET_CONFIGS["k8v4"], 1, dim, size)
    what = {"layout": layout, "codec": Codec(layout.config, dim)}
    key, value = rounded(normal(3 * 48, 1, dim), "float32")
    cache = np.full(layout.shape(12), 0xFF, np.uint8)
    reference.store(key, value, cache, np.arange(3 * 48), **what)
    table = np.arange(9, dtype=np.int32).reshape(3, 3)
    for b, n in enumerate(lens):
        table[b, -(-n // size) :] = -1
    wide = np.full((3, 70), 11, np.int32)
    call: dict[str, Any] = {
        "query": normal(6, 2, dim, 1)[0].astype(np.float32),
        "cache": cache,
        "seq_lens": np.array(lens, np.int32),
        "query_start_loc": np.array([0, 2, 5, 6], np.int32),
    }
    for window in (None, 9):
        if window:
            table[:2, 0] = -1
        wide[:, :3] = table
        options = {**FEATURES, **what, "sliding_window": window}
        wanted = judge({**call, "block_table": table}, **options)
        view = engine.array(wide)[:, :3]
        for splits in ({}, {"num_kv_splits": 3}) if engine.has_kernels else ({},):
            out, lse = engine.attention({**call, "block_table": view}, **options, **splits)
            assert_near(engine.numbers(out), engine.numbers(lse), wanted, "float32")


def fused_arrays(engine: Engine) -> None:
    """Query, key and value are slices of one tensor, or expanded; the cache is one of a pool."""
    import torch

    layout = CacheLayout(PRESET_CONFIGS["4bit_hq"], 2, 64, 16)
    what = {"layout": layout, "codec": Codec(layout.config, 64)}
    fused = engine.array(normal(20, 8, 64)[0], "float16")
    query, key, value = fused.split([4, 2, 2], 1)
    slots = engine.array(np.arange(20))
    pools = [engine.array(np.full((5, 2, *layout.shape(2)[1:]), 0xFF, np.uint8)) for _ in range(2)]
    engine.store(key, value, pools[0][3], slots, **what)
    plain = engine.store(key.contiguous(), value.contiguous(), pools[1][3].clone(), slots, **what)
    assert torch.equal(pools[0][3], plain)
    assert bool((pools[0][[0, 1, 2, 4]] == 0xFF).all())
    call = {
        "block_table": np.array([[0, 1]], np.int32),
        "seq_lens": np.array([20], np.int32),
        "query_start_loc": np.array([0, 20], np.int32),
    }
    have = engine.attention({**call, "query": query, "cache": pools[0][3]}, "float16", **what)
    want = engine.attention(
        {**call, "query": query.contiguous(), "cache": plain.clone()}, "float16", **what
    )
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))

    one = key[:1].expand(20, -1, -1)
    engine.store(one, one, pools[0][3], slots, **what)
    assert torch.equal(pools[0][3], engine.store(one.clone(), one.clone(), plain, slots, **what))
    row = query[:, :1].expand(-1, 4, -1)
    have = engine.attention({**call, "query": row, "cache": plain}, "float16", **what)
    want = engine.attention({**call, "query": row.clone(), "cache": plain}, "float16", **what)
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))


def far_pages(engine: Engine) -> None:
    """The last pages of a cache of more than 2**31 bytes."""
    layout = CacheLayout(PRESET_CONFIGS["4bit"], 8, 128, 16)
    what = {"layout": layout, "codec": Codec(layout.config, 128)}
    first = 2**31 // layout.page_bytes + 1
    key, value = rounded(normal(20, 8, 128), "float32")
    slots, lens = np.arange(20), np.array([20], np.int32)
    small = engine.store(key, value, np.full(layout.shape(2), 255, np.uint8), slots, **what)
    near = np.array([[0, 1]], np.int32)
    big = _memory(engine, layout.shape(first + 2))
    big = engine.store(key, value, big, slots + 16 * first, **what)
    query = normal(1, 8, 128, 1)[0].astype(np.float32)
    results = [
        engine.attention(
            {"query": query, "cache": cache, "block_table": table, "seq_lens": lens}, **what
        )
        for cache, table in ((small, near), (big, near + np.int32(first)))
    ]
    assert bits(big[first:])[: 20 * layout.num_kv_heads] == bits(small)[: 20 * layout.num_kv_heads]
    assert all(bits(a) == bits(b) for a, b in zip(*results, strict=True))


def _memory(engine: Engine, shape: tuple[int, ...]) -> Any:
    """uint8 of any content; on a CPU untouched pages cost nothing."""
    if engine.framework == "torch":
        import torch

        return torch.empty(shape, dtype=torch.uint8, device=engine.device)
    import jax.numpy as jnp

    return jnp.zeros(shape, jnp.uint8)


def far_rows(engine: Engine) -> None:
    """Rows of keys, values, query and output more than 2**31 elements apart."""
    import torch

    layout = CacheLayout(PRESET_CONFIGS["4bit"], 2, 64, 16)
    what = {"layout": layout, "codec": Codec(layout.config, 64)}
    step = 2**30 + 8
    room = torch.empty(2 * step + 4096, dtype=torch.float16, device=engine.device)

    def far(x: torch.Tensor, at: int) -> torch.Tensor:
        view = room.as_strided(x.shape, (step, x.shape[2], 1), at)
        return view.copy_(x)

    key, value = (engine.array(x, "float16") for x in normal(3, 2, 64))
    slots = engine.array(np.arange(3))
    caches = [engine.array(np.full(layout.shape(1), 255, np.uint8)) for _ in range(2)]
    engine.store(key, value, caches[0], slots, **what)
    engine.store(far(key, 0), far(value, 512), caches[1], slots, **what)
    assert torch.equal(*caches)
    query = engine.array(normal(3, 4, 64, 1)[0], "float16")
    call = {
        "cache": caches[0],
        "block_table": np.zeros((1, 1), np.int32),
        "seq_lens": np.array([3], np.int32),
        "query_start_loc": np.array([0, 3], np.int32),
    }
    want = engine.attention({**call, "query": query}, "float16", **what)
    out = far(torch.full_like(query, float("nan")), 2048)
    have = engine.attention({**call, "query": far(query, 1024), "out": out}, "float16", **what)
    assert torch.equal(have[0], want[0])
    assert torch.equal(have[1], want[1])


# --- running --------------------------------------------------------------------------------


def threads(engine: Engine) -> None:
    """First calls with a codec from several threads at once: the same bits."""
    layout = CacheLayout(PRESET_CONFIGS["2bit"], 1, 64, 16)
    codec = Codec(layout.config, 64, seed=4711)
    key, value = rounded(normal(30, 1, 64), "float32")
    cache = np.full(layout.shape(2), 255, np.uint8)
    reference.store(key, value, cache, np.arange(30), layout=layout, codec=codec)
    call = {
        "query": normal(1, 3, 64, 1)[0].astype(np.float32),
        "cache": cache,
        "block_table": np.array([[0, 1]], np.int32),
        "seq_lens": np.array([30], np.int32),
    }
    results: list[bytes] = []

    def run() -> None:
        out, _ = engine.attention(call, layout=layout, codec=codec)
        results.append(bits(out))

    running = [threading.Thread(target=run) for _ in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1


#: By name; what needs strides or several threads is not for every engine.
CHECKS: dict[str, Callable[[Engine], None]] = {
    check.__name__: check
    for check in (
        head_dims, every_head_dim, formats, groups, page_sizes, lengths, keys,
        hard_keys_come_back, values, bad_tokens, fp8_range, needle, speculative_rows, prefix_hit,
        narrow_tables, fused_arrays, far_pages, far_rows, threads,
    )
}  # fmt: skip
#: JAX has no strides, and copies its arrays of 2 GiB on the way to the interpreter. Triton's
#: interpreter has one state for the process.
NOT_FOR = {
    "torch-interpret": {"threads"},
    "jax-interpret": {"threads", "fused_arrays", "far_rows", "far_pages"},
    "jax-native": {"fused_arrays", "far_rows", "far_pages"},
    "jax-triton": {"fused_arrays", "far_rows"},
}
#: What takes seconds: the interpreter is slow, and JAX compiles every shape.
SLOW = {
    "torch-interpret": {
        "far_pages", "formats", "fused_arrays", "groups", "head_dims", "keys", "lengths", "needle",
        "page_sizes", "values",
    },
    "jax-native": set(CHECKS) - {"needle", "threads"},
}  # fmt: skip


def checks_for(engine: Engine) -> list[Any]:
    """Names of the checks of an engine, as parameters of a test."""
    slow = SLOW.get(str(engine), ())
    return [
        pytest.param(name, marks=[pytest.mark.slow] if name in slow else [])
        for name in CHECKS
        if name not in NOT_FOR.get(str(engine), ())
    ]
