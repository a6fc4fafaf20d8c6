"""What is observed of a transformers model, on a small one with random weights."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tq_core import Codec, QuantConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tq_torch.calibrate import Calibrator  # noqa: E402


def make_model(**changes):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": True,
        **changes,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                part.weight.mul_(10)
                part.bias.normal_(0, 6)
    return model


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def windows():
    return list(torch.randint(64, (2048,), generator=torch.Generator().manual_seed(1)).split(256))


@pytest.fixture(scope="module")
def found(model, windows):
    return Calibrator(model).fit(windows)


def test_observed_attention_is_exact(model, windows):
    with torch.inference_mode():
        expected = model(windows[0][None], use_cache=False).logits[0].log_softmax(-1)
    calibrator = Calibrator(model)
    with calibrator._attention():
        result = calibrator._log_probabilities(windows[0])
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "window, softcap, with_sink", [(7, None, False), (None, 2.0, False), (None, None, True)]
)
def test_windows_softcaps_and_sinks(window, softcap, with_sink, model):
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, heads, 20, 16, generator=generator) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator) if with_sink else None
    module = SimpleNamespace(layer_idx=0)
    out, _ = Calibrator(model)._attend(
        module, q, k, v, None, sliding_window=window, softcap=softcap, s_aux=sinks
    )
    scores = 16**-0.5 * q[0] @ k[0].repeat_interleave(2, 0).mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    row, column = torch.arange(20)[:, None], torch.arange(20)[None]
    hidden = (column > row) | (column <= row - (window or 100))
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
    expected = (weights / total) @ v[0].repeat_interleave(2, 0)
    torch.testing.assert_close(out[0].transpose(0, 1), expected, rtol=1e-4, atol=1e-5)


def test_calibration_lowers_the_expected_errors(found):
    for layer in found:
        assert layer.key_error < 0.7 * layer.plain_key_error
        assert layer.value_error <= layer.plain_value_error
        assert layer.fit.key.offset is not None


def test_the_weighted_moments_are_those_of_the_definition(model, windows):
    """The sums of one window, against loops over all pairs in float64."""
    calibrator = Calibrator(model)
    seen = {}
    original = calibrator._attend

    def spy(module, query, key, value, *args, **kwargs):
        if module.layer_idx == 0:
            seen.update(q=query[0], k=key[0], v=value[0], wo=module.o_proj.weight)
        return original(module, query, key, value, *args, **kwargs)

    calibrator._attend = spy
    calibrator._sums = {}
    with calibrator._attention():
        calibrator._forward(windows[0][:24])
    sums = calibrator._sums[0]
    q, k, v, wo = (seen[n].detach().double().numpy() for n in ("q", "k", "v", "wo"))
    second = np.zeros((2, 16, 16))
    total = np.zeros(2)
    read = np.zeros((2, 16, 16))
    for head in range(4):
        mine, out_matrix = head // 2, wo[:, 16 * head : 16 * (head + 1)]
        for i in range(24):
            scores = k[mine, : i + 1] @ q[head, i] / 4
            p = np.exp(scores - scores.max())
            p /= p.sum()
            out = p @ v[mine, : i + 1]
            away = np.square((v[mine, : i + 1] - out) @ out_matrix.T).sum(1)
            w = p**2 * away
            a = w * np.square(q[head, i]).sum()
            second[mine] += np.einsum("n,nd,ne->de", a, k[mine, : i + 1], k[mine, : i + 1])
            total[mine] += a.sum()
            b = (w * np.square(k[mine, : i + 1]).sum(1)).sum()
            read[mine] += b * np.outer(q[head, i], q[head, i])
    np.testing.assert_allclose(sums.keys.weight, total, rtol=1e-3)
    np.testing.assert_allclose(
        sums.keys.raw,
        second / total[:, None, None],
        rtol=1e-3,
        atol=1e-3 * abs(second / total[:, None, None]).max(),
    )
    expected = read / np.trace(read, axis1=1, axis2=2)[:, None, None]
    given = sums.queries.raw / np.trace(sums.queries.raw, axis1=1, axis2=2)[:, None, None]
    np.testing.assert_allclose(given, expected, atol=1e-4)


def test_a_probe_measures_what_is_lost(model, windows, found):
    config = QuantConfig(key="mse3", value="mse3")
    calibrator = Calibrator(model)
    plain = calibrator.probe(windows[-1], [Codec(config, 16)] * 2, values=False)
    fitted = calibrator.probe(windows[-1], [f.fit.codec(config, 16) for f in found], values=False)
    for before, after in zip(plain, fitted, strict=True):
        assert 0 < after.score_error < before.score_error
    values = calibrator.probe(windows[-1], [Codec(config, 16)] * 2, keys=False)
    assert all(probe.score_error == 0 for probe in values)
    assert all(probe.divergence > 0 for probe in values)


def test_too_little_text_is_refused(model, windows):
    with pytest.raises(ValueError, match="text: expected at least 768 fitting tokens"):
        Calibrator(model).fit(windows[:3])
    with pytest.raises(ValueError, match="text: expected at least"):
        Calibrator(model).fit([])


def test_a_model_that_does_not_use_the_interface_is_refused(model, windows, monkeypatch):
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda *args: None)
    with pytest.raises(ValueError, match="could be observed in 0 of 2 layers"):
        Calibrator(model).fit(windows)
