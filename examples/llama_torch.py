"""A Llama forward in PyTorch, over a cache that is either uncompressed or packed by ``tq_torch``.

Sizes: ``N`` tokens of this step, ``S`` tokens in the cache, ``Hq``/``Hk`` query/KV heads, ``D``
head_dim, ``L`` layers, ``V`` vocabulary, ``W`` width. One sequence at a time.

The model meets its cache in two calls: ``cache.extend(n)`` reserves room for the step's tokens, and
``cache.attend(layer, q, k, v)`` stores their keys and values and returns the attention output.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

import tq_torch
from examples.evaluate import ROTATION_SEED
from examples.weights import LlamaConfig, LlamaWeights
from tq_core import CacheLayout, Codec, QuantConfig

PAGE_SIZE = 16


class UncompressedCache:
    """Keys and values in 16 bits: ``keys``, ``values`` fp16 [L, max_tokens, Hk, D]."""

    def __init__(self, config: LlamaConfig, max_tokens: int, device: str = "cpu"):
        shape = (config.num_layers, max_tokens, config.num_kv_heads, config.head_dim)
        self.keys = torch.zeros(shape, dtype=torch.float16, device=device)
        self.values = torch.zeros(shape, dtype=torch.float16, device=device)
        self.length = 0
        self.bytes_per_token = 4 * config.num_layers * config.num_kv_heads * config.head_dim

    def extend(self, n: int) -> None:
        """Reserve the next ``n`` positions."""
        self.new = slice(self.length, self.length + n)
        self.length += n
        position = torch.arange(self.length, device=self.keys.device)
        self.visible = position[None, :] <= position[self.new, None]  # [N, S]

    def attend(self, layer: int, q, k, v) -> torch.Tensor:
        """Store k, v [N, Hk, D] of ``layer``; attend with q [N, Hq, D] to all that is cached."""
        self.keys[layer, self.new] = k.to(torch.float16)
        self.values[layer, self.new] = v.to(torch.float16)
        keys, values = self.keys[layer, : self.length], self.values[layer, : self.length]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1),  # [Hq, N, D]
            keys.transpose(0, 1).to(q.dtype),
            values.transpose(0, 1).to(q.dtype),
            attn_mask=self.visible,
            enable_gqa=True,
        )
        return out.transpose(0, 1)


class PackedCache:
    """Packed pages, written by ``tq_torch.store`` and read by ``tq_torch.attention``.

    One pool of pages serves all layers, and so does one codec: ``block_tables`` [L, pages] says
    which pages of the pool belong to a layer.
    """

    def __init__(
        self, config: LlamaConfig, quant: QuantConfig, max_tokens: int, device: str = "cpu"
    ):
        self.layout = CacheLayout(quant, config.num_kv_heads, config.head_dim, PAGE_SIZE)
        self.codec = Codec(quant, config.head_dim, seed=ROTATION_SEED)
        pages = -(-max_tokens // PAGE_SIZE)
        self.pool = tq_torch.empty_cache(self.layout, config.num_layers * pages, device=device)
        self.block_tables = torch.arange(
            config.num_layers * pages, dtype=torch.int32, device=device
        ).view(config.num_layers, pages)
        self.max_tokens = max_tokens
        self.length = 0
        self.bytes_per_token = config.num_layers * self.layout.bytes_per_token

    def extend(self, n: int) -> None:
        """Reserve the next ``n`` positions."""
        device = self.pool.device
        position = torch.arange(self.length, self.length + n, device=device)
        self.page, self.offset = position // PAGE_SIZE, position % PAGE_SIZE
        self.length += n
        self.seq_lens = torch.tensor([self.length], dtype=torch.int32, device=device)
        self.query_start_loc = torch.tensor([0, n], dtype=torch.int32, device=device)

    def attend(self, layer: int, q, k, v) -> torch.Tensor:
        """Store k, v [N, Hk, D] of ``layer``; attend with q [N, Hq, D] to all that is cached."""
        slots = self.block_tables[layer, self.page] * PAGE_SIZE + self.offset
        tq_torch.store(k, v, self.pool, slots, layout=self.layout, codec=self.codec)
        return tq_torch.attention(
            q,
            self.pool,
            self.block_tables[layer : layer + 1],
            self.seq_lens,
            self.query_start_loc,
            layout=self.layout,
            codec=self.codec,
            max_query_len=len(q),
            max_seq_len=self.length,
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

    def new_cache(self, quant: QuantConfig | None, max_tokens: int):
        """An empty cache for ``max_tokens`` tokens, packed as ``quant`` says; None: 16 bits."""
        if quant is None:
            return UncompressedCache(self.config, max_tokens, self.device)
        return PackedCache(self.config, quant, max_tokens, self.device)

    @torch.inference_mode()
    def __call__(self, ids, cache) -> np.ndarray:
        """Logits fp32 [N, V] of token ids [N], which follow what the cache already holds."""
        c = self.config
        ids = torch.as_tensor(ids, dtype=torch.long, device=self.device)
        start, n = cache.length, len(ids)
        cache.extend(n)
        position = torch.arange(start, start + n, dtype=torch.float32, device=self.device)
        angle = position[:, None] * self.inv_freq  # [N, D / 2]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]

        x = self.embedding[ids]  # [N, W]
        for index, layer in enumerate(self.layers):
            h = rms_norm(x, layer["attn_norm"], c.rms_eps)
            q = F.linear(h, layer["wq"], layer.get("bq")).view(n, c.num_heads, c.head_dim)
            k = F.linear(h, layer["wk"], layer.get("bk")).view(n, c.num_kv_heads, c.head_dim)
            v = F.linear(h, layer["wv"], layer.get("bv")).view(n, c.num_kv_heads, c.head_dim)
            out = cache.attend(index, rotate(q, cos, sin), rotate(k, cos, sin), v)
            x = x + F.linear(out.reshape(n, -1), layer["wo"], layer.get("bo"))
            h = rms_norm(x, layer["mlp_norm"], c.rms_eps)
            gated = F.silu(F.linear(h, layer["w_gate"])) * F.linear(h, layer["w_up"])
            x = x + F.linear(gated, layer["w_down"])
        return F.linear(rms_norm(x, self.final_norm, c.rms_eps), self.lm_head).cpu().numpy()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row of x [N, W] to a root mean square of 1, then by ``weight`` [W]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on x [N, H, D]: turns coordinates ``i`` and ``i + D/2`` by the angle of pair ``i``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
