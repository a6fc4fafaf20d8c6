from __future__ import annotations

import copy
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tests.cases import CONFIGS, Extras, config_id, make_codec
from tq_core import CacheLayout, Codec, QuantConfig, files, reference
from tq_core.codebook import default_centroids, default_value_centroids
from tq_core.rotation import make_rotation

FP8 = QuantConfig("fp8", "int4")
HQ = QuantConfig.preset("3bit_hq")
EVERYTHING = {
    "4bit": make_codec(QuantConfig(), 72, 3, Extras("heads", "shared", "heads", "shared")),
    "3bit_hq": make_codec(HQ, 64, 2, Extras("shared", "heads", "shared", "heads"), seed=5),
    "fp8": make_codec(FP8, 16, 2, Extras("heads", None, "heads", None, "heads")),
    "plain": Codec(QuantConfig("mse2", "int2", norm_correction=False), 8),
    "planar": Codec(QuantConfig("mse3", "mse2", key_packing="planar"), 33, seed=1),
}
ARRAYS = {
    "rotation",
    "centroids",
    "value_centroids",
    "key_scale",
    "key_offset",
    "value_offset",
    "key_transform",
    "value_transform",
}


# --- content --------------------------------------------------------------------------------


def test_defaults():
    codec = Codec(QuantConfig("mse3", "mse2"), 80)
    assert np.array_equal(codec.rotation, make_rotation(80, 0))
    assert np.array_equal(codec.centroids, default_centroids(3, 80))
    assert np.array_equal(codec.value_centroids, default_value_centroids(2, 80))
    assert codec.key_scale.tolist() == [1]
    assert codec.key_offset is codec.value_offset is None
    assert codec.key_transform is codec.value_transform is None
    assert codec.num_kv_heads is None


def test_formats_without_a_codebook_have_no_centroids():
    codec = Codec(FP8, 64)
    assert codec.centroids is None
    assert codec.value_centroids is None


@pytest.mark.parametrize("name", EVERYTHING)
def test_arrays_are_float32_contiguous_and_read_only(name):
    codec = EVERYTHING[name]
    matrices = ("key_matrix", "query_matrix", "value_matrix", "output_matrix")
    for attribute in (*ARRAYS, *matrices):
        array = getattr(codec, attribute)
        if array is None:
            continue
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_arguments_are_copied():
    rotation, offset = np.eye(8, dtype=np.float32), np.ones((2, 8), np.float32)
    codec = Codec(QuantConfig(), 8, rotation=rotation, key_offset=offset)
    rotation[:], offset[:] = 0, 7
    assert np.array_equal(codec.rotation, np.eye(8))
    assert (codec.key_offset == 1).all()


def test_one_array_for_all_heads_gets_a_head_axis():
    codec = Codec(FP8, 8, key_offset=np.ones(8), key_transform=np.eye(8), key_scale=0.5)
    assert codec.key_offset.shape == (1, 8)
    assert codec.key_transform.shape == (1, 8, 8)
    assert codec.key_scale.tolist() == [0.5]
    assert codec.num_kv_heads is None
    assert Codec(FP8, 8, key_scale=[1, 2, 3]).num_kv_heads == 3


@pytest.mark.parametrize("name", EVERYTHING)
def test_matrices(name):
    codec = EVERYTHING[name]
    dim = codec.head_dim
    for key in (True, False):
        transform = codec.key_transform if key else codec.value_transform
        transform = np.eye(dim)[None] if transform is None else transform.astype(np.float64)
        rotated = codec.config.key_is_codebook if key else codec.config.value_is_codebook
        rotation = codec.rotation.astype(np.float64) if rotated else np.eye(dim)
        forward, backward = (
            (codec.key_matrix, codec.query_matrix.swapaxes(1, 2))
            if key
            else (codec.value_matrix, codec.output_matrix)
        )
        np.testing.assert_allclose(forward, rotation @ transform, rtol=0, atol=1e-6)
        product = backward.astype(np.float64) @ forward
        np.testing.assert_allclose(product, np.eye(dim)[None] + 0 * product, rtol=0, atol=1e-5)
    assert codec.has_key_matrix == (codec.config.key_is_codebook or codec.key_transform is not None)
    assert codec.has_value_matrix == (
        codec.config.value_is_codebook or codec.value_transform is not None
    )


@pytest.mark.parametrize("name", ["4bit", "3bit_hq", "fp8"])
def test_scores_and_outputs_need_no_reconstructed_vectors(name, rng):
    """Scores are q . mu + g (M q) . c, and outputs are W (sum p v) + nu, as docs/format.md says."""
    codec = EVERYTHING[name]
    heads, dim = codec.num_kv_heads, codec.head_dim
    layout = CacheLayout(codec.config, heads, dim, 5, "token")
    key, value, query = rng.normal(size=(3, 5, heads, dim)).astype(np.float32)
    cache = np.zeros(layout.shape(1), np.uint8)
    reference.store(key, value, cache, np.arange(5), layout=layout, codec=codec)
    keys, values = reference.dequantize_pages(cache, layout=layout, codec=codec)
    codes, fields = reference.quantize_keys(key, layout=layout, codec=codec)
    if codec.config.key_is_codebook:
        coded = codec.centroids[codes] * fields[0][..., None].astype(np.float64)
    else:
        table = reference.packing.e4m3_values()
        coded = table[codes] * codec.key_scale.astype(np.float64)[:, None]
    matrix = np.broadcast_to(codec.query_matrix, (heads, dim, dim)).astype(np.float64)
    scores = np.einsum("nhd,nhd->nh", np.einsum("hij,nhj->nhi", matrix, query), coded)
    if codec.key_offset is not None:
        scores += (query * codec.key_offset).sum(-1)
    np.testing.assert_allclose(scores, (query * keys[0]).sum(-1), rtol=0, atol=1e-4)

    codes, fields = reference.quantize_values(value, layout=layout, codec=codec)
    wide = [f[..., None].astype(np.float64) for f in fields]
    if codec.config.value_is_codebook:
        coded = codec.value_centroids[codes] * wide[0]
    else:
        coded = codes * wide[0] + wide[1]
    weights = rng.dirichlet(np.ones(5))
    matrix = np.broadcast_to(codec.output_matrix, (heads, dim, dim)).astype(np.float64)
    out = np.einsum("hij,hj->hi", matrix, np.einsum("n,nhd->hd", weights, coded))
    if codec.value_offset is not None:
        out = out + codec.value_offset
    want = np.einsum("n,nhd->hd", weights, values[0])
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-5)


# --- identity -------------------------------------------------------------------------------


def test_equal_content_is_equal_however_it_was_given():
    one = Codec(HQ, 64, seed=4)
    same = Codec(
        HQ,
        64,
        seed=9,
        rotation=make_rotation(64, 4).astype(np.float64),
        centroids=default_centroids(3, 64).tolist(),
        value_centroids=default_value_centroids(3, 64),
    )
    assert one == same
    assert hash(one) == hash(same)
    assert one.digest == same.digest
    assert {one: 1}[same] == 1
    assert one != "codec"


def test_any_changed_number_makes_another_codec():
    def build(config=FP8, dim=8, **changed):
        arguments = {
            "rotation": np.eye(dim),
            "key_scale": [1.0, 2.0],
            "key_offset": np.ones((2, dim)),
            "value_offset": np.ones((2, dim)),
            "key_transform": np.stack([np.eye(dim)] * 2),
            "value_transform": np.stack([np.eye(dim)] * 2),
        }
        return Codec(config, dim, **{**arguments, **changed})

    step = np.nextafter(np.float32(1), np.float32(2))
    swapped = np.eye(8)[[1, 0, *range(2, 8)]]
    codecs = [
        build(),
        build(QuantConfig("fp8", "int3")),
        build(QuantConfig("fp8", "int4", norm_correction=False)),
        build(dim=9),
        build(rotation=swapped),
        build(key_scale=[1.0, np.float32(2) * step]),
        build(key_offset=np.ones((2, 8)) * [[1], [step]]),
        build(value_offset=np.ones((2, 8)) * [[1], [step]]),
        build(key_transform=np.stack([np.eye(8), swapped])),
        build(value_transform=np.stack([np.eye(8), swapped])),
        build(key_offset=None),
        build(value_offset=None),
        build(key_transform=None),
        build(value_transform=None),
        Codec(QuantConfig("mse2", "mse2"), 8),
        Codec(QuantConfig("mse2", "mse2"), 8, seed=1),
        Codec(QuantConfig("mse2", "mse2"), 8, centroids=[-2, -1, 1, 2]),
        Codec(QuantConfig("mse2", "mse2"), 8, value_centroids=[-2, -1, 1, 2]),
        Codec(QuantConfig("mse3", "mse2"), 8),
        Codec(QuantConfig("mse3", "mse2", key_packing="planar"), 8),
    ]
    assert len({c.digest for c in codecs}) == len(set(codecs)) == len(codecs)


def test_an_array_moved_to_another_argument_makes_another_codec():
    offset = np.ones(8)
    assert Codec(FP8, 8, key_offset=offset) != Codec(FP8, 8, value_offset=offset)


@pytest.mark.parametrize("name", [*sorted(ARRAYS), "config", "head_dim", "digest", "new"])
def test_attributes_cannot_be_replaced(name):
    codec = Codec(HQ, 8)
    with pytest.raises(AttributeError, match=f"{name}: a Codec is immutable"):
        setattr(codec, name, None)
    with pytest.raises(AttributeError, match=f"{name}: a Codec is immutable"):
        delattr(codec, name)
    assert codec == Codec(HQ, 8)


@pytest.mark.parametrize("name", EVERYTHING)
def test_copies_are_equal(name):
    codec = EVERYTHING[name]
    for other in (copy.deepcopy(codec), copy.copy(codec), pickle.loads(pickle.dumps(codec))):
        assert other == codec
        assert np.array_equal(other.key_matrix, codec.key_matrix)


def test_repr_says_what_it_holds():
    text = repr(EVERYTHING["4bit"])
    assert "key='mse4'" in text
    assert "head_dim=72" in text
    assert "key_transform" in text
    assert "value_centroids" not in text


# --- refusals -------------------------------------------------------------------------------

BIG = np.full((8, 8), 1e39)


@pytest.mark.parametrize(
    "config, arguments, message",
    [
        (HQ, {"rotation": np.eye(7)}, r"rotation: expected shape \(8, 8\), got \(7, 7\)"),
        (HQ, {"rotation": np.ones((8, 8))}, "rotation: expected an orthogonal matrix, got max"),
        (HQ, {"rotation": np.eye(8) * 1.001}, "rotation: expected an orthogonal matrix, got max"),
        (HQ, {"rotation": np.eye(8) * np.nan}, "rotation: expected finite .* got 64 that are not"),
        (HQ, {"rotation": BIG}, "rotation: expected finite float32 numbers, got 64 that are not"),
        (HQ, {"centroids": [1, 2]}, "centroids: expected 8 strictly ascending numbers, got"),
        (HQ, {"centroids": [0, 1, 2, 3, 4, 5, 6, 6]}, "centroids: .* that are not ascending"),
        (HQ, {"value_centroids": np.arange(4)}, "value_centroids: expected 8 strictly ascending"),
        (FP8, {"centroids": np.arange(16)}, "centroids: this format has no codebook"),
        (FP8, {"value_centroids": np.arange(16)}, "value_centroids: this format has no codebook"),
        (HQ, {"key_scale": 1.0}, "key_scale: is for key='fp8' only .*key='mse3'"),
        (FP8, {"key_scale": 0}, "key_scale: expected a positive number .* got 0"),
        (FP8, {"key_scale": [1, -2]}, r"key_scale: expected a positive number .* got \[1, -2\]"),
        (FP8, {"key_scale": []}, r"key_scale: expected a positive number .* got \[\]"),
        (FP8, {"key_scale": [[1.0]]}, "key_scale: expected a positive number or one per KV head"),
        (FP8, {"key_scale": [np.inf]}, "key_scale: expected finite"),
        (HQ, {"key_offset": np.ones(7)}, r"key_offset: expected shape \(8\) or .* got \(7,\)"),
        (HQ, {"key_offset": np.ones((0, 8))}, r"key_offset: .* got \(0, 8\)"),
        (HQ, {"value_offset": np.ones((1, 2, 8))}, r"value_offset: .* got \(1, 2, 8\)"),
        (HQ, {"value_offset": [np.nan] * 8}, "value_offset: expected finite .* got 8"),
        (HQ, {"key_transform": np.ones(8)}, r"key_transform: expected shape \(8, 8\) .* \(8,\)"),
        (HQ, {"key_transform": np.ones((8, 8))}, "key_transform: expected an invertible matrix"),
        (HQ, {"key_transform": np.zeros((8, 8))}, "key_transform: expected an invertible matrix"),
        (HQ, {"key_transform": np.eye(8) * 1e-39}, "key_transform: .* inverse float32 can hold"),
        (
            HQ,
            {"value_transform": np.stack([np.eye(8), np.diag([1, 1e-7] * 4)])},
            "value_transform: expected an invertible matrix .* got 1e",
        ),
        (
            HQ,
            {"key_offset": np.ones((2, 8)), "value_transform": np.stack([np.eye(8)] * 3)},
            "codec: expected arrays of one number of KV heads, got .*2.*3",
        ),
        (HQ, {"head_dim": 7}, "head_dim: expected 8 to 576, got 7"),
        (HQ, {"head_dim": 577}, "head_dim: expected 8 to 576, got 577"),
        (HQ, {"seed": -1}, "seed: expected at least 0, got -1"),
    ],
)
def test_wrong_values_are_refused(config, arguments, message):
    with pytest.raises(ValueError, match=message):
        Codec(**{"config": config, "head_dim": 8, **arguments})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"config": "4bit"}, "config: expected a QuantConfig, got str"),
        ({"head_dim": 8.5}, "head_dim: expected an int, got 8.5"),
        ({"head_dim": None}, "head_dim: expected an int, got None"),
        ({"seed": 1.5}, "seed: expected an int, got 1.5"),
        ({"key_offset": np.ones(8, complex)}, "key_offset: expected an array of real numbers, got"),
        ({"rotation": "hadamard"}, "rotation: expected an array of real numbers, got 'hadamard'"),
    ],
)
def test_wrong_types_are_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        Codec(**{"config": HQ, "head_dim": 8, **arguments})


# --- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERYTHING)
def test_save_and_load(name, tmp_path):
    codec = EVERYTHING[name]
    path = tmp_path / "codec.safetensors"
    codec.save(path)
    loaded = Codec.load(str(path))
    assert loaded == codec
    assert loaded.config == codec.config
    for array in ARRAYS:
        np.testing.assert_array_equal(getattr(loaded, array), getattr(codec, array))


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_every_format_survives_a_file(config, tmp_path):
    codec = Codec(config, 8)
    codec.save(tmp_path / "codec")
    assert Codec.load(tmp_path / "codec") == codec


def test_file_is_safetensors_with_readable_metadata(tmp_path):
    path = tmp_path / "codec"
    EVERYTHING["4bit"].save(path)
    with safetensors.safe_open(path, framework="numpy") as reader:
        metadata = reader.metadata()
        names = set(reader.keys())
    assert len(metadata.pop("checksum")) == 64
    assert metadata == {
        "format_version": "1",
        "kind": "codec",
        "key": "mse4",
        "value": "int4",
        "norm_correction": "true",
        "key_packing": "dense",
        "head_dim": "72",
    }
    assert names == ARRAYS - {"value_centroids"}


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("codec") / "small"
    codec = Codec(QuantConfig("mse2", "int2"), 8)
    codec.save(path)
    return codec, path.read_bytes()


def assert_refused(data: bytes, path: Path, match: str | None = None) -> None:
    path.write_bytes(data)
    with pytest.raises(ValueError, match=match) as caught:
        Codec.load(path)
    assert str(path) in str(caught.value)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_flipped_bit_in_any_byte_is_refused(small_file, tmp_path):
    _, data = small_file
    for byte in range(len(data)):
        assert_refused(flipped(data, 8 * byte + byte * 3 % 8), tmp_path / "codec")


@pytest.mark.slow
def test_every_flipped_bit_is_refused(small_file, tmp_path):
    _, data = small_file
    for bit in range(8 * len(data)):
        assert_refused(flipped(data, bit), tmp_path / "codec")


def test_a_flipped_number_is_a_wrong_checksum(small_file, tmp_path):
    _, data = small_file
    assert_refused(flipped(data, 8 * len(data) - 9), tmp_path / "codec", "wrong checksum")


def test_swapped_tensors_and_changed_metadata_are_a_wrong_checksum(tmp_path):
    """Valid files in themselves, each with the checksum of another."""
    path = tmp_path / "codec"
    codec = Codec(FP8, 8, key_offset=np.ones(8), value_offset=np.zeros(8))
    codec.save(path)
    with safetensors.safe_open(path, framework="numpy") as reader:
        metadata = reader.metadata()
    arrays = safetensors.numpy.load_file(path)
    same = safetensors.numpy.save(arrays, metadata)
    path.write_bytes(same)
    assert Codec.load(path) == codec
    swapped = {**arrays, "key_offset": arrays["value_offset"], "value_offset": arrays["key_offset"]}
    reshaped = {**arrays, "key_offset": arrays["key_offset"][0]}
    for changed in (swapped, reshaped):
        data = safetensors.numpy.save(changed, metadata)
        assert_refused(data, path, "wrong checksum")
    for name, value in [("value", "int3"), ("norm_correction", "false"), ("note", "x")]:
        data = safetensors.numpy.save(arrays, {**metadata, name: value})
        assert_refused(data, path, "wrong checksum")


def test_truncated_and_extended_files_are_refused(small_file, tmp_path):
    _, data = small_file
    for size in [*range(0, len(data), 7), len(data) - 1]:
        assert_refused(data[:size], tmp_path / "codec", "not a readable safetensors file")
    assert_refused(data + b"\0", tmp_path / "codec", "not a readable safetensors file")


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        Codec.load(tmp_path / "nothing")


def test_other_safetensors_files_are_refused(tmp_path):
    data = safetensors.numpy.save({"rotation": np.eye(8, dtype=np.float32)})
    assert_refused(data, tmp_path / "codec", "no format_version, so it was not written by tq")


def test_another_version_is_refused(tmp_path):
    data = safetensors.numpy.save({"x": np.zeros(1)}, {"format_version": "2", "kind": "codec"})
    assert_refused(data, tmp_path / "codec", "format_version '2'; this version of tq reads '1'")


def test_another_kind_is_refused(tmp_path):
    files.save(tmp_path / "codec", {"x": np.zeros(1)}, {"kind": "cache"})
    with pytest.raises(ValueError, match="expected a codec file, got a cache file"):
        Codec.load(tmp_path / "codec")


META = {
    "kind": "codec",
    "key": "mse2",
    "value": "int2",
    "norm_correction": "true",
    "key_packing": "dense",
    "head_dim": "8",
}
GOOD_ARRAYS = {
    "rotation": np.eye(8, dtype=np.float32),
    "centroids": np.arange(4, dtype=np.float32),
    "key_scale": np.ones(1, np.float32),
}


def test_a_hand_made_file_is_accepted(tmp_path):
    """So that the refusals below are for the reason they name."""
    files.save(tmp_path / "codec", GOOD_ARRAYS, META)
    codec = Codec.load(tmp_path / "codec")
    assert codec == Codec(
        QuantConfig("mse2", "int2"), 8, rotation=np.eye(8), centroids=np.arange(4)
    )


@pytest.mark.parametrize(
    "arrays, metadata, message",
    [
        ({"rotation": None}, {}, "missing arrays.*rotation"),
        ({"centroids": None}, {}, "missing arrays.*centroids"),
        ({"key_scale": None}, {}, "missing arrays.*key_scale"),
        ({}, {"value": "mse2"}, "missing arrays.*value_centroids"),
        ({"bias": np.zeros(3, np.float32)}, {}, "unknown arrays.*bias"),
        ({"rotation": np.ones((8, 8), np.float32)}, {}, "orthogonal"),
        ({}, {"head_dim": "16"}, "rotation: expected shape"),
        ({}, {"head_dim": "eight"}, "eight"),
        ({}, {"head_dim": None}, "head_dim"),
        ({}, {"key": "mse9"}, "key: expected one of"),
        ({}, {"norm_correction": "maybe"}, "maybe"),
        ({}, {"key_packing": None}, "key_packing"),
    ],
)
def test_inconsistent_files_with_a_right_checksum_are_refused(arrays, metadata, message, tmp_path):
    arrays = {k: v for k, v in {**GOOD_ARRAYS, **arrays}.items() if v is not None}
    metadata = {k: v for k, v in {**META, **metadata}.items() if v is not None}
    files.save(tmp_path / "codec", arrays, metadata)
    with pytest.raises(ValueError, match=f"not a valid codec file: .*{message}"):
        Codec.load(tmp_path / "codec")


def test_save_replaces_and_leaves_no_other_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Codec(FP8, 8).save("codec")
    Codec(HQ, 8).save(Path("codec"))
    assert os.listdir(tmp_path) == ["codec"]
    assert Codec.load("codec") == Codec(HQ, 8)


@pytest.mark.parametrize("call", ["fsync", "replace", "chmod"])
def test_a_failing_write_leaves_the_old_file(call, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    old = Codec(FP8, 8)
    old.save(tmp_path / "codec")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="disk full"):
        Codec(HQ, 8).save(tmp_path / "codec")
    assert os.listdir(tmp_path) == ["codec"]
    assert Codec.load(tmp_path / "codec") == old


def test_the_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    for name, kind in (("none/codec", FileNotFoundError), ("folder", IsADirectoryError)):
        path = tmp_path / name
        with pytest.raises(kind) as caught:
            Codec(HQ, 8).save(path)
        assert caught.value.filename == str(path)
        assert caught.value.filename2 is None
        assert str(path) in str(caught.value)
    assert os.listdir(tmp_path) == ["folder"]


def test_a_file_may_have_the_longest_of_names(tmp_path):
    path = tmp_path / ("x" * 255)
    Codec(HQ, 8).save(path)
    assert Codec.load(path) == Codec(HQ, 8)


CRASH = """
import os, sys
from tq_core import Codec, QuantConfig
setattr(os, sys.argv[2], lambda *_: os._exit(7))
Codec(QuantConfig.preset("3bit_hq"), 8).save(sys.argv[1])
"""


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_crash_leaves_the_old_file(call, tmp_path):
    old = Codec(FP8, 8)
    old.save(tmp_path / "codec")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", CRASH, str(tmp_path / "codec"), call]
    assert subprocess.run(command, cwd=root, check=False).returncode == 7
    assert Codec.load(tmp_path / "codec") == old


@pytest.mark.skipif(os.name != "posix", reason="POSIX file modes")
def test_saved_files_have_ordinary_permissions(tmp_path):
    mask = os.umask(0o027)
    try:
        Codec(HQ, 8).save(tmp_path / "codec")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "codec").stat().st_mode) == 0o640


def test_without_safetensors_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (Codec(HQ, 8).save, Codec.load):
        with pytest.raises(ImportError, match=r"safetensors package: pip install safetensors$"):
            call(tmp_path / "codec")
    assert not os.listdir(tmp_path)
