"""The native backend on a GPU: the same results, and the device is never waited for."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import tq_torch
from tests.cases import (
    ATTENTION_CASES,
    STORE_CASES,
    assert_close,
    assert_same_bytes,
    make_store_inputs,
)
from tests.torch.helpers import DTYPES, attention_tensors, tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # torch says so of its own detector, whenever it is switched on.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]


@contextmanager
def no_sync():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(params=["ieee", "tf32"])
def precision(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if request.param == "tf32" else "highest")
    yield
    torch.set_float32_matmul_precision(before)


def attention(case, **options):
    tensors = {n: None if x is None else x.cuda() for n, x in attention_tensors(case).items()}
    out = torch.full_like(tensors["query"], float("nan"))
    call = {**tensors, **case.options, **options, "out": out}
    tq_torch.attention(**call, backend="native")  # the codec's constants travel once
    out.fill_(float("nan"))
    with no_sync():
        return tq_torch.attention(**call, return_lse=True, backend="native")


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention(case, precision):
    out, lse = attention(case)
    assert_close(out.double().cpu().numpy(), lse.cpu().numpy(), case)


@pytest.mark.parametrize("case", ATTENTION_CASES[::5], ids=str)
def test_tight_hints(case):
    rows, tokens = zip(*case.batch, strict=True)
    out, lse = attention(case, max_query_len=max(rows), max_seq_len=max(tokens))
    assert_close(out.double().cpu().numpy(), lse.cpu().numpy(), case)


@pytest.mark.parametrize("case", STORE_CASES[::3], ids=str)
def test_store(case, precision):
    inputs = make_store_inputs(case)
    dtype = DTYPES[case.dtype]
    key, value = (tensor(x).to("cuda", dtype) for x in (inputs.key, inputs.value))
    cache, slots = tensor(inputs.cache).cuda(), tensor(inputs.slot_mapping).cuda()
    call = {"layout": case.layout, "codec": case.codec, "backend": "native"}
    tq_torch.store(key, value, cache.clone(), slots, **call)
    with no_sync():
        tq_torch.store(key, value, cache, slots, **call)
    assert_same_bytes(cache.cpu().numpy(), inputs, layout=case.layout, codec=case.codec)


def test_a_store_that_skips_every_row_changes_nothing():
    case = STORE_CASES[0]
    inputs = make_store_inputs(case)
    key, value, cache = (tensor(x).cuda() for x in (inputs.key, inputs.value, inputs.cache))
    slots = torch.full((len(key),), -1, device="cuda")
    tq_torch.store(key, value, cache, slots, layout=case.layout, codec=case.codec, backend="native")
    assert torch.equal(cache.cpu(), tensor(inputs.cache))


# With a window, entries of the block table before it are -1.
@pytest.mark.parametrize(
    "case", [c for c in ATTENTION_CASES if c.sliding_window is None][::9], ids=str
)
def test_dequantize(case):
    tensors = attention_tensors(case)
    arrays = [tensors[n] for n in ("cache", "block_table", "seq_lens")]
    options = {"layout": case.layout, "codec": case.codec, "dtype": torch.float32}
    want = tq_torch.dequantize(*arrays, **options)
    arrays = [x.cuda() for x in arrays]
    tq_torch.dequantize(*arrays, **options, backend="native")
    with no_sync():
        have = tq_torch.dequantize(*arrays, **options, backend="native")
    for a, b in zip(have, want, strict=True):
        assert torch.allclose(a.cpu(), b, rtol=1e-5, atol=1e-5)


def test_replay_of_a_captured_call_serves_other_lengths():
    case = next(c for c in ATTENTION_CASES if c.is_decode)
    tensors = {n: None if x is None else x.cuda() for n, x in attention_tensors(case).items()}
    lens = tensors["seq_lens"].clone()
    call = {**tensors, **case.options, "backend": "native"}
    tensors["seq_lens"].clamp_(max=1)
    tq_torch.attention(**call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = tq_torch.attention(**call, return_lse=True)
    tensors["seq_lens"].copy_(lens)
    graph.replay()
    assert_close(out.double().cpu().numpy(), lse.cpu().numpy(), case)
