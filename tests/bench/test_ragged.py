"""The benchmark of uneven lengths, with the CPU in place of the GPU."""

from __future__ import annotations

import csv

import pytest
import torch

import bench.__main__ as command_line
from bench import decode, gpu, providers, ragged

WORDS = ("--shape", "5:24:2:2:32", "--page-size", "16", "--rounds", "20", "--longest", "100")


def run(path, *words):
    parser = command_line.argparse.ArgumentParser()
    ragged.add_arguments(parser)
    return ragged.run(parser.parse_args([*WORDS, *words, "--csv", str(path)]))


def test_lengths():
    lens = ragged.log_uniform(64, 16, 131072)
    assert (min(lens), max(lens), len(lens)) == (16, 131072, 64)
    assert sorted(lens) != list(lens)
    # Half of them are shorter than the geometric mean of the ends.
    assert sum(n < 1448 for n in lens) == 32
    equal, uneven, *_ = ragged.works(decode.FLAGSHIP, 16, 131072)
    assert abs(sum(equal.lens) - sum(uneven.lens)) < 64


def test_rows(on_cpu, tmp_path, capsys):
    """Native takes no plan: those rows are listed with the reason."""
    path = tmp_path / "ragged.csv"
    assert run(path) == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert tuple(rows[0]) == ragged.COLUMNS
    assert [r["what"] for r in rows] == [w.what for w in ragged.works(decode.FLAGSHIP, 16, 100)]
    assert {r["plan"] for r in rows} == {""}
    assert float(rows[0]["ratio"]) == float(rows[3]["ratio"]) == 1
    assert int(rows[1]["tokens"]) == sum(ragged.log_uniform(5, 16, 100))
    assert int(rows[1]["max_seq_len"]) == 100
    assert capsys.readouterr().out.count("launches no kernels and takes no plan") == 10


def test_plans_reach_the_calls(on_cpu, monkeypatch, tmp_path):
    asked = []
    tq = providers.tq

    def recorded(query, data, item, caches):
        asked.append(item.plan)
        return tq(query, data, item._replace(overrides=()), caches)

    monkeypatch.setattr(providers, "tq", recorded)
    path = tmp_path / "ragged.csv"
    assert run(path, "--parts", "7") == 0
    splits = asked[1]["num_splits"]
    assert asked[:4] == [None, {"num_splits": splits}, {"deterministic": "batch"}, {"parts": 7}]
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [r["plan"] for r in rows[:4]] == [
        "", f"num_splits={splits}", "deterministic=batch", "parts=7"
    ]  # fmt: skip


def test_wrong_outputs_are_not_recorded(on_cpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(decode, "TOLERANCE", 1e-9)
    path = tmp_path / "ragged.csv"
    assert run(path) == 1
    assert not path.exists()
    assert "relative error" in capsys.readouterr().out


@pytest.mark.parametrize("lens, bound", [((16, 1, 40), 40), ((5,), 90)])
def test_a_view_has_pages_of_its_own(on_cpu, lens, bound):
    pool = gpu.make_cache(gpu.Shape(1, 96, 1, 1, 32), "4bit", 16, None, fill=True)
    data = ragged.view(pool, ragged.Lengths("x", lens, bound, "x"))
    assert data.table.shape == (len(lens), -(-bound // 16))
    used = data.table[data.table >= 0]
    assert len(used.unique()) == len(used) == sum(-(-n // 16) for n in lens)
    assert torch.equal(data.lens, torch.tensor(lens, dtype=torch.int32))
