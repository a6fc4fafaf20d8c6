"""A Llama in PyTorch, over a cache that is either uncompressed or packed by ``tq_torch``.

Sizes: ``N`` tokens of this step, ``B`` sequences, ``T`` cached tokens of all of them, ``Hq``/``Hk``
query/KV heads, ``D`` head_dim, ``L`` layers, ``V`` vocabulary, ``W`` width.

A step's tokens are packed rows of any number of sequences. ``Rows`` says where they are, and
``cache.attend(layer, rows, q, k, v)`` stores their keys and values and returns the attention
output. Both caches lie in pages; ``llama.generate`` gives each sequence its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

import tq_torch
from examples.batch import check_temperature, pack, pages_of
from examples.evaluate import ROTATION_SEED
from examples.weights import LlamaConfig, LlamaWeights
from tq_core import CacheLayout, Codec, QuantConfig

PAGE_SIZE = 16


@dataclass(frozen=True)
class Rows:
    """Where the rows of a step are: the last ``query_lens[b]`` tokens of each sequence, packed.

    ``block_table`` int32 [B, max_pages]: pages of a sequence in each layer. ``seq_lens`` [B]: its
    tokens, those of the step included. ``query_lens`` [B]: its rows, at least 1.
    """

    block_table: torch.Tensor
    seq_lens: list[int]
    query_lens: list[int]

    def to_device(self, numbers: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """The numbers as a tensor beside the block table."""
        return torch.tensor(numbers, dtype=dtype, device=self.block_table.device)

    def locate(self, starts: list[int], counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequence and position, int64 each, of ``counts[b]`` tokens from ``starts[b]`` on."""
        count = self.to_device(counts)
        sequence = torch.repeat_interleave(count)
        first = self.to_device(starts) - (count.cumsum(0) - count)
        rows = torch.arange(len(sequence), device=sequence.device)
        return sequence, first[sequence] + rows

    def slots_of(self, sequence: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Slots of tokens within a layer: page * page_size + offset."""
        page = self.block_table[sequence, position // PAGE_SIZE]
        return page.long() * PAGE_SIZE + position % PAGE_SIZE

    @functools.cached_property
    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequence and position of each row, int64 [N]."""
        lens = zip(self.seq_lens, self.query_lens, strict=True)
        return self.locate([total - new for total, new in lens], self.query_lens)

    @functools.cached_property
    def slots(self) -> torch.Tensor:
        """Where each row is stored within a layer, int64 [N]."""
        return self.slots_of(*self.tokens)

    @functools.cached_property
    def lengths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``seq_lens`` int32 [B] and ``query_start_loc`` int32 [B + 1] on the device."""
        starts = np.cumsum([0, *self.query_lens]).tolist()
        return self.to_device(self.seq_lens, torch.int32), self.to_device(starts, torch.int32)

    @functools.cached_property
    def cached(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of all cached tokens, int64 [T], and which of them a row sees, bool [N, T]."""
        sequence, position = self.locate([0] * len(self.seq_lens), self.seq_lens)
        own, last = (x[:, None] for x in self.tokens)
        return self.slots_of(sequence, position), (sequence == own) & (position <= last)


class UncompressedCache:
    """Keys and values in 16 bits: ``keys``, ``values`` fp16 [L, slots of a layer, Hk, D]."""

    def __init__(self, config: LlamaConfig, num_pages: int, device: str = "cpu"):
        slots = num_pages * PAGE_SIZE
        shape = (config.num_layers, slots, config.num_kv_heads, config.head_dim)
        self.keys = torch.zeros(shape, dtype=torch.float16, device=device)
        self.values = torch.zeros(shape, dtype=torch.float16, device=device)
        self.num_pages = num_pages
        self.length = 0
        self.bytes_per_token = 4 * config.num_layers * config.num_kv_heads * config.head_dim

    def attend(self, layer: int, rows: Rows, q, k, v) -> torch.Tensor:
        """Store k, v [N, Hk, D] of ``layer``; attend with q [N, Hq, D] to all that is cached."""
        self.keys[layer, rows.slots] = k.to(torch.float16)
        self.values[layer, rows.slots] = v.to(torch.float16)
        slots, visible = rows.cached
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1),  # [Hq, N, D]
            self.keys[layer, slots].transpose(0, 1).to(q.dtype),
            self.values[layer, slots].transpose(0, 1).to(q.dtype),
            attn_mask=visible,
            enable_gqa=True,
        )
        return out.transpose(0, 1)


class PackedCache:
    """Packed pages, written by ``tq_torch.store`` and read by ``tq_torch.attention``.

    One pool of pages serves all layers, and so does one codec: layer ``l`` owns the pages from
    ``l * num_pages`` on.
    """

    def __init__(
        self, config: LlamaConfig, quant: QuantConfig, num_pages: int, device: str = "cpu"
    ):
        self.layout = CacheLayout(quant, config.num_kv_heads, config.head_dim, PAGE_SIZE)
        self.codec = Codec(quant, config.head_dim, seed=ROTATION_SEED)
        self.pool = tq_torch.empty_cache(self.layout, config.num_layers * num_pages, device=device)
        self.num_pages = num_pages
        self.length = 0
        self.bytes_per_token = config.num_layers * self.layout.bytes_per_token

    def attend(self, layer: int, rows: Rows, q, k, v) -> torch.Tensor:
        """Store k, v [N, Hk, D] of ``layer``; attend with q [N, Hq, D] to all that is cached."""
        first_page = layer * self.num_pages
        slots = rows.slots + first_page * PAGE_SIZE
        tq_torch.store(k, v, self.pool, slots, layout=self.layout, codec=self.codec)
        seq_lens, query_start_loc = rows.lengths
        return tq_torch.attention(
            q,
            self.pool,
            rows.block_table + first_page,
            seq_lens,
            query_start_loc,
            layout=self.layout,
            codec=self.codec,
            max_query_len=max(rows.query_lens),
            max_seq_len=max(rows.seq_lens),
        )


class Llama:
    """The model. ``llama(ids, cache)`` appends ``ids`` to the cache and returns their logits."""

    def __init__(self, weights: LlamaWeights, device: str = "cpu"):
        def move(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        self.config = weights.config
        self.device = device
        self.embedding = move(weights.embedding)
        self.final_norm = move(weights.final_norm)
        self.lm_head = move(weights.lm_head)
        self.inv_freq = torch.tensor(weights.config.inv_freq, dtype=torch.float32, device=device)
        stacked = {name: move(array) for name, array in weights.layers.items()}
        self.layers = [
            {name: tensor[i] for name, tensor in stacked.items()}
            for i in range(self.config.num_layers)
        ]

    def new_cache(self, quant: QuantConfig | None, max_tokens: int | Sequence[int]):
        """An empty cache.

        Args:
            quant: how it is packed; None: 16 bits.
            max_tokens: tokens there is room for, in one sequence or in each of several.
        """
        num_pages = int(pages_of(max_tokens, PAGE_SIZE).sum())
        if quant is None:
            return UncompressedCache(self.config, num_pages, self.device)
        return PackedCache(self.config, quant, num_pages, self.device)

    @torch.inference_mode()
    def __call__(self, ids: Sequence[int], cache) -> np.ndarray:
        """Logits fp32 [N, V] of token ids [N], which follow the sequence that the cache holds."""
        cache.length += len(ids)
        table = torch.arange(cache.num_pages, dtype=torch.int32, device=self.device)[None]
        x = self.forward(ids, Rows(table, [cache.length], [len(ids)]), cache)
        return self.logits(x).cpu().numpy()

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        cache,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[list[int]]:
        """Continues prompts of any lengths, all in one batch.

        Args:
            prompts: token ids of each sequence, at least one.
            cache: a cache of this model with pages for every prompt and its new tokens, as
                ``new_cache(quant, [len(p) + max_new_tokens for p in prompts])`` has. What it held
                is overwritten.
            max_new_tokens: most tokens to write for each; an end token stops a sequence earlier.
            temperature: divides the logits before a token is drawn; 0 takes the likeliest.
            seed: of the draws. Sequence ``b`` draws from a generator of its own.

        Returns:
            The new token ids of each sequence, without the end token.

        Raises:
            ValueError: no or an empty prompt, too few pages, or another number out of range.
        """
        check_temperature(temperature)
        batch = pack(prompts, max_new_tokens, PAGE_SIZE, cache.num_pages)
        cache.length = 0
        table = torch.from_numpy(batch.block_table).to(self.device)
        lens = batch.prompt_lens.tolist()
        generators = [self._generator(seed, b) for b in range(len(lens))]
        written: list[list[int]] = [[] for _ in lens]

        x = self.forward(batch.ids, Rows(table, lens, lens), cache)
        x = x[torch.from_numpy(batch.query_start_loc[1:] - 1).to(self.device)]
        live = list(range(len(lens)))
        for step in range(max_new_tokens):
            draws = [generators[b] for b in live]
            tokens = choose(self.logits(x), temperature, draws).tolist()
            going = [
                (b, token)
                for b, token in zip(live, tokens, strict=True)
                if token not in self.config.eos_ids
            ]
            live = [b for b, _ in going]
            for b, token in going:
                written[b].append(token)
            if not live or step + 1 == max_new_tokens:
                break
            rows = Rows(table[live], [lens[b] + step + 1 for b in live], [1] * len(live))
            x = self.forward([token for _, token in going], rows, cache)
        return written

    def forward(self, ids: Sequence[int], rows: Rows, cache) -> torch.Tensor:
        """Stores the rows of token ids [N]; returns what the last layer gives, fp32 [N, W]."""
        c = self.config
        n = len(ids)
        position = rows.tokens[1].float()
        angle = position[:, None] * self.inv_freq  # [N, D / 2]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]

        x = self.embedding[torch.as_tensor(ids, dtype=torch.long, device=self.device)]  # [N, W]
        for index, layer in enumerate(self.layers):
            h = rms_norm(x, layer["attn_norm"], c.rms_eps)
            q = F.linear(h, layer["wq"], layer.get("bq")).view(n, c.num_heads, c.head_dim)
            k = F.linear(h, layer["wk"], layer.get("bk")).view(n, c.num_kv_heads, c.head_dim)
            v = F.linear(h, layer["wv"], layer.get("bv")).view(n, c.num_kv_heads, c.head_dim)
            out = cache.attend(index, rows, rotate(q, cos, sin), rotate(k, cos, sin), v)
            x = x + F.linear(out.reshape(n, -1), layer["wo"], layer.get("bo"))
            h = rms_norm(x, layer["mlp_norm"], c.rms_eps)
            gated = F.silu(F.linear(h, layer["w_gate"])) * F.linear(h, layer["w_up"])
            x = x + F.linear(gated, layer["w_down"])
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits fp32 [N, V] after what :meth:`forward` gives."""
        return F.linear(rms_norm(x, self.final_norm, self.config.rms_eps), self.lm_head)

    def _generator(self, seed: int, sequence: int) -> torch.Generator:
        """Random numbers of a sequence's own."""
        (state,) = np.random.SeedSequence([seed, sequence]).generate_state(1, np.uint64)
        return torch.Generator(self.device).manual_seed(int(state))


def choose(
    logits: torch.Tensor, temperature: float, generators: Sequence[torch.Generator]
) -> torch.Tensor:
    """The next token of each row of logits [N, V], int64 [N]: the likeliest, or a draw."""
    if temperature == 0:
        return logits.argmax(-1)
    weights = (logits / temperature).softmax(-1)
    pairs = zip(weights, generators, strict=True)
    return torch.cat([torch.multinomial(row, 1, generator=g) for row, g in pairs])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row of x [N, W] to a root mean square of 1, then by ``weight`` [W]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on x [N, H, D]: turns coordinates ``i`` and ``i + D/2`` by the angle of pair ``i``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
