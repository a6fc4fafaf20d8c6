"""The custom operators: schemas, fakes, and what torch.compile makes of the public functions."""

from __future__ import annotations

import gc
import shutil
import warnings
from dataclasses import replace

import pytest
import torch

import tq_torch
from tests.cases import ATTENTION_CASES, STORE_CASES, assert_close, make_store_inputs
from tests.torch.helpers import (
    attention_tensors,
    common_options,
    operator_arguments,
    tensor,
    to_float64,
)
from tq_core import CacheLayout, Codec, QuantConfig
from tq_torch import ops

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
FULL = (*CHECKS, "test_aot_dispatch_dynamic")
DECODE = next(c for c in ATTENTION_CASES if c.is_decode)
FEATURES = next(c for c in ATTENTION_CASES if c.sinks and c.alibi and c.padding_rows)


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        # torch's own, of its tracing and of its compiler.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*(TF32|tf32|skipping cudagraphs).*")
        yield
    torch.compiler.reset()


@pytest.mark.parametrize("case, decode", [(DECODE, True), (DECODE, False), (FEATURES, False)])
def test_opcheck_attention(case, decode):
    arguments = operator_arguments(case, attention_tensors(case), "native", decode)
    torch.library.opcheck(torch.ops.tq.attention.default, arguments, test_utils=FULL)


def test_opcheck_store():
    case = STORE_CASES[0]
    inputs = make_store_inputs(case)
    key, value, cache, slots = (tensor(x) for x in inputs)
    arguments = (key, value, cache, slots, common_options(case, "native"))
    torch.library.opcheck(torch.ops.tq.store.default, arguments, test_utils=FULL)


def test_opcheck_dequantize():
    tensors = attention_tensors(DECODE)
    arguments = tuple(tensors[n] for n in ("cache", "block_table", "seq_lens"))
    arguments += (torch.float16, common_options(DECODE, "native"))
    torch.library.opcheck(torch.ops.tq.dequantize.default, arguments, test_utils=FULL)


def step_inputs(num_tokens, layout):
    generator = torch.Generator().manual_seed(num_tokens)
    heads, dim = layout.num_kv_heads, layout.head_dim
    key, value = torch.randn((2, num_tokens, heads, dim), generator=generator)
    query = torch.randn((num_tokens, 2 * heads, dim), generator=generator)
    pages = -(-num_tokens // layout.page_size)
    table = torch.randperm(pages + 2, generator=generator)[:pages].int()[None]
    token = torch.arange(num_tokens)
    slots = table[0, token // layout.page_size] * layout.page_size + token % layout.page_size
    cache = tq_torch.empty_cache(layout, pages + 2)
    cache.fill_(255)
    return query, key, value, cache, slots, table


@pytest.mark.parametrize("preset", ["4bit", "k8v4"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_step_is_the_eager_one(preset, dynamic):
    layout = CacheLayout(QuantConfig.preset(preset), 2, 64, 16)
    codec = Codec(layout.config, 64)

    def step(query, key, value, cache, slots, table):
        tq_torch.store(key, value, cache, slots, layout=layout, codec=codec)
        lens = torch.full((1,), query.shape[0], dtype=torch.int32)
        rows = torch.tensor([0, query.shape[0]], dtype=torch.int32)
        out, lse = tq_torch.attention(
            query, cache, table, lens, rows, layout=layout, codec=codec, softcap=20.0,
            return_lse=True,
        )  # fmt: skip
        return 2 * out, lse

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for num_tokens in (20, 33, 40):
        inputs = step_inputs(num_tokens, layout)
        clone = [x.clone() for x in inputs]
        want = step(*clone)
        have = compiled(*inputs)
        assert torch.equal(inputs[3], clone[3])
        assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))


def test_compiled_decode_and_dequantize():
    arrays = attention_tensors(DECODE)
    del arrays["query_start_loc"]

    def step(**arrays):
        dense = tq_torch.dequantize(
            *(arrays[n] for n in ("cache", "block_table", "seq_lens")),
            layout=layout, codec=codec, dtype=torch.float32,
        )  # fmt: skip
        return tq_torch.decode_attention(
            **arrays, layout=layout, codec=codec, return_lse=True
        ), dense

    layout, codec = DECODE.layout, DECODE.codec
    (out, lse), dense = torch.compile(step, fullgraph=True, backend="aot_eager")(**arrays)
    assert_close(to_float64(out), lse.numpy(), DECODE)
    (_, want) = step(**arrays)
    assert all(torch.equal(a, b) for a, b in zip(dense, want, strict=True))


@pytest.mark.parametrize("name", ["sliding_window", "num_kv_splits"])
@pytest.mark.parametrize("dynamic", [True, None])
def test_compiled_options_may_be_arguments(name, dynamic):
    tensors = attention_tensors(DECODE)
    layout, codec = DECODE.layout, DECODE.codec

    def call(number):
        return tq_torch.attention(**tensors, layout=layout, codec=codec, **{name: number})

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="eager")
    for number in (3, 5):
        assert torch.equal(compiled(number), call(number))


def test_a_compiled_call_refuses_what_an_eager_one_does():
    layout = CacheLayout(QuantConfig.preset("4bit"), 2, 64, 16)
    codec = Codec(layout.config, 64)
    _, key, value, cache, slots, _ = step_inputs(20, layout)

    def store(key, value, cache, slots):
        tq_torch.store(key, value, cache, slots, layout=layout, codec=codec)

    with pytest.raises(Exception, match="value: expected shape"):
        torch.compile(store, fullgraph=True, backend="aot_eager")(key, value[:5], cache, slots)


def test_fakes_have_the_shapes_of_the_results():
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensors = attention_tensors(DECODE)
    call = {**tensors, **DECODE.options, "return_lse": True}
    want = tq_torch.attention(**call)
    with FakeTensorMode() as mode:
        fakes = {
            n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in call.items()
        }
        have = tq_torch.attention(**fakes)
    for a, b in zip(have, want, strict=True):
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)


def test_a_codec_is_found_as_long_as_an_equal_one_lives():
    config = QuantConfig.preset("4bit")
    first, second = (Codec(config, 64, seed=12345) for _ in range(2))
    digest = first.digest
    assert ops.codec_of(digest) == first
    del first
    gc.collect()
    assert ops.codec_of(digest) is second
    del second
    gc.collect()
    with pytest.raises(LookupError, match=f"no Codec with digest {digest[:12]} is alive"):
        ops.codec_of(digest)


def test_inductor_compiles_a_step():
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler on CPUs")
    layout = CacheLayout(QuantConfig.preset("4bit"), 2, 64, 16)
    codec = Codec(layout.config, 64)

    def step(query, key, value, cache, slots, table, scale):
        tq_torch.store(key + 0, 2 * value, cache, slots, layout=layout, codec=codec)
        lens = torch.full((1,), query.shape[0], dtype=torch.int32)
        where = {"layout": layout, "codec": codec}
        return 2 * tq_torch.decode_attention(query[-1:], cache, table, lens, scale=scale, **where)

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for num_tokens, scale in ((20, 0.1), (33, 0.3)):
        inputs = step_inputs(num_tokens, layout)
        clone = [x.clone() for x in inputs]
        assert torch.allclose(compiled(*inputs, scale), step(*clone, scale), rtol=1e-5, atol=1e-5)
        assert torch.equal(inputs[3], clone[3])


def test_compiled_code_serves_another_codec_after_another_trace():
    layout = CacheLayout(QuantConfig.preset("4bit"), 2, 64, 16)
    _, key, value, cache, slots, _ = step_inputs(20, layout)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def store(key, value, cache, slots, codec):
        tq_torch.store(key, value, cache, slots, layout=layout, codec=codec)

    for seed in range(2):
        codec = Codec(layout.config, 64, seed=seed)
        want = cache.clone()
        tq_torch.store(key, value, want, slots, layout=layout, codec=codec)
        store(key, value, cache, slots, codec)
        assert torch.equal(cache, want)


def test_compiled_hints_may_be_sizes_of_the_batch():
    layout = CacheLayout(QuantConfig.preset("4bit"), 2, 64, 16)
    codec = Codec(layout.config, 64)

    def attend(query, cache, table):
        lens = torch.full((1,), query.shape[0], dtype=torch.int32)
        rows = torch.tensor([0, query.shape[0]], dtype=torch.int32)
        return tq_torch.attention(
            query, cache, table, lens, rows, layout=layout, codec=codec,
            max_query_len=query.shape[0], max_seq_len=query.shape[0] + 1,
        )  # fmt: skip

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (20, 33, 40):
        query, key, value, cache, slots, table = step_inputs(num_tokens, layout)
        tq_torch.store(key, value, cache, slots, layout=layout, codec=codec)
        assert torch.equal(compiled(query, cache, table), attend(query, cache, table))


def test_compiled_into_a_given_out_of_any_strides():
    tensors = attention_tensors(FEATURES)
    shape = tensors["query"].shape

    options = FEATURES.options

    def attend(out, **tensors):
        return tq_torch.attention(**tensors, **options, out=out, return_lse=True)

    out = torch.full(shape[::-1], float("nan"), dtype=tensors["query"].dtype).permute(2, 1, 0)
    strides = out.stride()
    _, lse = torch.compile(attend, fullgraph=True, backend="aot_eager")(out, **tensors)
    assert out.stride() == strides
    assert_close(to_float64(out), lse.numpy(), FEATURES)


def test_the_default_device_of_torch_does_not_matter():
    tensors = attention_tensors(DECODE)
    with torch.device("meta"):
        out, lse = tq_torch.attention(**tensors, **DECODE.options, return_lse=True)
    assert_close(to_float64(out), lse.numpy(), DECODE)


def test_calls_keep_no_codec_alive():
    """What is prepared for a signature of a call holds plans, not codecs."""
    case = replace(DECODE, seed=4321)
    codec = Codec(case.config, case.head_dim, seed=4321)
    digest = codec.digest
    arguments = operator_arguments(DECODE, attention_tensors(DECODE), "native")
    options = arguments[-1].replace(DECODE.codec.digest, digest)
    query, cache, table, lens, starts, out = (ops._signature(x) for x in arguments[:6])
    arrays = (query, cache, table, lens, starts, None, None, out)
    ops._prepare_attention(arrays, 16, None, None, None, options)
    del codec
    gc.collect()
    with pytest.raises(LookupError, match="is alive"):
        ops.codec_of(digest)
