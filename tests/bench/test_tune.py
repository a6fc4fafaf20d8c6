"""The command that measures plans, with made-up times."""

from __future__ import annotations

import csv
import json

import pytest
import torch

import bench.__main__ as command_line
from bench import gpu, providers, tune
from tq_core import dispatch
from tq_core.dispatch import SPLITS


@pytest.fixture
def times(on_cpu, monkeypatch):
    """Times of a run by the overrides of its plan; gives the dictionary to fill."""
    made: dict[tuple[tuple[str, int], ...], float] = {}

    def tq(query, data, item, caches):
        assert len(caches) == 1
        if dict(item.overrides).get("num_stages") == 7:
            raise ValueError("too much shared memory")
        return gpu.Run("tq_torch", [], 1, {"overrides": item.overrides})

    def time_runs(runs, rounds, skipped):
        assert list(skipped.values()) == ["ValueError: too much shared memory"] * len(skipped) != []
        return [(run, gpu.Timing(made.get(run.fields["overrides"], 100.0), 1.0)) for run in runs]

    def on_file(*args):
        raise AssertionError("a plan on file was asked for")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Device 9")
    monkeypatch.setattr(dispatch, "_measured", on_file)
    monkeypatch.setattr(gpu, "time_runs", time_runs)
    monkeypatch.setattr(providers, "rotated", lambda data: [data.cache])
    monkeypatch.setattr(providers, "tq", tq)
    return made


def run(folder, *words):
    parser = command_line.argparse.ArgumentParser()
    tune.add_arguments(parser)
    path = folder / "tune.csv"
    files = ("--folder", str(folder / "plans"), "--csv", str(path))
    assert tune.run(parser.parse_args([*words, *files])) == 0
    return list(csv.DictReader(path.read_text().splitlines()))


def entries(folder):
    return json.loads((folder / "plans/a-device-9.json").read_text())["plans"]


def test_the_fastest_plan_is_written(times, tmp_path, capsys):
    times[("block_t", 32), ("num_splits", 1)] = 60.0
    rows = run(tmp_path, "--shapes", "2:100:2:4:32,1:64:2:1:32")
    assert tuple(rows[0]) == tune.COLUMNS
    kind = {"key": "mse4", "value": "int4", "head_dim": 32}
    plan = {"block_t": 32, "num_splits": 1}
    assert entries(tmp_path) == [
        {**kind, "group": 1, "programs": 2, "tokens": 64, "plan": plan},
        {**kind, "group": 4, "programs": 4, "tokens": 100, "plan": plan},
    ]
    assert [(r["us_planned"], r["us_measured"], json.loads(r["plan"])) for r in rows] == [
        ("100", "60", plan)
    ] * 2
    assert "at most 1.67 times" in capsys.readouterr().out


def test_what_saves_little_is_not(times, tmp_path):
    times[("num_splits", 1),] = 98.5
    (row,) = run(tmp_path, "--shapes", "2:100:2:4:32")
    assert (row["us_measured"], row["plan"]) == ("100", "{}")
    assert [e["plan"] for e in entries(tmp_path)] == [{}]


def test_another_run_replaces_its_own_entries_alone(times, tmp_path):
    run(tmp_path, "--shapes", "2:100:2:4:32,1:64:2:4:32")
    times[("num_splits", 1),] = 50.0
    rows = run(tmp_path, "--shapes", "1:64:2:4:32")
    assert [(r["L"], r["us_measured"]) for r in rows] == [
        ("100", "100"),
        ("64", "100"),
        ("64", "50"),
    ]
    assert [(e["tokens"], e["plan"]) for e in entries(tmp_path)] == [
        (64, {"num_splits": 1}),
        (100, {}),
    ]


def test_the_plan_from_numbers_is_not_written(times, tmp_path, capsys):
    times[tune.FROM_NUMBERS] = 20.0
    (row,) = run(tmp_path, "--shapes", "2:100:2:4:32")
    assert (row["us_planned"], row["us_measured"], row["plan"]) == ("20", "20", "{}")
    assert "20.0 planned; 100.0 {" in capsys.readouterr().out


def test_candidates_are_near_what_was_planned():
    item = gpu.Item(gpu.Shape(1, 8192, 8, 4, 128), "4bit", 64, "planes", 1)
    first, *others = tune.candidates(item, 16)
    assert first == item
    assert {dict(c.overrides)["num_splits"] for c in others} == {8, 12, 16, 24, 32}
    assert all(n in SPLITS for c in others for n in [dict(c.overrides)["num_splits"]])
    short = item._replace(shape=item.shape._replace(L=64))
    assert {dict(c.overrides)["num_splits"] for c in tune.candidates(short, 2)[1:]} == {1, 2}
