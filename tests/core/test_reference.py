from __future__ import annotations

import math

import numpy as np
import pytest

from tests.cases import (
    ATTENTION_CASES,
    CONFIGS,
    HEAD_DIMS,
    Extras,
    config_id,
    expected,
    hard_keys,
    make_attention_inputs,
    make_codec,
)
from tq_core import PRESETS, CacheLayout, Codec, QuantConfig, codebook, packing, reference

PRESET = {name: QuantConfig.preset(name) for name in PRESETS}


def round_trip(config, key, value=None, codec=None, page_size=16):
    """Keys and values ``[N, Hk, D]`` as a reader of the cache sees them, float64."""
    n, heads, dim = key.shape
    layout = CacheLayout(config, heads, dim, page_size)
    codec = codec or Codec(config, dim)
    num_pages = -(-n // page_size)
    cache = np.full(layout.shape(num_pages), 0xFF, np.uint8)
    value = np.zeros_like(key) if value is None else value
    reference.store(
        key.astype(np.float32),
        value.astype(np.float32),
        cache,
        np.arange(n),
        layout=layout,
        codec=codec,
    )
    table = np.arange(num_pages, dtype=np.int32)[None]
    lengths = np.array([n], np.int32)
    keys, values = reference.dequantize(cache, table, lengths, layout=layout, codec=codec)
    return keys[0, :n], values[0, :n]


def affine(value, bits=2):
    """Codes, and scale and zero, of values ``[1, 1, 8]``."""
    layout = CacheLayout(QuantConfig("fp8", f"int{bits}"), 1, 8, 1)
    return reference.quantize_values(value, layout=layout, codec=Codec(layout.config, 8))


def relative_error(x, y):
    return float(((x - y) ** 2).sum() / (y**2).sum())


def cosine(x, y):
    return (x * y).sum(-1) / np.sqrt((x**2).sum(-1) * (y**2).sum(-1))


# --- quality of the formats -----------------------------------------------------------------


@pytest.mark.parametrize("bits, error", [(4, 0.0092), (3, 0.0338), (2, 0.119)])
def test_squared_error_of_gaussian_keys(bits, error, rng):
    x = rng.normal(size=(1250, 16, 128))
    config = QuantConfig(key=f"mse{bits}", value=f"mse{bits}")
    keys, values = round_trip(config, x, x)
    assert relative_error(keys, x) == pytest.approx(error, rel=0.03)
    assert relative_error(values, x) == pytest.approx(error, rel=0.04)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_without_norm_correction_the_error_is_that_of_the_codebook(bits, rng):
    x = rng.normal(size=(250, 8, 576))
    config = QuantConfig(key=f"mse{bits}", value="int4", norm_correction=False)
    keys, _ = round_trip(config, x)
    want = codebook.expected_error(codebook.default_centroids(bits, 1).astype(np.float64))
    assert relative_error(keys, x) == pytest.approx(want, rel=0.02)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_squared_error_of_affine_values(bits, rng):
    """Uniform rounding: a twelfth of the squared step."""
    x = rng.normal(size=(100, 8, 128))
    _, values = round_trip(QuantConfig("mse4", f"int{bits}"), x, x)
    step = (x.max(-1) - x.min(-1)) / (2**bits - 1)
    assert ((values - x) ** 2).mean() == pytest.approx((step**2).mean() / 12, rel=0.05)
    assert np.abs((values - x) / step[..., None]).max() < 0.53


def test_squared_error_of_fp8_keys(rng):
    """Relative steps of 1/8 between numbers of one binade, halved by rounding."""
    x = rng.normal(size=(100, 8, 128))
    keys, _ = round_trip(PRESET["k8v4"], x)
    assert np.abs(keys - x).max() <= np.abs(x).max() / 16
    normal = np.abs(x) > 2.0**-6
    assert (np.abs(keys - x)[normal] <= np.abs(x)[normal] / 16 * 1.0001).all()
    assert relative_error(keys, x) == pytest.approx(0.0007, rel=0.05)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", hard_keys(8))
def test_hard_keys_keep_their_direction_at_4_bit(kind, head_dim):
    x = hard_keys(head_dim)[kind][:, None].astype(np.float64)
    keys, values = round_trip(PRESET["4bit_hq"], x, x)
    assert cosine(keys, x).min() >= 0.99
    assert cosine(values, x).min() >= 0.99


@pytest.mark.parametrize("head_dim", [64, 128])
def test_norm_correction_keeps_the_length(head_dim, rng):
    x = rng.normal(size=(50, 2, head_dim))
    keys, _ = round_trip(PRESET["2bit"], x)
    lengths = np.sqrt((keys**2).sum(-1) / (x**2).sum(-1))
    assert np.abs(lengths - 1).max() < 2.0**-11 + 1e-6


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
@pytest.mark.parametrize("head_dim", [8, 72, 100])
def test_every_format_reconstructs(config, head_dim, rng):
    """A misplaced bit or byte would leave nothing of the vector."""
    x, y = rng.normal(size=(2, 50, 2, head_dim))
    keys, values = round_trip(config, x, y, page_size=7)
    limit = {"mse2": 0.2, "mse3": 0.06, "mse4": 0.02, "fp8": 0.001}
    limit |= {"int2": 0.4, "int3": 0.08, "int4": 0.02, "int8": 1e-4}
    assert relative_error(keys, x) < limit[config.key]
    assert relative_error(values, y) < limit[config.value]


# --- hard values ----------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [3, 4])
def test_values_with_an_offset_of_1000_keep_their_precision(bits, rng):
    """The rounded zero and scale are the ones used, so that codes are exact for a reader."""
    x = rng.normal(size=(100, 4, 128))
    config = QuantConfig("mse4", f"int{bits}")
    plain = ((round_trip(config, x, x)[1] - x) ** 2).mean()
    x = (x + 1000).astype(np.float32).astype(np.float64)
    shifted = ((round_trip(config, x, x)[1] - x) ** 2).mean()
    assert shifted <= 1.1 * plain


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("offset", [10_000, -10_003, 60_000])
def test_values_with_a_larger_offset_lose_what_the_zero_cannot_hold(bits, offset, rng):
    """At most half the distance of fp16 numbers there, plus half a step."""
    x = (rng.normal(size=(100, 4, 128)) + offset).astype(np.float32).astype(np.float64)
    _, values = round_trip(QuantConfig("mse4", f"int{bits}"), x, x)
    spacing = float(np.spacing(np.float16(abs(offset))))
    step = (np.ptp(x, axis=-1).max() + spacing / 2) / (2**bits - 1)
    assert np.abs(values - x).max() <= spacing / 2 + step / 2 * 1.001


def test_a_value_offset_of_the_codec_takes_the_offset_away(rng):
    x = rng.normal(size=(100, 4, 128))
    config = QuantConfig("mse4", "int4")
    plain = ((round_trip(config, x, x)[1] - x) ** 2).mean()
    x = (x + 10_000).astype(np.float32).astype(np.float64)
    codec = Codec(config, 128, value_offset=np.full(128, 1e4))
    shifted = ((round_trip(config, x, x, codec)[1] - x) ** 2).mean()
    assert shifted == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize("constant", [0, 1, -3.7, 1000.3, 65504, -65504, 1e-3])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_constant_values(bits, constant):
    """A zero above the constant gives a negative scale, which brings the constant back."""
    x = np.full((1, 1, 64), np.float32(constant), np.float64)
    _, values = round_trip(QuantConfig("mse4", f"int{bits}"), x, x)
    np.testing.assert_allclose(values, x, rtol=2e-6, atol=6e-8 * 2**bits)


def test_a_zero_above_the_maximum_gives_a_negative_scale():
    value = np.full((1, 1, 8), 1000.3, np.float32)
    codes, (scale, zero) = affine(value, bits=4)
    assert zero.item() == 1000.5
    assert scale.item() == np.float16(np.float32(1000.3 - 1000.5) / 15)
    assert (codes == 15).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_tiny_values(bits, rng):
    """Scale and zero round to multiples of 2^-24, the smallest fp16 number."""
    x = 1e-6 * rng.normal(size=(20, 2, 64))
    _, values = round_trip(QuantConfig("mse4", f"int{bits}"), x, x)
    levels = 2**bits - 1
    assert np.abs(values - x).max() <= np.ptp(x, axis=-1).max() / levels + levels * 2.0**-25
    if bits <= 4:
        assert relative_error(values, x) < 0.5


@pytest.mark.parametrize("outlier", [70_000, -70_000, np.inf, -np.inf, 1e38])
@pytest.mark.parametrize("config", ["4bit", "k8v8", "4bit_hq"])
def test_an_outlier_saturates_alone(config, outlier, rng):
    x = rng.normal(size=(3, 2, 64))
    x[1, 0, 5] = outlier
    keys, values = round_trip(PRESET[config], x, x)
    clean = np.where(np.abs(x) > 1e4, 0, x)
    clean_keys, clean_values = round_trip(PRESET[config], clean, clean)
    assert np.isfinite(keys).all()
    assert np.isfinite(values).all()
    others = np.ones((3, 2), bool)
    others[1, 0] = False
    np.testing.assert_array_equal(keys[others], clean_keys[others])
    np.testing.assert_array_equal(values[others], clean_values[others])
    limit = np.sign(outlier) * min(abs(outlier), 65504)
    if config == "k8v8":
        assert keys[1, 0, 5] == np.sign(outlier) * 448
    else:
        assert cosine(keys[1, 0], np.eye(64)[5] * np.sign(outlier)) > 0.99
    if config != "4bit_hq":
        step = 65504 / (15 if config == "4bit" else 255)
        assert abs(values[1, 0, 5] - limit) <= step
        assert np.abs(np.delete(values[1, 0], 5) - np.delete(x[1, 0], 5)).max() <= step
    else:
        assert cosine(values[1, 0], np.eye(64)[5] * np.sign(outlier)) > 0.99


@pytest.mark.parametrize("config", PRESET)
def test_zero_vectors_stay_zero(config):
    x = np.zeros((2, 1, 72))
    keys, values = round_trip(PRESET[config], x, x)
    assert not keys.any()
    assert not values.any()


def test_zero_vectors_come_back_as_the_offset():
    codec = make_codec(PRESET["4bit"], 16, 2, Extras(key_offset="heads", value_offset="heads"))
    x, y = codec.key_offset[None], codec.value_offset[None]
    keys, values = round_trip(codec.config, x, y, codec)
    np.testing.assert_array_equal(keys, x)
    np.testing.assert_array_equal(values, y)


@pytest.mark.parametrize("norm", [300, 800, 60_000, 1e6, 1e17])
def test_large_key_norms(norm, rng):
    x = rng.normal(size=(20, 2, 128))
    x *= norm / np.sqrt((x**2).sum(-1, keepdims=True))
    keys, _ = round_trip(PRESET["4bit"], x)
    assert cosine(keys, x).min() > 0.98
    lengths = np.sqrt((keys**2).sum(-1))
    if norm < 65000:
        np.testing.assert_allclose(lengths, norm, rtol=1e-3)
    else:  # the scale saturates at 65504; the centroids have a length of about 1
        assert (lengths > 60_000).all()
        assert (lengths < 70_000).all()


@pytest.mark.parametrize("config", PRESET)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_numbers_reach_no_other_token_or_head(config, bad, rng):
    layout = CacheLayout(PRESET[config], 2, 16, 4)
    codec = Codec(layout.config, 16)
    x = rng.normal(size=(4, 2, 16)).astype(np.float32)
    y = x.copy()
    y[2, 1, [3, 7]] = bad
    clean, dirty = (np.zeros(layout.shape(1), np.uint8) for _ in range(2))
    for data, cache in ((x, clean), (y, dirty)):
        reference.store(data, data, cache, np.arange(4), layout=layout, codec=codec)
    touched = np.concatenate(
        [
            layout.key_index()[2, 1],
            layout.value_index()[2, 1],
            layout.meta_index()[2, 1],
            layout.meta_index()[2, 1] + 1,
        ]
    )
    changed = np.flatnonzero(clean.reshape(-1) != dirty.reshape(-1))
    assert len(changed)
    assert set(changed) <= set(touched)
    keys, values = reference.dequantize_pages(dirty, layout=layout, codec=codec)
    assert np.isfinite(keys).all()
    assert np.isfinite(values).all()


@pytest.mark.parametrize("config", PRESET)
def test_nan_is_stored_as_zero(config, rng):
    x = rng.normal(size=(4, 2, 16))
    x[2, 1, 3] = np.nan
    for got, want in zip(
        round_trip(PRESET[config], x, x),
        round_trip(PRESET[config], np.nan_to_num(x), np.nan_to_num(x)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


# --- the definitions, step by step ----------------------------------------------------------


@pytest.mark.parametrize("norm_correction", [True, False])
def test_codebook_by_hand(norm_correction):
    """D = 8, identity rotation, levels -3, -1, 1, 3 (times 0.1): everything can be read off."""
    config = QuantConfig("mse2", "mse2", norm_correction)
    levels = np.array([-0.3, -0.1, 0.1, 0.3])
    codec = Codec(config, 8, rotation=np.eye(8), centroids=levels, value_centroids=levels)
    layout = CacheLayout(config, 1, 8, 1)
    key = np.float32([[[3, -3, 0.5, -0.5, 0, 2, -2, 1]]])
    # Norm sqrt(27.5) = 5.244; edges at -0.2, 0, 0.2, times the norm -1.05, 0, 1.05.
    codes, (scale,) = reference.quantize_keys(key, layout=layout, codec=codec)
    assert codes.tolist() == [[[3, 0, 2, 1, 2, 3, 0, 2]]]
    length = math.sqrt(4 * 0.09 + 4 * 0.01)
    want = math.sqrt(27.5) / (length if norm_correction else 1)
    assert scale.item() == np.float16(want)
    keys, values = round_trip(config, key, key, codec)
    np.testing.assert_allclose(keys[0, 0], float(np.float16(want)) * levels[codes[0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(values, keys)


def test_a_coordinate_on_an_edge_goes_up():
    config = QuantConfig("mse2", "int2")
    codec = Codec(config, 8, rotation=np.eye(8), centroids=[-0.75, -0.25, 0.25, 0.75])
    layout = CacheLayout(config, 1, 8, 1)
    key = np.float32([[[1, -1, 1, 1, 0, 0, 0, 0]]])  # norm 2: coordinates +-0.5, 0
    codes, _ = reference.quantize_keys(key, layout=layout, codec=codec)
    assert codes.tolist() == [[[3, 1, 3, 3, 2, 2, 2, 2]]]


def test_chosen_centroids_of_length_zero_give_a_zero_scale():
    config = QuantConfig("mse2", "int2")
    codec = Codec(config, 8, rotation=np.eye(8), centroids=[-3, -2, 0, 2])
    keys, _ = round_trip(config, np.ones((1, 1, 8)), codec=codec)
    assert not keys.any()


def test_affine_by_hand():
    """The zero is -1, the scale fp16((2 - -1) / 3) = 1; halves go up."""
    value = np.float32([[[-1, 2, -0.5, 0.5, 0.49, -0.51, 1.5, 0]]])
    codes, (scale, zero) = affine(value)
    assert (scale.item(), zero.item()) == (1, -1)
    assert codes.tolist() == [[[0, 3, 1, 2, 1, 0, 3, 1]]]


def test_the_scale_is_taken_from_the_rounded_zero():
    value = np.float32([[[1000.2, 1003.2, 1001, 1002, 1001, 1002, 1001, 1002]]])
    _, (scale, zero) = affine(value)
    assert zero.item() == 1000
    assert scale.item() == np.float16(np.float32(3.2) / 3)


def test_a_stored_zero_is_positive_zero():
    value = np.float32([[[-0.0] * 8], [[-1e-9] * 7 + [0]], [[-0.0] + [1.0] * 7]])
    _, fields = affine(value)
    assert not np.signbit(fields).any()


def test_key_scale_divides_and_multiplies(rng):
    x = rng.normal(size=(8, 2, 16))
    scale = np.float32([4, 0.3])
    codec = Codec(PRESET["k8v4"], 16, key_scale=scale)
    keys, _ = round_trip(PRESET["k8v4"], x, codec=codec)
    codes = packing.encode_e4m3(x.astype(np.float32) / scale[:, None])
    want = packing.e4m3_values()[codes].astype(np.float64) * scale[:, None]
    np.testing.assert_array_equal(keys, want)


def test_key_scale_reaches_keys_beyond_448():
    x = np.full((1, 1, 8), 3000.0)
    codec = Codec(PRESET["k8v4"], 8, key_scale=10)
    np.testing.assert_allclose(round_trip(PRESET["k8v4"], x, codec=codec)[0], x, rtol=1 / 16)
    np.testing.assert_array_equal(round_trip(PRESET["k8v4"], x)[0], np.full_like(x, 448))


@pytest.mark.parametrize("config", ["4bit", "k8v8", "3bit_hq"])
def test_offsets_and_transforms_are_undone(config, rng):
    """Coding T (x - mu) and reading mu + T^-1 y: the error is that of the coded vector."""
    config = PRESET[config]
    codec = make_codec(config, 64, 2, Extras("heads", "shared", "shared", "heads"))
    x, y = rng.normal(size=(2, 40, 2, 64)) * 2
    plain = Codec(config, 64)
    got = round_trip(config, x, y, codec)
    for z, name, out in zip((x, y), ("key", "value"), got, strict=True):
        offset, transform = (
            np.concatenate([a] * (2 // len(a))).astype(np.float64)
            for a in (getattr(codec, f"{name}_offset"), getattr(codec, f"{name}_transform"))
        )
        coded = np.einsum("hij,nhj->nhi", transform, z.astype(np.float32) - offset)
        back = round_trip(config, coded, coded, plain)[0 if name == "key" else 1]
        want = offset + np.einsum("hij,nhj->nhi", np.linalg.inv(transform), back)
        # The coded vector is rounded to fp32 on its way in here, which moves a code at an edge.
        assert relative_error(out, want) < 1e-5
        assert relative_error(out, z) < 0.1


# --- store and dequantize: addressing -------------------------------------------------------


@pytest.mark.parametrize("order", ["token", "head", "planes"])
def test_store_touches_its_slots_only(order, rng):
    layout = CacheLayout(PRESET["3bit"], 2, 72, 3, order)
    codec = Codec(layout.config, 72)
    x = rng.normal(size=(4, 2, 72)).astype(np.float32)
    cache = np.full(layout.shape(4), 0xFF, np.uint8)
    reference.store(x, x, cache, np.array([7, -1, 0, -5]), layout=layout, codec=codec)
    pages = cache.reshape(4, -1)
    written = np.zeros(pages.shape, bool)
    for page, slot in ((2, 1), (0, 0)):
        for index in (layout.key_index(), layout.value_index(), layout.meta_index()):
            written[page, index[slot]] = True
        written[page, layout.meta_index()[slot] + 1] = True
    assert (pages[~written] == 0xFF).all()
    # The same row in another slot is read back alike.
    table, lengths = np.array([[2], [0]], np.int32), np.array([2, 1], np.int32)
    with np.errstate(invalid="ignore"):
        keys, values = reference.dequantize(cache, table, lengths, layout=layout, codec=codec)
    alone = round_trip(layout.config, x[[0, 2]], x[[0, 2]])
    np.testing.assert_array_equal(keys[[0, 1], [1, 0]], alone[0])
    np.testing.assert_array_equal(values[[0, 1], [1, 0]], alone[1])


def test_storing_again_overwrites(rng):
    layout = CacheLayout(PRESET["4bit"], 1, 64, 4)
    codec = Codec(layout.config, 64)
    old, new = rng.normal(size=(2, 4, 1, 64)).astype(np.float32)
    twice, once = np.zeros((2, *layout.shape(1)), np.uint8)
    reference.store(old, old, twice, np.arange(4), layout=layout, codec=codec)
    for cache in (twice, once):
        reference.store(new, new, cache, np.arange(4), layout=layout, codec=codec)
    np.testing.assert_array_equal(twice, once)


def test_store_takes_half_precision_as_it_is(rng):
    layout = CacheLayout(PRESET["4bit"], 1, 64, 4)
    codec = Codec(layout.config, 64)
    x = rng.normal(size=(4, 1, 64)).astype(np.float16)
    half, wide = np.zeros((2, *layout.shape(1)), np.uint8)
    reference.store(x, x, half, np.arange(4), layout=layout, codec=codec)
    wider = x.astype(np.float32)
    reference.store(wider, wider, wide, np.arange(4), layout=layout, codec=codec)
    np.testing.assert_array_equal(half, wide)


def test_dequantize_is_zero_past_the_end(rng):
    layout = CacheLayout(PRESET["4bit"], 2, 16, 4)
    codec = Codec(layout.config, 16)
    x = rng.normal(size=(12, 2, 16)).astype(np.float32)
    cache = np.full(layout.shape(3), 0xFF, np.uint8)
    reference.store(x, x, cache, np.arange(12), layout=layout, codec=codec)
    table = np.array([[1, 2, -1], [-1, -1, -1], [0, 1, 2], [2, -1, -1]], np.int32)
    lengths = np.array([7, 0, 12, 4], np.int32)
    keys, values = reference.dequantize(
        cache, table, lengths, layout=layout, codec=codec, dtype=np.float32
    )
    whole = round_trip(layout.config, x, x)
    for got, want in zip((keys, values), whole, strict=True):
        assert got.shape == (4, 12, 2, 16)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got[0, :7], want[4:11].astype(np.float32))
        np.testing.assert_array_equal(got[2], want.astype(np.float32))
        np.testing.assert_array_equal(got[3, :4], want[8:].astype(np.float32))
        assert not got[0, 7:].any()
        assert not got[1].any()
        assert not got[3, 4:].any()


# --- attention ------------------------------------------------------------------------------


def plain_row(query, keys, values, position, options, sink, slope):
    """One row of one head, token by token."""
    scale = len(query) ** -0.5 if options["scale"] is None else options["scale"]
    window, softcap = options["sliding_window"], options["softcap"]
    scores, chosen = [], []
    for j in range(len(keys)):
        if options["causal"] and j > position:
            continue
        if window is not None and j <= position - window:
            continue
        score = scale * float(query @ keys[j])
        if softcap is not None:
            score = softcap * math.tanh(score / softcap)
        scores.append(score + slope * (j - position))
        chosen.append(values[j])
    weights = [math.exp(s) for s in scores]
    total = sum(weights) + math.exp(sink)
    if not weights:
        return np.zeros(len(query)), sink
    return np.array(weights) @ np.array(chosen) / total, math.log(total)


def has_feature(case):
    return case.sinks or case.alibi or case.softcap or case.sliding_window or not case.causal


CHECKED = [c for i, c in enumerate(ATTENTION_CASES) if has_feature(c) or i % 5 == 0]


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_attention_is_a_softmax_over_the_dequantised_cache(case):
    inputs = make_attention_inputs(case)
    out, lse = expected(case)
    sinks, slopes = (
        np.full(case.num_query_heads, fill) if inputs[name] is None else inputs[name]
        for name, fill in (("sinks", -np.inf), ("alibi_slopes", 0.0))
    )
    keys, values = reference.dequantize(
        inputs["cache"],
        np.maximum(inputs["block_table"], 0),  # -1 entries are not seen
        inputs["seq_lens"],
        layout=case.layout,
        codec=case.codec,
    )
    for b, (rows, length) in enumerate(case.batch):
        for i in {0, rows // 2, rows - 1} if rows else ():
            row = inputs["query_start_loc"][b] + i
            for head in {0, case.num_query_heads // 2, case.num_query_heads - 1}:
                want, want_lse = plain_row(
                    inputs["query"][row, head].astype(np.float64),
                    keys[b, :length, head // case.group],
                    values[b, :length, head // case.group],
                    length - rows + i,
                    case.options,
                    float(sinks[head]),
                    float(slopes[head]),
                )
                np.testing.assert_allclose(out[row, head], want, rtol=1e-9, atol=1e-12)
                assert lse[row, head] == pytest.approx(want_lse, rel=1e-10, abs=1e-12)
    padding = slice(inputs["query_start_loc"][-1], None)
    assert not out[padding].any()
    assert (lse[padding] == sinks).all()


class Call:
    """A small batch over an identity table; keyword arguments change one thing at a time."""

    def __init__(self, rng, batch, heads=2, group=2, dim=16, page_size=4, config="4bit"):
        self.layout = CacheLayout(PRESET[config], heads, dim, page_size)
        self.codec = Codec(self.layout.config, dim)
        rows, lengths = np.array(batch).T
        width = int(-(-lengths.max() // page_size)) or 1
        num_pages = len(batch) * width
        self.cache = np.full(self.layout.shape(num_pages), 0xFF, np.uint8)
        self.key, self.value = rng.normal(size=(2, num_pages * page_size, heads, dim)).astype(
            np.float32
        )
        slots = np.arange(num_pages * page_size).reshape(len(batch), -1)
        mapping = np.where(np.arange(slots.shape[1]) < lengths[:, None], slots, -1).reshape(-1)
        reference.store(
            self.key, self.value, self.cache, mapping, layout=self.layout, codec=self.codec
        )
        self.arrays = {
            "query": rng.normal(size=(rows.sum(), heads * group, dim)).astype(np.float32),
            "cache": self.cache,
            "block_table": np.arange(num_pages, dtype=np.int32).reshape(len(batch), width),
            "seq_lens": lengths.astype(np.int32),
            "query_start_loc": np.concatenate([[0], rows.cumsum()]).astype(np.int32),
        }

    def __call__(self, **changes):
        arguments = {**self.arrays, "layout": self.layout, "codec": self.codec, **changes}
        return reference.attention(**arguments, return_lse=True)


def test_rows_that_see_nothing(rng):
    call = Call(rng, [(2, 0), (5, 3), (1, 4)])
    out, lse = call()
    blind = np.array([True] * 2 + [True] * 2 + [False] * 4)
    assert not out[blind].any()
    assert (lse[blind] == -np.inf).all()
    assert out[~blind].all()
    assert np.isfinite(lse[~blind]).all()
    sinks = np.float32([-np.inf, -100, 0, 30])
    out, lse = call(sinks=sinks)
    assert not out[blind].any()
    assert (lse[blind] == sinks).all()
    assert np.isfinite(lse[~blind]).all()


def test_rows_before_the_first_token_see_all_without_causality(rng):
    """Row 0 of 5 over 3 tokens has position -2: causally blind, else an ordinary row."""
    out, lse = Call(rng, [(5, 3)])(causal=False)
    assert np.isfinite(lse).all()
    assert out.all()
    out, lse = Call(rng, [(5, 3)])(causal=False, sliding_window=1)
    assert np.isfinite(lse).all()


def test_a_window_counts_the_token_itself(rng):
    call = Call(rng, [(1, 9)])
    out, _ = call(sliding_window=1)
    _, values = reference.dequantize(
        call.cache,
        call.arrays["block_table"],
        call.arrays["seq_lens"],
        layout=call.layout,
        codec=call.codec,
    )
    np.testing.assert_allclose(out[0], np.repeat(values[0, 8], 2, axis=0), rtol=1e-12)
    for window in (9, 10, 1000):
        np.testing.assert_array_equal(call(sliding_window=window)[0], call()[0])
    assert not np.array_equal(call(sliding_window=8)[0], call()[0])


def test_a_sink_takes_weight_and_no_value(rng):
    call = Call(rng, [(3, 9), (1, 20)])
    out, lse = call()
    sinks = np.float32([-np.inf, -100, 0, 30])
    with_sink, with_sink_lse = call(sinks=sinks)
    np.testing.assert_allclose(with_sink_lse, np.logaddexp(lse, sinks), rtol=1e-14)
    want = out * np.exp(lse - with_sink_lse)[..., None]
    np.testing.assert_allclose(with_sink, want, rtol=1e-12, atol=1e-18)
    np.testing.assert_array_equal(with_sink[:, 0], out[:, 0])


def test_the_default_scale(rng):
    call = Call(rng, [(3, 9)])
    np.testing.assert_array_equal(call()[0], call(scale=0.25)[0])
    assert not np.array_equal(call()[0], call(scale=0.24)[0])


def test_a_large_softcap_changes_nothing_and_a_small_one_flattens(rng):
    call = Call(rng, [(1, 9)])
    out, lse = call()
    np.testing.assert_allclose(call(softcap=1e6)[0], out, rtol=1e-9)
    _, flat = call(softcap=1e-6)
    np.testing.assert_allclose(flat, math.log(9), atol=1e-5)
    assert np.abs(lse - math.log(9)).max() > 1e-3


@pytest.mark.parametrize("byte", [0x00, 0x7C, 0xFF])
def test_unused_bytes_do_not_matter(byte, rng):
    call = Call(rng, [(2, 5), (1, 1), (3, 11)])
    want = call()
    used = np.zeros(call.cache.shape, bool).reshape(len(call.cache), -1)
    for b, length in enumerate(call.arrays["seq_lens"]):
        for j in range(length):
            page, slot = call.arrays["block_table"][b, j // 4], j % 4
            for index in (call.layout.key_index(), call.layout.value_index()):
                used[page, index[slot]] = True
            for half in (0, 1):
                used[page, call.layout.meta_index()[slot] + half] = True
    cache = np.where(used.reshape(call.cache.shape), call.cache, np.uint8(byte))
    for got, expected_ in zip(call(cache=cache), want, strict=True):
        np.testing.assert_array_equal(got, expected_)


def test_unused_table_entries_do_not_matter(rng):
    call = Call(rng, [(2, 5), (0, 9), (3, 11), (1, 0)])
    table = call.arrays["block_table"].copy()
    for b, length in enumerate(call.arrays["seq_lens"]):
        table[b, -(-length // 4) :] = -1
    want = call(sliding_window=3)
    table[2, :1] = -1  # rows at 8, 9, 10 see tokens from 6 on: page 1 is the first
    for got, expected_ in zip(call(sliding_window=3, block_table=table), want, strict=True):
        np.testing.assert_array_equal(got, expected_)


def test_permuted_and_shared_pages(rng):
    call = Call(rng, [(1, 16), (1, 16)])
    want = call()
    order = rng.permutation(len(call.cache))
    table = np.argsort(order).astype(np.int32)[call.arrays["block_table"]]
    moved = call(cache=call.cache[order], block_table=table)
    for got, expected_ in zip(moved, want, strict=True):
        np.testing.assert_array_equal(got, expected_)
    shared = np.tile(call.arrays["block_table"][:1], (2, 1))
    query = np.tile(call.arrays["query"][:1], (2, 1, 1))
    out, _ = call(block_table=shared, query=query)
    np.testing.assert_array_equal(out[0], out[1])


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_the_page_size_does_not_matter(page_size, rng):
    key, value = rng.normal(size=(2, 50, 2, 16)).astype(np.float32)
    query = rng.normal(size=(7, 4, 16)).astype(np.float32)
    results = []
    for size in (page_size, 16):
        layout = CacheLayout(PRESET["3bit"], 2, 16, size)
        codec = Codec(layout.config, 16)
        table = np.arange(-(-50 // size), dtype=np.int32)[None]
        cache = np.full(layout.shape(table.size), 0xFF, np.uint8)
        reference.store(key, value, cache, np.arange(50), layout=layout, codec=codec)
        results.append(
            reference.attention(
                query,
                cache,
                table,
                np.int32([50]),
                np.int32([0, 7]),
                layout=layout,
                codec=codec,
                sliding_window=20,
            )
        )
    np.testing.assert_allclose(results[0], results[1], rtol=1e-12)


def test_a_needle_is_found_at_every_position(rng):
    """One key equal to the query among random ones takes nearly all the weight."""
    length, dim = 512, 128
    layout = CacheLayout(PRESET["3bit"], 1, dim, 16)
    codec = Codec(layout.config, dim)
    key, value = rng.normal(size=(2, length, 1, dim)).astype(np.float32)
    query = 3 * rng.normal(size=(1, 1, dim)).astype(np.float32)
    table = np.arange(length // 16, dtype=np.int32)[None]
    plain = np.zeros(layout.shape(table.size), np.uint8)
    reference.store(key, value, plain, np.arange(length), layout=layout, codec=codec)
    _, values = reference.dequantize(plain, table, np.int32([length]), layout=layout, codec=codec)
    for position in [*range(0, 34), 255, 256, length - 1]:
        cache = plain.copy()
        slot = np.array([position])
        reference.store(query, value[slot], cache, slot, layout=layout, codec=codec)
        out = reference.attention(
            query, cache, table, np.int32([length]), np.int32([0, 1]), layout=layout, codec=codec
        )
        assert relative_error(out[0, 0], values[0, position, 0]) < 1e-3


def test_single_precision_arithmetic(rng):
    call = Call(rng, [(3, 9), (5, 40), (1, 0)])
    wide, wide_lse = call(sinks=np.float32([0, 1, -np.inf, 3]), softcap=20.0)
    out, lse = call(sinks=np.float32([0, 1, -np.inf, 3]), softcap=20.0, dtype=np.float32)
    assert out.dtype == lse.dtype == np.float32
    np.testing.assert_allclose(out, wide, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, wide_lse, rtol=1e-5)


def test_without_lse_only_the_output_is_returned(rng):
    call = Call(rng, [(3, 9)])
    out = reference.attention(**call.arrays, layout=call.layout, codec=call.codec)
    np.testing.assert_array_equal(out, call()[0])


def test_wrong_arguments_are_refused(rng):
    call = Call(rng, [(3, 9)])
    with pytest.raises(TypeError, match="seq_lens: expected dtype int32, got int64"):
        call(seq_lens=call.arrays["seq_lens"].astype(np.int64))
    with pytest.raises(TypeError, match="query: expected dtype"):
        call(query=call.arrays["query"].astype(np.float64))
    with pytest.raises(ValueError, match=r"sinks: expected shape .* got \(3,\)"):
        call(sinks=np.zeros(3, np.float32))


# --- merging --------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [4, 8, 16])
def test_two_halves_merge_into_the_whole(cut, rng):
    call = Call(rng, [(1, 19), (1, 19)])
    sinks = np.float32([-np.inf, -100, 0, 30])
    whole = call(sinks=sinks, causal=False)
    table = call.arrays["block_table"]
    first = call(block_table=table[:, : cut // 4], seq_lens=np.int32([cut] * 2), causal=False)
    second = call(
        block_table=table[:, cut // 4 :],
        seq_lens=np.int32([19 - cut] * 2),
        causal=False,
        sinks=sinks,
    )
    for got, want in zip(reference.merge_attention_states(*first, *second), whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_merging_with_nothing_changes_nothing(rng):
    call = Call(rng, [(2, 9)])
    out, lse = call()
    nothing = np.zeros_like(out), np.full_like(lse, -np.inf)
    for pair in ((out, lse, *nothing), (*nothing, out, lse)):
        got, got_lse = reference.merge_attention_states(*pair)
        np.testing.assert_allclose(got, out, rtol=1e-14)
        np.testing.assert_allclose(got_lse, lse, rtol=1e-14)
    got, got_lse = reference.merge_attention_states(*nothing, *nothing)
    assert not got.any()
    assert (got_lse == -np.inf).all()


def test_merging_is_stable_for_large_lse():
    out_a, out_b = np.ones((1, 1, 4)), np.full((1, 1, 4), 3.0)
    got, lse = reference.merge_attention_states(
        out_a, np.array([[5000.0]]), out_b, np.array([[5000.0]])
    )
    np.testing.assert_allclose(got, 2)
    np.testing.assert_allclose(lse, 5000 + math.log(2))
    got, _ = reference.merge_attention_states(
        out_a, np.array([[-5000.0]]), out_b, np.array([[5000.0]])
    )
    np.testing.assert_array_equal(got, out_b)
