"""The model of ``bench model`` in JAX: tq_jax beside attention over a static bf16 cache.

A jitted function generates: a loop whose body is a step of the whole model, its tokens fed back,
the caches donated and updated in place. Layers are unrolled, each with weights and a cache of its
own, so that nothing is sliced or copied for a loop over layers. The number of steps is data, so one
program is timed with N and with 2N of them, and the difference is that of N steps without the
start. Both start 2N steps before the cache is full.

The 16-bit caches are read by ``jax.nn.dot_product_attention``: by cuDNN, with the lengths, and
without them over all slots, which is what torch's peers do; by XLA where cuDNN does not work.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bench import gpu, model
from bench.jax_providers import import_jax
from tq_core import Codec

# A quarter of the memory would be out of reach otherwise.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
jax = import_jax()

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

import tq_jax  # noqa: E402

OURS = "tq_jax"
GATE_STEPS = 4
#: Tokens that are stored at once when a cache is filled.
STORED = 2**15

#: Stores key and value ``[B, Hk, D]`` in a layer's cache and attends with the query; gives both.
Attend = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


class Peer(NamedTuple):
    """Attention over a bf16 cache."""

    name: str
    implementation: str
    with_lengths: bool


CUDNN = Peer("jax cudnn", "cudnn", True)
WHOLE = Peer("jax cudnn, all slots", "cudnn", False)
XLA = Peer("jax xla", "xla", True)


# --- the model ----------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=(1, 2, 3))
def matrix(key: Any, rows: int, columns: int, scale: float = 1.0) -> Any:
    """Random bf16 ``[rows, columns]``; in a jitted function nothing is kept in 32 bits."""
    return (jax.random.normal(key, (rows, columns)) * (scale * columns**-0.5)).astype(jnp.bfloat16)


def make_params(config: model.Config) -> dict[str, Any]:
    """Weights as :class:`bench.model.Model` has them, ``layers`` a list."""
    keys = iter(jax.random.split(jax.random.key(2), 4 * config.layers + 2))
    width, dim = config.width, config.head_dim
    rows = config.heads * dim

    def ones() -> Any:
        return jnp.ones(width, jnp.bfloat16)

    return {
        "embedding": matrix(next(keys), config.vocab, width, width**0.5),
        "head": matrix(next(keys), config.vocab, width),
        "norm": ones(),
        "layers": [
            {
                "attention_norm": ones(),
                "qkv": matrix(next(keys), rows + 2 * config.kv_heads * dim, width),
                "out": matrix(next(keys), width, rows),
                "mlp_norm": ones(),
                "gate_up": matrix(next(keys), 2 * config.mlp, width),
                "down": matrix(next(keys), width, config.mlp),
            }
            for _ in range(config.layers)
        ],
    }


def norm(x: Any, weight: Any) -> Any:
    """RMSNorm of rows ``[B, width]``."""
    wide = x.astype(jnp.float32)
    wide *= lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + model.EPSILON)
    return wide.astype(x.dtype) * weight


def linear(x: Any, weight: Any) -> Any:
    """Rows ``[B, in]`` times ``[out, in]``."""
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())))


def forward(
    params: Any, config: model.Config, ids: Any, lens: Any, caches: Sequence[Any], attend: Attend
) -> tuple[Any, list[Any]]:
    """Logits ``[B, vocab]`` of ids ``[B]``, each the last of ``lens`` tokens; the caches after."""
    kv_heads, dim, new = config.kv_heads, config.head_dim, []
    inv_freq = model.ROPE_THETA ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle = (lens - 1)[:, None, None] * inv_freq
    cos, sin = jnp.cos(angle).astype(jnp.bfloat16), jnp.sin(angle).astype(jnp.bfloat16)
    cos, sin = jnp.concatenate((cos, cos), -1), jnp.concatenate((-sin, sin), -1)
    x = params["embedding"][ids]
    for layer, cache in zip(params["layers"], caches, strict=True):
        qkv = linear(norm(x, layer["attention_norm"]), layer["qkv"]).reshape(len(x), -1, dim)
        turned, value = qkv[:, :-kv_heads], qkv[:, -kv_heads:]
        turned = turned * cos + jnp.roll(turned, dim // 2, -1) * sin
        query, key = turned[:, : config.heads], turned[:, config.heads :]
        out, cache = attend(cache, query, key, value)
        new.append(cache)
        x = x + linear(out.reshape(len(x), -1), layer["out"])
        gate, up = jnp.split(linear(norm(x, layer["mlp_norm"]), layer["gate_up"]), 2, -1)
        x = x + linear(jax.nn.silu(gate) * up, layer["down"])
    return linear(norm(x, params["norm"]), params["head"]), new


# --- caches -------------------------------------------------------------------------------------


class Dense(NamedTuple):
    """bf16 caches: keys and values ``[B, L, Hk, D]`` of each layer."""

    shape: gpu.Shape
    peer: Peer

    def empty(self, make: Callable[..., Any]) -> Any:
        """What a layer has, by a function of shape and dtype."""
        size = (self.shape.B, self.shape.L, self.shape.Hk, self.shape.D)
        return make(size, jnp.bfloat16), make(size, jnp.bfloat16)

    def fill(self) -> Any:
        """A layer's cache full of random tokens."""
        size = (self.shape.B * self.shape.L, self.shape.Hk * self.shape.D)
        four_dims = (self.shape.B, self.shape.L, self.shape.Hk, self.shape.D)
        return tuple(
            jnp.reshape(matrix(jax.random.key(n), *size, size[1] ** 0.5), four_dims)
            for n in range(2)
        )

    def attend(self, lens: Any) -> Attend:
        """That of a step in which the sequences have ``lens`` tokens, all as many."""

        def attend(cache: Any, query: Any, key: Any, value: Any) -> tuple[Any, Any]:
            place = (0, lens[0] - 1, 0, 0)
            keys, values = (
                lax.dynamic_update_slice(old, new[:, None], place)
                for old, new in zip(cache, (key, value), strict=True)
            )
            known: dict[str, Any] = {}
            if self.peer.with_lengths:
                known["key_value_seq_lengths"] = lens
                known["query_seq_lengths"] = jnp.ones_like(lens)
            out = jax.nn.dot_product_attention(
                query[:, None], keys, values, implementation=self.peer.implementation, **known
            )
            return out[:, 0], (keys, values)

        return attend


class Packed(NamedTuple):
    """Packed caches: uint8 ``[pages, ...]`` of each layer, with one block table."""

    shape: gpu.Shape
    layout: Any
    codec: Codec

    @property
    def width(self) -> int:
        """Pages of a sequence."""
        return -(-self.shape.L // self.layout.page_size)

    @property
    def what(self) -> dict[str, Any]:
        """Arguments of every call."""
        return {"layout": self.layout, "codec": self.codec, "backend": gpu.BACKEND}

    def empty(self, make: Callable[..., Any]) -> Any:
        """What a layer has, by a function of shape and dtype."""
        return make(self.layout.shape(self.shape.B * self.width), jnp.uint8)

    def fill(self) -> Any:
        """A layer's cache full of random tokens."""
        total = self.shape.B * self.width * self.layout.page_size
        count = min(total, STORED)

        @partial(jax.jit, donate_argnums=0)
        def filled(cache: Any) -> Any:
            def body(n: Any, cache: Any) -> Any:
                size = (2, count, self.shape.Hk, self.shape.D)
                key, value = jax.random.normal(jax.random.key(n), size).astype(jnp.bfloat16)
                slots = n * count + jnp.arange(count, dtype=jnp.int32)
                return tq_jax.store(key, value, cache, slots, **self.what)

            return lax.fori_loop(0, -(-total // count), body, cache)

        return filled(self.empty(jnp.zeros))

    def table(self) -> Any:
        """Pages in random order; a constant of a program, which does not make it anew."""
        pages = np.random.default_rng(5).permutation(self.shape.B * self.width)
        return jnp.asarray(pages.reshape(self.shape.B, self.width), jnp.int32)

    def attend(self, lens: Any) -> Attend:
        """That of a step in which the sequences have ``lens`` tokens."""
        table, page_size = self.table(), self.layout.page_size
        page, slot = jnp.divmod(lens - 1, jnp.int32(page_size))
        slots = jnp.take_along_axis(table, page[:, None], 1)[:, 0] * page_size + slot

        def attend(cache: Any, query: Any, key: Any, value: Any) -> tuple[Any, Any]:
            cache = tq_jax.store(key, value, cache, slots, **self.what)
            out = tq_jax.decode_attention(
                query, cache, table, lens, max_seq_len=self.shape.L, **self.what
            )
            return out, cache

        return attend


def packed(shape: gpu.Shape, preset: str, page_size: int) -> Packed:
    """Of a preset."""
    layout = model.Job(model.LLAMA, shape, preset, page_size).layout
    return Packed(shape, layout, Codec(layout.config, shape.D))


# --- correctness --------------------------------------------------------------------------------


def gate(config: model.Config, page_size: int) -> dict[str, float | str]:
    """By provider, relative errors of a small model's logits, or why there are none.

    They are compared with those over a bf16 cache by XLA, of the tokens in the packed one. Where
    lengths are not known, only the step that fills the cache is.
    """
    small = config._replace(
        layers=2, width=512, heads=4 * config.heads // config.kv_heads, kv_heads=4, mlp=1024,
        vocab=2048,
    )  # fmt: skip
    shape = small.shape(3, page_size * -(-64 // page_size) + 2)  # the last pages begin in a step
    ours = packed(shape, model.GATE_PRESET, page_size)
    cache, params = ours.fill(), make_params(small)
    lens = jnp.full(shape.B, shape.L, jnp.int32)
    what = {**ours.what, "dtype": jnp.bfloat16}
    pair = tuple(x[:, : shape.L] for x in tq_jax.dequantize(cache, ours.table(), lens, **what))
    ids = jax.random.randint(jax.random.key(3), (GATE_STEPS, shape.B), 0, small.vocab)

    def logits(kind: Dense | Packed, layer: Any, steps: int) -> Any:
        @jax.jit
        def all_steps(params: Any, layer: Any) -> Any:
            caches, result = [layer] * small.layers, []
            for n in range(steps):
                now = lens - steps + 1 + n
                attend = kind.attend(now)
                out, caches = forward(params, small, ids[n], now, caches, attend)
                result.append(out)
            return jnp.stack(result).astype(jnp.float32)

        return all_steps(params, layer)

    def error(have: Any, want: Any) -> float:
        return float(jnp.linalg.norm(have - want) / jnp.linalg.norm(want))

    want = {n: logits(Dense(shape, XLA), pair, n) for n in (1, GATE_STEPS)}
    found: dict[str, float | str] = {OURS: error(logits(ours, cache, GATE_STEPS), want[GATE_STEPS])}
    for peer in (CUDNN, WHOLE):
        steps = GATE_STEPS if peer.with_lengths else 1
        try:
            found[peer.name] = error(logits(Dense(shape, peer), pair, steps), want[steps])
        except Exception as problem:
            found[peer.name] = gpu.reason_of(problem)
    return found


# --- timing -------------------------------------------------------------------------------------


def generate(
    params: Any, caches: Any, ids: Any, lens: Any, steps: Any, *, config: model.Config, kind: Any
) -> tuple[Any, Any]:
    """``steps`` tokens after ``ids`` [B], the last of ``lens`` [B] tokens; the last, and caches."""

    def body(_: Any, state: Any) -> Any:
        ids, lens, caches = state
        logits, caches = forward(params, config, ids, lens, caches, kind.attend(lens))
        return jnp.argmax(logits, -1).astype(jnp.int32), lens + 1, caches

    ids, _, caches = lax.fori_loop(0, steps, body, (ids, lens, list(caches)))
    return ids, caches


def compiled(params: Any, config: model.Config, kind: Dense | Packed) -> Any:
    """The program, before there are caches: tuning its products takes memory too."""
    ints = jax.ShapeDtypeStruct((kind.shape.B,), jnp.int32)
    caches = [kind.empty(jax.ShapeDtypeStruct) for _ in range(config.layers)]
    program = jax.jit(partial(generate, config=config, kind=kind), donate_argnums=1)
    return program.lower(params, caches, ints, ints, jax.ShapeDtypeStruct((), jnp.int32)).compile()


def peak_bytes(program: Any) -> int | str:
    """What the device has in use, and what the program adds to it; empty where it does not say.

    The peak that the device counts is that of the process, of which other caches are a part.
    """
    stats, sizes = jax.devices()[0].memory_stats(), program.memory_analysis()
    if not stats or sizes is None:
        return ""
    added = sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return int(stats["bytes_in_use"] + added)


def timed(
    params: Any, config: model.Config, kind: Dense | Packed, steps: int, rounds: int
) -> tuple[gpu.Timing, int | str]:
    """Microseconds of a step, and the peak."""
    start = time.perf_counter()
    program = compiled(params, config, kind)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    first = kind.fill()
    caches = [first, *(jax.tree.map(jnp.copy, first) for _ in range(1, config.layers))]
    del first  # donated with the others
    shape = kind.shape
    ids = jax.random.randint(jax.random.key(3), (shape.B,), 0, config.vocab, jnp.int32)
    lens = jnp.full(shape.B, shape.L - 2 * steps + 1, jnp.int32)
    counts = [jnp.int32(n * steps) for n in (1, 2)]
    jax.block_until_ready((caches, ids, lens, counts))
    peak = peak_bytes(program)
    samples = []
    for _ in range(rounds + 1):
        seconds = []
        for count in counts:
            start = time.perf_counter()
            out, caches = program(params, caches, ids, lens, count)
            jax.block_until_ready((out, caches))
            seconds.append(time.perf_counter() - start)
        samples.append(1e6 * (seconds[1] - seconds[0]) / steps)
    # The first one loads what was compiled.
    return gpu.timing_of(samples[1:]), peak


def measure(
    params: Any, job: model.Job, kind: Dense | Packed, name: str, steps: int, rounds: int
) -> list[dict[str, Any]]:
    """The row of a provider, without times where it does not fit; none where it does not work."""
    row = {**job.row, "provider": name}
    print(f"{name} {job.preset}, B={job.shape.B}, L={job.shape.L}: ", end="", flush=True)
    try:
        timing, peak = timed(params, job.config, kind, steps, rounds)
    except Exception as error:
        reason = gpu.reason_of(error)
        print(f"not timed, {reason}", flush=True)
        blank = dict.fromkeys(("us_median", "us_spread", "tokens_per_second", "peak_bytes"), "")
        full = model.no_room(reason) or "RESOURCE_EXHAUSTED" in reason
        return [{**row, **blank}] if full else []
    finally:
        gc.collect()
    row |= {"us_median": timing.median, "us_spread": timing.spread, "peak_bytes": peak}
    return [{**row, "tokens_per_second": 1e6 * job.shape.B / timing.median}]


def run(arguments: argparse.Namespace, config: model.Config, shapes: Sequence[gpu.Shape]) -> int:
    page_size, steps = arguments.page_size, arguments.jax_steps
    errors = gate(config, page_size)
    print(f"logits of a small model, tq_jax's with {model.GATE_PRESET}, against XLA over bf16")
    for name, error in errors.items():
        if isinstance(error, str):
            print(f"{name}: does not run, {error}")
        else:
            print(f"{name}: relative error {error:.2e}, expected at most {model.TOLERANCE:g}")
    right = {n for n, e in errors.items() if not isinstance(e, str) and e <= model.TOLERANCE}
    if OURS not in right:
        print("nothing was timed or written")
        return 1
    peers = [peer for peer in (CUDNN, WHOLE) if peer.name in right] or [XLA]
    environment = gpu.environment(arguments.commit)
    params = make_params(config)
    for shape in shapes:
        rows: list[dict[str, Any]] = []
        bf16 = model.Job(config, shape, "", page_size)
        kinds: list[tuple[model.Job, Dense | Packed, str]] = [
            (bf16, Dense(shape, peer), peer.name) for peer in peers
        ]
        for preset in arguments.presets:
            job = bf16._replace(preset=preset)
            kinds.append((job, packed(shape, preset, page_size), OURS))
        for job, kind, name in kinds:
            new = measure(params, job, kind, name, steps, arguments.rounds)
            model.with_ratios(rows, new)
            fields = {**environment, "what": f"generate {steps}"}
            gpu.append_csv(arguments.csv, [{**fields, **row} for row in new], model.COLUMNS)
            rows += new
        model.show(shape, rows)
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        print(f"\npeak of the process: {stats['peak_bytes_in_use'] / 1e9:.2f} GB")
    return 0
