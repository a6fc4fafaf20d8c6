"""The table and plots of recorded decode runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import bench.__main__ as command_line
from bench import gpu, report

README = Path(__file__).parents[2] / "README.md"
SHAPE = gpu.Shape(2, 1024, 2, 4, 64)


def row(preset="4bit", us=10.0, ratio=2.0, **changes):
    """A row of a CSV file, by default of tq_torch at ``SHAPE`` with a fifth of bf16's bytes."""
    return {
        **dict.fromkeys(gpu.COLUMNS, ""),
        **{"date": "2026-01-02", "commit": "abc", "device": "a GPU", "provider": "tq_torch"},
        **SHAPE._asdict(),
        **{"preset": preset, "page_size": 64, "order": "planes", "us_median": us},
        **{"ratio_to_best_bf16": ratio, "cache_bytes": SHAPE.bf16_bytes // 5},
        **changes,
    }


@pytest.fixture
def recorded(tmp_path):
    def write(*rows):
        path = tmp_path / "decode.csv"
        path.unlink(missing_ok=True)
        gpu.append_csv(path, rows)
        return path

    return write


def run(*words):
    parser = command_line.argparse.ArgumentParser()
    report.add_arguments(parser)
    return report.run(parser.parse_args([str(w) for w in words]))


def test_readme_shows_the_last_recorded_run():
    text = README.read_text()
    points = report.read(gpu.RESULTS / "decode.csv")
    tables = {
        "": report.table(points, gpu.Shape.parse(report.FLAGSHIP)),
        ", grid": report.grid(points),
    }
    assert report.replaced(text, tables) == text


def test_table(recorded, capsys):
    path = recorded(
        row("4bit", 20.0, 1.0, commit="old"),
        row("3bit", 11.0, 1.5),
        row("4bit", 10.0, 3.0),
        row("4bit", 8.0, 3.75, order="token"),
        row("4bit", 12.0, 2.5, page_size=16),
        row("", 30.0, 1.0, provider="a peer"),
        row("2bit", 1.0, 9.0, B=7),
    )
    shape = ":".join(map(str, SHAPE))
    assert run("--csv", path, "--shape", shape) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].count("us,") == 2
    assert lines[2:] == [
        "| `4bit` | 8 | 3.75x | 75% | 12 | 2.50x | 50% |",
        "| `3bit` | 11 | 1.50x | 30% |  |  |  |",
        "",
        "| D | KV heads | query heads of each | 2 x 1k |",
        "| --- | --- | --- | --- |",
        "| 64 | 2 | 4 | 3.75 |",
    ]
    assert run("--csv", path, "--shape", shape, "--commit", "old") == 0
    assert "| 20 | 1.00x | 20% |" in capsys.readouterr().out


def test_into_a_document(recorded, tmp_path):
    document = tmp_path / "page.md"
    (start, end), (grid_start, grid_end) = report.MARKS.values()
    document.write_text(f"before\n{start}\nold\n{end}\nmid\n{grid_start}{grid_end}\nafter\n")
    words = ("--csv", recorded(row()), "--shape", ":".join(map(str, SHAPE)), "--into", document)
    assert run(*words) == run(*words) == 0
    before, _, rest = document.read_text().partition(start)
    assert before == "before\n"
    assert rest.partition(end)[2].partition(grid_start)[0] == "\nmid\n"
    assert rest.endswith(f"| 64 | 2 | 4 | 2.00 |\n{grid_end}\nafter\n")
    assert "old" not in rest
    assert "| `4bit` | 10 | 2.00x | 40% |" in rest


def test_grid_of_four_bits(recorded):
    rows = [
        row(L=n, g=g, D=d, ratio=n / 1000 + g + d)
        for n in (1024, 1500)
        for g in (1, 2)
        for d in (64, 128)
    ]
    points = report.read(recorded(*rows[:-1], row("3bit", L=9)))
    assert report.grid(points).splitlines() == [
        "| D | KV heads | query heads of each | 2 x 1k | 2 x 1500 |",
        "| --- | --- | --- | --- | --- |",
        "| 128 | 2 | 1 | 130.02 | 130.50 |",
        "| 128 | 2 | 2 | 131.02 |  |",
        "| 64 | 2 | 1 | 66.02 | 66.50 |",
        "| 64 | 2 | 2 | 67.02 | 67.50 |",
    ]


def test_plots(recorded, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row(p, us, 2.0, L=n, g=g) for p, us in (("4bit", 9.0), ("3bit", 8.0))
            for n in (1024, 8192) for g in (1, 4)]  # fmt: skip
    points = report.read(recorded(*rows))
    paths = report.plot(points, tmp_path / "plots")
    assert [p.name for p in paths] == ["decode-ratio.png", "decode-roofline.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)


@pytest.mark.parametrize(
    ("rows", "words", "why"),
    [
        ([row()], ("--commit", "none"), "no rows of tq_torch"),
        ([row(provider="a peer")], (), "no rows of tq_torch"),
        ([row(ratio="")], (), "no rows of tq_torch"),
        ([row()], ("--shape", "1:1:1:1:8"), "not in the run"),
        ([row()], ("--into", README.parent / "LICENSE"), "once each"),
    ],
)
def test_what_cannot_be_shown_is_said(rows, words, why, recorded, capsys):
    path = recorded(*rows)
    assert run("--csv", path, "--shape", ":".join(map(str, SHAPE)), *words) == 1
    assert why in capsys.readouterr().err


def test_other_columns_are_refused(tmp_path, capsys):
    path = tmp_path / "decode.csv"
    path.write_text("date,us\n")
    assert run("--csv", path) == 1
    assert "other columns" in capsys.readouterr().err
    assert run("--csv", tmp_path / "none.csv") == 1
