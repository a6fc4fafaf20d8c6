"""``tq info`` on this machine and on others that are made up."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest

import tq_core
from tests.isolation import ROOT, run_without
from tq_cli import info, machine
from tq_cli.machine import Device, Machine
from tq_core.support import FRAMEWORKS, choose_backend

H200 = Machine("cuda", [Device("cuda:0", "NVIDIA H200", 150_000_000_000)])


def described(monkeypatch, **machines) -> dict:
    monkeypatch.setattr(info, "inspect", machines.get)
    return info.run(None)


@pytest.fixture(scope="module")
def here() -> dict:
    """What the process ``python -m tq_cli info --json`` prints on this machine."""
    result = subprocess.run(
        [sys.executable, "-m", "tq_cli", "info", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(result.stdout)


def test_versions(here):
    assert here["versions"]["tq"] == tq_core.__version__
    assert here["versions"]["python"] == sys.version.split()[0]
    assert here["versions"]["numpy"] == metadata.version("numpy")
    assert list(here["versions"])[2:] == list(info.PACKAGES)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_frameworks_of_this_machine(here, framework):
    state = here["frameworks"][framework]
    if state["unusable"]:
        pytest.skip(state["unusable"])
    assert state["devices"]
    assert list(state["backends"]) == list(FRAMEWORKS[framework])
    assert state["backends"]["native"] == {"runs": True, "reasons": []}
    for backend in state["backends"].values():
        assert backend["runs"] == (not backend["reasons"])


def test_the_text_has_what_the_json_has(here):
    text = info.text(here)
    for name, version in here["versions"].items():
        assert f"{name.ljust(12)}  {version or 'not installed'}\n" in text
    for state in here["frameworks"].values():
        for backend in state["backends"].values():
            assert all(reason in text for reason in backend["reasons"])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("target", ["cpu", "cuda", "hip"])
@pytest.mark.filterwarnings("ignore:tq_:RuntimeWarning")
def test_the_default_is_what_a_call_takes(monkeypatch, framework, target):
    found = Machine(target, [Device("0", "x")])
    result = described(monkeypatch, **dict.fromkeys(FRAMEWORKS, found))
    expected = choose_backend(info._layout(), backend=None, target=target, framework=framework)
    assert result["frameworks"][framework]["default_backend"] == expected


def test_measured_plans(monkeypatch):
    other = Machine("cuda", [Device("cuda:0", "NVIDIA Unheard-Of")])
    result = described(monkeypatch, torch=H200, jax=other)
    assert result["plans"]["NVIDIA H200"] > 0
    assert result["plans"]["NVIDIA Unheard-Of"] == 0
    text = info.text(result)
    assert f"NVIDIA H200: {result['plans']['NVIDIA H200']} points" in text
    assert "NVIDIA Unheard-Of: none" in text
    assert "device cuda:0, NVIDIA H200, 150.00 GB" in text


def test_a_failing_import_is_a_sentence(monkeypatch):
    def fail() -> Machine:
        raise OSError("libx.so: cannot open\nand a second line")

    monkeypatch.setitem(machine._INSPECT, "torch", fail)
    found = machine.inspect("torch")
    assert found.reason == ("torch is installed and cannot be used: OSError: libx.so: cannot open")
    result = described(monkeypatch, torch=found, jax=H200)
    assert result["frameworks"]["torch"]["default_backend"] is None
    assert f"tq_torch\n  {found.reason}\n" in info.text(result)


def test_a_missing_framework_is_a_sentence(monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    assert machine.inspect("jax") == Machine(reason="jax is not installed")


def test_neither_framework_can_be_imported():
    code = "from tq_cli.main import main; sys.exit(main(['info']))"
    result = run_without(["torch", "jax", "jaxlib", "triton"], code)
    assert (result.returncode, result.stderr) == (0, "")
    assert "torch is installed and cannot be used: ImportError: blocked: torch" in result.stdout
