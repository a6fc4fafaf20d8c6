"""The parts of the GPU benchmarks that need no GPU: arguments, arithmetic, files, order of work."""

from __future__ import annotations

import csv
import importlib.machinery
import math
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import bench.__main__ as command_line
from bench import chunk, decode, gpu, jax_providers, providers, store
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
    assert {i.page_size for i in decode.grid(made, [1])} == {64}
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
    assert items[0].label == "4bit token P16 num_splits 1"


def test_plans_are_timed_and_not_recorded(on_cpu, tmp_path, capsys, monkeypatch):
    made = arguments(
        decode, "--plan", "block_n=16,num_warps=2", "--plan", "block_t=32", "--splits", "3"
    )
    plans = [i.plan for i in decode.grid(made, [1])][:3]
    assert plans == [{"num_splits": 3}, {"block_n": 16, "num_warps": 2}, {"block_t": 32}]
    with pytest.raises(SystemExit):
        arguments(decode, "--plan", "block_n=x")
    path = tmp_path / "rows.csv"
    words = ("--presets", "4bit", "--shapes", "2:32:2:2:32", "--page-size", "16")
    monkeypatch.setattr(gpu, "BACKEND", "native")
    monkeypatch.setattr(gpu.Item, "plan", None)
    assert run(decode, path, *words, "--plan", "block_t=32") == 0
    assert "4bit planes P16 block_t=32" in capsys.readouterr().out
    assert all(r["provider"] != "tq_torch" for r in csv.DictReader(path.read_text().splitlines()))


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
        (("--shapes", SHAPE_TEXT, "--grid"), "--grid: not allowed with argument --shapes"),
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


@pytest.mark.parametrize("us, timed", [(1999.0, 30), (2001.0, 20)])
def test_long_calls_are_timed_in_fewer_rounds(us, timed, monkeypatch):
    event = SimpleNamespace(
        record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 3e-3 * us
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    replays = []
    graph = SimpleNamespace(replay=lambda: replays.append(1))
    (timing,) = gpu.time_graphs([gpu.Graph(graph, 3)], rounds=30)
    assert timing == pytest.approx((us, 0))
    assert len(replays) == 2 * (3 + timed)
    assert gpu.time_graphs([], rounds=30) == []


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


def test_below_looks_at_torch_alone():
    assert decode.below([row("4bit", 1.0, 0.1, provider="tq_jax")], ()) == []


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


def test_paged():
    x = torch.arange(2 * 3 * 21 * 4).view(2, 3, 21, 4).bfloat16()
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    pages = providers.paged(x, table, torch.float32)
    assert pages.shape == (4, providers.PAGE, 3, 4)
    for b, token in ((0, 0), (0, 20), (1, 17)):
        page, slot = table[b, token // providers.PAGE], token % providers.PAGE
        assert torch.equal(pages[page, slot], x[b, :, token].float())
    heads_first = providers.paged(x, table, torch.float32, heads_first=True)
    assert torch.equal(heads_first.permute(1, 2, 0, 3), pages)
    assert heads_first.is_contiguous()


def test_flashinfer_modules_are_distinct(monkeypatch):
    module = ModuleType("flashinfer")
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    items = [gpu.Item(s, p, 64, "planes", 1) for s in decode.GRID for p in ("4bit", "3bit")]
    modules = providers.flashinfer_modules(items)
    assert {(m.shape.g, m.shape.D, m.dtype) for m in modules} == {
        (g, dim, dtype) for g in (1, 4) for dim in (64, 128) for dtype in providers.PEER_TOLERANCE
    }
    assert len(modules) == 8
    assert all(m.shape.bf16_bytes < 2**20 for m in modules)
    chunks = [i._replace(query_len=n) for i in items for n in (64, 2048)]
    assert {(m.query_len, m.dtype) for m in providers.flashinfer_modules(chunks)} == {
        (2, torch.bfloat16)
    }
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert providers.flashinfer_modules(items) == []


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
        ("64", "170.123"),
        ("1", "0.5"),
    ]


def test_append_csv_refuses_other_columns(tmp_path):
    path = tmp_path / "rows.csv"
    gpu.append_csv(path, [{"a": 1, "b": 2}], columns=("a", "b"))
    with pytest.raises(ValueError, match="has other columns"):
        gpu.append_csv(path, [{"B": 64}])
    with pytest.raises(ValueError, match="'c'"):
        gpu.append_csv(path, [{"a": 1, "c": 2}], columns=("a", "b"))
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


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    monkeypatch.setattr(providers, "COPY_BYTES", 2**10)


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


def test_failed_gate_keeps_the_shapes_before(on_cpu, tmp_path, capsys, monkeypatch):
    path = tmp_path / "rows.csv"
    errors = iter([1e-3, 1e-3, 1e-3, math.nan])
    monkeypatch.setattr(decode, "gate", lambda *args: next(errors))
    words = ("--presets", "4bit,3bit", "--shapes", f"{SHAPE_TEXT},1:5:1:1:32,1:6:1:1:32")
    assert run(decode, path, *words) == 1
    printed = capsys.readouterr().out
    assert re.search(r"tq_torch 3bit .*L=5.* error nan.*no row of this shape was written", printed)
    assert {r["L"] for r in csv.DictReader(path.read_text().splitlines())} == {"37"}
    assert {r.fields["preset"] for r in on_cpu} == {"4bit", "3bit", ""}


def test_gate_sees_a_wrong_output(on_cpu, monkeypatch):
    item = gpu.Item(SHAPE, "4bit", 16, "planes", 1)
    query = gpu.make_query(SHAPE)
    data = gpu.make_cache(SHAPE, "4bit", 16, "planes", fill=True)
    run = providers.tq(query, data, item, [data.cache])

    def gate():
        return decode.gate(run, query, data, 1)

    assert gate() <= decode.TOLERANCE
    attend = providers.tq_torch.decode_attention
    monkeypatch.setattr(
        providers.tq_torch, "decode_attention", lambda *a, **kw: attend(*a, **kw).mul_(1.01)
    )
    assert gate() > decode.TOLERANCE
    monkeypatch.setattr(providers.tq_torch, "decode_attention", lambda *a, **kw: None)
    assert math.isnan(gate()), "an output that nobody wrote must fail"


def test_refused_configuration_is_reported(on_cpu, tmp_path, capsys, monkeypatch):
    def refuse(run, *args):
        if run.fields["preset"] == "3bit":
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


def test_peer_that_does_not_fit_is_reported(on_cpu, tmp_path, capsys, monkeypatch):
    def too_large(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(providers, "flashinfer", too_large)
    path = tmp_path / "rows.csv"
    assert run(decode, path, "--presets", "4bit", "--shapes", SHAPE_TEXT) == 0
    output = capsys.readouterr().out
    assert "FlashInfer bfloat16: not timed, OutOfMemoryError: CUDA out of memory" in output
    assert "torch SDPA" in path.read_text()
    dense = gpu.dense
    monkeypatch.setattr(gpu, "dense", lambda *a: too_large() if a[2].itemsize == 2 else dense(*a))
    assert run(decode, path, "--presets", "4bit", "--shapes", SHAPE_TEXT) == 0
    assert "16-bit attention: not timed, OutOfMemoryError" in capsys.readouterr().out


def test_one_cache_is_filled_once(on_cpu, tmp_path, monkeypatch):
    filled = []
    make_cache = gpu.make_cache

    def make(*args, **kwargs):
        filled.append(args)
        return make_cache(*args, **kwargs)

    monkeypatch.setattr(gpu, "make_cache", make)
    words = ("--presets", "4bit,3bit", "--splits", "1,2", "--shapes", SHAPE_TEXT, "--jax")
    assert run(decode, tmp_path / "rows.csv", *words) == 0
    assert [args[1] for args in filled] == ["4bit", "3bit"]


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


def test_the_grid_is_all_that_the_results_need():
    assert len(set(decode.GRID)) == 96
    words = ("--grid", "--presets", "3bit,4bit", "--orders", "token,planes")
    items = decode.items_of(arguments(decode, *words))
    flagship = [i for i in items if i.shape == decode.FLAGSHIP]
    assert items[: len(flagship)] == flagship
    assert [(i.preset, i.page_size, i.order) for i in flagship] == [
        (preset, page_size, order)
        for preset in ("3bit", "4bit")
        for page_size in (64, 16)
        for order in ("token", "planes")
    ]
    others = items[len(flagship) :]
    assert {i[1:] for i in others} == {("4bit", 64, "token", 1, ())}
    assert {i.shape for i in others} == set(decode.GRID) - {decode.FLAGSHIP}
    assert len(others) == 95
    few = decode.items_of(arguments(decode, "--grid", "--page-sizes", "16", "--presets", "4bit"))
    assert {i.page_size for i in few if i.shape == decode.FLAGSHIP} == {16, 64}
    assert len(few) == 97


def test_the_roof_is_timed_once(on_cpu, tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    words = ("--presets", "4bit", "--shapes", f"1:5:1:1:32,{SHAPE_TEXT}")

    def roofs():
        rows = csv.DictReader(path.read_text().splitlines())
        return [r["B"] for r in rows if r["provider"] == "device copy"]

    assert run(decode, path, *words) == 0
    assert roofs() == ["1"]
    monkeypatch.setattr(decode, "FLAGSHIP", SHAPE)
    assert run(decode, path, *words) == 0
    assert roofs() == ["1", "3"]


def shaped(ratio, B, L=8192, preset="4bit", provider="tq_torch"):
    shape = {"B": B, "L": L, "Hk": 8, "g": 4, "D": 128}
    return row(preset, 1.0, ratio, provider, page_size=64, order="planes", **shape)


@pytest.mark.parametrize(
    "rows, line, problem",
    [
        ([shaped(2.0, 1, 64), shaped(8.0, 8)], "4.00x .* of 2 shapes; at least 8.00x", ""),
        ([shaped(0.5, 1, 64), shaped(20.0, 1, 64)], "3.16x bf16 in the mean of 2 shapes$", ""),
        ([shaped(0.9, 8), shaped(90.0, 64)], "at least 0.90x .*, at 8:8192", "expected 1"),
        ([shaped(2.0, 8), shaped(2.0, 64)], "2.00x", "expected 2.7"),
        ([shaped(2.0, b, preset="3bit") for b in (8, 64)], "^tq_torch 3bit planes P64: 2.00x", ""),
        ([shaped(0.5, b, provider="tq_jax") for b in (8, 64)], "^tq_jax 4bit .* 0.50x", ""),
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


def test_warming_makes_the_calls_of_a_run(on_cpu, monkeypatch):
    assert decode.warm(gpu.Item(SHAPE, "4bit", 16, "planes", 1)) is None
    assert decode.warm(gpu.Item(SHAPE, "4bit", 16, "planes", 5)) is None
    assert store.warm(store.Job(gpu.Shape(1, 20, 1, 1, 64), "3bit", 16)) is None
    assert "no such" in decode.warm(gpu.Item(SHAPE, "4bit", 16, "no such order", 1))
    module = providers.FlashInferModule(gpu.Shape(1, 16, 1, 4, 64), 1, torch.float8_e4m3fn)
    assert decode.warm(module) == "FlashInfer float8_e4m3fn D=64: not installed: flashinfer"
    made = []
    monkeypatch.setattr(providers, "flashinfer", lambda *args: made.append(args))
    assert decode.warm(module) is None
    query, key, value, *rest = made[0]
    assert (query.shape, key.shape, value.shape) == ((1, 4, 64), (1, 1, 16, 64), (1, 1, 16, 64))
    assert rest == [*module]


def test_flashinfer_compiles_beside_the_kernels(on_cpu, tmp_path, monkeypatch):
    jobs = []
    monkeypatch.setattr(gpu, "in_workers", lambda function, items, *args: jobs.extend(items))
    monkeypatch.setattr(providers, "flashinfer_modules", lambda items: ["a module"])
    words = ("--presets", "4bit,3bit", "--shapes", f"{SHAPE_TEXT},1:5:1:1:32")
    assert run(decode, tmp_path / "rows.csv", *words) == 0
    assert jobs[0] == "a module"
    assert [i.shape.B for i in jobs[1:]] == [1, 1, 3, 3]


def test_cache_to_compile_with_has_the_plan_of_the_real_one(on_cpu):
    real, small = (gpu.make_cache(SHAPE, "4bit", 16, "planes", fill=f) for f in (True, False))
    assert real.cache.shape[0] == SHAPE.B * small.cache.shape[0]
    assert real.cache.stride() == small.cache.stride()
    assert real.table.shape == small.table.shape
    assert real.table.stride() == small.table.stride()


def test_pages_past_the_distinct_tokens_are_copies(on_cpu, monkeypatch):
    whole = gpu.make_cache(SHAPE, "4bit", 16, "planes", fill=True)
    monkeypatch.setattr(gpu, "DISTINCT_TOKENS", 50)
    data = gpu.make_cache(SHAPE, "4bit", 16, "planes", fill=True)
    assert sorted(data.table.flatten().tolist()) == list(range(9))
    assert len(whole.cache.flatten(1).unique(dim=0)) == 9
    assert len(data.cache[:4].flatten(1).unique(dim=0)) == 4
    assert len(data.cache.flatten(1).unique(dim=0)) == 4
    key, value = gpu.dense(data, SHAPE.L, torch.float32, [2, 0])
    assert key.shape == value.shape == (2, SHAPE.Hk, SHAPE.L, SHAPE.D)
    assert key.std() == pytest.approx(1, rel=0.1)
    assert torch.equal(gpu.dense(data, SHAPE.L, torch.float32, [0])[0][0], key[1])


# --- providers in JAX ---------------------------------------------------------------------------


@pytest.fixture
def profiled(on_cpu, monkeypatch):
    """Calls stand for what the profiler measures."""

    def kernel_times(calls):
        for call in calls:
            call()
        return [2.0] * len(calls)

    monkeypatch.setattr(jax_providers, "kernel_times", kernel_times)


JAX_WORDS = ("--presets", "4bit", "--shapes", "2:32:2:2:32", "--page-size", "16", "--jax")


def test_jax_is_timed_beside_torch(profiled, tmp_path, capsys):
    path = tmp_path / "rows.csv"
    assert run(decode, path, *JAX_WORDS, "--presets", "4bit,k8v8") == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    ours = {p: [r for r in rows if r["provider"] == p] for p in ("tq_torch", "tq_jax")}
    names = ("preset", "dtype", "page_size", "order", "num_splits", "cache_bytes")
    columns = [[[r[n] for n in names] for r in same] for same in ours.values()]
    assert len(columns[0]) == 2
    assert columns[0] == columns[1]
    assert {r["us_median"] for r in ours["tq_jax"]} == {"2"}
    (pallas,) = [r for r in rows if r["provider"] == jax_providers.PALLAS]
    assert (pallas["preset"], pallas["dtype"], pallas["page_size"]) == ("", "bfloat16", "16")
    assert "not installed: flashinfer" in capsys.readouterr().out


def test_jax_is_not_imported_unasked():
    code = (
        "import sys, bench.__main__; assert not {'jax', 'tq_jax', 'jax_triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=gpu.RESULTS.parents[1], check=True)


def test_jax_leaves_memory_to_torch(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    assert jax_providers.import_jax().__name__ == "jax"
    assert jax_providers.os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_wrong_output_of_jax_ends_the_run(profiled, tmp_path, capsys, monkeypatch):
    import tq_jax

    attend = tq_jax.decode_attention
    monkeypatch.setattr(tq_jax, "decode_attention", lambda *a, **kw: 1.01 * attend(*a, **kw))
    path = tmp_path / "rows.csv"
    assert run(decode, path, *JAX_WORDS) == 1
    assert "tq_jax 4bit planes P16, Shape(B=2, L=32" in capsys.readouterr().out
    assert not path.exists()


def test_jax_that_refuses_is_reported(profiled, tmp_path, capsys, monkeypatch):
    for name in ("tq", "pallas"):
        monkeypatch.setattr(jax_providers, name, lambda *args: sys.modules["no jax here"])
    path = tmp_path / "rows.csv"
    assert run(decode, path, *JAX_WORDS) == 0
    output = capsys.readouterr().out
    assert "tq_jax 4bit planes P16: not timed, KeyError" in output
    assert f"{jax_providers.PALLAS}: not timed, KeyError" in output
    assert "tq_torch" in path.read_text()


@pytest.mark.parametrize("length", [32, 256])
def test_pallas_attends(on_cpu, length):
    shape = SHAPE._replace(L=length)
    query = gpu.make_query(shape)
    key, value = torch.randn(2, shape.B, shape.Hk, length, shape.D).bfloat16()
    made = jax_providers.pallas(query, key, value, shape)
    assert made.is_jax
    assert len(made.calls) == gpu.copies(shape.bf16_bytes)
    for call in made.calls[:2]:
        out = torch.from_dlpack(call())
        error = gpu.error_of(out, query, 1, lambda b: (key[b], value[b]))
        assert error <= providers.PEER_TOLERANCE[torch.bfloat16]


def profile_of(*microseconds):
    """In place of the profiler: one that saw kernels of these times, the last first."""

    def event(kind, start, us):
        range_ = SimpleNamespace(start=start, elapsed_us=lambda: us)
        return SimpleNamespace(device_type=kind, time_range=range_)

    kinds = torch.autograd.DeviceType
    events = [event(kinds.CUDA, i, us) for i, us in enumerate(microseconds)][::-1]
    events += [event(kinds.CPU, 0, 1e9)]

    class Profile:
        def __init__(self, activities):
            pass

        def __enter__(self):
            return SimpleNamespace(events=lambda: events)

        def __exit__(self, *args):
            pass

    return Profile


def test_kernel_times_of_calls(on_cpu, monkeypatch):
    monkeypatch.setattr(torch.profiler, "profile", profile_of(1.0, 20.0, 2.0, 30.0))
    assert jax_providers.kernel_times([lambda: None] * 2) == [21.0, 32.0]
    with pytest.raises(RuntimeError, match="saw 4 kernels of 3 equal calls"):
        jax_providers.kernel_times([lambda: None] * 3)
    monkeypatch.setattr(torch.profiler, "profile", profile_of())
    with pytest.raises(RuntimeError, match="saw 0 kernels"):
        jax_providers.kernel_times([lambda: None] * 3)


def test_time_runs_of_jax_drops_the_first_and_rotates(monkeypatch):
    made = []

    def kernel_times(calls):
        made.extend(call() for call in calls)
        return [float(i) for i in range(len(calls))]

    monkeypatch.setattr(jax_providers, "kernel_times", kernel_times)
    run = gpu.Run("a", [lambda: "first", lambda: "second"], 1, {}, is_jax=True)
    ((timed, timing),) = jax_providers.time_runs([run], 21, {})
    assert timed is run
    assert timing.median == jax_providers.WARMUP + 10
    assert made == ["first", "second"] * 12
    monkeypatch.setattr(jax_providers, "kernel_times", lambda calls: [].pop())
    skipped = {}
    fields = {"preset": "4bit", "dtype": "bfloat16", "order": "planes", "page_size": 16}
    assert jax_providers.time_runs([run._replace(fields=fields)], 20, skipped) == []
    assert list(skipped) == ["a 4bit planes P16"]
