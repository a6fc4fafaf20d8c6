"""The file that holds a codec for each layer of a model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

from tq_core import Codec, QuantConfig, files
from tq_core.codec import load_codecs, save_codecs

DIM, HEADS = 16, 2


@pytest.fixture
def codecs(rng):
    presets = ("4bit", "k8v4", "2bit_hq")
    return [
        Codec(QuantConfig.preset(name), DIM, key_offset=rng.standard_normal((HEADS, DIM)))
        for name in presets
    ]


@pytest.fixture
def path(codecs, tmp_path):
    save_codecs(tmp_path / "codecs", codecs, {"name": "m"}, {"layers": [1, 2.5, None]})
    return tmp_path / "codecs"


def test_what_was_saved_is_loaded(codecs, path):
    file = load_codecs(path, num_layers=3, num_kv_heads=HEADS, head_dim=DIM)
    assert list(file.codecs) == codecs
    assert file.model == {"name": "m"}
    assert file.report == {"layers": [1, 2.5, None]}


def test_what_layers_share_is_stored_once(codecs, path, tmp_path):
    arrays, _ = files.load(path, kind="codecs")
    assert [name for name in arrays if name.endswith("rotation")] == ["0.rotation"]
    assert sum(name.endswith("key_offset") for name in arrays) == 3


@pytest.mark.parametrize(
    "sizes, words",
    [
        ({"num_layers": 4}, "a model of 4 layers, got 3"),
        ({"num_kv_heads": 8}, "a model of 8 KV heads, got 2"),
        ({"head_dim": 64}, r"64 coordinates a head \(head_dim\), got 16"),
    ],
)
def test_a_file_for_another_model_is_refused(sizes, words, path):
    with pytest.raises(ValueError, match=words):
        load_codecs(path, **sizes)


def test_the_file_may_say_the_number_of_kv_heads(tmp_path):
    plain = [Codec(QuantConfig(), DIM)]
    save_codecs(tmp_path / "codecs", plain, {"num_kv_heads": "3"})
    with pytest.raises(ValueError, match="a model of 2 KV heads, got 3"):
        load_codecs(tmp_path / "codecs", num_kv_heads=2)


@pytest.fixture
def small(tmp_path):
    save_codecs(tmp_path / "small", [Codec(QuantConfig.preset(n), 8) for n in ("2bit", "k8v8")])
    return tmp_path / "small"


def test_every_truncation_is_refused(small):
    data = small.read_bytes()
    for length in range(len(data)):
        small.write_bytes(data[:length])
        with pytest.raises(ValueError, match="not a readable safetensors file"):
            load_codecs(small)


def test_a_flipped_bit_in_any_byte_is_refused(small):
    data = small.read_bytes()
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << place * 3 % 8
        small.write_bytes(changed)
        with pytest.raises(ValueError, match=str(small)):
            load_codecs(small)


def test_a_changed_byte_is_a_wrong_checksum(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="wrong checksum"):
        load_codecs(path)


def test_another_version_is_refused(path):
    metadata = {"format_version": "2", "kind": "codecs"}
    path.write_bytes(safetensors.numpy.save({"x": np.zeros(1)}, metadata))
    with pytest.raises(ValueError, match="format_version '2'; this version of tq reads '1'"):
        load_codecs(path)


def test_a_file_of_one_codec_is_another_kind(codecs, tmp_path):
    codecs[0].save(tmp_path / "codec")
    with pytest.raises(ValueError, match="expected a codecs file, got a codec file"):
        load_codecs(tmp_path / "codec")


def test_layers_that_were_exchanged_are_refused(path):
    arrays, metadata = files.load(path, kind="codecs")
    layers = json.loads(metadata["layers"])
    layers[0]["arrays"], layers[2]["arrays"] = layers[2]["arrays"], layers[0]["arrays"]
    files.save(path, arrays, {**metadata, "layers": json.dumps(layers)})
    with pytest.raises(ValueError, match="not a valid file of codecs"):
        load_codecs(path)


@pytest.mark.parametrize("text", ["[1]", "nothing", '[{"arrays": {}}]'])
def test_metadata_that_is_not_ours_is_refused(text, path):
    arrays, metadata = files.load(path, kind="codecs")
    files.save(path, arrays, {**metadata, "layers": text})
    with pytest.raises(ValueError, match="not a valid file of codecs"):
        load_codecs(path)


@pytest.mark.parametrize(
    "others, words",
    [
        ([], "expected at least one"),
        ([Codec(QuantConfig(), 8)], r"expected one head_dim in all, got \[8, 16\]"),
        (
            [Codec(QuantConfig(), DIM, key_offset=np.ones((5, DIM)))],
            r"expected one num_kv_heads in all, got \[2, 5\]",
        ),
    ],
)
def test_codecs_of_several_models_are_refused(others, words, codecs, tmp_path):
    with pytest.raises(ValueError, match=words):
        save_codecs(tmp_path / "codecs", [*codecs, *others] if others else [])
    assert not list(tmp_path.iterdir())
