"""Tiny models with random weights, prompts for them, and what a greedy choice must be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import tq_jax
from examples.weights import LlamaConfig, LlamaWeights

HEADS, KV_HEADS, WIDTH, INNER, VOCAB, LAYERS = 4, 2, 32, 48, 60, 2

#: One token, a page and one more, a few, two pages.
PROMPT_LENS = (1, 17, 5, 32)


def make_weights(head_dim: int = 16, *, tied: bool = True, seed: int = 5) -> LlamaWeights:
    """A Llama of two layers."""
    rng = np.random.default_rng(seed)

    def matrix(*shape):
        return rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    embedding = matrix(VOCAB, WIDTH) * 4
    shapes = {
        "wq": (HEADS * head_dim, WIDTH),
        "wk": (KV_HEADS * head_dim, WIDTH),
        "wv": (KV_HEADS * head_dim, WIDTH),
        "wo": (WIDTH, HEADS * head_dim),
        "w_gate": (INNER, WIDTH),
        "w_up": (INNER, WIDTH),
        "w_down": (WIDTH, INNER),
    }
    layers = {name: matrix(LAYERS, *shape) for name, shape in shapes.items()}
    for name in ("attn_norm", "mlp_norm"):
        layers[name] = np.ones((LAYERS, WIDTH), np.float32)
    config = LlamaConfig(
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        rms_eps=1e-5,
        context_length=128,
        inv_freq=tuple(10000.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))),
    )
    norm = np.ones(WIDTH, np.float32)
    return LlamaWeights(
        config, embedding, norm, embedding if tied else matrix(VOCAB, WIDTH), layers
    )


def with_ends(weights: LlamaWeights, *eos_ids: int) -> LlamaWeights:
    """The model with these end tokens."""
    return replace(weights, config=replace(weights.config, eos_ids=eos_ids))


def make_prompts(lens=PROMPT_LENS, seed: int = 1) -> list[list[int]]:
    """Random tokens, a prompt for each length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lens]


def write_checkpoint(folder: Path, weights: LlamaWeights, **changes) -> None:
    """The tied model as a transformers directory."""
    names = {
        "wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj",
        "wo": "self_attn.o_proj", "w_gate": "mlp.gate_proj", "w_up": "mlp.up_proj",
        "w_down": "mlp.down_proj", "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    }  # fmt: skip
    tensors = {
        f"model.layers.{i}.{names[name]}.weight": np.ascontiguousarray(array[i])
        for name, array in weights.layers.items()
        for i in range(LAYERS)
    }
    tensors["model.embed_tokens.weight"] = weights.embedding
    tensors["model.norm.weight"] = weights.final_norm
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": WIDTH,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": weights.config.head_dim, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "vocab_size": VOCAB, "max_position_embeddings": 128,
        "tie_word_embeddings": True, **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def shortfall(llama, prompt: list[int], written: list[int], cache) -> float:
    """How far written tokens fall short of the likeliest, at most, in deviations of the logits.

    The model reads the prompt and the tokens in one step over an empty ``cache``: 0 is a greedy
    choice, a little is a near tie that rounding decides, a token at random has 2 or 3.
    """
    rows = llama([*prompt, *written], cache)[len(prompt) - 1 : -1].astype(np.float64)
    chosen = rows[np.arange(len(written)), written]
    return float(((rows.max(-1) - chosen) / rows.std(-1)).max())


def stored_of(pool, cache, block_table) -> np.ndarray:
    """Which positions of a sequence were ever written in the last layer, bool [positions].

    ``cache``, ``pool``: a packed one of ``llama_jax`` that was empty; ``block_table``: [max_pages].
    """
    pages = block_table[block_table >= 0]
    table = (cache.config.num_layers - 1) * cache.num_pages + pages[None]
    lens = np.array([table.size * cache.layout.page_size], np.int32)
    what = {"layout": cache.layout, "codec": cache.codec, "dtype": "float32"}
    keys, _ = tq_jax.dequantize(pool, table, lens, **what)
    return np.asarray(keys)[0].any((1, 2))
