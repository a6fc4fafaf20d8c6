"""What the public functions refuse, and how they say it."""

from __future__ import annotations

import pytest
import torch

import tq_torch
from tests.cases import PRESET_CONFIGS
from tq_core import CacheLayout, Codec

LAYOUT = CacheLayout(PRESET_CONFIGS["4bit"], 2, 64, 16)
CODEC = Codec(LAYOUT.config, 64)
OTHER = PRESET_CONFIGS["3bit"]
I32 = torch.int32


def store_arguments():
    return {
        "key": torch.ones(3, 2, 64),
        "value": torch.ones(3, 2, 64),
        "cache": tq_torch.empty_cache(LAYOUT, 4),
        "slot_mapping": torch.arange(3),
        "layout": LAYOUT,
        "codec": CODEC,
    }


def attention_arguments():
    return {
        "query": torch.ones(3, 8, 64),
        "cache": tq_torch.empty_cache(LAYOUT, 4).zero_(),
        "block_table": torch.zeros(2, 2, dtype=I32),
        "seq_lens": torch.full((2,), 5, dtype=I32),
        "query_start_loc": torch.tensor([0, 1, 3], dtype=I32),
        "layout": LAYOUT,
        "codec": CODEC,
    }


STORE = [
    ({"key": torch.ones(3, 2, 65)}, ValueError, "key: expected shape"),
    ({"key": torch.ones(3, 3, 64)}, ValueError, "key: expected shape"),
    ({"key": torch.ones(3, 2, 64, dtype=torch.float64)}, TypeError, "key: expected dtype"),
    ({"key": [[1.0]]}, TypeError, "key: expected a torch.Tensor"),
    ({"value": torch.ones(2, 2, 64)}, ValueError, "value: expected shape"),
    ({"slot_mapping": torch.arange(4)}, ValueError, "slot_mapping: expected shape"),
    ({"slot_mapping": torch.ones(3)}, TypeError, "slot_mapping: expected dtype"),
    ({"slot_mapping": torch.tensor([0, 1, 64])}, ValueError, "slot_mapping: expected slots below"),
    (
        {"cache": torch.zeros(4, 16, 2, 128, dtype=torch.float16)},
        ValueError,
        "cache: expected uint8",
    ),
    ({"cache": torch.zeros(4, 16, 2, 69, dtype=torch.uint8)}, ValueError, "cache: expected uint8"),
    (
        {"cache": torch.zeros(4, 2, 16, 70, dtype=torch.uint8).transpose(1, 2)},
        ValueError,
        "cache: expected pages that are dense",
    ),
    (
        {"cache": torch.zeros(1, 16, 2, 70, dtype=torch.uint8).expand(4, -1, -1, -1)},
        ValueError,
        "cache: expected memory of its own",
    ),
    (
        {"cache": torch.zeros(4000, dtype=torch.uint8).as_strided((3, 16, 2, 70), (2, 140, 70, 1))},
        ValueError,
        "cache: expected memory of its own",
    ),
    ({"codec": Codec(OTHER, 64)}, ValueError, "codec: expected the layout's"),
    ({"codec": Codec(LAYOUT.config, 72)}, ValueError, "codec: expected the layout's head_dim"),
    ({"layout": None}, TypeError, "layout: expected a CacheLayout"),
    ({"backend": "cuda"}, ValueError, "backend: expected one of"),
    ({"backend": "pallas"}, ValueError, "backend: 'pallas' cannot serve"),
    ({"backend": "triton"}, ValueError, "backend: 'triton' cannot serve"),
]
ATTENTION = [
    ({"query": torch.ones(3, 7, 64)}, ValueError, "query: expected 2 KV heads times a group"),
    ({"query": torch.ones(3, 258, 64)}, ValueError, "query: expected 2 KV heads times a group"),
    ({"query": torch.ones(3, 8, 32)}, ValueError, "query: expected shape"),
    ({"query": torch.ones(3, 8, 64, dtype=torch.int32)}, TypeError, "query: expected dtype"),
    ({"block_table": torch.zeros(2, 2).long()}, TypeError, "block_table: expected dtype int32"),
    ({"block_table": torch.zeros(3, 2, dtype=I32)}, ValueError, "block_table: expected shape"),
    ({"seq_lens": torch.zeros(2)}, TypeError, "seq_lens: expected dtype int32"),
    ({"query_start_loc": torch.zeros(2, dtype=I32)}, ValueError, "query_start_loc: expected shape"),
    (
        {"query_start_loc": torch.tensor([0, 3, 1]).int()},
        ValueError,
        "query_start_loc: expected asc",
    ),
    ({"seq_lens": torch.tensor([5, 33]).int()}, ValueError, "seq_lens"),
    ({"block_table": torch.full((2, 2), 4).int()}, ValueError, "block_table"),
    ({"sinks": torch.zeros(2)}, ValueError, "sinks: expected shape"),
    ({"sinks": torch.zeros(8).half()}, TypeError, "sinks: expected dtype float32"),
    ({"alibi_slopes": torch.zeros(9)}, ValueError, "alibi_slopes: expected shape"),
    ({"scale": float("nan")}, ValueError, "scale: expected a finite number"),
    ({"scale": torch.ones(1)}, TypeError, "scale: expected a number"),
    ({"softcap": 0.0}, ValueError, "softcap: expected a positive"),
    ({"sliding_window": 0}, ValueError, "sliding_window: expected at least 1"),
    ({"sliding_window": 1.5}, TypeError, "sliding_window: expected an int"),
    ({"causal": 1}, TypeError, "causal: expected a bool"),
    ({"return_lse": 1}, TypeError, "return_lse: expected a bool"),
    ({"max_query_len": -1}, ValueError, "max_query_len: expected at least 0"),
    ({"num_kv_splits": 0}, ValueError, "num_kv_splits: expected 1 to 256"),
    ({"out": torch.ones(3, 8, 32)}, ValueError, "out: expected shape"),
    ({"out": torch.ones(3, 8, 64).half()}, TypeError, "out: expected dtype float32"),
    ({"out": torch.ones(1, 8, 64).expand(3, 8, 64)}, ValueError, "out: expected memory of its own"),
    ({"out": [0.0]}, TypeError, "out: expected a torch.Tensor, got list"),
    ({"query": torch.ones(3, 8, 64).to_sparse()}, TypeError, "query: expected a dense"),
    ({"seq_lens": torch.tensor([5, 5], dtype=I32, device="meta")}, ValueError, "device: expected"),
    ({"query_start_loc": torch.tensor([0, 1, 4]).int()}, ValueError, "query_start_loc: expected r"),
    ({"query_start_loc": None}, TypeError, "query_start_loc: expected a torch.Tensor"),
    ({"backend": "interpret2"}, ValueError, "backend: expected one of"),
    ({"backend": 1}, ValueError, "backend: expected one of"),
    ({"backend": "triton"}, ValueError, "backend: 'triton' cannot serve .* not on cpu"),
    ({"backend": "interpret"}, ValueError, "backend: 'interpret' cannot serve .*Triton"),
    ({"plan": {"block_t": 64}}, ValueError, "plan: the native backend launches no kernels"),
    ({"plan": {"deterministic": "batch"}}, ValueError, "native backend .* takes no plan"),
    (
        {"plan": {"deterministic": True}},
        ValueError,
        "expected deterministic to be 'batch', got True",
    ),
    ({"plan": 64}, TypeError, "plan: expected a mapping of names to ints"),
    ({"plan": {"block_t": 64.0}}, TypeError, "plan: expected block_t to be an int, got 64.0"),
    ({"plan": {"num_splits": True}}, TypeError, "plan: expected num_splits to be an int, got True"),
    ({"plan": {3: 64}}, TypeError, "plan: expected names of overrides, got 3"),
    ({"plan": {"block_t=64,num_warps": 4}}, TypeError, "plan: expected names of overrides"),
    ({"plan": {"num_splits": 2}, "num_kv_splits": 3}, ValueError, "plan: num_splits=2 and num_kv_"),
]


@pytest.mark.parametrize(("change", "error", "message"), STORE, ids=lambda x: str(x)[:40])
def test_store(change, error, message):
    arguments = store_arguments()
    before = arguments["cache"].clone()
    with pytest.raises(error, match=message):
        tq_torch.store(**{**arguments, **change})
    assert torch.equal(arguments["cache"], before)


@pytest.mark.parametrize(("change", "error", "message"), ATTENTION, ids=lambda x: str(x)[:40])
def test_attention(change, error, message):
    with pytest.raises(error, match=message):
        tq_torch.attention(**{**attention_arguments(), **change})


def test_decode_attention_wants_one_row_a_sequence():
    arguments = attention_arguments()
    del arguments["query_start_loc"]
    with pytest.raises(ValueError, match="query: decode_attention expects one row"):
        tq_torch.decode_attention(**arguments)


def test_dequantize():
    arguments = {n: attention_arguments()[n] for n in ("cache", "block_table", "seq_lens")}
    with pytest.raises(ValueError, match="dtype: expected one of"):
        tq_torch.dequantize(**arguments, layout=LAYOUT, codec=CODEC, dtype=torch.float64)
    with pytest.raises(TypeError, match="dtype"):
        tq_torch.dequantize(**arguments, layout=LAYOUT, codec=CODEC, dtype="float32")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("4bit", 4), TypeError, "layout: expected a CacheLayout"),
        ((LAYOUT, 4.0), TypeError, "num_pages: expected an int"),
        ((LAYOUT, True), TypeError, "num_pages: expected an int"),
        ((LAYOUT, -1), ValueError, "num_pages: expected at least 0"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_empty_cache(arguments, error, message):
    with pytest.raises(error, match=message):
        tq_torch.empty_cache(*arguments)


def test_merge():
    out, lse = torch.ones(3, 8, 64), torch.zeros(3, 8)
    with pytest.raises(ValueError, match="out_b: expected shape"):
        tq_torch.merge_attention_states(out, lse, out[:2], lse)
    with pytest.raises(TypeError, match="lse_b: expected dtype float32"):
        tq_torch.merge_attention_states(out, lse, out, lse.half())


@pytest.mark.parametrize("raised", [AssertionError, NotImplementedError, ModuleNotFoundError])
@pytest.mark.parametrize("device", ["cuda", torch.device("cuda", 1)], ids=str)
def test_a_device_that_the_build_lacks_is_named(raised, device, monkeypatch):
    def empty(*args, **kwargs):
        raise raised("Torch not compiled with CUDA enabled. Long advice")

    monkeypatch.setattr(torch, "empty", empty)
    message = rf"^device: torch .* cannot allocate on '{device}': Torch not compiled with CUDA \w+$"
    with pytest.raises(RuntimeError, match=message) as caught:
        tq_torch.empty_cache(LAYOUT, 4, device)
    assert isinstance(caught.value.__cause__, raised)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_a_runtime_error():
    with pytest.raises(RuntimeError, match=r"CUDA|NVIDIA"):
        tq_torch.empty_cache(LAYOUT, 4, "cuda")
