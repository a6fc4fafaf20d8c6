"""The benchmark of a whole model, with the CPU in place of the GPU."""

from __future__ import annotations

import csv
import math
import re
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend

import bench.__main__ as command_line
from bench import gpu, model
from examples import llama_torch
from examples.weights import LlamaConfig, LlamaWeights
from tq_core import CacheLayout, QuantConfig

HEADER = (
    "date,commit,device,driver,torch,triton,jax,provider,preset,dtype,what,layers,B,L,Hk,g,D,"
    "page_size,us_median,us_spread,tokens_per_second,cache_bytes,peak_bytes,ratio_to_bf16"
)
TINY = model.Config(layers=2, width=64, heads=4, kv_heads=2, head_dim=32, mlp=96, vocab=50)
WORDS = ("--presets", "4bit,k8v8", "--batch", "1,3", "--lengths", "37", "--page-size", "16")
CUDNN, FLASH = "torch SDPA cuDNN", "torch SDPA FlashAttention"


def arguments(*words):
    parser = command_line.argparse.ArgumentParser()
    model.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture
def on_cpu(on_cpu, monkeypatch):
    """With a tiny model."""
    monkeypatch.setattr(model, "LLAMA", TINY)
    return on_cpu


def run(path, *words):
    made = arguments("--rounds", "2", "--commit", "abc", "--csv", str(path), *WORDS, *words)
    return model.run(made)


def rows_of(path):
    return list(csv.DictReader(path.read_text().splitlines()))


# --- arguments and files ------------------------------------------------------------------------


def test_defaults():
    made = arguments()
    assert (made.presets, made.layers, made.page_size) == (["4bit", "k8v4", "3bit"], 32, 64)
    assert model.shapes_of(made, model.LLAMA) == [
        model.LLAMA.shape(batch, length)
        for batch in (1, 16, 64)
        for length in (8192, 32768, 131072)
        if (batch, length) != (64, 131072)
    ]
    assert model.LLAMA.shape(64, 8192) == gpu.Shape(64, 8192, 8, 4, 128)


@pytest.mark.parametrize(
    "words, batches",
    [(("--fit",), [1]), (("--generate", "8"), [1, 16]), (("--jax",), [1, 16]),
     (("--jax", "--batch", "4"), [4])],
)  # fmt: skip
def test_defaults_of_other_measurements(words, batches):
    shapes = model.shapes_of(arguments(*words), model.LLAMA)
    assert [(s.B, s.L) for s in shapes] == [(batch, 32768) for batch in batches]


def test_one_measurement_a_run(capsys):
    with pytest.raises(SystemExit):
        arguments("--fit", "--jax")
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--rounds", "1"), ("--batch", "0"), ("--presets", "5bit")])
def test_wrong_arguments_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        arguments(*words)
    assert re.search(f"argument {words[0]}", capsys.readouterr().err)


def test_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "model", "--help"])
    with pytest.raises(SystemExit) as stop:
        command_line.main()
    assert stop.value.code == 0
    assert "--most-tokens" in capsys.readouterr().out


def test_columns():
    assert ",".join(model.COLUMNS) == HEADER


def test_ratios_are_those_to_the_fastest_bf16():
    times = [("", 8.0), ("", 4.0), ("", ""), ("4bit", 2.0), ("k8v8", "")]
    rows = [{"preset": p, "us_median": t} for p, t in times]
    model.with_ratios([], rows)
    assert [r["ratio_to_bf16"] for r in rows] == [0.5, 1.0, "", 2.0, ""]
    model.with_ratios([], rows[2:])
    assert rows[3]["ratio_to_bf16"] == ""
    model.with_ratios(rows[:3], rows[3:])
    assert rows[3]["ratio_to_bf16"] == 2.0


@pytest.mark.parametrize(
    "reason, expected",
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True),
        ("RuntimeError: Triton Error [CUDA]: out of memory", True),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", True),
        ("RuntimeError: No available kernel. Aborting execution.", False),
    ],
)
def test_no_room(reason, expected):
    assert model.no_room(reason) == expected


# --- the model ----------------------------------------------------------------------------------


@torch.inference_mode()
def test_the_model_is_a_llama(on_cpu):
    made = model.Model(TINY)

    def stacked(name, first=0, last=None):
        return torch.stack([getattr(w, name)[first:last] for w in made.layers]).float().numpy()

    wide, narrow = (n * TINY.head_dim for n in TINY[2:4])
    layers = {
        "attn_norm": stacked("attention_norm"), "mlp_norm": stacked("mlp_norm"),
        "wq": stacked("qkv", 0, wide), "wk": stacked("qkv", wide, wide + narrow),
        "wv": stacked("qkv", wide + narrow), "wo": stacked("out"), "w_down": stacked("down"),
        "w_gate": stacked("gate_up", 0, TINY.mlp), "w_up": stacked("gate_up", TINY.mlp),
    }  # fmt: skip
    embedding, norm, head = (w.float().numpy() for w in (made.embedding, made.norm, made.head))
    config = LlamaConfig(
        TINY.layers, TINY.heads, TINY.kv_heads, TINY.head_dim, model.EPSILON, 64,
        tuple(made.inv_freq.tolist()),
    )  # fmt: skip
    llama = llama_torch.Llama(LlamaWeights(config, embedding, norm, head, layers))
    ids = model.make_ids(made, 9)
    want = torch.from_numpy(llama(ids, llama.new_cache(None, 9)))
    caches = list(torch.full((2, 2, 1, TINY.kv_heads, 9, TINY.head_dim), math.nan).bfloat16())
    steps = [
        made(ids[i : i + 1], i + 1, model.dense(i + 1, caches, SDPBackend.MATH)) for i in range(9)
    ]
    assert gpu.relative_error(torch.cat(steps), want) < 2e-2


@pytest.mark.parametrize("page_size", [16, 64])
def test_gate(page_size, on_cpu):
    errors = model.gate(TINY, page_size)
    assert set(errors) == {"tq_torch", FLASH}
    assert max(errors.values()) <= model.TOLERANCE


STORE, DECODE = model.tq_torch.store, model.tq_torch.decode_attention
FAULTS = {
    "keys for values": ("store", lambda k, v, *a, **kw: STORE(v, k, *a, **kw)),
    "slot before": ("store", lambda k, v, c, slots, **kw: STORE(k, v, c, slots - 1, **kw)),
    "10 % more": ("decode_attention", lambda *a, **kw: DECODE(*a, **kw) * 1.1),
    "without the last": ("decode_attention", lambda q, c, t, n, **kw: DECODE(q, c, t, n - 1, **kw)),
    "NaN": ("decode_attention", lambda *a, **kw: DECODE(*a, **kw) * math.nan),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_failed_gate_times_and_writes_nothing(fault, on_cpu, tmp_path, capsys, monkeypatch):
    path = tmp_path / "rows.csv"
    monkeypatch.setattr(model.tq_torch, *FAULTS[fault])
    assert run(path) == 1
    assert "nothing was timed or written" in capsys.readouterr().out
    assert not path.exists()
    assert not on_cpu


# --- whole runs ---------------------------------------------------------------------------------


def test_run_measures_and_reports(on_cpu, tmp_path, capsys):
    path = tmp_path / "rows.csv"
    assert run(path) == 0
    rows = rows_of(path)
    assert [(r["B"], r["provider"], r["preset"], r["page_size"]) for r in rows] == [
        (batch, *rest)
        for batch in ("1", "3")
        for rest in ((FLASH, "", ""), ("tq_torch", "4bit", "16"), ("tq_torch", "k8v8", "16"))
    ]
    assert {(r["commit"], r["layers"], r["L"], r["g"]) for r in rows} == {("abc", "2", "37", "2")}
    assert {(r["what"], r["peak_bytes"]) for r in rows} == {("step", "12345")}
    slot_bytes = CacheLayout(QuantConfig.preset("4bit"), 2, 32, 16).bytes_per_token
    assert int(rows[3]["cache_bytes"]) == 2 * 3 * 37 * 2 * 32 * 4
    assert int(rows[4]["cache_bytes"]) == 2 * 3 * 37 * slot_bytes
    for row in rows[3:]:
        us = float(row["us_median"])
        assert float(row["tokens_per_second"]) == pytest.approx(3e6 / us, rel=1e-4)
        assert float(row["ratio_to_bf16"]) == pytest.approx(
            float(rows[3]["us_median"]) / us, rel=1e-4
        )
    output = capsys.readouterr().out
    assert output.count(f"{CUDNN} bfloat16: not timed, RuntimeError: ") == 2
    assert len(on_cpu) == len(rows)
    with torch.inference_mode():
        assert [len(run.calls[0]()) for run in on_cpu] == [int(r["B"]) for r in rows]


def test_a_cache_that_does_not_fit_is_reported(on_cpu, tmp_path, capsys, monkeypatch):
    runs_of = model.runs_of

    def scarce(made, job, peers):
        if not job.preset and job.shape.B == 3:
            raise torch.OutOfMemoryError("no room")
        return runs_of(made, job, peers)

    monkeypatch.setattr(model, "runs_of", scarce)
    path = tmp_path / "rows.csv"
    assert run(path) == 0
    large = [r for r in rows_of(path) if r["B"] == "3"]
    assert [(r["provider"], r["us_median"] == "", r["ratio_to_bf16"]) for r in large] == [
        (CUDNN, True, ""), (FLASH, True, ""), ("tq_torch", False, ""), ("tq_torch", False, ""),
    ]  # fmt: skip
    assert capsys.readouterr().out.count("skipped: out of memory") == 2


def test_peer_that_is_off_is_not_timed(on_cpu, tmp_path, capsys, monkeypatch):
    gate = model.gate
    monkeypatch.setattr(model, "gate", lambda *args: {**gate(*args), FLASH: math.nan})
    path = tmp_path / "rows.csv"
    assert run(path) == 0
    assert {r["provider"] for r in rows_of(path)} == {"tq_torch"}
    assert f"{FLASH}: relative error nan, expected at most" in capsys.readouterr().out


def test_layers_have_their_own_caches(on_cpu, monkeypatch):
    seen = []
    monkeypatch.setattr(model, "dense", lambda length, caches, backend: seen.append(caches))
    monkeypatch.setattr(model, "packed", lambda length, data, caches: seen.append(caches))
    made = model.Model(TINY)
    for shared, expected in ((False, 2 * TINY.layers), (True, 2)):
        seen.clear()
        for preset in ("", "4bit"):
            job = model.Job(TINY, TINY.shape(3, 37), preset, 16)
            model.runs_of(made, job, {SDPBackend.MATH: "peer"}, shared=shared)
        assert [len(caches) for caches in seen] == [TINY.layers] * 2
        assert len({cache.data_ptr() for caches in seen for cache in caches}) == expected


@pytest.mark.parametrize("kind", ["RuntimeError", "OutOfMemoryError"])
def test_what_fails_in_capture(kind, on_cpu, monkeypatch):
    """One is a reason, the other a row without times."""

    def fails(run):
        raise getattr(torch, kind, RuntimeError)("a reason")

    monkeypatch.setattr(gpu, "capture", fails)
    job = model.Job(TINY, TINY.shape(1, 37), "4bit", 16)
    skipped = {}
    with torch.inference_mode():
        rows = model.measure(model.Model(TINY), job, {}, 2, skipped)
    if kind == "RuntimeError":
        assert (rows, list(skipped.values())) == ([], ["RuntimeError: a reason"])
    else:
        assert ([r["us_median"] for r in rows], skipped) == ([""], {})


def test_other_errors_are_not_hidden(on_cpu, monkeypatch):
    def fails(*args):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(model, "runs_of", fails)
    job = model.Job(TINY, TINY.shape(1, 37), "4bit", 16)
    with pytest.raises(RuntimeError, match="illegal"):
        model.measure(None, job, {}, 2, {})


def test_no_shape_is_refused(on_cpu, tmp_path, capsys):
    assert run(tmp_path / "rows.csv", "--most-tokens", "36") == 2
    assert "no batch has at most 36 tokens" in capsys.readouterr().out


def test_warming_makes_the_calls_of_a_run(on_cpu):
    job = model.Job(TINY, TINY.shape(3, 37), "4bit", 16)
    assert model.warm(job) is None
    assert "no such" in model.warm(job._replace(preset="no such preset"))
