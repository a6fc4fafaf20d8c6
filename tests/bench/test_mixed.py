"""The benchmark of mixed batches, with the CPU in place of the GPU."""

from __future__ import annotations

import csv

import pytest
import torch

import bench.__main__ as command_line
import tq_torch
from bench import mixed

pytestmark = pytest.mark.usefixtures("on_cpu")
WORDS = ("--shape", "3:100:2:2:32", "--page-size", "16", "--query-len", "20", "--rounds", "20")


def run(path):
    parser = command_line.argparse.ArgumentParser()
    mixed.add_arguments(parser)
    return mixed.run(parser.parse_args([*WORDS, "--csv", str(path)]))


def test_rows(tmp_path, capsys):
    path = tmp_path / "mixed.csv"
    assert run(path) == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert tuple(rows[0]) == mixed.COLUMNS
    assert [(r["B"], r["query_len"]) for r in rows] == [("3", "20"), ("2", "1"), ("1", "20")]
    _, *alone = (float(r["ratio"]) for r in rows)
    assert sum(alone) == pytest.approx(1)
    assert "chunk alone" in capsys.readouterr().out


def test_another_output_is_not_recorded(tmp_path, capsys, monkeypatch):
    attend = tq_torch.decode_attention
    monkeypatch.setattr(
        tq_torch, "decode_attention", lambda *a, **k: torch.zeros_like(attend(*a, **k))
    )
    path = tmp_path / "mixed.csv"
    assert run(path) == 1
    assert not path.exists()
    assert "differs from its parts" in capsys.readouterr().out
