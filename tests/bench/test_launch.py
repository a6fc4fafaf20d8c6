"""The benchmark of launch costs, with the CPU in place of the GPU."""

from __future__ import annotations

import csv
from itertools import count
from types import SimpleNamespace

import pytest
import torch

import bench.__main__ as command_line
from bench import gpu, launch

WORDS = ("--shape", "2:100:2:2:32", "--page-size", "16", "--rounds", "20")


@pytest.fixture
def on_cpu(monkeypatch):
    """Graphs call what was captured; gives the captured runs."""
    captured = []

    def capture(run):
        captured.append(run)
        run.calls[0]()
        return gpu.Graph(SimpleNamespace(replay=run.calls[0]), 1)

    ticks = count(1)
    event = SimpleNamespace(
        record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: next(ticks)
    )
    environment = dict.fromkeys(launch.COLUMNS[:7], "x")
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "BACKEND", "native")
    monkeypatch.setattr(gpu, "require_gpu", lambda: True)
    monkeypatch.setattr(gpu, "environment", lambda commit: environment)
    monkeypatch.setattr(gpu, "capture", capture)
    monkeypatch.setattr(launch, "CALLS", 1)
    monkeypatch.setattr(launch, "SMALL", gpu.Shape(1, 16, 2, 2, 32))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return captured


def run(path, *words):
    parser = command_line.argparse.ArgumentParser()
    launch.add_arguments(parser)
    return launch.run(parser.parse_args([*WORDS, *words, "--csv", str(path)]))


def test_rows(on_cpu, tmp_path, capsys):
    path = tmp_path / "launch.csv"
    assert run(path) == run(path) == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert tuple(rows[0]) == launch.COLUMNS
    assert len(rows) == 2 * 5
    host, graph, *device = rows[:5]
    assert (host["what"], host["L"], graph["L"]) == ("eager call, host", "16", "16")
    assert {r["L"] for r in device} == {"100"}
    assert float(host["us_median"]) > 0
    assert float(device[1]["ratio"]) > 0
    assert "eager call, host" in capsys.readouterr().out


def test_another_output_is_not_recorded(on_cpu, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "equal", lambda a, b: False)
    path = tmp_path / "launch.csv"
    assert run(path) == 1
    assert not path.exists()
    assert "other bits" in capsys.readouterr().out
