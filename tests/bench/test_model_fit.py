"""What fits, of ``bench model``, with the CPU in place of the GPU."""

from __future__ import annotations

import csv

import pytest
import torch

import bench.__main__ as command_line
from bench import gpu, model, model_fit
from tests.bench.test_model import CUDNN, FLASH, TINY

WORDS = ("--presets", "4bit,k8v8", "--lengths", "37", "--page-size", "16", "--rounds", "2")
BF16 = model.Job(TINY, TINY.shape(1, 37), "", 16)


@pytest.fixture
def memory(on_cpu, monkeypatch):
    """A device with room for so many bf16 sequences; a longer batch does not fit."""
    free = [5 * model_fit.sequence_bytes(BF16) + 100]
    monkeypatch.setattr(model, "LLAMA", TINY)
    monkeypatch.setattr(model, "gate", lambda *args: {"tq_torch": 0.0, FLASH: 0.0, CUDNN: 1.0})
    monkeypatch.setattr(model_fit, "MARGIN", 0)
    monkeypatch.setattr(model_fit, "FIRST_GUESS", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free[0], 2**40))
    return free


def run(path):
    parser = command_line.argparse.ArgumentParser()
    model.add_arguments(parser)
    return model.run(parser.parse_args([*WORDS, "--fit", "--csv", str(path)]))


def test_weights():
    made = model_fit.weight_bytes(model.LLAMA)
    assert 16.0e9 < made < 16.1e9


def test_a_sequence_takes_whole_pages():
    job = BF16._replace(preset="4bit")
    assert model_fit.sequence_bytes(BF16) == BF16.cache_bytes == TINY.layers * 37 * 2 * 2 * 2 * 32
    assert model_fit.sequence_bytes(job) == TINY.layers * 48 * job.layout.bytes_per_token
    many = model_fit.with_batch(job, 3)
    assert model_fit.sequence_bytes(many) == model_fit.sequence_bytes(job)
    assert (many.shape.B, many.shape.L) == (3, 37)


def test_the_next_batch_is_smaller():
    assert [model_fit.smaller(n) for n in (117, 30, 2, 1)] == [113, 29, 1, 0]


@torch.inference_mode()
def test_what_a_step_needs_is_measured(memory, on_cpu, monkeypatch):
    each = model_fit.sequence_bytes(BF16)
    capture = gpu.capture

    def takes(run):
        graph = capture(run)
        memory[0] -= 3 * each // TINY.layers + 1000  # a layer of three sequences, and more
        return graph

    monkeypatch.setattr(gpu, "capture", takes)
    made = model.Model(TINY)
    peers = {torch.nn.attention.SDPBackend.MATH: "peer"}
    assert model_fit.needed(made, model_fit.with_batch(BF16, 3), peers) == 1000


def test_run(memory, on_cpu, tmp_path, capsys):
    path = tmp_path / "rows.csv"
    assert run(path) == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert tuple(rows[0]) == model.COLUMNS
    found = [(r["what"], int(r["B"]), r["preset"], r["provider"]) for r in rows]
    *equal, (_, four, *_), (_, eight, *_) = found
    assert equal == [
        ("step", 1, "", FLASH), ("step", 1, "4bit", "tq_torch"), ("step", 1, "k8v8", "tq_torch"),
        ("fit", 5, "", FLASH), ("step", 5, "4bit", "tq_torch"), ("step", 5, "k8v8", "tq_torch"),
    ]  # fmt: skip
    each = [model_fit.sequence_bytes(BF16._replace(preset=preset)) for preset in ("4bit", "k8v8")]
    assert [four, eight] == [memory[0] // n for n in each]
    assert four > eight > 5
    assert {r["peak_bytes"] for r in rows} == {"12345"}
    bf16, last = rows[3], rows[-1]
    ratio = float(last["tokens_per_second"]) / float(bf16["tokens_per_second"])
    assert float(last["ratio_to_bf16"]) == pytest.approx(ratio, rel=1e-4)
    output = capsys.readouterr().out
    assert (
        f"4bit: {four} sequences of 37 tokens, {four / 5:.2f} times as many as the 5 of bf16"
        in (output)
    )


def test_fewer_are_tried(memory, on_cpu, tmp_path, capsys, monkeypatch):
    memory[0] *= 40
    runs_of, tried = model.runs_of, []

    def scarce(made, job, peers, shared=False):
        if not shared and job.shape.B > 1:
            tried.append((job.preset, job.shape.B))
            if not job.preset and job.shape.B > 190:
                raise torch.OutOfMemoryError("no room")
            job = model_fit.with_batch(job, 2)
        return runs_of(made, model_fit.with_batch(job, 1) if shared else job, peers)

    monkeypatch.setattr(model, "runs_of", scarce)
    path = tmp_path / "rows.csv"
    assert run(path) == 0
    assert [n for preset, n in tried if not preset] == [200, 194, 188]
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert next(r["B"] for r in rows if r["what"] == "fit") == "188"
    assert all(r["us_median"] for r in rows)
    assert "bf16: 194 sequences do not fit" in capsys.readouterr().out


def test_tries_are_few(memory, on_cpu, monkeypatch):
    memory[0] *= 40
    tried = []

    def never(made, job, peers, shared=False):
        tried.append(job.shape.B)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(model, "runs_of", never)
    assert model_fit.fitted(None, BF16, {}, 2, {}) == []
    assert len(tried) == 1 + model_fit.MOST_TRIES  # the first one measures


def test_without_room_for_bf16(memory, on_cpu, tmp_path, capsys):
    memory[0] = model_fit.sequence_bytes(BF16) - 1
    path = tmp_path / "rows.csv"
    assert run(path) == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [(r["preset"], r["ratio_to_bf16"]) for r in rows[3:]] == [("4bit", ""), ("k8v8", "")]
    assert "none fits with bf16" in capsys.readouterr().out
