"""What a server needs: kernels that are compiled before, and caches that errors leave whole."""

from __future__ import annotations

import doctest
import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="its plans are compiled there")

import tq_torch
from tests.kernels.plans import DEVICES
from tests.torch.test_launch import Compiler
from tq_core import PRESETS, CacheLayout, Codec, QuantConfig, dispatch, kernels
from tq_core.dispatch import Device
from tq_torch import launch, ops, serving

LAYOUT = CacheLayout(QuantConfig.preset("4bit"), 8, 128, 16)
WHAT = {"layout": LAYOUT, "codec": Codec(LAYOUT.config, 128)}


class Triton:
    """In place of the kernels: notes what Triton would have to compile."""

    def __init__(self):
        self.compiled = set()

    def kernel(self, name):
        def find(*arguments, **options):
            kinds = [
                (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, torch.Tensor) else int
                for x in arguments
            ]
            self.compiled.add((name, *kinds, *sorted(options.items())))
            return Compiler.Compiled(SimpleNamespace(launched=[]))

        return type("Kernel", (), {"arg_names": (), "__getitem__": lambda self, grid: find})()


@pytest.fixture
def triton(monkeypatch):
    """Plans of an H200, launched nowhere."""
    made = Triton()
    loaded = SimpleNamespace(**{name: made.kernel(name) for name in kernels.KERNELS})
    monkeypatch.setattr(launch.kernels, "load", lambda: loaded)
    monkeypatch.setattr(launch.kernels, "current_stream", lambda _: 0)
    monkeypatch.setattr(launch, "device_of", lambda _: DEVICES["sm_90"])
    monkeypatch.setattr(ops, "_choose", lambda *_: launch)
    prepare = (ops._prepare_store, ops._prepare_attention, ops._prepare_dequantize)
    for cached in prepare:
        cached.cache_clear()
    yield made
    for cached in prepare:
        cached.cache_clear()


def serve(cache, num_seqs, lens, rows=None, **options):
    """A call of a server, with the hints that vLLM gives."""
    lens = torch.tensor(lens, dtype=torch.int32)
    table = torch.zeros(num_seqs, 512, dtype=torch.int32)
    count = num_seqs if rows is None else sum(rows)
    query = torch.zeros(count, 32, 128, dtype=torch.bfloat16)
    key = torch.zeros(count, 8, 128, dtype=torch.bfloat16)
    slots = torch.arange(count)
    tq_torch.store(key, key, cache, slots, **WHAT)
    options |= {**WHAT, "max_seq_len": int(lens.max())}
    if rows is None:
        tq_torch.decode_attention(query, cache, table, lens, **options)
        return
    starts = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    tq_torch.attention(query, cache, table, lens, starts, max_query_len=max(rows), **options)


SIZES = {"num_query_heads": 32, "dtype": torch.bfloat16, "max_pages": 512}
LENGTHS = sorted({n * 2**i for i in range(6, 12) for n in (2, 3)} | {1, 64, 8192})


def test_no_decode_compiles_after_a_warm_up(triton):
    cache = tq_torch.empty_cache(LAYOUT, 64)
    batches = {"decode_batches": range(1, 65), "max_seq_lens": LENGTHS}
    tq_torch.warmup(cache, **WHAT, **SIZES, **batches)
    before = set(triton.compiled)
    names = {name for name, *_ in before}
    assert names == {"store", "transform_query", "attention", "merge"}
    numbers = random.Random(1)
    for _ in range(150):
        num_seqs = numbers.randint(1, 64)
        serve(cache, num_seqs, [numbers.randint(1, 8192) for _ in range(num_seqs)])
    assert triton.compiled == before
    serve(cache, 3, [9, 8, 7], sliding_window=100)
    assert len(triton.compiled) > len(before)


def test_no_chunk_compiles_after_a_warm_up(triton):
    """With numbers of rows where tiles change, and mixes of long chunks and short ones."""
    cache = tq_torch.empty_cache(LAYOUT, 64)
    chunks = {
        (num_seqs, rows + (num_seqs - 1) * others, rows)
        for num_seqs in range(1, 5)
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        for others in (1, 2, 8, 9, 16, 32, 64, 128, 256)
        if others <= rows
    }
    lengths = [n for n in LENGTHS if n <= 1024]
    what = {**WHAT, **SIZES, "softcap": 30.0}
    tq_torch.warmup(cache, **what, chunk_batches=sorted(chunks), max_seq_lens=lengths)
    before = set(triton.compiled)
    numbers = random.Random(2)
    for _ in range(100):
        num_seqs = numbers.randint(1, 4)
        counts = [numbers.randint(1, numbers.choice((1, 8, 256))) for _ in range(num_seqs)]
        lens = [n + numbers.randint(0, 700) for n in counts]
        serve(cache, num_seqs, lens, counts, softcap=30.0)
    assert triton.compiled == before


def test_a_warm_up_leaves_the_cache_alone():
    cache = torch.randint(0, 256, LAYOUT.shape(4), dtype=torch.uint8)
    before = cache.clone()
    options = {"sinks": torch.zeros(32), "return_lse": True, "check": True}
    for slot_dtype in (torch.int32, torch.int64):
        tq_torch.warmup(
            cache, **WHAT, **SIZES, decode_batches=[1, 3], chunk_batches=[(2, 5, None)],
            slot_dtype=slot_dtype, **options,
        )  # fmt: skip
    assert torch.equal(cache, before)


def test_wrong_arguments_are_refused_by_the_calls():
    cache = tq_torch.empty_cache(LAYOUT, 4)
    with pytest.raises(ValueError, match=r"^softcap: expected a positive"):
        tq_torch.warmup(cache, **WHAT, **SIZES, decode_batches=[1], softcap=-1.0)
    with pytest.raises(ValueError, match=r"^query: expected 8 KV heads times"):
        tq_torch.warmup(cache, **WHAT, **SIZES | {"num_query_heads": 9}, decode_batches=[1])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_small_gpu_gets_smaller_tiles_or_a_reason(preset, triton, monkeypatch):
    """At the largest head_dim, where the tiles of a large one do not fit."""
    layout = CacheLayout(QuantConfig.preset(preset), 2, 576, 16)
    arrays = (
        torch.zeros(2, 32, 576, dtype=torch.bfloat16), tq_torch.empty_cache(layout, 4),
        torch.zeros(2, 64, dtype=torch.int32), torch.zeros(2, dtype=torch.int32),
    )  # fmt: skip
    what = {"layout": layout, "codec": Codec(layout.config, 576)}
    bytes_of = {}
    for shared in (232448, 101376, 49152):
        device = Device("cuda", 86, 84, shared)
        monkeypatch.setattr(launch, "device_of", lambda _, device=device: device)
        ops._prepare_attention.cache_clear()
        triton.compiled.clear()
        tq_torch.decode_attention(*arrays, **what)
        (options,) = (
            dict(x for x in rest if isinstance(x, tuple) and isinstance(x[0], str))
            for name, *rest in triton.compiled
            if name == "attention"
        )
        tile = (options["BLOCK_N"], options["BLOCK_T"], options["num_stages"])
        bytes_of[shared] = dispatch._shared(options, *tile)
    assert all(needed <= shared for shared, needed in bytes_of.items())
    monkeypatch.setattr(launch, "device_of", lambda _: Device("cuda", 86, 84, 8192))
    ops._prepare_attention.cache_clear()
    triton.compiled.clear()
    with pytest.raises(ValueError, match=r"^plan: .* bytes of shared memory, a program has 8192"):
        tq_torch.decode_attention(*arrays, **what)
    assert not triton.compiled


DEQUANTIZE = [
    ("4bit", False, 166912, 32),
    ("4bit", False, 232448, 64),
    ("3bit_hq", False, 166912, 64),
    ("3bit_hq", False, 139264, 16),
    ("k8v4", False, 8192, 64),
    ("k8v4", True, 232448, 32),
]


def dequantize_arguments(preset, transforms, shared, monkeypatch):
    """Of the largest head_dim, on a device with ``shared`` bytes of shared memory."""
    layout = CacheLayout(QuantConfig.preset(preset), 2, 576, 16)
    matrix = 2 * torch.eye(576).expand(2, 576, 576).numpy() if transforms else None
    monkeypatch.setattr(launch, "device_of", lambda _: Device("cuda", 86, 84, shared))
    ops._prepare_dequantize.cache_clear()
    return {
        "cache": tq_torch.empty_cache(layout, 4),
        "block_table": torch.zeros(2, 4, dtype=torch.int32),
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        "layout": layout,
        "codec": Codec(layout.config, 576, key_transform=matrix),
        "dtype": torch.float16,
    }


@pytest.mark.parametrize("preset, transforms, shared, block_o", DEQUANTIZE)
def test_a_small_gpu_dequantizes_with_smaller_tiles(
    preset, transforms, shared, block_o, triton, monkeypatch
):
    tq_torch.dequantize(**dequantize_arguments(preset, transforms, shared, monkeypatch))
    ((name, *rest),) = triton.compiled
    assert name == "dequantize"
    assert ("BLOCK_O", block_o) in rest


def test_a_gpu_that_cannot_dequantize_says_so(triton, monkeypatch):
    arguments = dequantize_arguments("4bit", False, 101376, monkeypatch)
    message = (
        r"^dequantize: .* about 147456 bytes .* head_dim 576, .* 101376 here; backend='native'"
    )
    with pytest.raises(ValueError, match=message):
        tq_torch.dequantize(**arguments)
    assert not triton.compiled


def fail(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 MiB")


def test_no_memory_for_scratch_leaves_the_cache_and_the_next_call_whole(triton, monkeypatch):
    cache = torch.randint(0, 256, LAYOUT.shape(64), dtype=torch.uint8)
    before, out = cache.clone(), torch.full((2, 32, 128), 7.0, dtype=torch.bfloat16)
    query, table = torch.zeros_like(out), torch.zeros(2, 512, dtype=torch.int32)
    lens = torch.tensor([3000, 5], dtype=torch.int32)
    with monkeypatch.context() as patched:
        patched.setattr(launch.torch, "empty", fail)
        with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory"):
            tq_torch.decode_attention(query, cache, table, lens, **WHAT, out=out)
    assert not triton.compiled  # no kernel ran
    assert torch.equal(cache, before)
    assert (out == 7).all()
    tq_torch.decode_attention(query, cache, table, lens, **WHAT, out=out)
    assert triton.compiled


def test_examples_run():
    result = doctest.testmod(serving)
    assert result.attempted > 3
    assert not result.failed
