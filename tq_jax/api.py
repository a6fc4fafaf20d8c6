"""Public functions: check the arguments, choose a backend, run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tq_core import validation
from tq_core.codec import Codec
from tq_core.contents import check_argument, is_checked
from tq_core.layout import CacheLayout
from tq_core.support import choose_backend
from tq_core.validation import ArraySpec, AttentionCall
from tq_jax import checking, launch, native


def empty_cache(layout: CacheLayout, num_pages: int, *, device: Any = None) -> jax.Array:
    """A cache of zeros.

    Args:
        layout: the byte layout.
        num_pages: pages, at least 0.
        device: a device or sharding; None is JAX's default device.

    Returns:
        uint8 ``[num_pages, page_size, num_kv_heads, slot_bytes]``.

    Raises:
        TypeError: ``layout`` is no :class:`tq_core.CacheLayout`, ``num_pages`` no int, or
            ``device`` a name.
        ValueError: ``num_pages`` is negative, or a page is too large for int32 offsets.

    Example:
        >>> from tq_core import CacheLayout, QuantConfig
        >>> layout = CacheLayout(QuantConfig.preset("4bit"), 8, 128, 16)
        >>> empty_cache(layout, 4).shape
        (4, 16, 8, 134)
    """
    if not isinstance(layout, CacheLayout):
        raise TypeError(f"layout: expected a CacheLayout, got {type(layout).__name__}")
    if isinstance(num_pages, bool) or not isinstance(num_pages, int | np.integer):
        raise TypeError(f"num_pages: expected an int, got {num_pages!r}")
    if num_pages < 0:
        raise ValueError(f"num_pages: expected at least 0, got {num_pages}")
    check_device(device)
    _check_page(layout)
    return jnp.zeros(layout.shape(int(num_pages)), jnp.uint8, device=device)


def store(
    key: jax.Array,
    value: jax.Array,
    cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    layout: CacheLayout,
    codec: Codec,
    backend: str | None = None,
    check: bool | None = None,
) -> jax.Array:
    """Quantises keys and values and returns the cache with them written.

    Under ``jax.jit`` with the cache donated (``donate_argnames="cache"``), or carried by
    ``lax.scan`` or ``lax.while_loop``, the cache is updated in place. Called eagerly, the old cache
    stays valid, which costs a copy of it.

    Args:
        key: float16, bfloat16 or float32 ``[N, Hk, D]``, after RoPE. NaN is stored as 0, infinity
            saturates.
        value: likewise.
        cache: uint8 ``layout.shape(num_pages)``.
        slot_mapping: int32 ``[N]``, ``page * page_size + slot`` of each token; int64 where x64 is
            enabled. Rows with a negative or out-of-range slot are skipped. Two rows of one call
            must not share a slot.
        layout: the cache's layout; static.
        codec: the codec of its contents; static.
        backend: None for the device's default, ``"triton"``, ``"native"`` or ``"interpret"``.
        check: whether to check what the arrays hold, see docs/api.md; static. None: whether
            ``TQ_CHECK=1`` is in the environment now, which inside ``jax.jit`` means when traced.

    Returns:
        The new cache, uint8 ``layout.shape(num_pages)``.

    Raises:
        TypeError: a wrong type or dtype; or JAX asks for a derivative, which codes do not have.
        ValueError: a wrong shape, a codec that does not match, or a backend that cannot serve; with
            ``check`` what is wrong in the arrays.
        jax.errors.JaxRuntimeError: the latter, of arrays that are traced, when the program runs.

    Source: TurboQuant, arXiv 2504.19874, algorithm 1.

    Example:
        >>> from functools import partial
        >>> from tq_core import CacheLayout, Codec, QuantConfig
        >>> config = QuantConfig.preset("4bit")
        >>> layout, codec = CacheLayout(config, 2, 64, 16), Codec(config, 64)
        >>> write = jax.jit(partial(store, layout=layout, codec=codec), donate_argnums=2)
        >>> kv = jax.random.normal(jax.random.key(0), (2, 3, 2, 64))
        >>> cache = write(kv[0], kv[1], empty_cache(layout, 4), jnp.arange(3, dtype=jnp.int32))
        >>> int((cache[0] != 0).sum()) > 0, int((cache[1:] != 0).sum())
        (True, 0)
    """
    specs = [_spec("key", key), _spec("value", value), _spec("cache", cache)]
    slots = _spec("slot_mapping", slot_mapping)
    check_argument(check)
    validation.check_store(*specs, slots, layout=layout, codec=codec)
    _check_page(layout)
    if slots.dtype == "int64" and not jax.config.jax_enable_x64:
        # A NumPy array: JAX would drop the high bits, and a slot out of range would wrap into it.
        limit = np.iinfo(np.int32)
        slot_mapping = np.clip(slot_mapping, limit.min, limit.max).astype(np.int32)
    run = _backend(backend, layout, cache)
    if is_checked(check):
        slot_mapping = checking.store(key, value, cache, slot_mapping, layout)
    return run.store(key, value, cache, slot_mapping, layout=layout, codec=codec)


def attention(
    query: jax.Array,
    cache: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    layout: CacheLayout,
    codec: Codec,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    return_lse: bool = False,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    num_kv_splits: int | None = None,
    backend: str | None = None,
    plan: Mapping[str, int | str] | None = None,
    check: bool | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of packed queries over a quantised paged cache.

    Row i of sequence b has position ``p = seq_lens[b] - query_len[b] + i`` and sees cached tokens
    ``j < seq_lens[b]`` with ``j <= p`` (causal) and ``j > p - sliding_window``. A score is
    ``s = scale * (q . k_j)``, then ``softcap * tanh(s / softcap)``, then
    ``+ alibi_slope * (j - p)``. Arithmetic is float32. A row that sees nothing gives 0. A query
    that is not finite spoils its own row and head alone.

    Args:
        query: float16, bfloat16 or float32 ``[N, Hq, D]``; sequence b owns rows
            ``query_start_loc[b] : query_start_loc[b + 1]``.
        cache: uint8 ``layout.shape(num_pages)``, this call's tokens already stored.
        block_table: int32 ``[B, max_pages]``; entries past a sequence's end, or wholly before its
            window, are never used and may be -1.
        seq_lens: int32 ``[B]``, cached tokens of each sequence, this call's included; at most
            ``max_pages * page_size``. A traced length or page cannot be refused: ``"native"``
            clips it, kernels read memory that is not the cache's.
        query_start_loc: int32 ``[B + 1]``, ascending from 0.
        layout: the cache's layout; static.
        codec: the codec of its contents; static.
        scale: factor of the scores, a Python number; None is ``1 / sqrt(D)``.
        causal: whether a row sees only tokens up to its own position.
        sliding_window: tokens that a row sees, itself included; None is no window.
        softcap: bound of the scores; None is none.
        sinks: float32 ``[Hq]``, joined to each softmax denominator as ``exp(sink)``; -inf is no
            sink.
        alibi_slopes: float32 ``[Hq]``, added as ``slope * (j - p)``.
        return_lse: also return the log-sum-exp.
        max_query_len: upper bound of the query lengths, for dispatch alone; None is N.
        max_seq_len: upper bound of ``seq_lens``, for dispatch alone; None is the table's width.
        num_kv_splits: for backends that split a sequence; without effect on the result.
        backend: None for the device's default, ``"triton"``, ``"native"`` or ``"interpret"``.
        plan: overrides of the launch plan, static, see ``tq_core.dispatch.plan_attention``; an
            impossible one raises. With ``{"deterministic": "batch"}`` the bits of a row's result do
            not depend on what else is in the call; the others are for tests and benchmarks.
        check: as in :func:`store`.

    Returns:
        ``[N, Hq, D]`` in query's dtype; with ``return_lse`` also float32 ``[N, Hq]``, the natural
        logarithm of the softmax denominator, sink included, -inf where a row sees nothing.

    Raises:
        TypeError: a wrong type or dtype, an array where a static number is expected, or JAX asks
            for a derivative.
        ValueError: a wrong shape or number, a codec that does not match, or a backend that cannot
            serve, with all the reasons; with ``check`` as :func:`store`.

    Source: TurboQuant, arXiv 2504.19874; online softmax, arXiv 1805.02867.

    Example:
        >>> from tq_core import CacheLayout, Codec, QuantConfig
        >>> config = QuantConfig.preset("4bit")
        >>> layout, codec = CacheLayout(config, 2, 64, 16), Codec(config, 64)
        >>> key, value, query = jax.random.normal(jax.random.key(0), (3, 20, 2, 64))
        >>> slots = jnp.arange(20, dtype=jnp.int32)
        >>> cache = store(key, value, empty_cache(layout, 2), slots, layout=layout, codec=codec)
        >>> table = jnp.array([[0, 1]], jnp.int32)
        >>> lens, starts = jnp.array([20], jnp.int32), jnp.array([0, 20], jnp.int32)
        >>> attention(query, cache, table, lens, starts, layout=layout, codec=codec).shape
        (20, 2, 64)
    """
    starts = _spec("query_start_loc", query_start_loc)
    return _attention(
        query,
        cache,
        block_table,
        seq_lens,
        query_start_loc,
        starts,
        layout=layout,
        codec=codec,
        scale=scale,
        causal=causal,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        return_lse=return_lse,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        num_kv_splits=num_kv_splits,
        backend=backend,
        plan=plan,
        check=check,
    )


def decode_attention(
    query: jax.Array,
    cache: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    *,
    layout: CacheLayout,
    codec: Codec,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    return_lse: bool = False,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    num_kv_splits: int | None = None,
    backend: str | None = None,
    plan: Mapping[str, int | str] | None = None,
    check: bool | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention with one query row a sequence, at its last position.

    The same as :func:`attention` with ``query_start_loc = [0, 1, ..., B]``.

    Args:
        query: float16, bfloat16 or float32 ``[B, Hq, D]``.
        cache: uint8 ``layout.shape(num_pages)``.
        block_table: int32 ``[B, max_pages]``.
        seq_lens: int32 ``[B]``, cached tokens of each sequence, this call's included; at most
            ``max_pages * page_size``, as in :func:`attention`.
        layout: the cache's layout; static.
        codec: the codec of its contents; static.
        scale: factor of the scores; None is ``1 / sqrt(D)``.
        causal: without effect on the last position; here so that calls look alike.
        sliding_window: tokens that a row sees, itself included; None is no window.
        softcap: bound of the scores; None is none.
        sinks: float32 ``[Hq]``, joined to each softmax denominator as ``exp(sink)``.
        alibi_slopes: float32 ``[Hq]``, added as ``slope * (j - p)``.
        return_lse: also return the log-sum-exp.
        max_query_len: 1 or None.
        max_seq_len: as in :func:`attention`.
        num_kv_splits: as in :func:`attention`.
        backend: None for the device's default, ``"triton"``, ``"native"`` or ``"interpret"``.
        plan: as in :func:`attention`.
        check: as in :func:`store`.

    Returns:
        ``[B, Hq, D]`` in query's dtype; with ``return_lse`` also float32 ``[B, Hq]``, natural
        logarithm, sink included, -inf where a row sees nothing.

    Raises:
        TypeError: as :func:`attention`.
        ValueError: as :func:`attention`, or another number of rows than of sequences.

    Source: TurboQuant, arXiv 2504.19874.

    Example:
        >>> from tq_core import CacheLayout, Codec, QuantConfig
        >>> config = QuantConfig.preset("3bit")
        >>> layout, codec = CacheLayout(config, 2, 64, 16), Codec(config, 64)
        >>> cache, table = empty_cache(layout, 2), jnp.array([[0], [1]], jnp.int32)
        >>> out, lse = decode_attention(
        ...     jnp.ones((2, 4, 64)), cache, table, jnp.array([5, 0], jnp.int32),
        ...     layout=layout, codec=codec, return_lse=True)
        >>> out.shape, [round(float(x), 3) for x in lse[:, 0]]
        ((2, 4, 64), [1.609, -inf])
    """
    return _attention(
        query,
        cache,
        block_table,
        seq_lens,
        None,
        None,
        layout=layout,
        codec=codec,
        scale=scale,
        causal=causal,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        return_lse=return_lse,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        num_kv_splits=num_kv_splits,
        backend=backend,
        plan=plan,
        check=check,
    )


def dequantize(
    cache: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    *,
    layout: CacheLayout,
    codec: Codec,
    dtype: Any,
    backend: str | None = None,
    check: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Dense keys and values of each sequence, offsets and transforms undone.

    Args:
        cache: uint8 ``layout.shape(num_pages)``.
        block_table: int32 ``[B, max_pages]``; entries past a sequence's end may be -1.
        seq_lens: int32 ``[B]``; lengths beyond the table are cut.
        layout: the cache's layout; static.
        codec: the codec of its contents; static.
        dtype: float16, bfloat16 or float32.
        backend: None for the device's default, ``"triton"``, ``"native"`` or ``"interpret"``.
        check: as in :func:`store`.

    Returns:
        Keys and values ``[B, max_pages * page_size, Hk, D]`` of ``dtype``, 0 past a sequence's end.

    Raises:
        TypeError: a wrong type or dtype of an array, or ``dtype`` is none.
        ValueError: a wrong shape, another ``dtype``, a codec that does not match, or a backend that
            cannot serve; with ``check`` as :func:`store`.

    Source: TurboQuant, arXiv 2504.19874, algorithm 1.

    Example:
        >>> from tq_core import CacheLayout, Codec, QuantConfig
        >>> config = QuantConfig.preset("4bit")
        >>> layout, codec = CacheLayout(config, 2, 64, 16), Codec(config, 64)
        >>> table, lens = jnp.array([[3, -1]], jnp.int32), jnp.array([5], jnp.int32)
        >>> keys, values = dequantize(
        ...     empty_cache(layout, 4), table, lens, layout=layout, codec=codec, dtype="bfloat16")
        >>> keys.shape, values.dtype
        ((1, 32, 2, 64), dtype(bfloat16))
    """
    check_argument(check)
    name = _dtype_name(dtype)
    validation.check_dequantize(
        _spec("cache", cache),
        _spec("block_table", block_table),
        _spec("seq_lens", seq_lens),
        layout=layout,
        codec=codec,
        dtype=name,
    )
    _check_page(layout)
    run = _backend(backend, layout, cache)
    if is_checked(check):
        seq_lens = checking.dequantize(cache, block_table, seq_lens, layout)
    return run.dequantize(cache, block_table, seq_lens, layout=layout, codec=codec, dtype=name)


def merge_attention_states(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over the union of two disjoint sets of tokens.

    Args:
        out_a: float16, bfloat16 or float32 ``[N, Hq, D]``, attention over the first set.
        lse_a: float32 ``[N, Hq]``, its natural-log LSE; -inf where a row saw nothing.
        out_b: as ``out_a``, over the second set.
        lse_b: its LSE. A sink may be in one of the two only.

    Returns:
        Output ``[N, Hq, D]`` in the dtype of ``out_a``, and natural-log LSE float32 ``[N, Hq]``,
        both over the union; 0 and -inf where neither saw anything.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape.

    Source: FlashInfer, arXiv 2501.01005, section 2.2.

    Example:
        >>> out, lse = merge_attention_states(
        ...     jnp.ones((1, 2, 8)), jnp.zeros((1, 2)), jnp.zeros((1, 2, 8)), jnp.zeros((1, 2)))
        >>> float(out[0, 0, 0]), round(float(lse[0, 0]), 4)
        (0.5, 0.6931)
    """
    validation.check_merge(
        _spec("out_a", out_a), _spec("lse_a", lse_a), _spec("out_b", out_b), _spec("lse_b", lse_b)
    )
    return native.merge_attention_states(out_a, lse_a, out_b, lse_b)


def _attention(
    query: jax.Array,
    cache: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array | None,
    starts: ArraySpec | None,
    *,
    layout: CacheLayout,
    codec: Codec,
    sinks: jax.Array | None,
    alibi_slopes: jax.Array | None,
    return_lse: bool,
    backend: str | None,
    plan: Mapping[str, int | str] | None,
    check: bool | None,
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    for name, value in {**options, "return_lse": return_lse}.items():
        if isinstance(value, jax.Array):
            raise TypeError(
                f"{name}: expected a Python value, which is static under jax.jit, got an array "
                f"{value.dtype.name}{list(value.shape)}; name it in static_argnames, or bind it "
                "with functools.partial"
            )
    check_argument(check)
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse: expected a bool, got {return_lse!r}")
    call: AttentionCall = validation.check_attention(
        _spec("query", query),
        _spec("cache", cache),
        _spec("block_table", block_table),
        _spec("seq_lens", seq_lens),
        starts,
        layout=layout,
        codec=codec,
        sinks=None if sinks is None else _spec("sinks", sinks),
        alibi_slopes=None if alibi_slopes is None else _spec("alibi_slopes", alibi_slopes),
        **options,
    )
    overrides = validation.check_plan(plan, options["num_kv_splits"])
    _check_page(layout)
    run = _backend(backend, layout, cache)
    if overrides:
        if run is native:
            raise ValueError("plan: the native backend launches no kernels and takes no plan")
        run = replace(run, plan=overrides)
    if is_checked(check):
        seq_lens = checking.attention(
            query, cache, block_table, seq_lens, query_start_loc, call, layout
        )
    out, lse = run.attention(
        query,
        cache,
        block_table,
        seq_lens,
        query_start_loc,
        sinks,
        alibi_slopes,
        call=call,
        layout=layout,
        codec=codec,
    )
    return (out, lse) if return_lse else out


def check_device(device: Any) -> None:
    """It is not a name, of which JAX's own message says little."""
    if isinstance(device, str):
        raise TypeError(
            f"device: expected a jax.Device, a sharding or None, got {device!r}; "
            f"jax.devices({device!r})[0] is one"
        )


def _spec(name: str, array: Any) -> ArraySpec:
    if not isinstance(array, jax.Array | np.ndarray):
        raise TypeError(f"{name}: expected a jax.Array or numpy array, got {type(array).__name__}")
    return ArraySpec(array.shape, array.dtype.name)


def _dtype_name(dtype: Any) -> str:
    try:
        if dtype is None:
            raise TypeError
        return jnp.dtype(dtype).name
    except TypeError:
        wanted = list(validation.FLOAT_DTYPES)
        raise TypeError(f"dtype: expected one of {wanted}, got {dtype!r}") from None


def _check_page(layout: CacheLayout) -> None:
    if layout.page_bytes > np.iinfo(np.int32).max:
        raise ValueError(
            f"layout: expected pages of less than 2 GiB, got {layout.page_bytes} bytes; "
            "use a smaller page_size"
        )


def _backend(name: str | None, layout: CacheLayout, cache: Any) -> Any:
    """What implements the backend called ``name``."""
    device = _device(cache)
    target = launch.device_of(device)
    kind = device.platform if target.kind == "interpret" else target.kind
    chosen = choose_backend(layout, backend=name, target=kind, framework="jax")
    return native if chosen == "native" else launch.Kernels(target)


def _device(array: Any) -> jax.Device:
    """The device that will run: that of a concrete array, else JAX's default."""
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        return next(iter(array.devices()))
    default = jax.config.jax_default_device
    return default if isinstance(default, jax.Device) else jax.devices(default)[0]
