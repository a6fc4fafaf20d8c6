"""Files of caches from and to tensors; tests/core has what they refuse."""

from __future__ import annotations

import doctest
import os
import tracemalloc

import pytest
import torch

pytest.importorskip("safetensors")

import tq_torch
from tq_core import CacheLayout, Codec, QuantConfig, files
from tq_torch import snapshot

LAYOUT = CacheLayout(QuantConfig.preset("4bit"), 2, 64, 4)
CODEC = Codec(LAYOUT.config, 64)
WHAT = {"layout": LAYOUT, "codec": CODEC}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def cache():
    generator = torch.Generator().manual_seed(5)
    shape = (9, *LAYOUT.shape(0)[1:])
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def test_a_whole_cache_comes_back(cache, path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 2 * LAYOUT.page_bytes)
    tq_torch.save_cache(path, cache, **WHAT)
    file = tq_torch.load_cache(path, **WHAT)
    assert torch.equal(file.cache, cache)
    assert (file.layout, file.codec_digest) == (LAYOUT, CODEC.digest)
    assert file.block_table is None


@pytest.mark.parametrize(
    "pages", [[8, 1, 2], torch.tensor([8, 1, 2]), torch.tensor([8, 1, 2]).int()]
)
def test_pages_with_their_table(pages, cache, path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 2 * LAYOUT.page_bytes)
    table = torch.tensor([[2, 8], [1, 0]], dtype=torch.int32)
    lens = torch.tensor([7, 3], dtype=torch.int32)
    tq_torch.save_cache(path, cache, **WHAT, pages=pages, block_table=table, seq_lens=lens)
    file = tq_torch.load_cache(path, **WHAT, device="cpu")
    assert torch.equal(file.cache, cache[[8, 1, 2]])
    assert file.block_table.tolist() == [[2, 0], [1, -1]]
    assert torch.equal(file.seq_lens, lens)
    assert file.block_table.dtype == torch.int32
    again = tq_torch.load_cache(path, pages=torch.tensor([1, 2, 0]))
    assert torch.equal(again.cache, cache[[1, 2, 8]])


def test_strided_and_transposed_arrays(cache, path):
    table = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)
    lens = torch.tensor([5, 0, 5, 0], dtype=torch.int32)[::2]
    tq_torch.save_cache(path, cache[::2], **WHAT, block_table=table.t(), seq_lens=lens)
    file = tq_torch.load_cache(path)
    assert torch.equal(file.cache, cache[::2])
    assert torch.equal(file.block_table, table.t())
    assert file.seq_lens.tolist() == [5, 5]


def test_tensors_of_inference_mode(cache, path):
    with torch.inference_mode():
        tq_torch.save_cache(path, cache.clone(), **WHAT)
    assert torch.equal(tq_torch.load_cache(path).cache, cache)


def test_the_device_is_that_of_empty_cache(cache, path):
    tq_torch.save_cache(path, cache, **WHAT)
    with torch.device("meta"):
        assert tq_torch.load_cache(path).cache.device.type == "meta"
    assert tq_torch.load_cache(path, device="meta").cache.device.type == "meta"


def test_host_memory_has_blocks_alone(path, monkeypatch):
    """Of a cache on another device, which is not one of numpy's arrays."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 2**17)
    cache = torch.zeros(LAYOUT.shape(2**21 // LAYOUT.page_bytes), dtype=torch.uint8)
    tracemalloc.start()
    tq_torch.save_cache(path, cache, **WHAT)
    tq_torch.load_cache(path, **WHAT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < cache.nbytes / 2


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"cache": [0]}, TypeError, "^cache: expected a torch.Tensor, got list"),
        ({"cache": None}, TypeError, "^cache: expected a torch.Tensor, got NoneType"),
        ({"block_table": [[0]]}, TypeError, "^block_table: expected a torch.Tensor, got list"),
        ({"pages": [9]}, ValueError, "^pages: expected numbers from 0 to 8, got 9"),
        ({"pages": torch.tensor([0.5])}, TypeError, "^pages: expected numbers of pages"),
        ({"cache": torch.zeros(LAYOUT.shape(9))}, ValueError, "^cache: expected uint8"),
    ],
)
def test_refusals(changes, error, message, cache, path):
    with pytest.raises(error, match=message):
        tq_torch.save_cache(path, **{"cache": cache, **WHAT, **changes})
    assert not os.listdir(path.parent)


def test_pages_inside_of_which_there_are_strides_are_refused(cache, path):
    with pytest.raises(ValueError, match=r"^cache: expected pages that are dense inside"):
        tq_torch.save_cache(path, cache.transpose(1, 2).contiguous().transpose(1, 2), **WHAT)


def test_examples_run():
    result = doctest.testmod(snapshot)
    assert result.attempted > 10
    assert not result.failed


@pytest.mark.gpu
def test_to_a_gpu_and_back(cache, path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 2 * LAYOUT.page_bytes)
    pages = torch.tensor([8, 0, 3], device="cuda")
    tq_torch.save_cache(path, cache.cuda(), **WHAT, pages=pages)
    file = tq_torch.load_cache(path, **WHAT, device="cuda")
    assert file.cache.is_cuda
    assert torch.equal(file.cache.cpu(), cache[[8, 0, 3]])
    file = tq_torch.load_cache(path, pages=pages[1:2], device="cuda")
    assert torch.equal(file.cache.cpu(), cache[8:9])
