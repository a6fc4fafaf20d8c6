from __future__ import annotations

import dataclasses
import itertools

import pytest

from tq_core import PRESET_ALIASES, PRESETS, QuantConfig
from tq_core.config import KEY_FORMATS, VALUE_FORMATS

TABLE = {
    "k8v8": ("fp8", "int8"),
    "k8v4": ("fp8", "int4"),
    "4bit": ("mse4", "int4"),
    "k3v4": ("mse3", "int4"),
    "3bit": ("mse3", "int3"),
    "2bit": ("mse2", "int2"),
    "4bit_hq": ("mse4", "mse4"),
    "3bit_hq": ("mse3", "mse3"),
    "2bit_hq": ("mse2", "mse2"),
}
ALIASES = {
    "turboquant_k8v4": "k8v4",
    "turboquant_4bit_nc": "4bit",
    "turboquant_k3v4_nc": "k3v4",
    "turboquant_3bit_nc": "3bit",
}


def test_preset_table():
    assert PRESETS == TABLE
    assert PRESET_ALIASES == ALIASES


@pytest.mark.parametrize("name", TABLE)
def test_preset(name):
    assert QuantConfig.preset(name) == QuantConfig(*TABLE[name], True, "dense")


@pytest.mark.parametrize("alias", ALIASES)
def test_preset_alias(alias):
    assert QuantConfig.preset(alias) == QuantConfig.preset(ALIASES[alias])


def test_preset_unknown_names_the_known():
    with pytest.raises(ValueError, match=r"preset: expected one of .*4bit_hq.*got '5bit'"):
        QuantConfig.preset("5bit")


@pytest.mark.parametrize("key, value", [*itertools.product(KEY_FORMATS, VALUE_FORMATS)])
def test_every_key_format_combines_with_every_value_format(key, value):
    config = QuantConfig(key=key, value=value)
    assert config.key_bits == {"mse2": 2, "mse3": 3, "mse4": 4, "fp8": 8}[key]
    assert config.value_bits == int(value[-1])
    assert config.key_is_codebook == (key != "fp8")
    assert config.value_is_codebook == (value in ("mse2", "mse3", "mse4"))
    fields = [] if key == "fp8" else ["key_scale"]
    fields += ["value_scale"] if value.startswith("mse") else ["value_scale", "value_zero"]
    assert list(config.meta_fields) == fields


def test_defaults_are_the_4bit_preset():
    assert QuantConfig() == QuantConfig.preset("4bit")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"key": "mse5"}, r"key: expected one of .*'mse2'.*got 'mse5'"),
        ({"key": "int4"}, r"key: expected one of .*got 'int4'"),
        ({"key": None}, r"key: expected one of .*got None"),
        ({"value": "fp8"}, r"value: expected one of .*'int2'.*got 'fp8'"),
        ({"value": "int1"}, r"value: expected one of .*got 'int1'"),
        ({"key": "mse3", "key_packing": "sparse"}, r"key_packing: expected one of .*got 'sparse'"),
        ({"key": "mse4", "key_packing": "planar"}, r"key_packing: 'planar' .*got key='mse4'"),
        ({"key": "fp8", "key_packing": "planar"}, r"key_packing: 'planar' .*got key='fp8'"),
    ],
)
def test_wrong_values_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        QuantConfig(**arguments)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_norm_correction_must_be_a_bool(value):
    with pytest.raises(TypeError, match="norm_correction: expected a bool, got"):
        QuantConfig(norm_correction=value)


def test_planar_is_for_3_bit_keys():
    assert QuantConfig(key="mse3", key_packing="planar").key_packing == "planar"


def test_frozen_hashable_and_compared_by_content():
    one, same = QuantConfig("mse3", "int3"), QuantConfig.preset("3bit")
    assert one == same
    assert hash(one) == hash(same)
    for field, value in [
        ("key", "mse2"),
        ("value", "int2"),
        ("norm_correction", False),
        ("key_packing", "planar"),
    ]:
        assert dataclasses.replace(one, **{field: value}) != one
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, field, value)
