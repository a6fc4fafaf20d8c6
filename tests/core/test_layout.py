from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from tests.cases import CONFIGS, HEAD_DIMS, PAGE_SIZES, config_id
from tq_core import CacheLayout, Codec, QuantConfig, reference
from tq_core.layout import ORDERS


def preset_layout(name, *sizes, order=None):
    return CacheLayout(QuantConfig.preset(name), *sizes, order=order)


@pytest.mark.parametrize(
    "preset, slot_bytes, ratio",
    [("k8v4", 196, 2.61), ("4bit", 134, 3.82), ("k3v4", 118, 4.34), ("3bit", 102, 5.02)],
)
def test_sizes_at_128(preset, slot_bytes, ratio):
    layout = preset_layout(preset, 8, 128, 16)
    assert layout.slot_bytes == slot_bytes
    assert round(layout.compression_ratio, 2) == ratio
    assert layout.bytes_per_token == 8 * slot_bytes
    assert layout.page_bytes == 16 * 8 * slot_bytes
    assert layout.shape(5) == (5, 16, 8, slot_bytes)


@pytest.mark.parametrize(
    "config, sizes",
    [
        # (key bytes, value bytes, fields, slot bytes) at D = 100
        (QuantConfig("mse3", "int3"), (38, 38, 3, 82)),
        (QuantConfig("mse3", "int3", key_packing="planar"), (25 + 13, 38, 3, 82)),
        (QuantConfig("mse2", "mse2"), (25, 25, 2, 54)),
        (QuantConfig("mse2", "int8"), (25, 100, 3, 132)),  # 131, rounded up
        (QuantConfig("fp8", "mse4"), (100, 50, 1, 152)),
        (QuantConfig("fp8", "int2"), (100, 25, 2, 130)),  # 129, rounded up
    ],
    ids=lambda x: config_id(x) if isinstance(x, QuantConfig) else None,
)
def test_sizes_at_100(config, sizes):
    layout = CacheLayout(config, 2, 100, 4)
    fields = (layout.key_bytes, layout.value_bytes, layout.num_meta_fields, layout.slot_bytes)
    assert fields == sizes


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("heads, page_size, meta_offset", [(1, 1, 64), (1, 3, 190), (3, 5, 946)])
def test_odd_record_rounds_the_metadata_offset_up(order, heads, page_size, meta_offset):
    layout = preset_layout("k3v4", heads, 72, page_size, order=order)
    assert (layout.key_bytes, layout.value_bytes, layout.code_bytes) == (27, 36, 63)
    assert layout.slot_bytes == 70
    assert layout.meta_offset == meta_offset
    assert layout.meta_index().min() == meta_offset
    assert layout.meta_index().max() + 2 <= layout.page_bytes


# D = 8, mse3 keys (3 bytes), int4 values (4 bytes), 3 fields, 2 slots, 2 heads: M0 = 28.
SMALL_OFFSETS = {
    # order: {(slot, head): (key offsets, value offsets, metadata offsets)}
    "token": {
        (0, 0): ([0, 1, 2], [3, 4, 5, 6], [28, 32, 36]),
        (0, 1): ([7, 8, 9], [10, 11, 12, 13], [40, 44, 48]),
        (1, 0): ([14, 15, 16], [17, 18, 19, 20], [30, 34, 38]),
        (1, 1): ([21, 22, 23], [24, 25, 26, 27], [42, 46, 50]),
    },
    "head": {
        (0, 0): ([0, 1, 2], [3, 4, 5, 6], [28, 32, 36]),
        (1, 0): ([7, 8, 9], [10, 11, 12, 13], [30, 34, 38]),
        (0, 1): ([14, 15, 16], [17, 18, 19, 20], [40, 44, 48]),
        (1, 1): ([21, 22, 23], [24, 25, 26, 27], [42, 46, 50]),
    },
    "planes": {
        (0, 0): ([0, 1, 2], [6, 7, 8, 9], [28, 32, 34]),
        (1, 0): ([3, 4, 5], [10, 11, 12, 13], [30, 36, 38]),
        (0, 1): ([14, 15, 16], [20, 21, 22, 23], [40, 44, 46]),
        (1, 1): ([17, 18, 19], [24, 25, 26, 27], [42, 48, 50]),
    },
}


@pytest.mark.parametrize("order", ORDERS)
def test_offsets_by_hand(order):
    layout = preset_layout("k3v4", 2, 8, 2, order=order)
    assert layout.meta_offset == 28
    for (slot, head), (keys, values, meta) in SMALL_OFFSETS[order].items():
        assert layout.key_index()[slot, head].tolist() == keys
        assert layout.value_index()[slot, head].tolist() == values
        assert layout.meta_index()[slot, head].tolist() == meta


def test_planes_offsets_by_hand_with_values_that_end_inside_a_word():
    """D = 72, 3bit: 27 key and 27 value bytes, that is 6 words and 3 bytes, 3 slots, 2 heads."""
    layout = preset_layout("3bit", 2, 72, 3, order="planes")
    values = layout.value_index()
    # Head 0: keys fill 0..80; then 6 rows of 3 words, then 3 x 3 bytes.
    assert values[0, 0, :8].tolist() == [81, 82, 83, 84, 93, 94, 95, 96]
    assert values[1, 0, :8].tolist() == [85, 86, 87, 88, 97, 98, 99, 100]
    assert values[2, 0, 20:24].tolist() == [149, 150, 151, 152]
    assert values[0, 0, 24:].tolist() == [153, 154, 155]
    assert values[2, 0, 24:].tolist() == [159, 160, 161]
    # Head 1 starts at 3 * 54.
    assert layout.key_index()[0, 1, 0] == 162
    assert layout.key_index()[2, 1, 26] == 162 + 80
    assert values[1, 1, 4] == 162 + 81 + 12 + 4
    assert values[2, 1, 26] == 2 * 162 - 1
    assert layout.meta_offset == 324
    # Key scales of head 0, its pairs, key scales of head 1, its pairs.
    assert layout.meta_index()[:, 0].tolist() == [[324, 330, 332], [326, 334, 336], [328, 338, 340]]
    assert layout.meta_index()[:, 1, 0].tolist() == [342, 344, 346]


def test_planes_offsets_by_hand_without_key_scales():
    layout = preset_layout("k8v4", 1, 8, 3, order="planes")
    assert layout.meta_offset == 36
    assert layout.meta_index()[:, 0].tolist() == [[36, 38], [40, 42], [44, 46]]


def test_planes_offsets_by_hand_with_codebook_values():
    layout = preset_layout("2bit_hq", 1, 8, 3, order="planes")
    assert layout.meta_offset == 12
    assert layout.meta_index()[:, 0].tolist() == [[12, 18], [14, 20], [16, 22]]


@pytest.mark.parametrize("order", ["token", "head"])
@pytest.mark.parametrize("name", ["k3v4", "3bit", "k8v8", "2bit_hq"])
def test_offsets_follow_the_formulas(order, name):
    for head_dim, heads, page_size in [(72, 3, 5), (100, 2, 16), (8, 1, 1)]:
        layout = preset_layout(name, heads, head_dim, page_size, order=order)
        kd, vd, f = layout.key_bytes, layout.value_bytes, layout.num_meta_fields
        start = page_size * heads * (kd + vd)
        start += start % 2
        for s in range(page_size):
            for h in range(heads):
                record = (s * heads + h if order == "token" else h * page_size + s) * (kd + vd)
                assert layout.key_index()[s, h].tolist() == [record + i for i in range(kd)]
                assert layout.value_index()[s, h].tolist() == [record + kd + i for i in range(vd)]
                assert layout.meta_index()[s, h].tolist() == [
                    start + 2 * ((h * f + n) * page_size + s) for n in range(f)
                ]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_every_byte_has_one_place(config, order):
    """Codes fill the data region exactly, metadata its region, and a page holds both."""
    for i, head_dim in enumerate(HEAD_DIMS):
        for page_size in PAGE_SIZES[i % 2 :: 2]:
            heads = 1 + i % 3
            layout = CacheLayout(config, heads, head_dim, page_size, order)
            codes = np.concatenate([layout.key_index(), layout.value_index()], -1)
            assert codes.shape == (page_size, heads, layout.code_bytes)
            assert np.array_equal(np.sort(codes, None), np.arange(codes.size))
            meta = layout.meta_index()
            assert meta.shape == (page_size, heads, layout.num_meta_fields)
            size = 2 * meta.size
            assert np.array_equal(np.sort(meta, None), layout.meta_offset + np.arange(0, size, 2))
            assert 0 <= layout.meta_offset - codes.size <= 1
            assert layout.meta_offset % 2 == layout.slot_bytes % 2 == 0
            assert layout.meta_offset + size <= layout.page_bytes


@pytest.mark.parametrize("page_size", [1, 3])
def test_planes_differ_from_head_only_where_a_page_has_several_slots(page_size):
    planes, head = (preset_layout("3bit", 2, 72, page_size, order=o) for o in ("planes", "head"))
    same = np.array_equal(planes.value_index(), head.value_index())
    assert same == (page_size == 1)


# Two tokens of two heads at D = 8: fp8 keys and int8 values, whose bytes can be read off.
KEY_BYTES = {(s, h): [0x38 + 0x10 * s + 0x08 * h] * 8 for s in range(2) for h in range(2)}
KEYS = np.array([[1.0, 2.0], [4.0, 8.0]])[..., None] * np.ones(8)  # [slot, head, dim]
RAMP = np.array([0, 36, 73, 109, 146, 182, 219, 255.0])
# Values 0..255 + 256 * (2 slot + head): scale 1 = 3c00, zero 0, 256 = 5c00, 512 = 6000, 768 = 6200.
ZERO_BYTES = {(0, 0): "0000", (0, 1): "005c", (1, 0): "0060", (1, 1): "0062"}
VALUES = RAMP + 256 * np.array([[0, 1], [2, 3]])[..., None]
K = {place: bytes(data).hex() for place, data in KEY_BYTES.items()}
V, LOW, HIGH = "0024496d92b6dbff", "0024496d", "92b6dbff"
ONE = "003c"
PAGES = {
    "token": [
        *(K[0, 0], V, K[0, 1], V, K[1, 0], V, K[1, 1], V),
        *(ONE, ONE, ZERO_BYTES[0, 0], ZERO_BYTES[1, 0]),
        *(ONE, ONE, ZERO_BYTES[0, 1], ZERO_BYTES[1, 1]),
    ],
    "head": [
        *(K[0, 0], V, K[1, 0], V, K[0, 1], V, K[1, 1], V),
        *(ONE, ONE, ZERO_BYTES[0, 0], ZERO_BYTES[1, 0]),
        *(ONE, ONE, ZERO_BYTES[0, 1], ZERO_BYTES[1, 1]),
    ],
    "planes": [
        *(K[0, 0], K[1, 0], LOW, LOW, HIGH, HIGH),
        *(K[0, 1], K[1, 1], LOW, LOW, HIGH, HIGH),
        *(ONE, ZERO_BYTES[0, 0], ONE, ZERO_BYTES[1, 0]),
        *(ONE, ZERO_BYTES[0, 1], ONE, ZERO_BYTES[1, 1]),
    ],
}


@pytest.mark.parametrize("order", ORDERS)
def test_page_byte_for_byte(order):
    layout = preset_layout("k8v8", 2, 8, 2, order=order)
    cache = np.full(layout.shape(2), 0xEE, np.uint8)
    reference.store(
        KEYS.astype(np.float32),
        VALUES.astype(np.float32),
        cache,
        np.array([2, 3]),
        layout=layout,
        codec=Codec(layout.config, 8),
    )
    assert cache[1].tobytes() == bytes.fromhex("".join(PAGES[order]))
    assert (cache[0] == 0xEE).all()


def test_tags_name_the_bytes_of_an_order():
    tags = {order: preset_layout("4bit", 1, 64, 16, order=order).tag for order in ORDERS}
    assert tags == {
        "token": "token",
        "head": "head",
        "planes": "planes/word-major-values/paired-affine",
    }


def test_default_order():
    assert preset_layout("4bit", 1, 64, 16) == preset_layout("4bit", 1, 64, 16, order="planes")


@pytest.mark.parametrize("order", ORDERS)
def test_index_arrays_are_read_only(order):
    layout = preset_layout("4bit", 2, 64, 16, order=order)
    for index in (layout.key_index(), layout.value_index(), layout.meta_index()):
        with pytest.raises(ValueError, match="read-only"):
            index[...] = 0


def test_frozen_hashable_and_compared_by_content():
    one = CacheLayout(QuantConfig(), 8, 128, 16)
    same = CacheLayout(QuantConfig(), np.int64(8), np.int32(128), 16, "planes", 128)
    assert one == same
    assert hash(one) == hash(same)
    assert type(same.num_kv_heads) is int
    for field, value in [
        ("config", QuantConfig.preset("3bit")),
        ("num_kv_heads", 4),
        ("head_dim", 64),
        ("page_size", 32),
        ("order", "head"),
    ]:
        assert dataclasses.replace(one, **{field: value}) != one
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, field, value)


@pytest.mark.parametrize("head_dim", [8, 9, 575, 576])
@pytest.mark.parametrize("page_size", [1, 10_000])
def test_extreme_sizes_are_accepted(head_dim, page_size):
    layout = preset_layout("3bit", 1, head_dim, page_size)
    assert layout.slot_bytes == 2 * -(-3 * head_dim // 8) + 6


GOOD = {"config": QuantConfig(), "num_kv_heads": 8, "head_dim": 128, "page_size": 16}


@pytest.mark.parametrize(
    "argument, value, message",
    [
        ("head_dim", 7, "head_dim: expected 8 to 576, got 7"),
        ("head_dim", 577, "head_dim: expected 8 to 576, got 577"),
        ("num_kv_heads", 0, "num_kv_heads: expected at least 1, got 0"),
        ("page_size", 0, "page_size: expected at least 1, got 0"),
        ("page_size", -16, "page_size: expected at least 1, got -16"),
        ("order", "page", r"order: expected one of \['token', 'head', 'planes'\], got 'page'"),
        ("value_head_dim", 64, r"value_head_dim: expected head_dim \(128\), got 64; .*latent"),
    ],
)
def test_wrong_values_are_refused(argument, value, message):
    with pytest.raises(ValueError, match=message):
        CacheLayout(**{**GOOD, argument: value})


@pytest.mark.parametrize(
    "argument, value, message",
    [
        ("config", "4bit", "config: expected a QuantConfig, got str"),
        ("num_kv_heads", 8.0, "num_kv_heads: expected an int, got 8.0"),
        ("head_dim", "128", "head_dim: expected an int, got '128'"),
        ("page_size", True, "page_size: expected an int, got True"),
    ],
)
def test_wrong_types_are_refused(argument, value, message):
    with pytest.raises(TypeError, match=message):
        CacheLayout(**{**GOOD, argument: value})


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_a_descriptor_describes_a_layout_completely(config):
    for order in ORDERS:
        layout = CacheLayout(replace(config, norm_correction=False), 3, 72, 16, order)
        assert CacheLayout.from_descriptor(layout.descriptor) == layout
        assert CacheLayout.from_descriptor(layout.descriptor).config == layout.config


@pytest.mark.parametrize(
    "text", ["", "mse4", "mse4 int4 2 dense 8 128 16 planes", "mse4 int4 1 dense 8 x 16 planes"]
)
def test_other_text_is_no_descriptor(text):
    with pytest.raises(ValueError, match="descriptor: "):
        CacheLayout.from_descriptor(text)
