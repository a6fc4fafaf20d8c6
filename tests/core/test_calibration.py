"""Moments, transforms, their choice on held-out tokens, and bits, on made-up data."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tq_core import CacheLayout, Codec, QuantConfig, calibration, reference
from tq_core.calibration import Choice, Moments, Part
from tq_core.config import PRESETS

DIM = 16


def positive(rng, dim=DIM, heads=2, spread=3.0):
    """Second moments whose eigenvalues differ by a factor of ``exp(2 spread)``."""
    basis = np.linalg.qr(rng.standard_normal((heads, dim, dim)))[0]
    values = np.exp(rng.uniform(-spread, spread, (heads, 1, dim)))
    return (basis * values) @ basis.swapaxes(1, 2)


def draw(rng, count, moments, mean=0.0):
    """[count, heads, D] normal vectors."""
    normal = rng.standard_normal((count, len(moments), moments.shape[-1]))
    return np.einsum("hde,nhe->nhd", calibration.square_root(moments), normal) + mean


def part(keys, queries):
    coded, read = Moments(*keys.shape[1:]), Moments(*keys.shape[1:])
    coded.add(keys)
    read.add(queries)
    return Part(coded, read, len(keys), np.ones(keys.shape[1]))


# --- moments --------------------------------------------------------------------------------------


def test_moments_are_those_of_all_that_was_added(rng):
    x, w = rng.standard_normal((50, 3, 8)) + 2, rng.uniform(size=(50, 3))
    moments = Moments(3, 8)
    moments.add(x[:20], w[:20])
    moments.add(x[20:], w[20:])
    p = w / w.sum(0)
    mean = np.einsum("nh,nhd->hd", p, x)
    np.testing.assert_allclose(moments.mean, mean)
    np.testing.assert_allclose(moments.raw, np.einsum("nh,nhd,nhe->hde", p, x, x))
    centred = x - mean
    np.testing.assert_allclose(
        moments.centred, np.einsum("nh,nhd,nhe->hde", p, centred, centred), atol=1e-12
    )
    assert moments.count == 50


def test_effective_tokens_are_fewer_under_unequal_weights(rng):
    even, uneven = Moments(1, 2), Moments(1, 2)
    even.add(np.ones((10, 1, 2)))
    uneven.add(np.ones((10, 1, 2)), np.array([1.0] + [0.0] * 9)[:, None])
    assert (even.effective, uneven.effective) == (10, 1)


@pytest.mark.parametrize(
    "vectors, weights, words",
    [
        (np.ones((4, 2, 3)), None, r"vectors: expected \[N, 2, 4\], got \(4, 2, 3\)"),
        (np.ones((4, 2, 4)), -np.ones((4, 2)), "weights: expected numbers of at least 0"),
        (np.full((4, 2, 4), np.inf), None, "not finite"),
    ],
)
def test_moments_refuse(vectors, weights, words):
    with pytest.raises(ValueError, match=words), np.errstate(invalid="ignore"):
        Moments(2, 4).add(vectors, weights)


# --- the transform --------------------------------------------------------------------------------


def test_the_geometric_mean_solves_its_equation(rng):
    a, b = positive(rng), positive(rng)
    g = calibration.geometric_mean(a, b)
    np.testing.assert_allclose(g @ np.linalg.inv(a) @ g, b, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(g, calibration.geometric_mean(b, a), rtol=1e-8, atol=1e-10)


def test_the_best_transform_beats_the_identity_and_others(rng):
    coded, read = positive(rng), positive(rng)
    best = calibration.best_transform(coded, read)
    least = calibration.isotropic_error(coded, read, best)
    assert (least < 0.5 * calibration.isotropic_error(coded, read, None)).all()
    for _ in range(20):
        other = best + 0.03 * rng.standard_normal(best.shape)
        assert (least < calibration.isotropic_error(coded, read, other)).all()
    np.testing.assert_allclose(np.linalg.det(best), 1, rtol=1e-8)


def test_the_predicted_error_is_that_of_a_codec(rng):
    coded, read = (positive(rng, 64, heads=1, spread=1.0) for _ in range(2))
    keys, queries = draw(rng, 1000, coded), draw(rng, 500, read)
    transform = calibration.best_transform(coded, read)
    for bits in (2, 3, 4):
        config = QuantConfig(key=f"mse{bits}")
        errors = []
        for seed in range(8):
            codec = Codec(config, 64, seed=seed, key_transform=transform)
            back = round_trip(keys, codec)[0]
            errors.append(np.square((back - keys)[:, 0] @ queries[:, 0].T).mean())
        predicted = calibration.noise(config.key, 64) * calibration.isotropic_error(
            coded, read, transform
        )
        assert np.mean(errors) == pytest.approx(predicted[0], rel=0.15)


def round_trip(vectors, codec):
    """Keys and values as they come back."""
    vectors = vectors.astype(np.float32)
    layout = CacheLayout(codec.config, vectors.shape[1], vectors.shape[2], 16)
    count = len(vectors)
    cache = np.zeros(layout.shape(-(-count // 16)), np.uint8)
    table = np.arange(len(cache), dtype=np.int32)[None]
    reference.store(
        vectors, vectors, cache, np.arange(count, dtype=np.int64), layout=layout, codec=codec
    )
    lens = np.array([count], np.int32)
    keys, values = reference.dequantize(cache, table, lens, layout=layout, codec=codec)
    return keys[0, :count], values[0, :count]


@pytest.mark.parametrize("name", ["mse2", "mse3", "mse4", "int2", "int3", "int4", "int8"])
def test_the_noise_of_a_value_format(name, rng):
    vectors = rng.standard_normal((500, 1, 64))
    fit = calibration.Fit(None, None, 0.0, 1.0, 0.0, 0)
    layer = calibration.LayerFit(fit, fit, np.ones(1))
    codec = layer.codec(QuantConfig(value=name), 64)
    back = round_trip(vectors, codec)[1]
    error = np.square(back - vectors).sum() / np.square(vectors).sum()
    assert error == pytest.approx(calibration.noise(name, 64), rel=0.08)


def test_the_noise_of_fp8_keys(rng):
    vectors = 1e-3 * rng.standard_normal((500, 1, 64))
    fit = calibration.Fit(None, None, 0.0, 1.0, 0.0, 0)
    codec = calibration.LayerFit(fit, fit, np.full(1, 4e3)).codec(QuantConfig(key="fp8"), 64)
    back = round_trip(vectors, codec)[0]
    error = np.square(back - vectors).sum() / np.square(vectors).sum()
    assert error == pytest.approx(calibration.noise("fp8", 64), rel=0.06)


# --- fitting --------------------------------------------------------------------------------------


def parts(rng, count, mean=0.0):
    """Fitting and held-out part, and a third one that nothing saw."""
    coded, read = positive(rng), positive(rng)
    shift = mean * rng.standard_normal((2, DIM))
    sizes = (count, max(count // 3, 1), 20000)
    return [part(draw(rng, n, coded, shift), draw(rng, n, read)) for n in sizes]


@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_a_fit_wins_on_tokens_that_it_did_not_see(mean, rng):
    fitting, held_out, fresh = parts(rng, 1200, mean)
    fit = calibration.fit(fitting, held_out)
    assert fit.transform is not None
    assert fit.gain < 0.5
    error = fresh.error(fit.offset, fit.transform)
    assert error / fresh.error(None, None) == pytest.approx(fit.gain, rel=0.15)
    assert (fit.mean_energy > 0.9) == bool(mean)


def test_a_large_mean_is_subtracted(rng):
    fitting, held_out, _ = parts(rng, 1200, 30.0)
    fit = calibration.fit(fitting, held_out)
    assert fit.offset is not None


def test_fewer_tokens_are_shrunk_more(rng, monkeypatch):
    monkeypatch.setattr(calibration, "check_tokens", lambda *args: None)
    coded, read = positive(rng), positive(rng)
    chosen = []
    for count in (24, 5000):
        made = [part(draw(rng, n, coded), draw(rng, n, read)) for n in (count, 2000)]
        chosen.append(calibration.fit(*made).shrinkage)
    assert chosen[0] > chosen[1]


def test_what_does_not_win_on_held_out_tokens_is_not_used(rng):
    # Both moments are isotropic: there is nothing to win.
    made = [
        part(rng.standard_normal((n, 2, DIM)), rng.standard_normal((n, 2, DIM))) for n in (800, 400)
    ]
    fit = calibration.fit(*made)
    assert (fit.offset, fit.transform, fit.gain) == (None, None, 1.0)


@pytest.mark.parametrize("count, held_out, name", [(500, 400, "fitting"), (800, 100, "held-out")])
def test_too_little_text_is_refused(count, held_out, name, rng):
    made = [
        part(rng.standard_normal((n, 2, DIM)), rng.standard_normal((n, 2, DIM)))
        for n in (count, held_out)
    ]
    with pytest.raises(ValueError, match=f"text: expected at least .* {name} tokens"):
        calibration.fit(*made)


def test_outlier_channels_are_counted(rng):
    keys = rng.standard_normal((1000, 2, DIM))
    keys[:, 1, 3] *= 10
    made = [part(keys[n::2], keys[n::2]) for n in (0, 1)]
    assert calibration.fit(made[0] + made[1], made[1]).outliers == 1


def test_a_dead_head_has_a_codec(rng):
    keys = rng.standard_normal((1200, 2, DIM))
    keys[:, 1] = 0
    made = part(keys[:800], keys[:800]), part(keys[800:], keys[800:])
    layer = calibration.fit_layer(made, made)
    for name in PRESETS:
        layer.codec(QuantConfig.preset(name), DIM)


@pytest.mark.parametrize("name", PRESETS)
def test_a_calibrated_codec_has_a_smaller_error(name, rng):
    coded, read = positive(rng), positive(rng)
    shift = 3 * rng.standard_normal((2, DIM))
    made = [part(draw(rng, n, coded, shift), draw(rng, n, read)) for n in (2000, 500)]
    layer = calibration.fit_layer((made[0], made[1]), (made[0], made[1]))
    config = QuantConfig.preset(name)
    vectors, readers = draw(rng, 400, coded, shift), draw(rng, 400, read)

    def errors(codec):
        return [
            np.square(np.einsum("nhd,mhd->hnm", back - vectors, readers)).mean()
            for back in round_trip(vectors, codec)
        ]

    plain, fitted = errors(Codec(config, DIM)), errors(layer.codec(config, DIM))
    assert fitted[0] < 0.6 * plain[0]
    assert fitted[1] < 0.6 * plain[1]


# --- bits -----------------------------------------------------------------------------------------


def test_allocation_is_the_best_of_all(rng):
    formats = [("mse2", 18), ("mse3", 26), ("mse4", 34)]
    layers = [
        [Choice(QuantConfig(key=k), size, float(rng.uniform()) / size) for k, size in formats]
        for _ in range(5)
    ]
    for budget in (18, 20, 25.5, 34, 100):
        every = itertools.product(*layers)
        fits = [c for c in every if sum(x.size for x in c) <= budget * 5]
        least = min(sum(x.cost for x in c) for c in fits)
        picked = calibration.allocate(layers, budget)
        assert sum(x.size for x in picked) <= budget * 5
        assert sum(x.cost for x in picked) == pytest.approx(least)


def test_a_budget_below_the_smallest_formats_is_refused():
    layers = [[Choice(QuantConfig(), 34, 1.0)]] * 2
    with pytest.raises(ValueError, match=r"budget: expected at least 34 bytes .* got 30"):
        calibration.allocate(layers, 30)


# --- other formats --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("old, new", [*itertools.permutations(["4bit_hq", "k8v4", "2bit"], 2)])
def test_a_codec_of_another_format_keeps_the_transform(old, new, seed, rng):
    transforms = {f"{side}_transform": positive(rng) for side in ("key", "value")}
    codec = Codec(QuantConfig.preset(old), DIM, key_offset=rng.standard_normal(DIM), **transforms)
    other = calibration.recode(codec, QuantConfig.preset(new), seed)
    assert other.config == QuantConfig.preset(new)
    np.testing.assert_array_equal(other.key_offset, codec.key_offset)
    for name in ("key_matrix", "value_matrix"):
        mine, its = (np.asarray(getattr(c, name), np.float64) for c in (codec, other))
        metric, same = (m.swapaxes(1, 2) @ m for m in (mine, its))
        np.testing.assert_allclose(same, metric, rtol=1e-4, atol=1e-4 * abs(metric).max())
    again = calibration.recode(other, QuantConfig.preset(new))
    assert again == other
