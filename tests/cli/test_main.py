"""The command as a whole."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from tests.isolation import ROOT, run_without
from tq_cli import main as module
from tq_cli.main import COMMANDS, main


def test_importing_loads_no_framework():
    code = "import tq_cli.main; print(sorted({'torch', 'jax', 'triton'} & set(sys.modules)))"
    result = run_without([], code)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_the_console_script_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"tq": f"{module.__name__}:{main.__name__}"}
    assert "tq_cli" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_help(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*words, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(" ".join(["usage: tq", *words]))
    assert ("--json" in out) == bool(words)
    assert words or all(name in out for name in COMMANDS)


@pytest.mark.parametrize("words", [[], ["nothing"]])
def test_no_such_command(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "COMMAND" in line
    assert line.endswith("`tq --help` says more")


def test_an_error_of_the_module_is_one_line_and_status_2():
    result = subprocess.run(
        [sys.executable, "-m", "tq_cli", "plan", "no-such-file", "--memory", "1GB"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "tq plan: no-such-file: No such file or directory\n"
