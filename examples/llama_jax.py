"""The same Llama forward in JAX, one jitted step, over an uncompressed or a packed cache.

Sizes: ``N`` tokens of this step, ``S`` tokens the cache has room for, ``Hq``/``Hk`` query/KV heads,
``D`` head_dim, ``L`` layers, ``V`` vocabulary, ``W`` width. One sequence at a time.

A cache is two things: a hashable description, which is a static argument of the step, and its
arrays, which are donated to the step, so that it updates them in place. The layers run in one
``lax.scan``, whatever their number: the program holds (and compiles) a single layer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import tq_jax
from examples.evaluate import ROTATION_SEED
from examples.weights import LlamaConfig, LlamaWeights
from tq_core import CacheLayout, Codec, QuantConfig

PAGE_SIZE = 16


@dataclass(frozen=True)
class UncompressedCache:
    """Keys and values as they come, in 16 bits: two arrays fp16 [L, max_tokens, Hk, D]."""

    config: LlamaConfig
    max_tokens: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token takes over all layers."""
        return 4 * self.config.num_layers * self.config.num_kv_heads * self.config.head_dim

    def empty(self):
        """The arrays of an empty cache."""
        c = self.config
        shape = (c.num_layers, self.max_tokens, c.num_kv_heads, c.head_dim)
        return jnp.zeros(shape, jnp.float16), jnp.zeros(shape, jnp.float16)

    def attend(self, arrays, layer, position, q, k, v):
        """Store k, v [N, Hk, D] of ``layer`` at ``position`` [N]; attend with q [N, Hq, D].

        Returns:
            The output [N, Hq, D] and the arrays of the longer cache.
        """
        start = (layer, position[0], 0, 0)
        keys, values = (
            jax.lax.dynamic_update_slice(array, new[None].astype(array.dtype), start)
            for array, new in zip(arrays, (k, v), strict=True)
        )
        visible = jnp.arange(self.max_tokens)[None, :] <= position[:, None]  # [N, S]
        out = jax.nn.dot_product_attention(
            q, keys[layer].astype(q.dtype), values[layer].astype(q.dtype), mask=visible[None]
        )
        return out, (keys, values)


@dataclass(frozen=True)
class PackedCache:
    """Pages of packed keys and values, written by ``tq_jax.store``, read by ``tq_jax.attention``.

    One pool of pages serves all layers, and so does one codec: layer ``l`` owns the pages from
    ``l * pages`` on.
    """

    config: LlamaConfig
    layout: CacheLayout
    codec: Codec
    max_tokens: int

    @property
    def pages(self) -> int:
        """Pages a layer has."""
        return -(-self.max_tokens // self.layout.page_size)

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token takes over all layers."""
        return self.config.num_layers * self.layout.bytes_per_token

    def empty(self):
        """The pool of an empty cache."""
        return tq_jax.empty_cache(self.layout, self.config.num_layers * self.pages)

    def attend(self, pool, layer, position, q, k, v):
        """Store k, v [N, Hk, D] of ``layer`` at ``position`` [N]; attend with q [N, Hq, D].

        Returns:
            The output [N, Hq, D] and the updated pool.
        """
        first_page = layer * self.pages
        slots = first_page * self.layout.page_size + position
        pool = tq_jax.store(k, v, pool, slots, layout=self.layout, codec=self.codec)
        out = tq_jax.attention(
            q,
            pool,
            (first_page + jnp.arange(self.pages, dtype=jnp.int32))[None],
            position[-1:] + 1,
            jnp.array([0, len(q)], jnp.int32),
            layout=self.layout,
            codec=self.codec,
            max_query_len=len(q),
            max_seq_len=self.max_tokens,
        )
        return out, pool


@functools.partial(jax.jit, static_argnames=("config", "cache"), donate_argnames="arrays")
def step(params, ids, start, arrays, *, config: LlamaConfig, cache):
    """One step of the model.

    Args:
        params: ``embedding``, ``final_norm``, ``lm_head`` and the stacked ``layers``.
        ids: int32 [N], the tokens of this step.
        start: int32 scalar, how many tokens came before.
        arrays: the cache's arrays; donated.

    Returns:
        Logits fp32 [N, V], and the arrays of the longer cache.
    """
    n = len(ids)
    position = start + jnp.arange(n, dtype=jnp.int32)
    angle = position[:, None] * jnp.array(config.inv_freq, jnp.float32)  # [N, D / 2]
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]

    def block(carry, inputs):
        x, arrays = carry
        index, layer = inputs
        h = rms_norm(x, layer["attn_norm"], config.rms_eps)
        q = linear(h, layer["wq"], layer.get("bq")).reshape(n, config.num_heads, -1)
        k = linear(h, layer["wk"], layer.get("bk")).reshape(n, config.num_kv_heads, -1)
        v = linear(h, layer["wv"], layer.get("bv")).reshape(n, config.num_kv_heads, -1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out, arrays = cache.attend(arrays, index, position, q, k, v)
        x = x + linear(out.reshape(n, -1), layer["wo"], layer.get("bo"))
        h = rms_norm(x, layer["mlp_norm"], config.rms_eps)
        gated = jax.nn.silu(linear(h, layer["w_gate"])) * linear(h, layer["w_up"])
        return (x + linear(gated, layer["w_down"]), arrays), None

    layers = (jnp.arange(config.num_layers, dtype=jnp.int32), params["layers"])
    (x, arrays), _ = jax.lax.scan(block, (params["embedding"][ids], arrays), layers)
    return linear(rms_norm(x, params["final_norm"], config.rms_eps), params["lm_head"]), arrays


def linear(x, weight, bias=None):
    """Multiply x [N, in] by weight [out, in] and add bias [out]."""
    y = x @ weight.T
    return y if bias is None else y + bias


def rms_norm(x, weight, eps):
    """Scale each row of x [N, W] to a root mean square of 1, then by ``weight`` [W]."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + eps) * weight


def rotate(x, cos, sin):
    """RoPE on x [N, H, D]: turns coordinates ``i`` and ``i + D/2`` by the angle of pair ``i``."""
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


class Session:
    """A cache being filled: its description, its arrays, and how many tokens it holds."""

    def __init__(self, cache: UncompressedCache | PackedCache):
        self.cache = cache
        self.arrays = cache.empty()
        self.length = 0
        self.bytes_per_token = cache.bytes_per_token


class Llama:
    """The model. ``llama(ids, session)`` appends ``ids`` to the cache and returns their logits."""

    def __init__(self, weights: LlamaWeights):
        self.config = weights.config
        arrays = {
            "embedding": weights.embedding,
            "final_norm": weights.final_norm,
            "lm_head": weights.lm_head,
            "layers": weights.layers,
        }
        self.params = jax.tree.map(jnp.asarray, arrays)

    def new_cache(self, quant: QuantConfig | None, max_tokens: int) -> Session:
        """An empty cache for ``max_tokens`` tokens, packed as ``quant`` says; None: 16 bits."""
        c = self.config
        if quant is None:
            return Session(UncompressedCache(c, max_tokens))
        layout = CacheLayout(quant, c.num_kv_heads, c.head_dim, PAGE_SIZE)
        codec = Codec(quant, c.head_dim, seed=ROTATION_SEED)
        return Session(PackedCache(c, layout, codec, max_tokens))

    def __call__(self, ids, session: Session) -> np.ndarray:
        """Logits fp32 [N, V] of token ids [N], which follow what the session already holds."""
        logits, session.arrays = step(
            self.params,
            jnp.asarray(ids, jnp.int32),
            jnp.int32(session.length),
            session.arrays,
            config=self.config,
            cache=session.cache,
        )
        session.length += len(ids)
        return np.asarray(logits)
