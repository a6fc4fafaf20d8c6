"""Files of caches: what they keep, what they refuse, and that a crash leaves the old one."""

from __future__ import annotations

import doctest
import os
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("safetensors")
import safetensors
import safetensors.numpy

from tq_core import (
    CacheLayout,
    Codec,
    QuantConfig,
    files,
    load_cache,
    reference,
    save_cache,
    snapshot,
)
from tq_core.layout import ORDERS

LAYOUT = CacheLayout(QuantConfig.preset("k3v4"), 1, 8, 2)
CODEC = Codec(LAYOUT.config, 8)
TABLE = np.array([[3, 0, 9], [1, -1, -1]], np.int32)
LENS = np.array([4, 1], np.int32)


def random_cache(rng, num_pages, layout=LAYOUT):
    return rng.integers(0, 256, layout.shape(num_pages), np.uint8)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


@pytest.mark.parametrize("num_pages", [0, 1, 5, 64])
@pytest.mark.parametrize("order", ORDERS)
def test_a_whole_cache_comes_back(order, num_pages, rng, path, monkeypatch):
    layout = CacheLayout(QuantConfig.preset("3bit_hq"), 3, 72, 5, order)
    monkeypatch.setattr(files, "BLOCK_BYTES", 3 * layout.page_bytes)
    cache = random_cache(rng, num_pages, layout)
    save_cache(path, cache, layout=layout)
    file = load_cache(path)
    assert np.array_equal(file.cache, cache)
    assert file.cache.flags.writeable
    assert (file.layout, file.codec_digest) == (layout, None)
    assert file.block_table is None
    assert file.seq_lens is None


@pytest.mark.parametrize("block", [1, 3 * LAYOUT.page_bytes, 2**20])
def test_a_choice_of_pages_in_its_order(block, rng, path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", block)
    cache, pages = random_cache(rng, 20), [7, 19, 0, 3, 12, 8, 9]
    save_cache(path, cache, layout=LAYOUT, codec=CODEC, pages=pages)
    file = load_cache(path, layout=LAYOUT, codec=CODEC)
    assert np.array_equal(file.cache, cache[pages])
    assert file.codec_digest == CODEC.digest
    again = load_cache(path, pages=np.array([5, 6, 1], np.uint8))
    assert np.array_equal(again.cache, cache[[8, 9, 19]])
    assert load_cache(path, pages=[]).cache.shape == LAYOUT.shape(0)


def test_strided_pages_are_saved(rng, path):
    memory = random_cache(rng, 12)
    cache = memory[::3]
    save_cache(path, cache, layout=LAYOUT)
    assert np.array_equal(load_cache(path).cache, cache)


def test_a_table_stays_as_it_is_beside_a_whole_cache(rng, path):
    """Entries past the end included: a server may have given those pages already."""
    save_cache(path, random_cache(rng, 4), layout=LAYOUT, block_table=TABLE, seq_lens=LENS)
    file = load_cache(path)
    assert np.array_equal(file.block_table, TABLE)
    assert np.array_equal(file.seq_lens, LENS)
    assert {file.block_table.dtype, file.seq_lens.dtype} == {np.dtype(np.int32)}


def test_a_table_is_renumbered_with_its_pages(rng, path):
    cache = random_cache(rng, 4)
    save_cache(
        path, cache, layout=LAYOUT, pages=[1, 0, 3], block_table=TABLE, seq_lens=LENS
    )  # fmt: skip
    file = load_cache(path)
    assert file.block_table.tolist() == [[2, 1, -1], [0, -1, -1]]
    assert np.array_equal(file.cache[file.block_table[0, :2]], cache[TABLE[0, :2]])
    some = load_cache(path, pages=[0, 2, 1])
    assert some.block_table.tolist() == [[1, 2, -1], [0, -1, -1]]


def test_pages_before_a_window_may_be_missing(rng, path):
    table = np.array([[-1, 2]], np.int32)
    lens = np.array([4], np.int32)
    cache = random_cache(rng, 3)
    save_cache(path, cache, layout=LAYOUT, pages=[2], block_table=table, seq_lens=lens)
    assert load_cache(path).block_table.tolist() == [[-1, 0]]


def test_a_restored_prefix_attends_as_before(rng, path):
    layout = CacheLayout(QuantConfig.preset("4bit"), 2, 16, 4)
    codec = Codec(layout.config, 16)
    cache, other = random_cache(rng, 9, layout), random_cache(rng, 9, layout)
    key, value, query = rng.standard_normal((3, 10, 2, 16)).astype(np.float32)
    table, lens = np.array([[4, 8, 1]], np.int32), np.array([10], np.int32)
    position = np.arange(10)
    slots = table[0, position // 4] * 4 + position % 4
    what = {"layout": layout, "codec": codec}
    reference.store(key, value, cache, slots, **what)
    starts = np.array([0, 10], np.int32)
    want = reference.attention(query, cache, table, lens, starts, **what)
    save_cache(path, cache, **what, pages=table[0], block_table=table, seq_lens=lens)
    file = load_cache(path, **what)
    free = np.array([7, 0, 5], np.int32)
    other[free] = file.cache
    have = reference.attention(query, other, free[file.block_table], file.seq_lens, starts, **what)
    assert np.array_equal(have, want)


# --- the file -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("cache") / "small"
    cache = np.arange(4 * LAYOUT.page_bytes, dtype=np.uint8).reshape(LAYOUT.shape(4))
    what = {"layout": LAYOUT, "codec": CODEC, "block_table": TABLE, "seq_lens": LENS}
    save_cache(path, cache, **what)
    return cache, path.read_bytes()


def test_the_file_is_safetensors_with_readable_metadata(small_file, path):
    cache, data = small_file
    path.write_bytes(data)
    with safetensors.safe_open(path, framework="numpy") as reader:
        metadata = reader.metadata()
    assert len(metadata.pop("checksum")) == 64
    assert metadata == {
        "format_version": "1",
        "kind": "cache",
        "key": "mse3",
        "value": "int4",
        "norm_correction": "true",
        "key_packing": "dense",
        "order": "planes/word-major-values/paired-affine",
        "num_kv_heads": "1",
        "head_dim": "8",
        "page_size": "2",
        "codec": CODEC.digest,
    }
    arrays = safetensors.numpy.load_file(path)
    assert set(arrays) == {"cache", "block_table", "seq_lens"}
    assert np.array_equal(arrays["cache"], cache)
    assert np.array_equal(arrays["block_table"], TABLE)


def test_equal_caches_make_equal_files(small_file, path, monkeypatch):
    cache, data = small_file
    monkeypatch.setattr(files, "BLOCK_BYTES", 1)
    save_cache(path, cache, layout=LAYOUT, codec=CODEC, block_table=TABLE, seq_lens=LENS)
    assert path.read_bytes() == data


def assert_refused(data, path, match=None, **what):
    path.write_bytes(data)
    with pytest.raises(ValueError, match=match) as caught:
        load_cache(path, **what)
    assert str(path) in str(caught.value)


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_flipped_bit_in_any_byte_is_refused(small_file, path):
    _, data = small_file
    for byte in range(len(data)):
        assert_refused(flipped(data, 8 * byte + byte * 3 % 8), path)


@pytest.mark.slow
def test_every_flipped_bit_is_refused(small_file, path):
    _, data = small_file
    for bit in range(8 * len(data)):
        assert_refused(flipped(data, bit), path)


def test_a_flipped_bit_of_a_page_is_a_wrong_checksum_whatever_is_loaded(small_file, path):
    """Also of one that is not loaded: a file is whole or refused."""
    _, data = small_file
    for byte in range(1, 4 * LAYOUT.page_bytes, 13):
        damaged = flipped(data, 8 * (len(data) - byte))
        assert_refused(damaged, path, "wrong checksum")
        assert_refused(damaged, path, "wrong checksum", pages=[1, 3, 0])


def test_every_truncation_is_refused(small_file, path):
    _, data = small_file
    for size in range(len(data)):
        assert_refused(data[:size], path, "not a readable safetensors file")
    assert_refused(data + b"\0", path, "not a readable safetensors file")


def rewritten(data, path, arrays=None, **metadata):
    """The file with other arrays or metadata, and the checksum that belongs to them."""
    path.write_bytes(data)
    old, kept = files.load(path, "cache")
    arrays = {k: v for k, v in {**old, **(arrays or {})}.items() if v is not None}
    metadata = {k: v for k, v in {**kept, **metadata}.items() if v is not None}
    files.save(path, arrays, metadata)
    return path.read_bytes()


def test_a_rewritten_file_is_accepted(small_file, path):
    """So that the refusals below are for the reason they name."""
    cache, data = small_file
    assert rewritten(data, path) == data
    assert np.array_equal(load_cache(path).cache, cache)


@pytest.mark.parametrize(
    "arrays, metadata, message",
    [
        ({"cache": None}, {}, "expected cache, or block_table, cache and seq_lens, got"),
        ({"seq_lens": None}, {}, "expected cache, or block_table, cache and seq_lens, got"),
        ({"extra": LENS}, {}, "expected cache, or block_table, cache and seq_lens, got"),
        ({}, {"page_size": "3"}, "cache: expected"),
        ({}, {"num_kv_heads": "2"}, "cache: expected"),
        ({}, {"head_dim": "16"}, "cache: expected"),
        ({}, {"value": "int8"}, "cache: expected"),
        ({}, {"value": "int9"}, "value: expected one of"),
        ({}, {"order": "planes"}, "'planes'"),
        ({}, {"order": None}, "'order'"),
        ({}, {"norm_correction": "maybe"}, "'maybe'"),
        ({}, {"page_size": "two"}, "page_size: expected a number in decimal, got 'two'"),
        ({}, {"page_size": " 2"}, "page_size: expected a number in decimal"),
        ({}, {"page_size": "-2"}, "page_size: expected a number in decimal"),
        ({}, {"page_size": "\u0662"}, "page_size: expected a number in decimal"),
        ({}, {"page_size": "9" * 5000}, "page_size: expected a number in decimal"),
        ({}, {"head_dim": "4096"}, "head_dim: expected 8 to 576"),
        ({}, {"codec": "../../other"}, "codec: expected a digest of 64 hex digits"),
        ({}, {"codec": CODEC.digest.upper()}, "codec: expected a digest of 64 hex digits"),
        ({"cache": np.zeros((4, 2, 1, 3), np.uint8)}, {}, "cache: expected"),
        ({"cache": np.zeros(LAYOUT.shape(4), np.int8)}, {}, "cache: expected"),
        ({"block_table": TABLE.astype(np.int64)}, {}, "block_table: expected dtype int32"),
        ({"block_table": TABLE[:1]}, {}, "block_table: expected shape"),
        ({"seq_lens": LENS + 100}, {}, "seq_lens: expected 0 to 6 tokens"),
        ({"block_table": TABLE + 1}, {}, "block_table: expected pages below 4, got 4"),
    ],
)
def test_inconsistent_files_with_a_right_checksum_are_refused(
    arrays, metadata, message, small_file, path
):
    data = rewritten(small_file[1], path, arrays, **metadata)
    assert_refused(data, path, f"not a valid cache file: .*{message}")


def test_dtypes_that_no_file_has_are_refused(path):
    header = b'{"__metadata__":{"format_version":"1","kind":"cache"},'
    header += b'"cache":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    data = len(header).to_bytes(8, "little") + header + b"\0\0"
    assert_refused(data, path, r"holds cache as BF16\[1\], unlike tq's$")


def empty_arrays(shape):
    """Of a table without sequences: nothing but its header says how wide it is."""
    return {"block_table": np.zeros(shape, np.int32), "seq_lens": np.zeros(0, np.int32)}


@pytest.mark.parametrize("pages", [None, [1]])
def test_a_table_without_sequences_takes_no_memory(pages, small_file, path):
    data = rewritten(small_file[1], path, empty_arrays((0, 2**45)))
    path.write_bytes(data)
    assert load_cache(path, pages=pages).block_table.shape == (0, 2**45)


@pytest.mark.parametrize(
    "name, shape",
    [("block_table", (0, 2**62)), ("cache", (0, 2**62, 1, 14)), ("cache", (2**62, 0))],
)
def test_shapes_that_no_array_has_are_refused(name, shape, small_file, path):
    """They hold nothing, so that the file is as large as it says."""
    dtype = {"block_table": "int32", "cache": "uint8"}[name]
    data = rewritten(small_file[1], path, {name: files.Blocks(dtype, shape, ())})
    assert_refused(data, path, rf"holds {name} as \w+\[\d+, \d+.*, unlike tq's$")


def test_another_version_or_kind_is_refused(small_file, path):
    cache, data = small_file
    metadata = {"format_version": "2", "kind": "cache"}
    other = safetensors.numpy.save({"cache": cache}, metadata)
    assert_refused(other, path, "format_version '2'; this version of tq reads '1'")
    CODEC.save(path)
    with pytest.raises(ValueError, match="expected a cache file, got a codec file"):
        load_cache(path)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="expected a codec file, got a cache file"):
        Codec.load(path)


def test_missing_file(path):
    with pytest.raises(FileNotFoundError):
        load_cache(path)


def test_a_file_that_may_not_be_read_is_not_missing(small_file, path, monkeypatch):
    def deny(*_):
        raise PermissionError(13, "Permission denied")

    path.write_bytes(small_file[1])
    monkeypatch.setattr(files, "open", deny, raising=False)
    with pytest.raises(PermissionError, match="Permission denied"):
        load_cache(path)


@pytest.mark.parametrize("wrong", [3, b"cache", None])
def test_what_is_no_path_is_refused(wrong):
    message = "^path: expected a str or an os.PathLike of one, got "
    with pytest.raises(TypeError, match=message):
        load_cache(wrong)
    with pytest.raises(TypeError, match=message):
        save_cache(wrong, np.zeros(LAYOUT.shape(1), np.uint8), layout=LAYOUT)


@pytest.mark.parametrize(
    "other",
    [
        replace(LAYOUT, order="token"),
        replace(LAYOUT, page_size=4),
        replace(LAYOUT, num_kv_heads=2),
        replace(LAYOUT, config=QuantConfig.preset("4bit")),
        replace(LAYOUT, config=replace(LAYOUT.config, norm_correction=False)),
    ],
    ids=str,
)
def test_another_layout_is_refused_before_anything_is_read(other, small_file, path):
    _, data = small_file
    damaged = flipped(data, 8 * len(data) - 1)
    assert_refused(damaged, path, "^layout: .* has CacheLayout.*, expected Cache", layout=other)


def test_another_codec_is_refused(small_file, path):
    other = Codec(LAYOUT.config, 8, seed=1)
    assert_refused(small_file[1], path, f"^codec: .* has codec {CODEC.digest[:12]}", codec=other)
    without = rewritten(small_file[1], path, codec=None)
    assert_refused(without, path, "^codec: .* names no codec", codec=CODEC)


# --- arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"layout": "4bit"}, TypeError, "^layout: expected a CacheLayout"),
        ({"layout": replace(LAYOUT, page_size=4)}, ValueError, "^cache: expected uint8"),
        ({"cache": [1]}, TypeError, "^cache: expected a numpy array"),
        ({"codec": Codec(QuantConfig(), 8)}, ValueError, "^codec: expected the layout's"),
        ({"pages": [0, 4]}, ValueError, "^pages: expected numbers from 0 to 3, got 4 at index 1"),
        ({"pages": [-1]}, ValueError, "^pages: expected numbers from 0 to 3, got -1"),
        ({"pages": [2, 1, 2]}, ValueError, "^pages: expected distinct numbers, got 2 twice"),
        ({"pages": [0.5]}, TypeError, "^pages: expected numbers of pages"),
        ({"pages": 3}, TypeError, "^pages: expected numbers of pages"),
        ({"seq_lens": None}, ValueError, "^seq_lens: expected with block_table"),
        ({"block_table": None}, ValueError, "^block_table: expected with seq_lens"),
        ({"block_table": TABLE.astype(np.int64)}, TypeError, "^block_table: expected dtype int32"),
        ({"seq_lens": LENS[:1]}, ValueError, "^block_table: expected shape"),
        ({"seq_lens": LENS + 6}, ValueError, "^seq_lens: expected 0 to 6 tokens.*got 10 for seq"),
        ({"seq_lens": -LENS}, ValueError, "^seq_lens: expected 0 to 6 tokens.*got -4 for seq"),
        ({"block_table": TABLE + 1}, ValueError, "got 4 for page 0 of sequence 0"),
        ({"pages": [0, 1]}, ValueError, "^pages: expected page 3 too, .* page 0 of sequence 0"),
    ],
)
def test_refusals_leave_no_file(changes, error, message, path):
    what = {
        "cache": np.zeros(LAYOUT.shape(4), np.uint8), "layout": LAYOUT, "codec": CODEC,
        "block_table": TABLE, "seq_lens": LENS, **changes,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        save_cache(path, **what)
    assert not os.listdir(path.parent)


@pytest.mark.parametrize(
    "what, error, message",
    [
        ({"layout": 3}, TypeError, "^layout: expected a CacheLayout"),
        ({"codec": 3}, TypeError, "^codec: expected a Codec"),
        ({"pages": [4]}, ValueError, "^pages: expected numbers from 0 to 3, got 4"),
        ({"pages": [0, 1]}, ValueError, "^pages: expected page 3 too"),
    ],
)
def test_arguments_of_load_are_checked(what, error, message, small_file, path):
    path.write_bytes(small_file[1])
    with pytest.raises(error, match=message):
        load_cache(path, **what)


# --- memory and crashes ---------------------------------------------------------------------


def test_neither_way_needs_the_memory_twice(rng, path, monkeypatch):
    layout = CacheLayout(LAYOUT.config, 4, 64, 16)
    monkeypatch.setattr(files, "BLOCK_BYTES", 2**18)
    cache = random_cache(rng, 2**22 // layout.page_bytes, layout)
    tracemalloc.start()
    save_cache(path, cache, layout=layout, pages=range(len(cache)))
    saving = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    file = load_cache(path)
    loading = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(file.cache, cache)
    assert saving < cache.nbytes / 3
    assert cache.nbytes < loading < 4 / 3 * cache.nbytes


@pytest.mark.parametrize("call", ["fsync", "replace", "chmod"])
def test_a_failing_write_leaves_the_old_file(call, small_file, path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    path.write_bytes(small_file[1])
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left") as caught:
        save_cache(path, np.zeros(LAYOUT.shape(9), np.uint8), layout=LAYOUT)
    assert caught.value.filename == str(path)
    assert os.listdir(path.parent) == ["cache"]
    assert path.read_bytes() == small_file[1]


@pytest.mark.skipif(os.name != "posix", reason="POSIX files")
def test_only_files_are_read_and_replaced(path):
    folder, pipe, loop = (path.with_name(n) for n in ("folder", "pipe", "loop"))
    folder.mkdir()
    os.mkfifo(pipe)
    loop.symlink_to("loop")
    for other, message in (
        (folder, "Is a directory"),
        (pipe, "Not a regular file"),
        (loop, "Too many levels of symbolic links"),
    ):
        with pytest.raises(OSError, match=message) as caught:
            save_cache(other, np.zeros(LAYOUT.shape(9), np.uint8), layout=LAYOUT)
        assert caught.value.filename == str(other)
        with pytest.raises(ValueError, match="not a readable safetensors file"):
            load_cache(other)
    assert sorted(os.listdir(path.parent)) == ["folder", "loop", "pipe"]


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_permissions_and_what_a_link_names_stay(small_file, path):
    cache, data = small_file
    path.write_bytes(data)
    path.chmod(0o640)
    link = path.with_name("link")
    link.symlink_to(path)
    save_cache(path, cache[:1], layout=LAYOUT)
    assert path.stat().st_mode & 0o777 == 0o640
    save_cache(link, cache[:2], layout=LAYOUT)
    assert not link.is_symlink()
    assert (len(load_cache(path).cache), len(load_cache(link).cache)) == (1, 2)


def test_pages_that_cannot_be_fetched_leave_the_old_file(small_file, path):
    class Broken(np.ndarray):
        def __getitem__(self, index):
            raise MemoryError

    path.write_bytes(small_file[1])
    with pytest.raises(MemoryError):
        save_cache(path, np.zeros(LAYOUT.shape(9), np.uint8).view(Broken), layout=LAYOUT)
    assert os.listdir(path.parent) == ["cache"]
    assert path.read_bytes() == small_file[1]


KILLED = """
import os, signal, sys
import numpy as np
from tq_core import CacheLayout, QuantConfig, files, save_cache

layout = CacheLayout(QuantConfig.preset("k3v4"), 1, 8, 2)
files.BLOCK_BYTES = 1

class Killing(np.ndarray):
    def __getitem__(self, index):
        if index.start == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.asarray(self)[index]

save_cache(sys.argv[1], np.zeros(layout.shape(9), np.uint8).view(Killing), layout=layout)
"""


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_a_process_killed_while_it_writes_leaves_the_old_file(small_file, path):
    cache, data = small_file
    path.write_bytes(data)
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=root, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(os.listdir(path.parent)) == 2  # what it had begun is beside it
    assert np.array_equal(load_cache(path, layout=LAYOUT, codec=CODEC).cache, cache)


def test_without_safetensors_the_message_says_what_to_install(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"safetensors package: pip install safetensors$"):
        save_cache(path, np.zeros(LAYOUT.shape(1), np.uint8), layout=LAYOUT)
    with pytest.raises(ImportError, match=r"safetensors package: pip install safetensors$"):
        load_cache(path)
    assert not os.listdir(path.parent)


def test_examples_run():
    result = doctest.testmod(snapshot)
    assert result.attempted > 3
    assert not result.failed
