"""The Triton backend of tq_torch on a GPU, against the float64 reference."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

import tq_torch
from tests.batch import PLAN, SHORT, check_batch_invariance, invariance_cases
from tests.cases import AttentionCase, assert_close
from tests.gpu.cases import ATTENTION, LONG, PRESETS, STORE
from tests.torch.helpers import (
    DTYPES,
    attention_tensors,
    check_attention,
    check_decode,
    check_dequantize,
    check_store,
    common_options,
    on_device,
    operator_arguments,
    to_float64,
)
from tests.torch.test_gpu import no_sync
from tq_core import CacheLayout, Codec, QuantConfig, kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]

FLAGSHIP = QuantConfig.preset("4bit")


def attention(case: AttentionCase, **options):
    """Output and LSE of a case by the triton backend, no comparison."""
    tensors = on_device(attention_tensors(case), "cuda")
    call = {**tensors, **case.options, **options}
    return tq_torch.attention(**call, return_lse=True, backend="triton")


# --- the case table -------------------------------------------------------------------------


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention(case):
    first = check_attention(case, "triton", "cuda")
    again = check_attention(case, "triton", "cuda")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("case", ATTENTION[::2], ids=str)
def test_attention_in_three_splits(case):
    check_attention(case, "triton", "cuda", num_kv_splits=3)


@pytest.mark.parametrize("case", [c for c in ATTENTION[::2] if c.head_dim <= 256], ids=str)
@pytest.mark.parametrize("block_n", [64, 128])
def test_rows_on_the_m_axis(case, block_n):
    """The same numbers as with tokens there, but for the order of sums."""
    want = check_attention(case, "triton", "cuda")
    have = check_attention(case, "triton", "cuda", plan={"block_n": block_n})
    again = check_attention(case, "triton", "cuda", plan={"block_n": block_n})
    assert all(torch.equal(a, b) for a, b in zip(have, again, strict=True))
    assert (have[0].double() - want[0].double()).norm() <= 3e-3 * want[0].double().norm() + 1e-6


@pytest.mark.parametrize("preset", PRESETS)
def test_long_chunks_with_rows_on_the_m_axis(preset):
    config = QuantConfig.preset(preset)
    case = AttentionCase(config, 128, 64, batch=((300, 2100), (1, 900), (64, 64), (0, 5)), group=4)
    for splits in (1, 4):
        plan = {"block_n": 128, "num_splits": splits}
        check_attention(case, "triton", "cuda", plan=plan)


@pytest.mark.parametrize("case", [c for c in ATTENTION if c.head_dim <= 256], ids=str)
def test_tokens_decoded_once(case):
    """In pieces that end within sequences; the same bits every time."""
    case = replace(case, dtype="bfloat16")
    plan = {"unpack": 1, "block_n": 64, "block_t": 64, "num_warps": 4, "piece_tokens": 128}
    first, again = (check_attention(case, "triton", "cuda", plan=plan) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("piece_tokens", [512, 2048, 8192])
def test_long_chunks_decoded_once(preset, piece_tokens):
    case = AttentionCase(
        QuantConfig.preset(preset), 128, 64, num_kv_heads=2, group=3, dtype="bfloat16", seed=5,
        batch=((600, 5000), (300, 300), (0, 70), (411, 2048)),
    )  # fmt: skip
    check_attention(case, "triton", "cuda", plan={"unpack": 1, "piece_tokens": piece_tokens})


@pytest.mark.parametrize("case", ATTENTION[::4], ids=str)
def test_hints_change_nothing_but_the_plan(case):
    rows, tokens = zip(*case.batch, strict=True)
    check_attention(case, "triton", "cuda", max_query_len=max(rows), max_seq_len=max(tokens))


@pytest.mark.parametrize("case", [c for c in ATTENTION if c.is_decode][::2], ids=str)
def test_decode_attention(case):
    tensors = on_device(attention_tensors(case), "cuda")
    del tensors["query_start_loc"]
    out, lse = tq_torch.decode_attention(
        **tensors, **case.options, return_lse=True, backend="triton"
    )
    assert_close(to_float64(out.cpu()), lse.cpu().numpy(), case)


@pytest.mark.parametrize("case", LONG, ids=str)
def test_long_sequences(case):
    results = [
        check_attention(case, "triton", "cuda", num_kv_splits=n)[0] for n in (None, 1, 16, 64)
    ]
    for parts in results[2:]:
        error = (parts.double() - results[1].double()).norm() / results[1].double().norm()
        assert error <= 2e-3


@pytest.mark.parametrize("splits", [1, 2, 5, 16, 33, 64, 256])
def test_forced_splits(splits):
    case = AttentionCase(
        FLAGSHIP, 128, batch=((1, 1500), (1, 0), (4, 700)), dtype="float16", sinks=True
    )
    check_attention(case, "triton", "cuda", num_kv_splits=splits)


@pytest.mark.parametrize("case", [c for c in ATTENTION if c.is_decode], ids=str)
@pytest.mark.parametrize("parts", [1, 40, 1000])
def test_parts_in_shares_of_the_lengths(case, parts):
    check_decode(case, "triton", "cuda", plan={"parts": parts})


@pytest.mark.parametrize("case", [c for c in ATTENTION if max(c.batch)[0] <= 8][::2], ids=str)
def test_parts_of_a_few_rows_each(case):
    case = replace(case, group=min(case.group, 4))
    plan = {"parts": 20, "block_n": 32}
    check_attention(case, "triton", "cuda", max_query_len=8, plan=plan)


#: 200 and 1000 lengths are more than fit one load of 64.
@pytest.mark.parametrize("num_seqs", [2, 64, 200, 1000])
@pytest.mark.parametrize("features", [{}, {"sliding_window": 600, "sinks": True}], ids=str)
@pytest.mark.parametrize("default", [False, True], ids=["parts", "default"])
def test_many_sequences_of_uneven_lengths(num_seqs, features, default):
    lens = [(1, 1 + (37 * i * i) % 120 + 4500 * (i % 97 == 1)) for i in range(num_seqs)]
    case = AttentionCase(
        FLAGSHIP, 128, 64, num_kv_heads=1, dtype="float16", batch=tuple(lens), **features
    )
    # By default 64 sequences or fewer have equal splits here, as few programs do.
    plan = None if default else {"parts": 2 * num_seqs}
    first = check_decode(case, "triton", "cuda", plan=plan)
    again = check_decode(case, "triton", "cuda", plan=plan)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    check_attention(case, "triton", "cuda", max_query_len=1, plan=plan)


@pytest.mark.parametrize("case", ATTENTION[::3], ids=str)
def test_batch_deterministic(case):
    for split_tokens in (64, 1024):
        check_attention(case, "triton", "cuda", plan={**PLAN, "split_tokens": split_tokens})


LONG_BATCH = ((9, 5003), (1, 40), (3, 70), (2, 0), (1, 3000), (64, 700))
#: A window whose ends are in different tiles for different rows, and one of several splits.
WINDOWED = [replace(c, sliding_window=2500) for c in invariance_cases(LONG_BATCH, 2)[:4]]


@pytest.mark.parametrize("case", invariance_cases(SHORT, 2), ids=str)
@pytest.mark.parametrize("split_tokens", [128, 1024])
def test_a_sequence_has_the_same_bits_in_any_batch(case, split_tokens):
    check_batch_invariance(case, "triton", "cuda", split_tokens=split_tokens)


@pytest.mark.parametrize("case", [*invariance_cases(LONG_BATCH, 2), *WINDOWED], ids=str)
def test_a_long_sequence_has_the_same_bits_in_any_batch(case):
    check_batch_invariance(case, "triton", "cuda")


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("group", [1, 4, 16])
def test_every_format_has_the_same_bits_in_any_batch(preset, group):
    case = AttentionCase(
        QuantConfig.preset(preset), 128, 64, num_kv_heads=2, group=group, dtype="bfloat16",
        batch=((9, 1500), (1, 40), (8, 2100), (2, 0)),
    )  # fmt: skip
    check_batch_invariance(case, "triton", "cuda")


@pytest.mark.parametrize("case", [c for c in ATTENTION if c.sliding_window is None][::5], ids=str)
def test_dequantize(case):
    check_dequantize(case, "triton", "cuda")


@pytest.mark.parametrize("case", STORE, ids=str)
def test_store(case):
    first = check_store(case, "triton", "cuda")
    assert torch.equal(first, check_store(case, "triton", "cuda"))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_default_backend_is_triton(preset):
    case = AttentionCase(QuantConfig.preset(preset), 128, dtype="bfloat16")
    tensors = on_device(attention_tensors(case), "cuda")
    default = tq_torch.attention(**tensors, **case.options)
    named = tq_torch.attention(**tensors, **case.options, backend="triton")
    assert torch.equal(default, named)


# --- addressing -----------------------------------------------------------------------------


def test_pages_past_2_gigabytes():
    """Page ids times page bytes beyond 2**31, for readers and for store."""
    case = AttentionCase(FLAGSHIP, 128, 16, num_kv_heads=8, dtype="bfloat16", batch=((1, 300),))
    tensors = on_device(attention_tensors(case), "cuda")
    small = tensors["cache"]
    first = 2**31 // case.layout.page_bytes + 5
    big = torch.full(case.layout.shape(first + len(small)), 255, dtype=torch.uint8, device="cuda")
    big[first:] = small
    want = tq_torch.attention(**tensors, **case.options, backend="triton")
    moved = {**tensors, "cache": big, "block_table": tensors["block_table"] + first}
    assert torch.equal(tq_torch.attention(**moved, **case.options, backend="triton"), want)
    arrays = [moved[n] for n in ("cache", "block_table", "seq_lens")]
    what = {"layout": case.layout, "codec": case.codec}
    dense = tq_torch.dequantize(*arrays, **what, dtype=torch.float32, backend="triton")
    plain = [tensors[n] for n in ("cache", "block_table", "seq_lens")]
    want = tq_torch.dequantize(*plain, **what, dtype=torch.float32, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(dense, want, strict=True))

    key, value = torch.randn((2, 50, 8, 128), device="cuda")
    slots = torch.randperm(len(small) * 16, device="cuda")[:50]
    tq_torch.store(key, value, small, slots, **what, backend="triton")
    tq_torch.store(key, value, big, slots + first * 16, **what, backend="triton")
    assert torch.equal(big[first:], small)
    assert bool((big[:first] == 255).all())


@pytest.mark.parametrize("shift", [2, 4, 8, 16, 18])
@pytest.mark.parametrize("preset", ["4bit", "3bit", "k8v8"])
def test_strided_pages_at_any_even_address(preset, shift):
    case = AttentionCase(QuantConfig.preset(preset), 64, 16, dtype="float16")
    tensors = on_device(attention_tensors(case), "cuda")
    cache, layout = tensors["cache"], case.layout
    stride = layout.page_bytes + shift
    flat = torch.full((shift + len(cache) * stride,), 255, dtype=torch.uint8, device="cuda")
    inner = (layout.num_kv_heads * layout.slot_bytes, layout.slot_bytes, 1)
    moved = flat.as_strided(cache.shape, (stride, *inner), shift)
    moved.copy_(cache)
    out, lse = tq_torch.attention(
        **{**tensors, "cache": moved}, **case.options, return_lse=True, backend="triton"
    )
    assert_close(to_float64(out.cpu()), lse.cpu().numpy(), case)
    before = flat.clone()
    key, value = torch.randn((2, 20, layout.num_kv_heads, layout.head_dim), device="cuda")
    slots = torch.randperm(len(cache) * layout.page_size, device="cuda")[:20]
    what = {"layout": layout, "codec": case.codec, "backend": "triton"}
    tq_torch.store(key, value, moved, slots, **what)
    dense = cache.clone()
    tq_torch.store(key, value, dense, slots, **what)
    assert torch.equal(moved, dense)
    between = torch.ones_like(flat, dtype=torch.bool)
    between.as_strided(cache.shape, (stride, *inner), shift).fill_(False)
    assert torch.equal(flat[between], before[between])


def test_strided_arrays():
    case = next(c for c in ATTENTION if c.sinks and c.alibi)
    tensors = on_device(attention_tensors(case), "cuda")
    want, lse = attention(case)
    for name in ("query", "block_table", "seq_lens", "query_start_loc", "sinks", "alibi_slopes"):
        x = tensors[name]
        wide = torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype, device="cuda")
        wide[..., ::2] = x
        tensors[name] = wide[..., ::2]
    out = torch.full(want.shape[::-1], float("nan"), dtype=want.dtype, device="cuda")
    out = out.permute(2, 1, 0)
    have, have_lse = tq_torch.attention(
        **tensors, **case.options, return_lse=True, out=out, backend="triton"
    )
    assert torch.equal(have, want)
    assert torch.equal(have_lse, lse)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_cache_at_the_end_of_an_allocation(preset):
    """The bytes after the last page are NaN scales; the tail of every row is read right."""
    case = AttentionCase(QuantConfig.preset(preset), 72, 1, batch=((1, 5), (1, 1)))
    tensors = on_device(attention_tensors(case), "cuda")
    cache = tensors["cache"]
    flat = torch.full((cache.numel() + 64,), 255, dtype=torch.uint8, device="cuda")
    tensors["cache"] = flat[:-64].view(cache.shape).copy_(cache)
    out, lse = tq_torch.attention(**tensors, **case.options, return_lse=True, backend="triton")
    assert_close(to_float64(out.cpu()), lse.cpu().numpy(), case)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 6e4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_queries_of_any_size(scale, dtype):
    """A query may be as large as its dtype allows; the softmax scale brings scores back."""
    case = AttentionCase(FLAGSHIP, 128, dtype=dtype, batch=((1, 200), (3, 40)))
    tensors = on_device(attention_tensors(case), "cuda")
    tensors["query"] = (tensors["query"].clamp(-1, 1) * scale).to(DTYPES[dtype])
    options = {**case.options, "scale": case.head_dim**-0.5 / scale}
    have = tq_torch.attention(**tensors, **options, backend="triton")
    want = tq_torch.attention(
        **{**tensors, "query": tensors["query"].float()}, **options, backend="native"
    )
    tolerance = {"float16": 1e-3, "bfloat16": 4e-3}[dtype]
    assert (have.double() - want.double()).norm() <= tolerance * want.double().norm()


# --- PTX and plain helpers ------------------------------------------------------------------


@pytest.mark.parametrize("kind, bits, unit", [
    ("int", 2, 2), ("int", 4, 2), ("int", 8, 2), ("int", 4, 4), ("int", 8, 4),
    ("int", 2, 4), ("int", 3, 3), ("int", 3, 6), ("fp8", 8, 2), ("fp8", 8, 4), ("poly", 2, 2),
    ("poly", 2, 4), ("poly", 4, 2), ("poly", 4, 4), ("poly", 3, 3), ("poly", 3, 6),
])  # fmt: skip
def test_ptx_is_the_twin_of_the_plain_helpers(kind, bits, unit):
    """All 16-bit units and a million wider ones, bit for bit."""
    from tests.gpu.decoding import decoded

    asm, plain = decoded(kind, bits, unit)
    assert torch.equal(asm, plain)


@pytest.mark.parametrize("bits, packing", [(2, "dense"), (3, "dense"), (3, "planar"), (4, "dense")])
def test_ptx_of_grids_is_the_twin_of_the_plain_helper(bits, packing):
    from tests.gpu.decoding import decoded_grid

    asm, plain = decoded_grid(bits, packing)
    assert torch.equal(asm, plain)


#: Not those with 3-bit codes: ptxas miscompiled a plain reading of their words, see
#: docs/kernels.md; the tests before this one compare their decoding.
@pytest.mark.parametrize("preset", [p for p in PRESETS if "3" not in p])
@pytest.mark.parametrize("head_dim", [72, 128])
def test_attention_without_ptx(preset, head_dim):
    case = AttentionCase(QuantConfig.preset(preset), head_dim, dtype="float16")
    with_ptx = check_attention(case, "triton", "cuda", plan={"asm": 1})
    without = check_attention(case, "triton", "cuda", plan={"asm": 0})
    assert all(torch.equal(a, b) for a, b in zip(with_ptx, without, strict=True))


# --- running --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ATTENTION[::7], ids=str)
def test_the_device_is_never_waited_for(case):
    tensors = on_device(attention_tensors(case), "cuda")
    call = {**tensors, **case.options, "backend": "triton"}
    arrays = [tensors[n] for n in ("cache", "block_table", "seq_lens")]
    what = {"layout": case.layout, "codec": case.codec, "backend": "triton"}
    shape = (7, case.num_kv_heads, case.head_dim)
    key, value = torch.randn((2, *shape), device="cuda")
    slots = torch.full((7,), -1, device="cuda")

    def everything():
        tq_torch.store(key, value, tensors["cache"], slots, **what)
        tq_torch.attention(**call)
        if case.sliding_window is None:
            tq_torch.dequantize(*arrays, dtype=torch.float16, **what)

    everything()
    with no_sync():
        everything()


def _decode_inputs(num_seqs, length, capacity, layout, codec):
    generator = torch.Generator(device="cuda").manual_seed(num_seqs + length)
    pages = -(-capacity // layout.page_size)
    cache = tq_torch.empty_cache(layout, num_seqs * pages, device="cuda")
    table = torch.randperm(num_seqs * pages, device="cuda", generator=generator).int()
    table = table.view(num_seqs, pages)
    token = torch.arange(capacity, device="cuda")
    for b in range(num_seqs):
        shape = (2, capacity, layout.num_kv_heads, layout.head_dim)
        key, value = torch.randn(shape, device="cuda", generator=generator)
        slots = table[b, token // layout.page_size].long() * layout.page_size
        slots += token % layout.page_size
        tq_torch.store(key, value, cache, slots, layout=layout, codec=codec)
    shape = (num_seqs, 4 * layout.num_kv_heads, layout.head_dim)
    query = torch.randn(shape, device="cuda", generator=generator, dtype=torch.float16)
    lens = torch.full((num_seqs,), length, dtype=torch.int32, device="cuda")
    return query, cache, table, lens


def _capture(function):
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@pytest.mark.parametrize("preset", ["4bit", "k8v4", "3bit"])
def test_a_graph_captured_at_length_1_serves_40000(preset):
    layout = CacheLayout(QuantConfig.preset(preset), 2, 128, 64)
    codec = Codec(layout.config, 128)
    query, cache, table, lens = _decode_inputs(2, 1, 40_000, layout, codec)

    def step():
        return tq_torch.decode_attention(
            query, cache, table, lens, layout=layout, codec=codec, return_lse=True,
            backend="triton",
        )  # fmt: skip

    graph, (out, lse) = _capture(step)
    for length in (1000, 40_000, 1):
        lens.fill_(length)
        out.fill_(float("nan"))
        graph.replay()
        want, want_lse = step()
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)


@pytest.mark.parametrize("plan", [None, {"deterministic": "batch"}], ids=str)
def test_a_graph_serves_uneven_lengths(plan):
    layout = CacheLayout(FLAGSHIP, 2, 128, 64)
    codec = Codec(layout.config, 128)
    query, cache, table, lens = _decode_inputs(6, 1, 20_000, layout, codec)

    def step():
        return tq_torch.decode_attention(
            query, cache, table, lens, layout=layout, codec=codec, plan=plan, backend="triton"
        )

    graph, out = _capture(step)
    for new in ([20_000, 1, 16, 0, 700, 64], [5] * 6, [20_000] * 6):
        lens.copy_(torch.tensor(new))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, step())
        want = tq_torch.decode_attention(
            query, cache, table, lens, layout=layout, codec=codec, num_kv_splits=1
        )
        assert (out.double() - want.double()).norm() <= 2e-3 * want.double().norm()


def test_graphs_of_two_batch_sizes():
    layout = CacheLayout(FLAGSHIP, 2, 128, 16)
    codec = Codec(layout.config, 128)

    def step(inputs):
        query, cache, table, lens = inputs
        return lambda: tq_torch.decode_attention(
            query, cache, table, lens, layout=layout, codec=codec, backend="triton"
        )

    one, many = (_decode_inputs(n, 500, 600, layout, codec) for n in (1, 64))
    graph_one, out_one = _capture(step(one))
    graph_many, out_many = _capture(step(many))
    for graph, out, inputs in ((graph_one, out_one, one), (graph_many, out_many, many)) * 2:
        inputs[3].random_(1, 600)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, step(inputs)())


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_a_codec_unseen_before_a_capture_is_refused():
    layout = CacheLayout(FLAGSHIP, 2, 128, 16)
    codec = Codec(layout.config, 128)
    query, cache, table, lens = _decode_inputs(1, 50, 64, layout, codec)
    unseen = Codec(layout.config, 128, seed=991)
    graph = torch.cuda.CUDAGraph()
    message = "one call with this codec before the capture"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(graph):
        tq_torch.decode_attention(query, cache, table, lens, layout=layout, codec=unseen)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_is_the_eager_one():
    """fullgraph, with inductor."""
    layout = CacheLayout(FLAGSHIP, 2, 128, 16)
    codec = Codec(layout.config, 128)
    query, cache, table, lens = _decode_inputs(3, 200, 208, layout, codec)
    key, value = torch.randn((2, 3, 2, 128), device="cuda")

    def step(query, key, value, cache, table, lens):
        page = table.gather(1, ((lens - 1) // 16)[:, None].long())[:, 0].long()
        slots = page * 16 + (lens - 1) % 16
        tq_torch.store(key, value, cache, slots, layout=layout, codec=codec)
        out = tq_torch.decode_attention(query, cache, table, lens, layout=layout, codec=codec)
        return out * 2

    twin = cache.clone()
    want = step(query, key, value, twin, table, lens)
    have = torch.compile(step, fullgraph=True)(query, key, value, cache, table, lens)
    assert torch.equal(have, want)
    assert torch.equal(cache, twin)


def test_opcheck():
    case = next(c for c in ATTENTION if c.is_decode)
    tensors = on_device(attention_tensors(case), "cuda")
    options = common_options(case, "triton")
    arguments = operator_arguments(case, tensors, "triton")
    utils = (
        "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    )  # fmt: skip
    torch.library.opcheck(torch.ops.tq.attention.default, arguments, test_utils=utils)
    torch.library.opcheck(
        torch.ops.tq.dequantize.default,
        (*arguments[1:4], torch.float16, options),
        test_utils=utils,
    )
    key, value = torch.randn((2, 5, case.num_kv_heads, case.head_dim), device="cuda")
    torch.library.opcheck(
        torch.ops.tq.store.default,
        (key, value, tensors["cache"].clone(), torch.arange(5, device="cuda"), options),
        test_utils=utils,
    )


def test_first_calls_from_many_threads():
    case = AttentionCase(QuantConfig.preset("2bit"), 64, 16, group=5, dtype="float16", seed=77)
    tensors = on_device(attention_tensors(case), "cuda")
    results: list[torch.Tensor] = []

    def call():
        with torch.cuda.stream(torch.cuda.Stream()):
            results.append(tq_torch.attention(**tensors, **case.options, backend="triton"))
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(torch.equal(results[0], x) for x in results)


def test_two_threads_on_two_streams():
    """Different calls at once, each again and again: the bits that they have alone."""
    cases = [
        AttentionCase(FLAGSHIP, 128, 64, batch=((1, 5000), (1, 300)), dtype="float16", seed=1),
        AttentionCase(FLAGSHIP, 128, 64, batch=((40, 700), (2, 90)), dtype="float16", seed=2),
    ]
    inputs = [on_device(attention_tensors(case), "cuda") for case in cases]

    def call(i):
        return tq_torch.attention(**inputs[i], **cases[i].options, backend="triton")

    want = [call(i) for i in range(2)]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def repeat(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [call(i) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        wrong.extend(i for result in results if not torch.equal(result, want[i]))

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_graphs_at_once():
    """Replayed on two streams, neither writes what the other reads."""
    layout = CacheLayout(FLAGSHIP, 2, 128, 16)
    codec = Codec(layout.config, 128)
    made, want = [], []
    for n in (3, 64):
        query, cache, table, lens = _decode_inputs(n, 500, 600, layout, codec)

        def step(query=query, cache=cache, table=table, lens=lens):
            return tq_torch.decode_attention(
                query, cache, table, lens, layout=layout, codec=codec, backend="triton"
            )

        want.append(step())
        made.append(_capture(step))
    streams = [torch.cuda.Stream() for _ in made]
    torch.cuda.synchronize()
    for _ in range(20):
        for (graph, _), stream in zip(made, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, out), right in zip(made, want, strict=True):
        assert torch.equal(out, right)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one():
    case = AttentionCase(FLAGSHIP, 128, 64, batch=((1, 5000), (1, 300)), dtype="float16")
    results = []
    for device in ("cuda:0", "cuda:1"):
        tensors = on_device(attention_tensors(case), device)
        with torch.cuda.device(0):
            results.append(tq_torch.attention(**tensors, **case.options).cpu())
    assert torch.equal(*results)


def test_stale_memory_never_matters():
    """Scratch and unused cache bytes hold NaN before the call."""
    case = next(c for c in ATTENTION if c.sinks and not c.is_decode)
    want = check_attention(case, "triton", "cuda", num_kv_splits=7)
    junk = [torch.full((2**22,), float("nan"), device="cuda") for _ in range(16)]
    del junk
    have = check_attention(case, "triton", "cuda", num_kv_splits=7)
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))


def test_head_dims_that_the_kernels_refuse():
    layout = CacheLayout(FLAGSHIP, 2, 100, 16)
    codec = Codec(layout.config, 100)
    cache = tq_torch.empty_cache(layout, 2, device="cuda")
    key, value = torch.randn((2, 3, 2, 100), device="cuda")
    slots = torch.arange(3, device="cuda")
    with pytest.raises(ValueError, match="multiple of 8, not 100; backend='native' takes any"):
        tq_torch.store(key, value, cache, slots, layout=layout, codec=codec, backend="triton")
    tq_torch.store(key, value, cache, slots, layout=layout, codec=codec)


def test_the_kernels_are_compiled():
    assert not kernels.interpreted()
    assert np.isfinite(to_float64(attention(ATTENTION[0])[0].cpu())).all()
