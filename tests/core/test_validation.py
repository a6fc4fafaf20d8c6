from __future__ import annotations

import re

import numpy as np
import pytest

from tq_core import CacheLayout, Codec, QuantConfig
from tq_core.validation import (
    ArraySpec,
    check_attention,
    check_codec,
    check_dequantize,
    check_merge,
    check_store,
)

CONFIG = QuantConfig.preset("4bit")
LAYOUT = CacheLayout(CONFIG, 2, 64, 16)  # slots of 70 bytes
CODEC = Codec(CONFIG, 64)
CACHE = ArraySpec((10, 16, 2, 70), "uint8")
BOTH = {"layout": LAYOUT, "codec": CODEC}


def f16(*shape):
    return ArraySpec(shape, "float16")


def f32(*shape):
    return ArraySpec(shape, "float32")


def i32(*shape):
    return ArraySpec(shape, "int32")


STORE = {
    "key": f16(5, 2, 64),
    "value": f16(5, 2, 64),
    "cache": CACHE,
    "slot_mapping": ArraySpec((5,), "int64"),
    **BOTH,
}
ATTENTION = {
    "query": f16(7, 8, 64),
    "cache": CACHE,
    "block_table": i32(3, 6),
    "seq_lens": i32(3),
    "query_start_loc": i32(4),
    **BOTH,
}
DECODE = {**ATTENTION, "query": f16(3, 8, 64), "query_start_loc": None}
DEQUANTIZE = {
    "cache": CACHE,
    "block_table": i32(3, 6),
    "seq_lens": i32(3),
    "dtype": "float32",
    **BOTH,
}
MERGE = {"out_a": f16(5, 8, 64), "lse_a": f32(5, 8), "out_b": f16(5, 8, 64), "lse_b": f32(5, 8)}


def refusal(check, good, changes, error, *parts):
    """``check`` of ``good`` with ``changes`` raises, and the message has all the parts."""
    check(**good)
    with pytest.raises(error) as caught:
        check(**{**good, **changes})
    for part in parts:
        assert re.search(part, str(caught.value)), f"{part!r} not in {caught.value}"


OTHER = QuantConfig.preset("3bit")
PER_HEAD = Codec(CONFIG, 64, key_offset=np.zeros((3, 64)))
CODEC_REFUSALS = [
    ({"layout": CONFIG}, TypeError, "^layout: expected a CacheLayout, got QuantConfig"),
    ({"codec": CONFIG}, TypeError, "^codec: expected a Codec, got QuantConfig"),
    ({"codec": None}, TypeError, "^codec: expected a Codec, got NoneType"),
    ({"codec": Codec(OTHER, 64)}, ValueError, "^codec: expected the layout's .*mse4.* got .*mse3"),
    ({"codec": Codec(CONFIG, 72)}, ValueError, "^codec: expected .* head_dim 64, got 72"),
    ({"codec": PER_HEAD}, ValueError, "^codec: expected .* 2 KV heads or one for all, got 3"),
]


@pytest.mark.parametrize("changes, error, message", CODEC_REFUSALS)
def test_codec_refusals(changes, error, message):
    refusal(check_codec, BOTH, changes, error, message)
    for check, good in (
        (check_store, STORE),
        (check_attention, ATTENTION),
        (check_attention, DECODE),
        (check_dequantize, DEQUANTIZE),
    ):
        refusal(check, good, changes, error, message)


def test_a_codec_of_one_array_for_all_heads_or_of_the_right_heads_is_accepted():
    for heads in (1, 2):
        check_codec(LAYOUT, Codec(CONFIG, 64, key_offset=np.zeros((heads, 64))))


CACHE_REFUSALS = [
    (ArraySpec((10, 16, 2, 72), "uint8"), r"got uint8\[10, 16, 2, 72\]"),
    (ArraySpec((10, 16, 1, 70), "uint8"), r"got uint8\[10, 16, 1, 70\]"),
    (ArraySpec((10, 8, 2, 70), "uint8"), r"got uint8\[10, 8, 2, 70\]"),
    (ArraySpec((10, 2240), "uint8"), r"got uint8\[10, 2240\]"),
    (ArraySpec((2, 10, 16, 2, 64), "float16"), r"got float16\[2, 10, 16, 2, 64\]"),
    (ArraySpec((10, 16, 2, 70), "int8"), r"got int8\[10, 16, 2, 70\]"),
    (ArraySpec((10, 16, 2, 70), "uint8", (2240, 140, 1, 2)), r"strides .* got \(2240, 140, 1, 2\)"),
    (ArraySpec((10, 16, 2, 70), "uint8", (2560, 160, 80, 1)), "dense inside"),
]


@pytest.mark.parametrize("cache, message", CACHE_REFUSALS)
def test_cache_refusals(cache, message):
    for check, good in (
        (check_store, STORE),
        (check_attention, ATTENTION),
        (check_dequantize, DEQUANTIZE),
    ):
        refusal(check, good, {"cache": cache}, ValueError, "^cache: expected ", message)


def test_the_cache_message_says_how_to_get_one():
    changes = {"cache": f16(10, 16, 2, 64)}
    expected = r"uint8\[num_pages, 16, 2, 70\]"
    refusal(
        check_store, STORE, changes, ValueError, expected, "page_size, num_kv_heads", "empty_cache"
    )


@pytest.mark.parametrize(
    "cache",
    [
        ArraySpec((10, 16, 2, 70), "uint8", (2240, 140, 70, 1)),
        ArraySpec((10, 16, 2, 70), "uint8", (9999, 140, 70, 1)),  # a slice of a larger allocation
        ArraySpec((10, 16, 2, 70), "uint8", (0, 140, 70, 1)),
        ArraySpec((0, 16, 2, 70), "uint8", (1, 1, 1, 1)),
    ],
    ids=str,
)
def test_pages_may_be_strided(cache):
    check_store(**{**STORE, "cache": cache})


def test_the_stride_of_a_dimension_of_one_does_not_matter():
    layout = CacheLayout(CONFIG, 1, 64, 1)
    cache = ArraySpec((10, 1, 1, 70), "uint8", (70, 3, 7, 1))
    good = {**STORE, "key": f16(5, 1, 64), "value": f16(5, 1, 64), "layout": layout}
    check_store(**{**good, "cache": cache})


@pytest.mark.parametrize(
    "changes, error, parts",
    [
        (
            {"key": ArraySpec((5, 2, 64), "float64")},
            TypeError,
            ["^key: ", "float16", "got float64"],
        ),
        ({"key": i32(5, 2, 64)}, TypeError, ["^key: ", "bfloat16", "got int32"]),
        (
            {"value": ArraySpec((5, 2, 64), "uint8")},
            TypeError,
            ["^value: ", "float32", "got uint8"],
        ),
        ({"key": f16(5, 128)}, ValueError, ["^key: ", "num_kv_heads, head_dim", r"got \(5, 128\)"]),
        ({"key": f16(5, 2, 72)}, ValueError, ["^key: ", r"\(any, 2, 64\)", r"got \(5, 2, 72\)"]),
        ({"key": f16(5, 4, 64)}, ValueError, ["^key: ", r"\(any, 2, 64\)", r"got \(5, 4, 64\)"]),
        ({"value": f16(6, 2, 64)}, ValueError, ["^value: ", r"\(5, 2, 64\)", r"got \(6, 2, 64\)"]),
        ({"value": f16(5, 2, 32)}, ValueError, ["^value: ", r"\(5, 2, 64\)", r"got \(5, 2, 32\)"]),
        ({"slot_mapping": i32(4)}, ValueError, ["^slot_mapping: ", r"\(5\)", r"got \(4,\)"]),
        ({"slot_mapping": i32(5, 1)}, ValueError, ["^slot_mapping: ", r"got \(5, 1\)"]),
        ({"slot_mapping": f32(5)}, TypeError, ["^slot_mapping: ", "int32 or int64", "got float32"]),
    ],
)
def test_store_refusals(changes, error, parts):
    refusal(check_store, STORE, changes, error, *parts)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_store_takes_every_float_dtype_and_two_different_ones(dtype):
    check_store(**{**STORE, "key": ArraySpec((5, 2, 64), dtype)})
    check_store(**{**STORE, "value": ArraySpec((5, 2, 64), dtype)})


def on(spec, device):
    return spec._replace(device=device)


def test_arrays_without_a_device_are_not_compared():
    check_store(**{**STORE, "key": on(STORE["key"], "cuda:1")})


def test_arrays_on_two_devices_are_refused():
    cpu, gpu = "cpu", "cuda:0"
    placed = {n: on(a, cpu) if isinstance(a, ArraySpec) else a for n, a in STORE.items()}
    refusal(
        check_store,
        placed,
        {"cache": on(CACHE, gpu)},
        ValueError,
        "^device: expected all arrays on one device",
        "'cache': 'cuda:0'",
        "'key': 'cpu'",
    )
    placed = {n: on(a, gpu) if isinstance(a, ArraySpec) else a for n, a in ATTENTION.items()}
    for name in ("query", "cache", "block_table", "seq_lens", "query_start_loc"):
        changes = {name: on(ATTENTION[name], "cuda:1")}
        refusal(check_attention, placed, changes, ValueError, f"'{name}': 'cuda:1'")
    for name in ("sinks", "alibi_slopes"):
        refusal(check_attention, placed, {name: on(f32(8), cpu)}, ValueError, f"'{name}': 'cpu'")
    refusal(check_attention, placed, {"out": on(f16(7, 8, 64), cpu)}, ValueError, "'out': 'cpu'")
    placed = {n: on(a, gpu) if isinstance(a, ArraySpec) else a for n, a in DEQUANTIZE.items()}
    refusal(check_dequantize, placed, {"seq_lens": on(i32(3), cpu)}, ValueError, "^device: ")
    placed = {n: on(a, gpu) for n, a in MERGE.items()}
    refusal(check_merge, placed, {"lse_b": on(f32(5, 8), cpu)}, ValueError, "'lse_b': 'cpu'")


@pytest.mark.parametrize(
    "changes, error, parts",
    [
        ({"query": ArraySpec((7, 8, 64), "float64")}, TypeError, ["^query: ", "got float64"]),
        ({"query": f16(7, 512)}, ValueError, ["^query: ", "num_query_heads", r"got \(7, 512\)"]),
        ({"query": f16(7, 8, 128)}, ValueError, ["^query: ", r"64\)", r"got \(7, 8, 128\)"]),
        ({"query": f16(7, 7, 64)}, ValueError, ["^query: ", "2 KV heads", "got 7 query heads"]),
        ({"query": f16(7, 1, 64)}, ValueError, ["^query: ", "2 KV heads", "got 1 query heads"]),
        ({"query": f16(7, 0, 64)}, ValueError, ["^query: ", "got 0 query heads"]),
        ({"query": f16(7, 258, 64)}, ValueError, ["^query: ", "1 to 128", "got 258 query heads"]),
        ({"seq_lens": ArraySpec((3,), "int64")}, TypeError, ["^seq_lens: ", "int32", "got int64"]),
        ({"seq_lens": i32(3, 1)}, ValueError, ["^seq_lens: ", r"\[B\]", r"got \(3, 1\)"]),
        (
            {"block_table": i32(4, 6)},
            ValueError,
            ["^block_table: ", r"\(3, any\)", r"got \(4, 6\)"],
        ),
        ({"block_table": i32(18)}, ValueError, ["^block_table: ", "max_pages", r"got \(18,\)"]),
        (
            {"block_table": ArraySpec((3, 6), "int64")},
            TypeError,
            ["^block_table: ", "int32", "got int64"],
        ),
        ({"query_start_loc": i32(3)}, ValueError, ["^query_start_loc: ", r"\(4\)", r"got \(3,\)"]),
        (
            {"query_start_loc": ArraySpec((4,), "int64")},
            TypeError,
            ["^query_start_loc: ", "int32", "got int64"],
        ),
        ({"sinks": f32(2)}, ValueError, ["^sinks: ", r"\(8\)", r"got \(2,\)"]),
        ({"sinks": f16(8)}, TypeError, ["^sinks: ", "float32", "got float16"]),
        ({"alibi_slopes": f32(3, 8)}, ValueError, ["^alibi_slopes: ", r"\(8\)", r"got \(3, 8\)"]),
        ({"alibi_slopes": f16(8)}, TypeError, ["^alibi_slopes: ", "float32", "got float16"]),
        ({"out": f32(7, 8, 64)}, TypeError, ["^out: ", "float16", "got float32"]),
        ({"out": f16(7, 8, 32)}, ValueError, ["^out: ", r"\(7, 8, 64\)", r"got \(7, 8, 32\)"]),
        ({"causal": 1}, TypeError, ["^causal: expected a bool, got 1"]),
        ({"causal": None}, TypeError, ["^causal: expected a bool, got None"]),
        ({"scale": "auto"}, TypeError, ["^scale: expected a number, got str"]),
        ({"scale": True}, TypeError, ["^scale: expected a number, got bool"]),
        ({"scale": float("nan")}, ValueError, ["^scale: expected a finite number, got nan"]),
        ({"scale": float("inf")}, ValueError, ["^scale: expected a finite number, got inf"]),
        ({"softcap": 0.0}, ValueError, ["^softcap: expected a positive .* or None, got 0.0"]),
        ({"softcap": -5}, ValueError, ["^softcap: expected a positive .* or None, got -5"]),
        ({"softcap": float("inf")}, ValueError, ["^softcap: .* got inf"]),
        ({"sliding_window": 0}, ValueError, ["^sliding_window: .* at least 1, got 0", "no window"]),
        ({"sliding_window": -1}, ValueError, ["^sliding_window: .* at least 1, got -1"]),
        ({"sliding_window": 16.0}, TypeError, ["^sliding_window: expected an int .* got 16.0"]),
        ({"sliding_window": (16, 0)}, TypeError, [r"^sliding_window: expected .* got \(16, 0\)"]),
        ({"max_query_len": -1}, ValueError, ["^max_query_len: expected at least 0, got -1"]),
        ({"max_seq_len": 1.5}, TypeError, ["^max_seq_len: expected an int or None, got 1.5"]),
        ({"max_seq_len": -1}, ValueError, ["^max_seq_len: expected at least 0, got -1"]),
        ({"num_kv_splits": 0}, ValueError, ["^num_kv_splits: expected 1 to 256, got 0"]),
        ({"num_kv_splits": 257}, ValueError, ["^num_kv_splits: expected 1 to 256, got 257"]),
        ({"num_kv_splits": True}, TypeError, ["^num_kv_splits: expected an int .* got True"]),
    ],
)
def test_attention_refusals(changes, error, parts):
    refusal(check_attention, ATTENTION, changes, error, *parts)
    if not {"query", "query_start_loc", "out"} & set(changes):
        refusal(check_attention, DECODE, changes, error, *parts)


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"query": f16(4, 8, 64)}, ["^query: ", "3 sequences", "got 4 rows", r"attention\(\)"]),
        ({"query": f16(3, 7, 64)}, ["^query: ", "got 7 query heads"]),
        ({"query": f16(3, 512)}, ["^query: ", r"\[B, num_query_heads, head_dim\]"]),
        ({"max_query_len": 2}, ["^max_query_len: ", "one query row", "got 2"]),
    ],
)
def test_decode_attention_refusals(changes, parts):
    refusal(check_attention, DECODE, changes, ValueError, *parts)


def test_attention_call_of_a_plain_call():
    call = check_attention(**ATTENTION)
    assert (call.num_tokens, call.num_seqs, call.num_query_heads, call.group) == (7, 3, 8, 4)
    assert (call.max_pages, call.max_query_len, call.max_seq_len) == (6, 7, 96)
    assert call.scale == 1 / 8
    assert call.causal is True
    assert call.sliding_window is call.softcap is call.num_kv_splits is None


def test_attention_call_of_a_full_call():
    call = check_attention(
        **ATTENTION,
        scale=np.float32(0.5),
        causal=False,
        sliding_window=np.int64(7),
        softcap=30,
        sinks=f32(8),
        alibi_slopes=f32(8),
        out=f16(7, 8, 64),
        max_query_len=3,
        max_seq_len=50,
        num_kv_splits=4,
    )
    assert (call.scale, call.causal, call.sliding_window, call.softcap) == (0.5, False, 7, 30.0)
    assert [type(x) for x in (call.scale, call.sliding_window, call.softcap)] == [float, int, float]
    assert (call.max_query_len, call.max_seq_len, call.num_kv_splits) == (3, 50, 4)
    hash(call)


def test_size_hints_never_exceed_what_the_arrays_allow():
    call = check_attention(**ATTENTION, max_query_len=10**9, max_seq_len=10**9)
    assert (call.max_query_len, call.max_seq_len) == (7, 96)
    assert check_attention(**DECODE, max_query_len=1).max_query_len == 1
    assert check_attention(**DECODE).max_query_len == 1


@pytest.mark.parametrize("group", [1, 3, 7, 71, 128])
def test_every_group_up_to_128_is_accepted(group):
    assert check_attention(**{**ATTENTION, "query": f16(7, 2 * group, 64)}).group == group


def test_empty_batches_are_accepted():
    empty = {"query": f16(0, 8, 64), "block_table": i32(0, 0), "seq_lens": i32(0)}
    call = check_attention(**{**ATTENTION, **empty, "query_start_loc": i32(1)})
    assert (call.num_tokens, call.num_seqs, call.max_pages) == (0, 0, 0)
    check_attention(**{**DECODE, **empty})
    check_store(**{**STORE, "key": f16(0, 2, 64), "value": f16(0, 2, 64), "slot_mapping": i32(0)})


@pytest.mark.parametrize(
    "changes, error, parts",
    [
        ({"dtype": "float64"}, ValueError, ["^dtype: ", "bfloat16", "got float64"]),
        ({"dtype": "int8"}, ValueError, ["^dtype: ", "got int8"]),
        ({"block_table": i32(2, 6)}, ValueError, ["^block_table: ", r"got \(2, 6\)"]),
        ({"seq_lens": f32(3)}, TypeError, ["^seq_lens: ", "got float32"]),
    ],
)
def test_dequantize_refusals(changes, error, parts):
    refusal(check_dequantize, DEQUANTIZE, changes, error, *parts)


@pytest.mark.parametrize(
    "changes, error, parts",
    [
        ({"out_a": f16(5, 512)}, ValueError, ["^out_a: ", r"got \(5, 512\)"]),
        ({"out_a": ArraySpec((5, 8, 64), "int8")}, TypeError, ["^out_a: ", "got int8"]),
        ({"out_b": f16(5, 8, 32)}, ValueError, ["^out_b: ", "out_a", r"got \(5, 8, 32\)"]),
        ({"out_b": f32(5, 8, 64)}, TypeError, ["^out_b: ", "float16", "got float32"]),
        ({"lse_a": f32(8, 5)}, ValueError, ["^lse_a: ", r"\(5, 8\)", r"got \(8, 5\)"]),
        ({"lse_b": f32(5, 8, 1)}, ValueError, ["^lse_b: ", r"\(5, 8\)", r"got \(5, 8, 1\)"]),
        ({"lse_b": f16(5, 8)}, TypeError, ["^lse_b: ", "float32", "got float16"]),
    ],
)
def test_merge_refusals(changes, error, parts):
    refusal(check_merge, MERGE, changes, error, *parts)
