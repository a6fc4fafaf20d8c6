"""The benchmark of calibrated codecs, with the CPU in place of the GPU."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch

import bench.__main__ as command_line
from bench import calibrated, gpu

SHAPE = gpu.Shape(3, 37, 2, 2, 32)
WORDS = ("--shapes", "3:37:2:2:32", "--presets", "4bit,k8v4", "--page-size", "16", "--rounds", "20")


def arguments(*words):
    parser = command_line.argparse.ArgumentParser()
    calibrated.add_arguments(parser)
    return parser.parse_args(words)


def run(path):
    return calibrated.run(arguments(*WORDS, "--csv", str(path)))


def test_defaults():
    made = arguments()
    assert made.shapes == [(64, 8192, 8, 4, 128), (1, 32768, 8, 4, 128), (8, 32768, 8, 4, 128)]
    assert (made.presets, made.csv.name) == (["4bit", "3bit", "k8v4"], "calibrated.csv")


@pytest.mark.parametrize("sides", calibrated.CODECS.values())
def test_codecs(sides):
    codec = calibrated.make_codec("4bit", SHAPE, sides)
    for side in ("key", "value"):
        offset, transform = (getattr(codec, f"{side}_{x}") for x in ("offset", "transform"))
        if side not in sides:
            assert offset is transform is None
            continue
        assert offset.shape == (2, 32)
        assert np.linalg.cond(transform) == pytest.approx([calibrated.CONDITION] * 2, rel=1e-4)


def test_rows(on_cpu, tmp_path, capsys):
    path = tmp_path / "rows.csv"
    assert run(path) == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert tuple(rows[0]) == calibrated.COLUMNS
    assert [(r["preset"], r["codec"]) for r in rows] == [
        (preset, codec) for preset in ("4bit", "k8v4") for codec in calibrated.CODECS
    ]
    for plain, *others in (rows[:3], rows[3:]):
        assert float(plain["ratio_to_plain"]) == 1
        for row in others:
            ratio = float(row["us_median"]) / float(plain["us_median"])
            assert float(row["ratio_to_plain"]) == pytest.approx(ratio, rel=1e-4)
            assert row["cache_bytes"] == plain["cache_bytes"]
    assert "keys and values" in capsys.readouterr().out
    assert len(on_cpu) == 6


def test_wrong_output_is_not_recorded(on_cpu, tmp_path, capsys, monkeypatch):
    attend = calibrated.providers.tq_torch.decode_attention

    def off(*args, codec, **what):
        out = attend(*args, codec=codec, **what)
        return out.mul_(1.1) if codec.value_offset is not None else out

    monkeypatch.setattr(calibrated.providers.tq_torch, "decode_attention", off)
    path = tmp_path / "rows.csv"
    assert run(path) == 1
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [r["codec"] for r in rows] == ["plain", "keys"] * 2
    output = capsys.readouterr().out
    assert "4bit planes P16 keys and values, Shape(B=3" in output
    assert output.count("expected at most 0.004: not timed") == 2
    assert len(on_cpu) == 4


def test_without_the_plain_codec_there_is_no_ratio(on_cpu, monkeypatch):
    prepared = calibrated.prepared

    def refuses(job, fill):
        if job.codec == calibrated.PLAIN:
            raise ValueError("refused")
        return prepared(job, fill)

    monkeypatch.setattr(calibrated, "prepared", refuses)
    with torch.inference_mode():
        rows, problems = calibrated.measure(gpu.Item(SHAPE, "4bit", 16, "planes", 1), 20)
    assert [r["ratio_to_plain"] for r in rows] == ["", ""]
    assert len(problems) == 1
    assert problems[0].endswith("ValueError: refused")


def test_warming_makes_the_calls_of_a_run(on_cpu):
    for codec in calibrated.CODECS:
        job = calibrated.Job(gpu.Item(SHAPE, "3bit", 16, "planes", 1), codec)
        with torch.inference_mode():
            assert calibrated.warm(job) is None
    assert "no such" in calibrated.warm(job._replace(codec="no such codec"))
