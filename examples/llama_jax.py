"""The same Llama in JAX, over an uncompressed or a packed cache: a jitted step, and a whole loop.

Sizes: ``N`` tokens of a step, ``B`` sequences, ``S`` slots of a layer, ``Hq``/``Hk`` query/KV
heads, ``D`` head_dim, ``L`` layers, ``V`` vocabulary, ``W`` width.

A cache is two things: a hashable description, which is a static argument of the jitted functions,
and its arrays, which are donated to them, so that they update them in place. The layers run in one
``lax.scan``, whatever their number: the program holds (and compiles) a single layer.

``generate`` is one program too: the prompts of a batch in one packed prefill, then a
``lax.while_loop`` of decode steps that carries the cache. Lengths, pages and end tokens are data of
it, not shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

import tq_jax
from examples.batch import check_temperature, pack, pages_of
from examples.evaluate import ROTATION_SEED
from examples.weights import LlamaConfig, LlamaWeights
from tq_core import CacheLayout, Codec, QuantConfig

PAGE_SIZE = 16
#: Ends the tokens of a sequence in what ``generate`` returns.
NO_TOKEN = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Where the rows of a step are; arrays int32, traced.

    ``sequence``, ``position`` [N]: of each row's token. ``slots`` [N]: where a layer stores it,
    ``page * page_size + offset``, or -1 for a row that pads. ``block_table`` [B, max_pages]: pages
    of a sequence in each layer, -1 past its last. ``seq_lens`` [B]: its tokens, those of the step
    included. ``query_start_loc`` [B + 1]: its rows; None: one row a sequence. ``max_query_len``:
    most rows of a sequence, static.
    """

    sequence: jax.Array
    position: jax.Array
    slots: jax.Array
    block_table: jax.Array
    seq_lens: jax.Array
    query_start_loc: jax.Array | None
    max_query_len: int = field(metadata={"static": True})

    @classmethod
    def prefill(cls, num_rows: int, query_start_loc, block_table, max_query_len: int) -> Rows:
        """Whole prompts, packed; rows past the last prompt's end pad."""
        row = jnp.arange(num_rows, dtype=jnp.int32)
        after = jnp.searchsorted(query_start_loc, row, side="right").astype(jnp.int32)
        sequence = jnp.minimum(after - 1, len(block_table) - 1)
        position = row - query_start_loc[sequence]
        slots = slots_of(sequence, position, row < query_start_loc[-1], block_table)
        lens = jnp.diff(query_start_loc)
        return cls(sequence, position, slots, block_table, lens, query_start_loc, max_query_len)

    @classmethod
    def decode(cls, position, live, block_table) -> Rows:
        """The token at ``position`` [B] of each sequence that is ``live`` [B]; others see nothing.

        A sequence that is not live stores nothing and has no tokens.
        """
        sequence = jnp.arange(len(position), dtype=jnp.int32)
        slots = slots_of(sequence, position, live, block_table)
        lens = jnp.where(live, position + 1, 0)
        return cls(sequence, position, slots, block_table, lens, None, 1)


def slots_of(sequence, position, stored, block_table):
    """Slots int32 [N] of tokens within a layer, -1 where not ``stored`` [N]."""
    page = block_table[sequence, position // PAGE_SIZE]
    return jnp.where(stored, page * PAGE_SIZE + position % PAGE_SIZE, -1)


@dataclass(frozen=True)
class UncompressedCache:
    """Keys and values as they come, in 16 bits: two arrays fp16 [L, S, Hk, D]."""

    config: LlamaConfig
    num_pages: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token takes over all layers."""
        return 4 * self.config.num_layers * self.config.num_kv_heads * self.config.head_dim

    def empty(self):
        """The arrays of an empty cache."""
        c = self.config
        shape = (c.num_layers, self.num_pages * PAGE_SIZE, c.num_kv_heads, c.head_dim)
        return jnp.zeros(shape, jnp.float16), jnp.zeros(shape, jnp.float16)

    def attend(self, arrays, layer, rows: Rows, q, k, v):
        """Store k, v [N, Hk, D] of ``layer``; attend with q [N, Hq, D] to all that is cached.

        Returns:
            The output [N, Hq, D] and the arrays of the longer cache.
        """
        slots = jnp.where(rows.slots < 0, self.num_pages * PAGE_SIZE, rows.slots)
        keys, values = (
            array.at[layer, slots].set(new.astype(array.dtype), mode="drop")
            for array, new in zip(arrays, (k, v), strict=True)
        )
        out = jax.nn.dot_product_attention(
            q,
            keys[layer].astype(q.dtype),
            values[layer].astype(q.dtype),
            mask=self._visible(rows)[None],
        )
        return out, (keys, values)

    def _visible(self, rows: Rows):
        """Which slots of a layer a row sees, bool [N, S]: its sequence's, up to its position."""
        table = jnp.where(rows.block_table < 0, self.num_pages, rows.block_table)
        num_seqs, max_pages = table.shape
        owner = jnp.full(self.num_pages, -1, jnp.int32)
        owner = owner.at[table].set(jnp.arange(num_seqs, dtype=jnp.int32)[:, None], mode="drop")
        order = jnp.zeros(self.num_pages, jnp.int32)
        order = order.at[table].set(jnp.arange(max_pages, dtype=jnp.int32)[None], mode="drop")
        token = order[:, None] * PAGE_SIZE + jnp.arange(PAGE_SIZE, dtype=jnp.int32)
        own = jnp.repeat(owner, PAGE_SIZE) == rows.sequence[:, None]
        return own & (token.reshape(-1) <= rows.position[:, None])


@dataclass(frozen=True)
class PackedCache:
    """Pages of packed keys and values, written by ``tq_jax.store``, read by ``tq_jax.attention``.

    One pool of pages serves all layers, and so does one codec: layer ``l`` owns the pages from
    ``l * num_pages`` on. ``backend`` is that of both functions, None the device's default.
    """

    config: LlamaConfig
    layout: CacheLayout
    codec: Codec
    num_pages: int
    backend: str | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token takes over all layers."""
        return self.config.num_layers * self.layout.bytes_per_token

    def empty(self):
        """The pool of an empty cache."""
        return tq_jax.empty_cache(self.layout, self.config.num_layers * self.num_pages)

    def attend(self, pool, layer, rows: Rows, q, k, v):
        """Store k, v [N, Hk, D] of ``layer``; attend with q [N, Hq, D] to all that is cached.

        Returns:
            The output [N, Hq, D] and the updated pool.
        """
        what = {"layout": self.layout, "codec": self.codec, "backend": self.backend}
        first_page = layer * self.num_pages
        slots = jnp.where(rows.slots < 0, -1, rows.slots + first_page * PAGE_SIZE)
        pool = tq_jax.store(k, v, pool, slots, **what)
        table = rows.block_table + first_page  # entries past a sequence's end are not read
        if rows.query_start_loc is None:
            return tq_jax.decode_attention(q, pool, table, rows.seq_lens, **what), pool
        lens = (rows.seq_lens, rows.query_start_loc)
        hint = {"max_query_len": rows.max_query_len}
        return tq_jax.attention(q, pool, table, *lens, **hint, **what), pool


@functools.partial(jax.jit, static_argnames=("config", "cache"), donate_argnames="arrays")
def step(params, ids, start, arrays, *, config: LlamaConfig, cache):
    """One step of the model over the one sequence that the cache holds.

    Args:
        params: ``embedding``, ``final_norm``, ``lm_head`` and the stacked ``layers``.
        ids: int32 [N], the tokens of this step.
        start: int32 scalar, how many tokens came before.
        arrays: the cache's arrays; donated.
        config: the model's numbers; static.
        cache: the cache's description; static.

    Returns:
        Logits fp32 [N, V], and the arrays of the longer cache.
    """
    n = len(ids)
    table = jnp.arange(cache.num_pages, dtype=jnp.int32)[None]
    sequence = jnp.zeros(n, jnp.int32)
    position = start + jnp.arange(n, dtype=jnp.int32)
    slots = slots_of(sequence, position, True, table)
    starts = jnp.array([0, n], jnp.int32)
    rows = Rows(sequence, position, slots, table, start[None] + n, starts, n)
    x, arrays = forward(params, ids, rows, arrays, config, cache)
    return logits_of(params, x, config), arrays


@functools.partial(
    jax.jit,
    static_argnames=("config", "cache", "max_prompt_len", "max_new_tokens"),
    donate_argnames="arrays",
)
def generate(
    params,
    ids,
    query_start_loc,
    block_table,
    arrays,
    key=None,
    temperature=None,
    *,
    config: LlamaConfig,
    cache,
    max_prompt_len: int,
    max_new_tokens: int,
):
    """Continues a batch of prompts until each has met an end token or ``max_new_tokens``.

    The cache's contents before the call are of no matter; afterwards it holds, in the pages of the
    block table, every prompt and every new token but the last, which was not fed.

    Args:
        params: ``embedding``, ``final_norm``, ``lm_head`` and the stacked ``layers``.
        ids: int32 [N], the prompts one after the other; what follows the last one pads.
        query_start_loc: int32 [B + 1]: prompt ``b`` is ``ids`` from entry ``b`` to ``b + 1``. A
            sequence without a prompt is one that has ended.
        block_table: int32 [B, max_pages], pages of each sequence for its prompt and
            ``max_new_tokens`` more; no two share one. Other entries are not used.
        arrays: the cache's arrays; donated.
        key: a ``jax.random.key``. Sequence ``b`` draws token ``i`` with ``fold_in`` of both, so
            that no draw depends on the other sequences. Not used without a temperature.
        temperature: fp32 scalar, positive, that divides the logits before a token is drawn; None
            takes the likeliest.
        config: the model's numbers; its ``eos_ids`` are the end tokens; static.
        cache: the cache's description; static.
        max_prompt_len: upper bound of the prompts' lengths; static.
        max_new_tokens: most tokens to write for a sequence, at least 1; static.

    Returns:
        New tokens int32 [B, max_new_tokens], ``NO_TOKEN`` from a sequence's end token on, and the
        arrays of the cache.
    """
    ends = jnp.array(config.eos_ids, jnp.int32)
    lens = jnp.diff(query_start_loc)

    def choose(x, i):
        """The ``i``-th new token of each sequence, int32 [B]."""
        logits = logits_of(params, x, config)
        if temperature is None:
            return logits.argmax(-1).astype(jnp.int32)
        keys = jax.vmap(lambda b: jax.random.fold_in(jax.random.fold_in(key, b), i))(
            jnp.arange(len(lens))
        )
        return jax.vmap(jax.random.categorical)(keys, logits / temperature).astype(jnp.int32)

    def add(token, i, live, tokens):
        """Who goes on, and the tokens [B, max_new_tokens] with column ``i`` filled."""
        live = live & ~jnp.isin(token, ends)
        return live, tokens.at[:, i].set(jnp.where(live, token, NO_TOKEN))

    def goes_on(state):
        i, live, _, _ = state
        return (i < max_new_tokens) & live.any()

    def decode(state):
        i, live, tokens, arrays = state
        rows = Rows.decode(lens + i - 1, live, block_table)
        last = jnp.where(live, tokens[:, i - 1], 0)
        x, arrays = forward(params, last, rows, arrays, config, cache)
        return i + 1, *add(choose(x, i), i, live, tokens), arrays

    rows = Rows.prefill(len(ids), query_start_loc, block_table, max_prompt_len)
    x, arrays = forward(params, ids, rows, arrays, config, cache)
    tokens = jnp.full((len(lens), max_new_tokens), NO_TOKEN, jnp.int32)
    first = choose(x[query_start_loc[1:] - 1], 0)
    state = (jnp.int32(1), *add(first, 0, lens > 0, tokens), arrays)
    _, _, tokens, arrays = jax.lax.while_loop(goes_on, decode, state)
    return tokens, arrays


def forward(params, ids, rows: Rows, arrays, config: LlamaConfig, cache):
    """Stores the rows of token ids [N]; returns what the last layer gives, fp32 [N, W], and arrays.

    ``arrays`` are the cache's, before and after.
    """
    n = len(ids)
    angle = rows.position[:, None] * jnp.array(config.inv_freq, jnp.float32)  # [N, D / 2]
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]

    def block(carry, inputs):
        x, arrays = carry
        index, layer = inputs
        h = rms_norm(x, layer["attn_norm"], config.rms_eps)
        q = linear(h, layer["wq"], layer.get("bq")).reshape(n, config.num_heads, -1)
        k = linear(h, layer["wk"], layer.get("bk")).reshape(n, config.num_kv_heads, -1)
        v = linear(h, layer["wv"], layer.get("bv")).reshape(n, config.num_kv_heads, -1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out, arrays = cache.attend(arrays, index, rows, q, k, v)
        x = x + linear(out.reshape(n, -1), layer["wo"], layer.get("bo"))
        h = rms_norm(x, layer["mlp_norm"], config.rms_eps)
        gated = jax.nn.silu(linear(h, layer["w_gate"])) * linear(h, layer["w_up"])
        return (x + linear(gated, layer["w_down"]), arrays), None

    layers = (jnp.arange(config.num_layers, dtype=jnp.int32), params["layers"])
    (x, arrays), _ = jax.lax.scan(block, (params["embedding"][ids], arrays), layers)
    return x, arrays


def logits_of(params, x, config: LlamaConfig):
    """Logits fp32 [N, V] after what :func:`forward` gives."""
    return linear(rms_norm(x, params["final_norm"], config.rms_eps), params["lm_head"])


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

    def new_cache(
        self,
        quant: QuantConfig | None,
        max_tokens: int | Sequence[int],
        backend: str | None = None,
    ) -> Session:
        """An empty cache.

        Args:
            quant: how it is packed; None: 16 bits.
            max_tokens: tokens there is room for, in one sequence or in each of several.
            backend: of a packed cache, as in ``tq_jax.attention``.
        """
        c = self.config
        num_pages = int(pages_of(max_tokens, PAGE_SIZE).sum())
        if quant is None:
            return Session(UncompressedCache(c, num_pages))
        layout = CacheLayout(quant, c.num_kv_heads, c.head_dim, PAGE_SIZE)
        codec = Codec(quant, c.head_dim, seed=ROTATION_SEED)
        return Session(PackedCache(c, layout, codec, num_pages, backend))

    def __call__(self, ids: Sequence[int], session: Session) -> np.ndarray:
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

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        session: Session,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[list[int]]:
        """Continues prompts of any lengths, all in one batch and one jitted program.

        The prompts are padded to a power of two of tokens in all, and so is the bound of the
        longest one. Lengths within these, of as many prompts on the same cache, compile nothing.

        Args:
            prompts: token ids of each sequence, at least one.
            session: a cache of this model with pages for every prompt and its new tokens, as
                ``new_cache(quant, [len(p) + max_new_tokens for p in prompts])`` has. What it held
                is overwritten.
            max_new_tokens: most tokens to write for each; an end token stops a sequence earlier.
            temperature: divides the logits before a token is drawn; 0 takes the likeliest.
            seed: of the ``jax.random.key`` of the draws.

        Returns:
            The new token ids of each sequence, without the end token.

        Raises:
            ValueError: no or an empty prompt, too few pages, or another number out of range.
        """
        check_temperature(temperature)
        batch = pack(prompts, max_new_tokens, PAGE_SIZE, session.cache.num_pages)
        num_tokens, longest = map(power_of_two, (len(batch.ids), int(batch.prompt_lens.max())))
        ids = np.zeros(num_tokens, np.int32)
        ids[: len(batch.ids)] = batch.ids
        width = pages_of(longest + max_new_tokens, PAGE_SIZE)[0]
        table = np.full((len(prompts), width), -1, np.int32)
        table[:, : batch.block_table.shape[1]] = batch.block_table
        session.length = 0
        tokens, session.arrays = generate(
            self.params,
            ids,
            batch.query_start_loc,
            table,
            session.arrays,
            jax.random.key(seed) if temperature else None,
            np.float32(temperature) if temperature else None,
            config=self.config,
            cache=session.cache,
            max_prompt_len=longest,
            max_new_tokens=max_new_tokens,
        )
        return [[int(t) for t in row if t != NO_TOKEN] for row in np.asarray(tokens)]


def power_of_two(n: int) -> int:
    """The least power of two from ``n`` on, at least a page."""
    return max(PAGE_SIZE, 1 << (n - 1).bit_length())
