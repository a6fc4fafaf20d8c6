"""The benchmark of launch costs, with the CPU in place of the GPU."""

from __future__ import annotations

import csv

import pytest
import torch

import bench.__main__ as command_line
from bench import gpu, launch

WORDS = ("--shape", "2:100:2:2:32", "--page-size", "16", "--rounds", "20")


@pytest.fixture(autouse=True)
def few_calls(on_cpu, monkeypatch):
    monkeypatch.setattr(launch, "CALLS", 1)
    monkeypatch.setattr(launch, "SMALL", gpu.Shape(1, 16, 2, 2, 32))


def run(path, *words):
    parser = command_line.argparse.ArgumentParser()
    launch.add_arguments(parser)
    return launch.run(parser.parse_args([*WORDS, *words, "--csv", str(path)]))


def test_rows(tmp_path, capsys):
    path = tmp_path / "launch.csv"
    assert run(path) == run(path) == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert tuple(rows[0]) == launch.COLUMNS
    assert len(rows) == 2 * 6
    host, stored, graph, *device = rows[:6]
    assert (host["what"], stored["what"]) == ("eager call, host", "eager store, host")
    assert {r["L"] for r in (host, stored, graph)} == {"16"}
    assert {r["L"] for r in device} == {"100"}
    assert float(host["us_median"]) > 0
    assert float(device[1]["ratio"]) > 0
    assert "eager call, host" in capsys.readouterr().out


def test_another_output_is_not_recorded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "equal", lambda a, b: False)
    path = tmp_path / "launch.csv"
    assert run(path) == 1
    assert not path.exists()
    assert "other bits" in capsys.readouterr().out
