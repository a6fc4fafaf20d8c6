"""The benchmark on the CPU: what it prints, and when it fails."""

from __future__ import annotations

import pytest
import torch

import bench.__main__ as command_line
from bench import cpu
from bench.timing import Timing

SIZES = ("--seq-len", "37", "--kv-heads", "2", "--head-dim", "32", "--rounds", "1")


@pytest.fixture
def twice(monkeypatch):
    """Every function after the first takes twice its time."""

    def side_by_side(functions, rounds):
        return {name: Timing(*[2.0 if i else 1.0] * 3) for i, name in enumerate(functions)}

    monkeypatch.setattr(cpu, "side_by_side", side_by_side)
    monkeypatch.setattr(cpu, "fork_join", lambda: 0.5)


def run(*words):
    parser = command_line.argparse.ArgumentParser()
    cpu.add_arguments(parser)
    threads = ("--threads", str(torch.get_num_threads()))
    return cpu.run(parser.parse_args([*SIZES, *threads, *words]))


@pytest.mark.parametrize(
    "words, status, end",
    [
        ((), 0, "2.00x SDPA's time\n"),
        (("--limit", "2"), 0, "2.00x SDPA's time, limit 2x\n"),
        (("--limit", "1.9"), 1, "2.00x SDPA's time, limit 1.9x\n"),
    ],
)
def test_only_a_limit_that_was_asked_for_decides(words, status, end, twice, capsys):
    assert run(*words) == status
    assert capsys.readouterr().out.endswith(end)


def test_a_busy_machine_is_named_and_no_failure(twice, capsys, monkeypatch):
    monkeypatch.setattr(cpu, "fork_join", lambda: 2 * cpu.BUSY_MS)
    assert run() == 0
    assert "other work holds the cores" in capsys.readouterr().out


@pytest.mark.parametrize("preset", ["k8v4", "3bit_hq"])
def test_a_run(preset, capsys):
    assert run("--preset", preset) == 0
    assert f"tq native, {preset}" in capsys.readouterr().out


def test_a_wrong_output_is_not_timed(twice, capsys, monkeypatch):
    attend = cpu.tq_torch.decode_attention
    monkeypatch.setattr(
        cpu.tq_torch, "decode_attention", lambda *a, **kw: attend(*a, **kw).mul_(1.01)
    )
    assert run() == 1
    assert "nothing was timed" in capsys.readouterr().out
