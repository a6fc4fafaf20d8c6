from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tq_torch
from tests.cases import (
    ATTENTION_CASES,
    PREFIX_HIT,
    PRESET_CONFIGS,
    AttentionCase,
    assert_close,
)
from tests.torch.helpers import (
    attention_tensors,
    check_a_sequence_without_rows,
    check_empty_out,
    check_windows_of_any_size,
    to_float64,
)
from tq_core import CacheLayout, Codec
from tq_torch import native

CASE = AttentionCase(sliding_window=16, sinks=True)


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention(case):
    tensors = attention_tensors(case)
    out = torch.full_like(tensors["query"], float("nan"))
    result, lse = tq_torch.attention(**tensors, **case.options, out=out, return_lse=True)
    assert result is out
    assert lse.dtype == torch.float32
    assert_close(to_float64(out), lse.numpy(), case)


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention_in_small_tiles(case, monkeypatch):
    """Many blocks, tiles and parts of pages, where the cases fit into one tile otherwise."""
    monkeypatch.setitem(native.TILE_ELEMENTS, "cpu", 2**12)
    out, lse = tq_torch.attention(**attention_tensors(case), **case.options, return_lse=True)
    assert_close(to_float64(out), lse.numpy(), case)


@pytest.mark.parametrize("case", [c for c in ATTENTION_CASES if c.is_decode], ids=str)
def test_decode_attention(case):
    tensors = attention_tensors(case)
    del tensors["query_start_loc"]
    out, lse = tq_torch.decode_attention(**tensors, **case.options, return_lse=True)
    assert out.dtype == tensors["query"].dtype
    assert_close(to_float64(out), lse.numpy(), case)


def test_lse_is_returned_on_request_only():
    out = tq_torch.attention(**attention_tensors(CASE), **CASE.options)
    assert_close(to_float64(out), None, CASE)


@pytest.mark.parametrize(
    "hint", [{"max_query_len": 10**6}, {"max_seq_len": 10**6}, {"num_kv_splits": 7}], ids=str
)
def test_hints_do_not_change_a_bit(hint):
    tensors = attention_tensors(CASE)
    plain = tq_torch.attention(**tensors, **CASE.options, return_lse=True)
    hinted = tq_torch.attention(**tensors, **CASE.options, return_lse=True, **hint)
    assert all(torch.equal(a, b) for a, b in zip(plain, hinted, strict=True))


def test_two_runs_are_bit_equal():
    tensors = attention_tensors(ATTENTION_CASES[0])
    runs = [tq_torch.attention(**tensors, **ATTENTION_CASES[0].options) for _ in range(2)]
    assert torch.equal(*runs)


def test_an_out_without_elements_may_have_any_strides():
    check_empty_out("native")


def test_windows_of_any_size():
    check_windows_of_any_size("native")


def test_pages_of_a_sequence_without_rows_may_be_anything():
    check_a_sequence_without_rows("native")


def test_strides_of_query_out_and_cache_do_not_matter():
    tensors = attention_tensors(CASE)
    query, cache = tensors["query"], tensors["cache"]
    plain = tq_torch.attention(**tensors, **CASE.options)
    fused = torch.full((query.shape[0], query.shape[1], 2 * query.shape[2]), float("nan"))
    fused[..., ::2] = query
    pool = torch.full((2 * len(cache), *cache.shape[1:]), 0xFF, dtype=torch.uint8)
    pool[1::2] = cache
    out = torch.full((query.shape[2], query.shape[1], query.shape[0]), float("nan")).permute(
        2, 1, 0
    )
    strided = {**tensors, "query": fused[..., ::2], "cache": pool[1::2]}
    tq_torch.attention(**strided, **CASE.options, out=out)
    assert torch.equal(plain, out)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_query_stays_in_its_row(bad):
    case = replace(CASE, batch=PREFIX_HIT, sliding_window=None)
    tensors = attention_tensors(case)
    plain = tq_torch.attention(**tensors, **case.options)
    tensors["query"][7, 1, 3] = bad
    dirty = tq_torch.attention(**tensors, **case.options)
    others = torch.ones(plain.shape[:2], dtype=torch.bool)
    others[7, 1] = False
    assert torch.equal(plain[others], dirty[others])


def test_inference_only():
    tensors = attention_tensors(CASE)
    tensors["query"].requires_grad_()
    with pytest.raises(ValueError, match=r"query.*grad"):
        tq_torch.attention(**tensors, **CASE.options)
    with torch.no_grad():
        tq_torch.attention(**tensors, **CASE.options)


MEMORY = """
import resource, torch, tq_torch
from tq_core import CacheLayout, Codec, QuantConfig
torch.set_num_threads(1)
layout = CacheLayout(QuantConfig.preset("4bit"), 4, 128, 64)
codec = Codec(layout.config, 128)

def peak(tokens, rows):
    pages = tokens // 64
    cache = torch.zeros(layout.shape(pages), dtype=torch.uint8)
    table = torch.arange(pages, dtype=torch.int32)[None]
    query = torch.randn(rows, 16, 128)
    lens, starts = (torch.tensor(x, dtype=torch.int32) for x in ([tokens], [0, rows]))
    tq_torch.attention(query, cache, table, lens, starts, layout=layout, codec=codec)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

before = peak(1024, 5)
print(peak(131072, 5) - before)
"""


def test_memory_does_not_grow_with_the_sequence():
    """131072 tokens of 4 heads: 67 MiB packed, 512 MiB of fp32 keys and values."""
    command = [sys.executable, "-c", MEMORY]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    packed = 131072 * 4 * 134 / 2**20
    assert int(result.stdout) < packed + 64


def test_empty_batches():
    tensors = attention_tensors(CASE)
    for name in ("block_table", "seq_lens"):
        tensors[name] = tensors[name][:0]
    tensors["query"], tensors["query_start_loc"] = tensors["query"][:0], torch.zeros(1).int()
    out, lse = tq_torch.attention(**tensors, **CASE.options, return_lse=True)
    assert out.shape == tensors["query"].shape
    assert np.prod(lse.shape) == 0


def test_out_may_be_the_query():
    tensors = attention_tensors(CASE)
    plain = tq_torch.attention(**tensors, **CASE.options)
    tq_torch.attention(**tensors, **CASE.options, out=tensors["query"])
    assert torch.equal(plain, tensors["query"])


def test_out_may_be_a_part_of_the_query_s_memory():
    tensors = attention_tensors(CASE)
    query = tensors["query"]
    plain = tq_torch.attention(**tensors, **CASE.options)
    fused = torch.cat([query, query], 1)
    tensors["query"] = fused[:, : query.shape[1]]
    tq_torch.attention(**tensors, **CASE.options, out=fused[:, query.shape[1] :])
    assert torch.equal(fused, torch.cat([query, plain], 1))


def test_a_cache_at_an_odd_address():
    tensors = attention_tensors(CASE)
    plain = tq_torch.attention(**tensors, **CASE.options)
    cache = tensors["cache"]
    odd = torch.empty(cache.numel() + 1, dtype=torch.uint8)[1:].view(cache.shape)
    tensors["cache"] = odd.copy_(cache)
    assert torch.equal(plain, tq_torch.attention(**tensors, **CASE.options))


def test_pages_past_two_gigabytes():
    layout = CacheLayout(PRESET_CONFIGS["4bit"], 8, 128, 16)
    codec = Codec(layout.config, 128)
    cache = tq_torch.empty_cache(layout, 2**31 // layout.page_bytes + 2)
    small = tq_torch.empty_cache(layout, 1)
    key, value, query = torch.randn(3, 16, 8, 128)
    last, slots = len(cache) - 1, torch.arange(16)
    results = []
    for pages, number in ((small, 0), (cache, last)):
        where = {"layout": layout, "codec": codec}
        tq_torch.store(key, value, pages, slots + 16 * number, **where)
        table, lens = torch.tensor([[number]]).int(), torch.tensor([16]).int()
        starts = torch.tensor([0, 16]).int()
        results.append(tq_torch.attention(query, pages, table, lens, starts, **where))
    assert torch.equal(cache[last], small[0])
    assert torch.equal(*results)


def test_autocast_does_not_lower_the_precision():
    tensors = attention_tensors(CASE)
    plain = tq_torch.attention(**tensors, **CASE.options)
    with torch.autocast("cpu", torch.bfloat16):
        cast = tq_torch.attention(**tensors, **CASE.options)
    assert cast.dtype == torch.float32
    assert (cast - plain).abs().max() < 1e-5


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_reduced_matrix_precision_is_noticed(device):
    """The settings are the user's: they are read, and neither obeyed nor changed."""
    device = torch.device(device)
    before = torch.get_float32_matmul_precision()
    try:
        found = {}
        for name in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(name)
            found[name] = native._reduces_precision(device)
            assert torch.get_float32_matmul_precision() == name
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == {"highest": False, "high": True, "medium": True}


def test_threads_do_not_disturb_each_other():
    tensors = attention_tensors(CASE)
    plain = tq_torch.attention(**tensors, **CASE.options)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(tq_torch.attention, **tensors, **CASE.options) for _ in range(16)]
        assert all(torch.equal(plain, call.result()) for call in calls)


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes", "out"])
def test_no_input_may_require_a_gradient(name):
    tensors = attention_tensors(replace(CASE, alibi=True))
    tensors["out"] = torch.empty_like(tensors["query"])
    tensors[name].requires_grad_()
    with pytest.raises(ValueError, match=f"^{name}: requires a gradient"):
        tq_torch.attention(**tensors, **CASE.options)


def test_a_codec_first_used_in_inference_mode_serves_outside_too():
    case = replace(CASE, seed=77)
    tensors = attention_tensors(case)
    with torch.inference_mode():
        inside = tq_torch.attention(**tensors, **case.options)
    assert torch.equal(inside, tq_torch.attention(**tensors, **case.options))
