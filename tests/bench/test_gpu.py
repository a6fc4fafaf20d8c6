"""The parts of the GPU benchmarks that need no GPU: arguments, arithmetic, files, order of work."""

from __future__ import annotations

import csv
import math
import re
import subprocess
import sys
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bench.__main__ as command_line
from bench import chunk, decode, gpu, providers, store
from tq_core import CacheLayout, Codec, QuantConfig, reference
from tq_core.layout import ORDERS

COMMANDS = ("cpu", "decode", "chunk", "store")
HEADER = (
    "date,commit,device,driver,torch,triton,jax,provider,preset,dtype,B,L,Hk,g,D,page_size,order,"
    "query_len,num_splits,us_median,us_spread,cache_bytes,tbps,ratio_to_best_bf16"
)
SHAPE = gpu.Shape(3, 37, 2, 2, 32)
SHAPE_TEXT = "3:37:2:2:32"


def arguments(module, *words):
    parser = command_line.argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(words)


def row(preset, us, ratio="", provider="tq_torch", dtype="bfloat16", cache_bytes=10**6, **fields):
    return {
        "provider": provider, "preset": preset, "dtype": dtype, "order": "", "page_size": "",
        "us_median": us, "cache_bytes": cache_bytes, "ratio_to_best_bf16": ratio, **fields,
    }  # fmt: skip


# --- arguments --------------------------------------------------------------------------------


def test_shape_parse():
    shape = gpu.Shape.parse("64:8192:8:4:128")
    assert shape == (64, 8192, 8, 4, 128) == decode.FLAGSHIP
    assert shape.bf16_bytes == 64 * 8192 * 8 * 128 * 2 * 2


@pytest.mark.parametrize("text", ["", "1:2:3:4", "1:2:3:4:5:6", "1:2:3:4:x", "0:1:1:1:1", "-1:1:1"])
def test_shape_parse_refuses(text):
    with pytest.raises(ValueError, match="expected B:L:Hk:g:D"):
        gpu.Shape.parse(text)


def test_defaults():
    made = arguments(decode)
    assert made.shapes == [decode.FLAGSHIP]
    assert {"4bit", "3bit", "k8v4"} <= set(made.presets)
    assert (made.csv.name, made.rounds, made.jobs, made.commit) == ("decode.csv", 30, 14, None)
    items = decode.grid(arguments(chunk), arguments(chunk).query_lens)
    assert [(i.shape, i.query_len) for i in items] == [
        (gpu.Shape(1, 32768, 8, 4, 128), rows) for rows in (64, 2048)
    ]
    assert arguments(store).tokens == [64, 16384]


def test_grid_has_every_combination():
    words = ["--presets", "4bit,3bit", "--page-size", "16,64", "--all-orders", "--splits", "1,2"]
    items = decode.grid(arguments(decode, *words), [1])
    assert len(set(items)) == len(items) == 2 * 2 * len(ORDERS) * 2
    assert {i.order for i in items} == set(ORDERS)
    assert [i.plan for i in items[:2]] == [{"num_splits": 1}, {"num_splits": 2}]
    assert items[0].label == "4bit token P16 splits 1"


def test_order_and_size_are_lists_under_both_names():
    made = arguments(decode, "--order", "head,token", "--page-sizes", "16,16,32")
    assert (made.orders, made.page_sizes) == (["head", "token"], [16, 32])
    assert decode.grid(made, [1])[0].plan is None


@pytest.mark.parametrize(
    "words, message",
    [
        (("--shapes", "1:2"), "expected B:L:Hk:g:D"),
        (("--presets", "4bit,5bit"), "preset: expected one of .*'4bit'.*got '5bit'"),
        (("--order", "rows"), "order: expected one of .*got 'rows'"),
        (("--page-size", "0"), "expected a positive int, got '0'"),
        (("--rounds", "19"), "expected at least 20, got '19'"),
    ],
)
def test_wrong_arguments_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        arguments(decode, *words)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", name, "--help"])
    with pytest.raises(SystemExit) as stop:
        command_line.main()
    assert stop.value.code == 0
    assert "--rounds" in capsys.readouterr().out


def test_help_in_a_process_of_its_own():
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--help"],
        cwd=gpu.RESULTS.parents[1], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", ["decode", "chunk", "store"])
def test_without_a_gpu_status_2_and_one_sentence(name, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench", name])
    assert command_line.main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "this benchmark needs a CUDA device, and torch finds none\n"


# --- arithmetic -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_bytes, expected", [(200, 1), (199, 3), (100, 3), (99, 4), (1, 201), (10**9, 1)]
)
def test_copies_needed(num_bytes, expected):
    assert gpu.copies_needed(num_bytes, 100) == expected


def test_between_two_uses_of_a_copy_twice_the_l2_is_touched():
    for num_bytes in range(1, 400):
        n = gpu.copies_needed(num_bytes, 100)
        assert n == 1 or (n - 1) * num_bytes >= 200
        assert n > 1 or num_bytes >= 200


def test_copies_are_limited():
    assert gpu.copies_needed(1, 10**6) == gpu.MOST_COPIES


def test_jobs_that_fit():
    worker = gpu.WORKER_BYTES
    assert gpu.jobs_that_fit(14, 20, 0, 1000 * worker) == 14
    assert gpu.jobs_that_fit(14, 3, 0, 1000 * worker) == 3
    assert gpu.jobs_that_fit(14, 20, worker, 10 * worker) == 4
    assert gpu.jobs_that_fit(14, 20, 0, 0) == 1


def test_timing_of():
    assert gpu.timing_of([float(x) for x in range(1, 24)]) == (12, 12)


def test_ratios_are_to_the_fastest_bf16_peer():
    rows = gpu.with_ratios(
        [
            row("4bit", 100.0),
            row("", 300.0, provider="slow"),
            row("", 200.0, provider="fast"),
            row("", 50.0, provider="fp8", dtype="float8_e4m3fn"),
            row("", 10.0, provider="device copy", dtype="uint8"),
        ]
    )
    assert [r["ratio_to_best_bf16"] for r in rows] == pytest.approx([2, 2 / 3, 1, 4, 20])
    assert rows[0]["tbps"] == pytest.approx(0.01)


def test_no_ratio_without_a_bf16_peer():
    rows = gpu.with_ratios([row("4bit", 100.0), row("", 9.0, dtype="float8_e4m3fn")])
    assert [r["ratio_to_best_bf16"] for r in rows] == ["", ""]


@pytest.mark.parametrize(
    "ratios, asked, problems",
    [
        ({"4bit": 3.0, "3bit": 3.0, "k8v4": 2.2, "k8v8": 0.1}, (), []),
        ({"4bit": 2.99}, (), ["4bit has 2.99x .* at least 3x"]),
        ({"3bit": 0.99, "k8v4": 0.5}, (), ["3bit has 0.99x", "k8v4 has 0.50x"]),
        ({"4bit": ""}, (), ["4bit has no bf16"]),
        ({}, (), []),
        ({}, ("4bit", "k8v8"), ["4bit was asked for and not timed"]),
    ],
)
def test_below(ratios, asked, problems):
    lines = decode.below([row(p, 1.0, ratio) for p, ratio in ratios.items()], asked)
    assert len(lines) == len(problems)
    for line, problem in zip(lines, problems, strict=True):
        assert re.search(problem, line), line


def test_below_takes_the_best_row_of_a_preset():
    assert decode.below([row("4bit", 1.0, 2.5), row("4bit", 1.0, 3.1)], ()) == []


def test_of_copy():
    rows = [
        row("4bit", 20.0, provider="tq_torch store", cache_bytes=1001),
        row("", 10.0, provider="device copy", dtype="uint8", cache_bytes=1000),
        row("", 99.0, provider="device copy", dtype="uint8", cache_bytes=2000),
    ]
    assert store.of_copy(rows) == ["tq_torch store 4bit: 50% of the speed of a copy"]


def test_checked_rows_and_seqs():
    assert gpu.checked_rows(1) == [0]
    assert gpu.checked_rows(100) == [*range(8), *range(92, 100)]
    assert gpu.checked_seqs(1) == [0]
    assert gpu.checked_seqs(64) == [0, 32, 63]


def test_lower_right_mask():
    mask = providers.lower_right_mask(3, 5, torch.empty(0, dtype=torch.bfloat16))
    hidden = [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]
    want = torch.zeros(3, 5).masked_fill(torch.tensor(hidden).bool(), -torch.inf)
    assert mask.dtype == torch.bfloat16
    assert torch.equal(mask[0, 0].float(), want)


def test_reasons():
    assert gpu.reason_of(ModuleNotFoundError(name="flashinfer")) == "not installed: flashinfer"
    assert gpu.reason_of(ValueError("one\ntwo")) == "ValueError: one"
    assert gpu.reason_of(RuntimeError()) == "RuntimeError: "


# --- the gate's own reference -------------------------------------------------------------------


@pytest.mark.parametrize("query_len", [1, 11, 25])
def test_expected_is_the_reference(query_len, rng):
    layout = CacheLayout(QuantConfig.preset("4bit"), SHAPE.Hk, SHAPE.D, 16)
    what = {"layout": layout, "codec": Codec(layout.config, SHAPE.D)}
    cache = np.full(layout.shape(3), 255, np.uint8)
    key, value = rng.standard_normal((2, SHAPE.L, SHAPE.Hk, SHAPE.D), dtype=np.float32)
    reference.store(key, value, cache, np.arange(SHAPE.L), **what)
    table, lens = np.arange(3, dtype=np.int32)[None], np.array([SHAPE.L], np.int32)
    query = rng.standard_normal((query_len, SHAPE.Hk * SHAPE.g, SHAPE.D), dtype=np.float32)
    starts = np.array([0, query_len], np.int32)
    want = reference.attention(query, cache, table, lens, starts, **what)
    dense = reference.dequantize(cache, table, lens, **what)
    pair = [torch.tensor(x[0, : SHAPE.L]).transpose(0, 1) for x in dense]
    rows = gpu.checked_rows(query_len)
    have = gpu.expected(torch.tensor(query[rows]), *pair, rows, query_len)
    np.testing.assert_allclose(have, want[rows], rtol=1e-5, atol=1e-6)
    full = torch.tensor(want)
    assert gpu.error_of(full, torch.tensor(query), query_len, lambda b: pair) < 1e-5
    full[query_len // 2, 0, 0] = math.nan  # of 25 rows, one that is not compared
    assert math.isnan(gpu.error_of(full, torch.tensor(query), query_len, lambda b: pair))


# --- files --------------------------------------------------------------------------------------


def test_columns():
    assert ",".join(gpu.COLUMNS) == HEADER


def test_append_csv(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    gpu.append_csv(path, [{"B": 64, "us_median": 170.123456, "preset": "4bit"}])
    gpu.append_csv(path, [{"B": 1, "us_median": 0.5, "ratio_to_best_bf16": ""}])
    lines = path.read_text().splitlines()
    assert lines[0] == HEADER
    assert [(r["B"], r["us_median"]) for r in csv.DictReader(lines)] == [
        ("64", "170.1"),
        ("1", "0.5"),
    ]


def test_append_csv_refuses_other_columns(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="has other columns"):
        gpu.append_csv(path, [{"B": 64}])
    assert path.read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize("name", ["decode", "chunk", "store"])
def test_committed_results_have_the_columns(name):
    assert (gpu.RESULTS / f"{name}.csv").read_text().splitlines()[0] == HEADER


def test_environment(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some device")
    made = gpu.environment("abc")
    assert tuple(made) == gpu.COLUMNS[:7]
    assert (made["commit"], made["device"]) == ("abc", "some device")

    def missing(*args, **kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    assert gpu.environment(None)["commit"] == "unknown"


# --- whole runs, with the CPU in place of the GPU -----------------------------------------------


class Recorded:
    """In place of a CUDA graph: calls what was captured."""

    def __init__(self, calls):
        self.calls = calls

    def replay(self):
        for call in self.calls:
            call()


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs benchmarks on the native backend; yields what was captured, in order."""
    captured = []

    def capture(run):
        captured.append(run)
        return gpu.Graph(Recorded(run.calls), len(run.calls))

    ticks = count()
    event = SimpleNamespace(
        record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 1e-3 * next(ticks)
    )
    properties = SimpleNamespace(L2_cache_size=2**15)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "BACKEND", "native")
    monkeypatch.setattr(gpu, "capture", capture)
    monkeypatch.setattr(gpu, "in_workers", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a processor")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(providers, "COPY_BYTES", 2**10)
    return captured


def run(module, path, *words):
    made = arguments(module, "--rounds", "20", "--commit", "abc", "--csv", str(path), *words)
    return module.run(made)


@pytest.mark.parametrize("module, query_len", [(decode, 1), (chunk, 9)])
def test_run_measures_and_reports(module, query_len, on_cpu, tmp_path, capsys):
    path = tmp_path / "rows.csv"
    words = ("--presets", "4bit,k8v8", "--shapes", SHAPE_TEXT, "--page-size", "16")
    words += () if module is decode else ("--query-lens", str(query_len))
    assert run(module, path, *words) == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    ours = [r for r in rows if r["provider"] == "tq_torch"]
    assert [r["preset"] for r in ours] == ["4bit", "k8v8"]
    assert {(r["commit"], r["B"], r["L"], r["query_len"]) for r in rows} == {
        ("abc", "3", "37", str(query_len))
    }
    assert all(r["order"] == "planes" and r["num_splits"] for r in ours)
    assert rows[-1]["provider"] == "device copy"
    output = capsys.readouterr().out
    timed = {r["provider"] for r in rows} | {
        line.partition(": not timed, ")[0] for line in output.splitlines() if "not timed" in line
    }
    names = {"torch SDPA cuDNN", "torch SDPA FlashAttention", "FlashInfer bfloat16"}
    assert names <= timed, output
    assert "FlashInfer bfloat16: not timed, not installed: flashinfer" in output
    assert len({id(r) for r in on_cpu}) == len(rows)
    assert all(len(r.calls) >= 2 for r in on_cpu), "the working set did not rotate"


def test_failed_gate_times_and_writes_nothing(on_cpu, tmp_path, capsys, monkeypatch):
    path = tmp_path / "rows.csv"
    errors = iter([1e-3, math.nan])
    monkeypatch.setattr(decode, "gate", lambda item: next(errors))
    words = ("--presets", "4bit", "--shapes", f"{SHAPE_TEXT},1:5:1:1:32")
    assert run(decode, path, *words) == 1
    assert "nothing was timed or written" in capsys.readouterr().out
    assert not path.exists()
    assert not on_cpu


def test_gate_sees_a_wrong_output(on_cpu, monkeypatch):
    item = gpu.Item(SHAPE, "4bit", 16, "planes", 1)
    assert decode.gate(item) <= decode.TOLERANCE
    attend = providers.tq_torch.decode_attention
    monkeypatch.setattr(
        providers.tq_torch, "decode_attention", lambda *a, **kw: attend(*a, **kw).mul_(1.01)
    )
    assert decode.gate(item) > decode.TOLERANCE
    monkeypatch.setattr(providers.tq_torch, "decode_attention", lambda *a, **kw: None)
    assert math.isnan(decode.gate(item)), "an output that nobody wrote must fail"


def test_refused_configuration_is_reported(on_cpu, tmp_path, capsys, monkeypatch):
    def refuse(item):
        if item.preset == "3bit":
            raise ValueError("no such kernel")
        return 0.0

    monkeypatch.setattr(decode, "gate", refuse)
    path = tmp_path / "rows.csv"
    assert run(decode, path, "--presets", "4bit,3bit", "--shapes", SHAPE_TEXT) == 0
    output = capsys.readouterr().out
    assert "tq_torch 3bit planes P64: not timed, ValueError: no such kernel" in output
    assert "3bit" not in path.read_text()


def test_peer_that_is_off_is_not_timed(on_cpu, tmp_path, capsys, monkeypatch):
    sdpa = providers.scaled_dot_product_attention
    monkeypatch.setattr(
        providers, "scaled_dot_product_attention", lambda *a, **kw: sdpa(*a, **kw) * 1.1
    )
    path = tmp_path / "rows.csv"
    assert run(decode, path, "--presets", "4bit", "--shapes", SHAPE_TEXT) == 0
    output = capsys.readouterr().out
    assert "torch SDPA FlashAttention: not timed, relative error" in output
    assert "SDPA" not in path.read_text()


def test_provider_that_cannot_be_captured_is_reported(on_cpu, monkeypatch):
    def capture(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(gpu, "capture", capture)
    skipped = {}
    fields = {"preset": "", "dtype": "bfloat16", "order": "", "page_size": ""}
    assert gpu.time_runs([gpu.Run("peer", [lambda: None], 1, fields)], 20, skipped) == []
    assert list(skipped) == ["peer bfloat16"]


def test_check_decides_the_status(on_cpu, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(decode, "FLAGSHIP", SHAPE)
    words = ("--presets", "4bit", "--shapes", SHAPE_TEXT, "--check")
    for least, status in ((1e-9, 0), (1e9, 1)):
        monkeypatch.setattr(decode, "LEAST_RATIO", {"4bit": least})
        assert run(decode, tmp_path / "rows.csv", *words) == status
    assert "--check: 4bit has" in capsys.readouterr().out


def test_the_grid_stands_for_shapes():
    assert arguments(decode, "--grid").shapes == decode.GRID
    assert len(set(decode.GRID)) == 96
    assert decode.FLAGSHIP in decode.GRID


def shaped(ratio, B, L=8192, preset="4bit"):
    shape = {"B": B, "L": L, "Hk": 8, "g": 4, "D": 128}
    return row(preset, 1.0, ratio, page_size=64, order="planes", **shape)


@pytest.mark.parametrize(
    "rows, line, problem",
    [
        ([shaped(2.0, 1, 64), shaped(8.0, 8)], "4.00x .* of 2 shapes; at least 8.00x", ""),
        ([shaped(0.5, 1, 64), shaped(20.0, 1, 64)], "3.16x bf16 in the mean of 2 shapes$", ""),
        ([shaped(0.9, 8), shaped(90.0, 64)], "at least 0.90x .*, at 8:8192", "expected 1"),
        ([shaped(2.0, 8), shaped(2.0, 64)], "2.00x", "expected 2.7"),
        ([shaped(2.0, b, preset="3bit") for b in (8, 64)], "^3bit planes P64: 2.00x", ""),
    ],
)  # fmt: skip
def test_summary(rows, line, problem):
    ((have, what),) = decode.summary(rows)
    assert re.search(line, have), have
    assert problem in what
    assert bool(problem) == bool(what)


def test_no_summary_of_one_shape_or_without_bf16():
    assert list(decode.summary([shaped(2.0, 8)])) == []
    assert list(decode.summary([shaped("", 8), shaped("", 64)])) == []


def test_a_grid_that_is_too_slow_fails_the_check(on_cpu, tmp_path, capsys, monkeypatch):
    other = SHAPE._replace(B=1)
    monkeypatch.setattr(decode, "GRID", [SHAPE, other])
    monkeypatch.setattr(decode, "LEAST_MEAN", 1e9)
    texts = ",".join(":".join(map(str, s)) for s in (SHAPE, other))
    words = ("--presets", "4bit", "--check")
    assert run(decode, tmp_path / "rows.csv", *words, "--shapes", texts) == 1
    assert "in the mean of 2 shapes" in capsys.readouterr().out
    assert run(decode, tmp_path / "rows.csv", *words, "--shapes", SHAPE_TEXT) == 0


def test_check_without_the_flagship_says_so(on_cpu, tmp_path, capsys):
    words = ("--presets", "4bit", "--shapes", SHAPE_TEXT, "--check")
    assert run(decode, tmp_path / "rows.csv", *words) == 0
    assert "nothing was checked" in capsys.readouterr().out


def test_store_measures(on_cpu, tmp_path, capsys):
    path = tmp_path / "rows.csv"
    words = ("--tokens", "5,33", "--kv-heads", "2", "--head-dim", "64", "--page-size", "16")
    assert run(store, path, "--presets", "4bit,3bit,k8v4", *words) == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    ours = [r for r in rows if r["provider"] == "tq_torch store"]
    assert [(r["L"], r["preset"]) for r in ours] == [
        (tokens, preset) for tokens in ("5", "33") for preset in ("4bit", "3bit", "k8v4")
    ]
    slot_bytes = CacheLayout(QuantConfig.preset("4bit"), 2, 64, 16).bytes_per_token
    assert int(ours[0]["cache_bytes"]) == 5 * (2 * 2 * 2 * 64 + slot_bytes)
    assert sum(r["provider"] == "bf16 index_copy" for r in rows) == 2
    copied = {r["cache_bytes"] for r in rows if r["provider"] == "device copy"}
    assert {r["cache_bytes"] for r in ours} <= copied
    assert "of the speed of a copy" in capsys.readouterr().out
    assert all(len(r.calls) >= 2 for r in on_cpu), "the working set did not rotate"


def test_store_gate_sees_what_was_not_stored(on_cpu, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(store.tq_torch, "store", lambda *args, **kwargs: None)
    path = tmp_path / "rows.csv"
    assert run(store, path, "--tokens", "5", "--kv-heads", "1", "--head-dim", "64") == 1
    assert "nothing was timed or written" in capsys.readouterr().out
    assert not path.exists()


@pytest.mark.parametrize("name", sorted(decode.gpu.PRESETS))
def test_store_gate_lets_every_preset_pass(name, on_cpu):
    job = store.Job(gpu.Shape(1, 300, 1, 1, 128), name, 16)
    inputs, slots = store.make_inputs(job.shape, 1), store.make_slots(job)
    assert store.off(store.packed(job, inputs, slots)) is None


def test_warming_makes_the_calls_of_a_run(on_cpu):
    assert decode.warm(gpu.Item(SHAPE, "4bit", 16, "planes", 1)) is None
    assert decode.warm(gpu.Item(SHAPE, "4bit", 16, "planes", 5)) is None
    assert store.warm(store.Job(gpu.Shape(1, 20, 1, 1, 64), "3bit", 16)) is None
    assert "no such" in decode.warm(gpu.Item(SHAPE, "4bit", 16, "no such order", 1))


def test_cache_to_compile_with_has_the_plan_of_the_real_one(on_cpu):
    real, small = (gpu.make_cache(SHAPE, "4bit", 16, "planes", fill=f) for f in (True, False))
    assert real.cache.shape[0] == SHAPE.B * small.cache.shape[0]
    assert real.cache.stride() == small.cache.stride()
    assert real.table.shape == small.table.shape
    assert real.table.stride() == small.table.stride()
