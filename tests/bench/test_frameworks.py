"""What the comparison of the frameworks records."""

from __future__ import annotations

import csv

import bench.__main__ as command_line
from bench import frameworks, gpu


def test_rows_are_appended(on_cpu, tmp_path, monkeypatch):
    monkeypatch.setattr(frameworks, "version", lambda package: "0.4.1")
    parser = command_line.argparse.ArgumentParser()
    frameworks.add_arguments(parser)
    path = tmp_path / "new" / "rows.csv"
    arguments = parser.parse_args(["--shape", "2:100:2:4:32", "--csv", str(path)])
    for _ in range(2):
        frameworks.record(arguments, [("decode, kernels", "162.9", "160.7", "0.987")])
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert len(rows) == 2
    assert tuple(rows[0]) == frameworks.COLUMNS
    assert (rows[1]["shape"], rows[1]["jax_triton"]) == ("2:100:2:4:32", "0.4.1")
    assert [rows[1][name] for name in frameworks.COLUMNS[-4:]] == [
        "decode, kernels", "162.9", "160.7", "0.987",
    ]  # fmt: skip


def test_committed_results_have_the_columns():
    header, *_ = (gpu.RESULTS / "frameworks.csv").read_text().splitlines()
    assert header == ",".join(frameworks.COLUMNS)
