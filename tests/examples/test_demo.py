"""The demo's model code on tiny random weights: no download, no network."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from examples import demo, evaluate, llama_jax, llama_torch
from examples.export import BIASED_PAIRS, biased, key_bias
from examples.weights import (
    LlamaConfig,
    LlamaWeights,
    UnsupportedModel,
    load_transformers,
    undo_rope_interleaving,
)
from tq_core import PRESETS, QuantConfig

HEADS, KV_HEADS, DIM, WIDTH, INNER, VOCAB, LAYERS = 4, 2, 16, 32, 48, 60, 2


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(5)

    def matrix(*shape):
        return rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    embedding = matrix(VOCAB, WIDTH) * 4
    shapes = {
        "wq": (HEADS * DIM, WIDTH),
        "wk": (KV_HEADS * DIM, WIDTH),
        "wv": (KV_HEADS * DIM, WIDTH),
        "wo": (WIDTH, HEADS * DIM),
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
        head_dim=DIM,
        rms_eps=1e-5,
        context_length=128,
        inv_freq=tuple(10000.0 ** (-np.arange(DIM // 2) / (DIM // 2))),
    )
    norm = np.ones(WIDTH, np.float32)
    return LlamaWeights(config, embedding, norm, embedding, layers)


IDS = [int(i) for i in np.random.default_rng(1).integers(0, VOCAB, 40)]


def logits(module, weights, quant, chunks=(25, 14, 1)):
    llama = module.Llama(weights)
    cache = llama.new_cache(quant, len(IDS))
    steps = np.split(np.array(IDS), np.cumsum(chunks)[:-1])
    return np.concatenate([llama(list(step), cache) for step in steps])


def distance(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_torch_and_jax_agree_on_a_16_bit_cache(weights):
    assert distance(logits(llama_torch, weights, None), logits(llama_jax, weights, None)) < 1e-4


@pytest.mark.parametrize("module", [llama_torch, llama_jax])
def test_chunks_do_not_change_a_16_bit_cache(module, weights):
    whole = logits(module, weights, None, (40,))
    assert distance(logits(module, weights, None), whole) < 1e-4


@pytest.mark.parametrize(("preset", "bound"), [("k8v8", 0.05), ("4bit", 0.3), ("3bit", 0.6)])
def test_packed_caches_come_near_the_16_bit_one(weights, preset, bound):
    exact = logits(llama_torch, weights, None)
    quant = QuantConfig.preset(preset)
    by_torch = logits(llama_torch, weights, quant)
    by_jax = logits(llama_jax, weights, quant)
    assert 0 < distance(by_torch, exact) < bound
    assert distance(by_jax, by_torch) < bound / 4


def test_generate_and_perplexity(weights):
    llama = llama_torch.Llama(weights)
    cache = llama.new_cache(None, 20)
    seen = []
    written = evaluate.generate(llama, cache, IDS[:12], 8, seen.append)
    assert len(written) == 8 == sum(seen)
    rows = logits(llama_torch, weights, None).astype(np.float64)
    nll = evaluate.log_sum_exp(rows)[:-1] - rows[np.arange(39), IDS[1:]]
    value = evaluate.perplexity(llama, llama.new_cache(None, 40), IDS, 7)
    assert value == pytest.approx(np.exp(nll.mean()), rel=1e-4)


def test_undo_rope_interleaving():
    """A GGUF stores the pair (i, i + D/2) of a head as neighbours (2i, 2i + 1)."""
    rows = np.arange(3 * 8, dtype=np.float32)[:, None] * np.ones(2, np.float32)
    stored = rows.reshape(3, 2, 4, 2).swapaxes(1, 2).reshape(24, 2)
    assert np.array_equal(undo_rope_interleaving(stored[None], 3)[0], rows)


def checkpoint(folder, weights, **changes):
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
        "num_key_value_heads": KV_HEADS, "head_dim": DIM, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "vocab_size": VOCAB, "max_position_embeddings": 128,
        "tie_word_embeddings": True, **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def test_a_transformers_directory_gives_the_same_logits(tmp_path, weights):
    checkpoint(tmp_path, weights)
    loaded = load_transformers(tmp_path)
    assert np.array_equal(logits(llama_torch, loaded, None), logits(llama_torch, weights, None))


def test_what_the_forward_would_ignore_is_refused(tmp_path, weights):
    checkpoint(tmp_path, weights, sliding_window=4096, model_type="mistral")
    with pytest.raises(UnsupportedModel):
        load_transformers(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [["--presets", "5bit"], ["--tokens", "0"], ["--model", "/nowhere"], ["--frameworks", "tf"]],
)
def test_wrong_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        demo.parse(arguments)
    assert error.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_results_out_of_bounds_are_named():
    def result(value):
        return {f: demo.Result(100, value, "", 1.0) for f in ("torch", "jax")}

    results = {demo.BASELINE: result(32.2), **{name: result(33.0) for name in PRESETS}}
    report = demo.Report({**results, "k8v8": result(32.3)})
    demo.judge(report, known=True)
    assert report.failures == []
    results["3bit"]["jax"].perplexity = 50.0
    results[demo.BASELINE] = result(float("nan"))
    report = demo.Report(results)
    demo.judge(report, known=True)
    assert any("jax, 3bit" in failure for failure in report.failures)
    assert any("differ" in failure for failure in report.failures)
    assert any("not finite" in failure for failure in report.failures)


def test_the_made_bias_is_large_where_rope_is_slow(weights):
    bias = key_bias(weights, 150.0).reshape(LAYERS, KV_HEADS, 2, DIM // 2)
    sizes = np.abs(bias).max((1, 2))
    assert sizes[0].max() == 150
    slow, fast = sizes[:, -BIASED_PAIRS:], sizes[:, :-BIASED_PAIRS]
    assert slow.min() > 10 * fast.max()


def test_the_made_bias_is_added_to_keys_alone(weights):
    made = biased(weights, 150.0).layers
    np.testing.assert_array_equal(made["bk"], key_bias(weights, 150.0))
    assert not any(made[name].any() for name in ("bq", "bv", "bo"))
    assert all(made[name] is array for name, array in weights.layers.items())
