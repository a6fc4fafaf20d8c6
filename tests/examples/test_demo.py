"""The demo's model code on tiny random weights: no download, no network."""

from __future__ import annotations

import numpy as np
import pytest

from examples import demo, evaluate, llama_jax, llama_torch
from examples.export import BIASED_PAIRS, biased, key_bias
from examples.weights import UnsupportedModel, load_transformers, undo_rope_interleaving
from tests.examples.models import VOCAB, make_weights, write_checkpoint
from tq_core import PRESETS, QuantConfig


@pytest.fixture(scope="module")
def weights():
    return make_weights()


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
    quant, chunks = QuantConfig.preset(preset), (13, 13, 13, 1)
    by_torch = logits(llama_torch, weights, quant, chunks)
    by_jax = logits(llama_jax, weights, quant, chunks)
    assert 0 < distance(by_torch, exact) < bound
    assert distance(by_jax, by_torch) < bound / 4


def test_perplexity(weights):
    llama = llama_torch.Llama(weights)
    rows = logits(llama_torch, weights, None).astype(np.float64)
    nll = evaluate.log_sum_exp(rows)[:-1] - rows[np.arange(39), IDS[1:]]
    value = evaluate.perplexity(llama, llama.new_cache(None, 40), IDS, 7)
    assert value == pytest.approx(np.exp(nll.mean()), rel=1e-4)


def test_undo_rope_interleaving():
    """A GGUF stores the pair (i, i + D/2) of a head as neighbours (2i, 2i + 1)."""
    rows = np.arange(3 * 8, dtype=np.float32)[:, None] * np.ones(2, np.float32)
    stored = rows.reshape(3, 2, 4, 2).swapaxes(1, 2).reshape(24, 2)
    assert np.array_equal(undo_rope_interleaving(stored[None], 3)[0], rows)


def test_a_transformers_directory_gives_the_same_logits(tmp_path, weights):
    write_checkpoint(tmp_path, weights)
    loaded = load_transformers(tmp_path)
    assert np.array_equal(logits(llama_torch, loaded, None), logits(llama_torch, weights, None))


def test_what_the_forward_would_ignore_is_refused(tmp_path, weights):
    write_checkpoint(tmp_path, weights, sliding_window=4096, model_type="mistral")
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
        return {f: demo.Result(100, value, [""], 1.0) for f in ("torch", "jax")}

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
    c = weights.config
    bias = key_bias(weights, 150.0).reshape(c.num_layers, c.num_kv_heads, 2, c.head_dim // 2)
    sizes = np.abs(bias).max((1, 2))
    assert sizes[0].max() == 150
    slow, fast = sizes[:, -BIASED_PAIRS:], sizes[:, :-BIASED_PAIRS]
    assert slow.min() > 10 * fast.max()


def test_the_made_bias_is_added_to_keys_alone(weights):
    made = biased(weights, 150.0).layers
    np.testing.assert_array_equal(made["bk"], key_bias(weights, 150.0))
    assert not any(made[name].any() for name in ("bq", "bv", "bo"))
    assert all(made[name] is array for name, array in weights.layers.items())
