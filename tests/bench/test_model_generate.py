"""Generation of ``bench model``, with the CPU in place of the GPU."""

from __future__ import annotations

import csv

import pytest
import torch
from torch.nn.attention import SDPBackend

import bench.__main__ as command_line
from bench import gpu, model, model_generate
from tests.bench.test_model import FLASH, TINY

WORDS = ("--presets", "4bit", "--batch", "1,3", "--lengths", "37", "--page-size", "16")
STEPS = 7


class Graph:
    """In place of a captured step."""

    def __init__(self, step):
        self.replay = step


@pytest.fixture
def on_cpu(on_cpu, monkeypatch):
    monkeypatch.setattr(model, "LLAMA", TINY)
    # Something is run while it is captured here, which must not matter.
    monkeypatch.setattr(
        model_generate, "capture", lambda steps: [steps[0](), *map(Graph, steps)][1:]
    )
    return on_cpu


def run(path, *words):
    parser = command_line.argparse.ArgumentParser()
    model.add_arguments(parser)
    words = (*WORDS, "--rounds", "2", "--csv", str(path), "--generate", str(STEPS), *words)
    return model.run(parser.parse_args(words))


@torch.inference_mode()
def wanted(made, job, peer):
    """Tokens of steps that are told everything by the host."""
    caches = model.dense_caches(job) if peer else model.packed_caches(job)
    ids, tokens = model.make_ids(made, job.shape.B), []
    for length in range(job.shape.L - STEPS + 1, job.shape.L + 1):
        attend = model.dense(length, caches, peer) if peer else model.packed(length, *caches)
        ids = made(ids, length, attend).argmax(-1)
        tokens.append(ids)
    return torch.stack(tokens, 1)


@pytest.mark.parametrize("preset, peer", [("4bit", None), ("", SDPBackend.FLASH_ATTENTION)])
def test_tokens_are_those_of_steps_by_the_host(preset, peer, on_cpu):
    job = model.Job(TINY, TINY.shape(3, 37), preset, 16)
    made = model.Model(TINY)
    first = model.make_ids(made, 3)
    state = model_generate.State.make(first, STEPS)
    torch.manual_seed(0)
    with torch.inference_mode():
        (calls,) = model_generate.steps_of(made, job, {peer: "peer"}, state).values()
        assert len(calls) == STEPS
        assert len(set(calls)) == (STEPS if peer else 1)
        for _ in range(2):
            state.reset(first, 37 - STEPS + 1)
            for call in calls:
                call()
    torch.manual_seed(0)
    want = wanted(made, job, peer)
    assert torch.equal(state.written, want)
    assert len(want.unique()) > STEPS
    assert state.lens.tolist() == [38] * 3


def test_rows(on_cpu, tmp_path, capsys):
    path = tmp_path / "rows.csv"
    assert run(path) == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert tuple(rows[0]) == model.COLUMNS
    assert [(r["B"], r["provider"], r["what"]) for r in rows] == [
        (batch, name, f"generate {STEPS}") for batch in ("1", "3") for name in (FLASH, "tq_torch")
    ]
    for row in rows:
        per_second = 1e6 * int(row["B"]) / float(row["us_median"])
        assert float(row["tokens_per_second"]) == pytest.approx(per_second, rel=1e-4)
        assert row["peak_bytes"] == "12345"
    output = capsys.readouterr().out
    assert output.count(f"{STEPS} tokens a sequence are those of eager calls") == 4
    assert "torch SDPA cuDNN bfloat16: not timed, RuntimeError: " in output


def test_other_tokens_are_not_recorded(on_cpu, tmp_path, capsys, monkeypatch):
    """A graph that does nothing leaves what was there before."""
    nothing = lambda steps: [Graph(lambda: None) for _ in steps]  # noqa: E731
    monkeypatch.setattr(model_generate, "capture", nothing)
    path = tmp_path / "rows.csv"
    assert run(path) == 1
    assert list(csv.DictReader(path.read_text().splitlines())) == []
    assert f"tq_torch 4bit: not timed, {model_generate.OTHER_TOKENS}" in capsys.readouterr().out


def test_more_tokens_than_the_cache_has_are_refused(on_cpu, tmp_path, capsys):
    path = tmp_path / "rows.csv"
    assert run(path, "--generate", "38") == 2
    assert "38 steps end at a length of at least 38, not at 37" in capsys.readouterr().out
    assert not path.exists()


def test_one_graph_of_equal_steps(on_cpu, monkeypatch):
    monkeypatch.undo()
    made = []

    class Captured:
        def __enter__(self):
            made.append(self)

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 1)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: Captured())
    one, two = (lambda: None for _ in range(2))
    graphs = model_generate.capture([one, one, two])
    assert len(made) == 2
    assert graphs[0] is graphs[1] is not graphs[2]


def test_time_is_that_of_a_step(on_cpu):
    assert gpu.DEVICE == "cpu"
    assert model_generate.elapsed([Graph(lambda: None)] * 2) == pytest.approx(0.5)
