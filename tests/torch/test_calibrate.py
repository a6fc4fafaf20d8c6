"""What is observed of a transformers model, on a small one with random weights."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tq_core import Codec, QuantConfig
from tq_core.calibration import noise as noise_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tq_torch.calibrate import Calibrator, _directions  # noqa: E402


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
    with calibrator._attention(), torch.inference_mode():
        result = calibrator._forward(windows[0]).log_softmax(-1)
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
    calibrator = Calibrator(model)
    out, _ = calibrator._attend(
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
        assert layer.key_divergence < 0.7 * layer.plain_key_divergence
        assert layer.value_divergence <= layer.plain_value_divergence
        assert layer.fit.key.offset is not None


def test_random_directions_have_the_covariance_of_a_sampled_token():
    logits = torch.tensor([[0.0, 1.0, -2.0, 3.0]])
    p = logits.softmax(-1)[0]
    generator = torch.Generator().manual_seed(0)
    u = _directions(logits.expand(200_000, 4), generator)
    torch.testing.assert_close(u.T @ u / len(u), p.diag() - p.outer(p), atol=3e-3, rtol=0)


@pytest.mark.parametrize("side", ["key", "value"])
def test_the_expected_divergence_is_that_of_a_small_move(side, windows):
    """Keys or values of one layer moved by noise as long as they are, at the identity."""
    window, unit = windows[0], 1e-7
    calibrator = Calibrator(make_model().double())
    sums = {}
    generator = torch.Generator().manual_seed(0)
    with calibrator._attention():
        for _ in range(16):
            calibrator._add(window, sums, {}, generator)
    part = sums[0].sides[side == "value"].part()
    expected = unit * part.error(None, None) / 2

    def move(layer, query, key, value, scale):
        moved = {"key": key, "value": value}
        if layer == 0:
            x = moved[side]
            length = x.norm(dim=-1, keepdim=True)
            noise = torch.randn(x.shape, dtype=x.dtype, generator=generator)
            moved[side] = x + length * (unit / 16) ** 0.5 * noise
        return moved["key"], moved["value"]

    found = []
    with calibrator._attention(), torch.inference_mode():
        exact = calibrator._forward(window).log_softmax(-1)
        calibrator._observe = move
        for _ in range(16):
            other = calibrator._forward(window).log_softmax(-1)
            found.append(float((exact.exp() * (exact - other)).sum(-1).mean()))
    assert np.mean(found) == pytest.approx(expected, rel=0.25)


def test_parameters_are_left_as_they_were(model, windows):
    frozen = model.model.embed_tokens.weight.requires_grad_(False)
    try:
        Calibrator(model).fit(windows)
        assert all(p.requires_grad != (p is frozen) for p in model.parameters())
        assert all(p.grad is None for p in model.parameters())
    finally:
        frozen.requires_grad_(True)


def test_a_check_measures_what_was_expected(model, windows, found):
    config = QuantConfig(key="mse4", value="mse4")
    calibrator = Calibrator(model)
    plain = calibrator.check(windows[-1], [Codec(config, 16)] * 2)
    fitted = calibrator.check(windows[-1], [f.fit.codec(config, 16) for f in found])
    assert 0 < fitted.divergence < plain.divergence
    unit = noise_of("mse4", 16)
    for layer, before, after in zip(found, plain.score_errors, fitted.score_errors, strict=True):
        assert before == pytest.approx((unit * layer.plain_score_error) ** 0.5, rel=0.2)
        assert after == pytest.approx((unit * layer.score_error) ** 0.5, rel=0.2)


def test_a_model_writes_texts_of_its_own(model):
    calibrator = Calibrator(model)
    texts = calibrator.sample(3, 20, seed=1)
    assert [text.shape for text in texts] == [(20,)] * 3
    assert len({tuple(text.tolist()) for text in texts}) == 3
    again, other = calibrator.sample(3, 20, seed=1), calibrator.sample(3, 20, seed=2)
    assert torch.equal(torch.stack(texts), torch.stack(again))
    assert not torch.equal(torch.stack(texts), torch.stack(other))


def test_own_texts_are_likely_to_the_model(model):
    """Their mean nll is the entropy of the model's own predictions."""
    calibrator = Calibrator(model)
    nll, entropy = [], []
    for text in calibrator.sample(16, 64):
        with torch.inference_mode():
            log_p = model(text[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        nll.append(-float(log_p.gather(1, text[1:, None]).mean()))
        entropy.append(-float((log_p.exp() * log_p).sum(-1).mean()))
    assert np.mean(nll) == pytest.approx(np.mean(entropy), rel=0.02)


def test_too_little_text_is_refused(model, windows):
    with pytest.raises(ValueError, match="text: expected at least 768 fitting tokens"):
        Calibrator(model).fit(windows[:3])
    with pytest.raises(ValueError, match="text: expected at least"):
        Calibrator(model).fit([])


def test_a_model_that_does_not_use_the_interface_is_refused(model, windows, monkeypatch):
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda *args: None)
    with pytest.raises(ValueError, match="could be observed in 0 of 2 layers"):
        Calibrator(model).fit(windows)
