"""The checking mode of tq_torch: each kind of wrong content, by argument and by environment."""

from __future__ import annotations

import pytest
import torch

import tq_torch
from tests.torch.test_refusals import CODEC, LAYOUT, attention_arguments, store_arguments
from tq_torch import contents

NAN, INF = float("nan"), float("inf")
I32 = torch.int32


def changed(x, index, value):
    x = x.clone()
    x[index] = value
    return x


def decode_arguments():
    arguments = attention_arguments()
    del arguments["query_start_loc"]
    return {**arguments, "query": arguments["query"][:2]}


def dequantize_arguments():
    names = ("cache", "block_table", "seq_lens", "layout", "codec")
    return {n: attention_arguments()[n] for n in names} | {"dtype": torch.float32}


ARGUMENTS = {
    "store": store_arguments,
    "attention": attention_arguments,
    "decode_attention": decode_arguments,
    "dequantize": dequantize_arguments,
}
KEY, QUERY = torch.ones(3, 2, 64), torch.ones(3, 8, 64)
#: What is wrong in the checking mode and nowhere else, at least on the CPU.
WRONG = [
    ("store", "key", changed(KEY, (1, 0, 5), NAN), r"^key: .* got nan at \[1, 0, 5\] and 1 such"),
    ("store", "key", changed(KEY.half(), (2, 1), INF), r"^key: .* got inf at \[2, 1, 0\] and 64"),
    ("store", "value", changed(KEY, (0, 1, 63), -INF), r"^value: .* got -inf at \[0, 1, 63\]"),
    ("store", "slot_mapping", torch.tensor([5, 2, 5]), "^slot_mapping: .* got 5 at index 2 and 0"),
    ("attention", "query", changed(QUERY, (2, 7, 9), NAN), r"^query: .* at \[2, 7, 9\] and 1 such"),
    ("attention", "query_start_loc", torch.tensor([1, 1, 3]).int(), "^query_start_loc: .*got 1"),
    ("attention", "seq_lens", torch.tensor([5, -1], dtype=I32), "^seq_lens: .* -1 for sequence 1"),
    ("attention", "max_seq_len", 4, "^max_seq_len: .* got 4, and sequence 0 has 5"),
    ("attention", "max_query_len", 1, "^max_query_len: .* got 1, and sequence 1 has 2"),
    ("decode_attention", "query", changed(QUERY[:2], 1, NAN), r"^query: .* at \[1, 0, 0\] and 512"),
    ("decode_attention", "max_seq_len", 3, "^max_seq_len: .* got 3, and sequence 0 has 5"),
    ("dequantize", "seq_lens", torch.tensor([-3, 5], dtype=I32), "^seq_lens: .* -3 for sequence 0"),
]  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_is_right_passes(name):
    getattr(tq_torch, name)(**ARGUMENTS[name](), check=True)


@pytest.mark.parametrize("name, argument, value, message", WRONG)
def test_what_is_wrong_is_found(name, argument, value, message, monkeypatch):
    function = getattr(tq_torch, name)
    arguments = {**ARGUMENTS[name](), argument: value}
    function(**arguments)
    before = arguments["cache"].clone()
    with pytest.raises(ValueError, match=message):
        function(**arguments, check=True)
    assert torch.equal(arguments["cache"], before)
    monkeypatch.setenv("TQ_CHECK", "1")
    with pytest.raises(ValueError, match=message):
        function(**arguments)
    function(**arguments, check=False)


def test_rows_that_are_skipped_or_pad_may_hold_anything():
    arguments = store_arguments() | {"slot_mapping": torch.tensor([4, -1, 2])}
    arguments["key"] = arguments["value"] = changed(KEY, 1, NAN)
    tq_torch.store(**arguments, check=True)
    starts = torch.tensor([0, 1, 2], dtype=I32)
    query = changed(QUERY, 2, NAN)
    tq_torch.attention(
        **attention_arguments() | {"query": query, "query_start_loc": starts}, check=True
    )


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_argument_is_a_bool(name):
    with pytest.raises(TypeError, match=r"^check: expected a bool or None, got 1"):
        getattr(tq_torch, name)(**ARGUMENTS[name](), check=1)


def test_a_compiled_function_checks_when_it_runs(monkeypatch):
    @torch.compile(fullgraph=True, backend="eager")
    def step(key, cache, slots):
        tq_torch.store(key, key, cache, slots, layout=LAYOUT, codec=CODEC)
        return cache

    arguments = store_arguments()
    key, cache, slots = (arguments[n] for n in ("key", "cache", "slot_mapping"))
    step(key, cache, slots)
    wrong = changed(key, 0, NAN)
    step(wrong, cache, slots)
    monkeypatch.setenv("TQ_CHECK", "1")
    step(key, cache, slots)
    with pytest.raises(ValueError, match=r"^key: expected finite"):
        step(wrong, cache, slots)


def test_a_capture_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    x = torch.zeros(1)
    contents._check_readable(x)
    monkeypatch.setattr(torch.Tensor, "device", property(lambda _: torch.device("cuda", 0)))
    with pytest.raises(RuntimeError, match=r"^check: waits .* capture with check=False"):
        contents._check_readable(x)


@pytest.mark.gpu
def test_on_a_gpu():
    def on_gpu(arguments):
        tensors = {n: x for n, x in arguments.items() if isinstance(x, torch.Tensor)}
        return arguments | {n: x.cuda() for n, x in tensors.items()}

    for name, argument, value, message in WRONG:
        arguments = on_gpu(ARGUMENTS[name]() | {argument: value})
        with pytest.raises(ValueError, match=message):
            getattr(tq_torch, name)(**arguments, check=True)
    for name in ARGUMENTS:
        getattr(tq_torch, name)(**on_gpu(ARGUMENTS[name]()), check=True)
    table = on_gpu(attention_arguments() | {"block_table": torch.full((2, 2), 9, dtype=I32)})
    with pytest.raises(ValueError, match=r"^block_table: expected a page from 0 to 3"):
        tq_torch.attention(**table, check=True)
    arguments = on_gpu(store_arguments())
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match=r"^check: waits for the device"),
        torch.cuda.graph(graph),
    ):
        tq_torch.store(**arguments, check=True)
