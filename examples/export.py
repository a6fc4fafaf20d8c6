"""The demo's model as a transformers directory: ``python -m examples.export DIR``.

``--key-bias`` adds a bias to its key projections, of the kind that the Qwen2 family has: a few
channels of up to that size in the first layers, less in later ones, little in most channels.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from examples.tokenizer import load_tokenizer
from examples.weights import LlamaWeights, ModelUnavailable, UnsupportedModel, load_model

#: Layers over which the largest bias falls by a factor of e.
BIAS_DECAY = 16.0
#: Pairs of each head that it is large in.
BIASED_PAIRS = 4


def key_bias(weights: LlamaWeights, largest: float, seed: int = 0) -> np.ndarray:
    """A bias fp32 ``[L, Hk*D]``: a few large channels, small others, falling from layer to layer.

    The largest entry of a layer is ``largest * exp(-layer / BIAS_DECAY)``, at least 20 %. It lies
    in the ``BIASED_PAIRS`` slowest of RoPE's pairs, whose share of a score hardly depends on the
    position: the softmax does not see it, a quantiser does.
    """
    c = weights.config
    rng = np.random.default_rng(seed)
    bias = rng.standard_normal((c.num_layers, c.num_kv_heads, 2, c.head_dim // 2))
    size = np.full(c.head_dim // 2, 0.01)
    size[-BIASED_PAIRS:] = 1.0  # pairs get slower along the last axis
    bias = (bias * size).reshape(c.num_layers, -1)
    bias /= np.abs(bias).max(1, keepdims=True)
    size = largest * np.maximum(np.exp(-np.arange(c.num_layers) / BIAS_DECAY), 0.2)
    return (bias * size[:, None]).astype(np.float32)


def biased(weights: LlamaWeights, largest: float, seed: int = 0) -> LlamaWeights:
    """The model with :func:`key_bias` added to its keys."""
    zero = np.zeros((weights.config.num_layers, 1), np.float32)
    layers = dict(weights.layers)
    for name, rows in (("bq", "wq"), ("bk", "wk"), ("bv", "wv"), ("bo", "wo")):
        layers.setdefault(name, np.repeat(zero, layers[rows].shape[1], 1))
    layers["bk"] = layers["bk"] + key_bias(weights, largest, seed)
    return replace(weights, layers=layers)


def to_transformers(weights: LlamaWeights):
    """A ``LlamaForCausalLM`` in fp32 with these weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    c = weights.config
    theta = float(np.exp(-np.log(c.inv_freq[1]) * c.head_dim / 2))
    plain = theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
    if not np.allclose(plain, c.inv_freq, rtol=1e-4):
        raise UnsupportedModel("a model with scaled RoPE has no export; use its own directory")
    tied = weights.lm_head is weights.embedding
    config = LlamaConfig(
        vocab_size=weights.embedding.shape[0],
        hidden_size=weights.embedding.shape[1],
        intermediate_size=weights.layers["w_gate"].shape[1],
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_eps,
        max_position_embeddings=c.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": round(theta, 3)},
        attention_bias="bk" in weights.layers,
        tie_word_embeddings=tied,
        bos_token_id=c.bos_id,
        eos_token_id=list(c.eos_ids),
    )
    model = LlamaForCausalLM(config).eval()
    tensors = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
    }
    if not tied:
        tensors["lm_head.weight"] = weights.lm_head
    names = {
        "attn_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight",
        "wq": "self_attn.q_proj.weight", "wk": "self_attn.k_proj.weight",
        "wv": "self_attn.v_proj.weight", "wo": "self_attn.o_proj.weight",
        "bq": "self_attn.q_proj.bias", "bk": "self_attn.k_proj.bias",
        "bv": "self_attn.v_proj.bias", "bo": "self_attn.o_proj.bias",
        "w_gate": "mlp.gate_proj.weight", "w_up": "mlp.up_proj.weight",
        "w_down": "mlp.down_proj.weight",
    }  # fmt: skip
    for ours, theirs in names.items():
        if ours in weights.layers:
            for number, array in enumerate(weights.layers[ours]):
                tensors[f"model.layers.{number}.{theirs}"] = array
    state = {name: torch.tensor(array) for name, array in tensors.items()}
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def main(argv: list[str] | None = None) -> int:
    """Writes the directory; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.export", description=__doc__)
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--model", metavar="PATH", help="another model than the demo's")
    parser.add_argument("--key-bias", metavar="SIZE", type=float, help="its largest entry")
    arguments = parser.parse_args(argv)
    try:
        weights, path = load_model(arguments.model)
        tokenizer = load_tokenizer(path)
        if arguments.key_bias is not None:
            weights = biased(weights, arguments.key_bias)
        model = to_transformers(weights)
    except (ModelUnavailable, UnsupportedModel) as error:
        print(error, file=sys.stderr)
        return 2
    model.save_pretrained(arguments.directory)
    tokenizer.save(str(arguments.directory / "tokenizer.json"))
    (arguments.directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}\n', encoding="utf-8"
    )
    print(f"{arguments.directory}: {model.num_parameters():,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
