"""``tq info``: versions, devices, backends, measured plans."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata
from typing import Any

import tq_core
from tq_cli.machine import Machine, inspect, sentence
from tq_cli.sizes import show_size
from tq_cli.table import table
from tq_core import CacheLayout, QuantConfig, plans
from tq_core.support import FRAMEWORKS, reasons_against

DESCRIPTION = """\
Say which versions and devices there are, which backends of tq_torch and tq_jax run
on them and why others do not, and whether launch plans were measured for the GPU."""
PACKAGES = ("numpy", "torch", "triton", "jax", "jaxlib", "jax-triton", "transformers")
ABSENT = "not installed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none but ``--json``."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All that ``tq info`` prints."""
    machines = {name: inspect(name) for name in FRAMEWORKS}
    return {
        "versions": _versions(),
        "frameworks": {name: _framework(name, machine) for name, machine in machines.items()},
        "plans": _plans(list(machines.values())),
    }


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "tq": tq_core.__version__,
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _framework(name: str, machine: Machine) -> dict[str, Any]:
    result: dict[str, Any] = {"unusable": machine.reason, "devices": [], "backends": {}}
    result["default_backend"] = None
    if machine.reason is not None:
        return result
    result["devices"] = [vars(device) for device in machine.devices]
    result["backends"] = {
        backend: {"runs": not reasons, "reasons": reasons}
        for backend in FRAMEWORKS[name]
        for reasons in [_reasons(backend, machine.target, name)]
    }
    runs = (backend for backend, state in result["backends"].items() if state["runs"])
    result["default_backend"] = next(runs, None)
    return result


def _layout() -> CacheLayout:
    """A layout that every backend takes, so that what is missing is the machine's."""
    return CacheLayout(QuantConfig(), num_kv_heads=8, head_dim=128, page_size=16)


def _reasons(backend: str, target: str, framework: str) -> list[str]:
    try:
        return reasons_against(_layout(), backend=backend, target=target, framework=framework)
    except Exception as error:  # importing a broken Triton
        return [sentence(error)]


def _plans(machines: list[Machine]) -> dict[str, int]:
    """How many measured points there are for each GPU, by its name."""
    names = {device.name for machine in machines for device in machine.gpus}
    return {name: sum(map(len, plans.load(name).values())) for name in sorted(names)}


def text(result: dict[str, Any]) -> str:
    """The result as lines."""
    versions = result["versions"].items()
    lines = table([(name, version or ABSENT) for name, version in versions], right=False)
    for name, framework in result["frameworks"].items():
        lines += ["", f"tq_{name}", *_framework_lines(framework)]
    lines += ["", "measured plans"]
    found = result["plans"].items()
    lines += [
        f"  {name}: {f'{count} points' if count else 'none, launches are planned from numbers'}"
        for name, count in found
    ]
    return "\n".join(lines if found else [*lines, "  there is no GPU here that would use them"])


def _framework_lines(framework: dict[str, Any]) -> list[str]:
    if framework["unusable"]:
        return [f"  {framework['unusable']}"]
    lines = []
    for device in framework["devices"]:
        memory = f", {show_size(device['memory'])}" if device["memory"] else ""
        name = "" if device["name"].lower() in device["id"] else f", {device['name']}"
        lines.append(f"  device {device['id']}{name}{memory}")
    for backend, state in framework["backends"].items():
        if state["runs"]:
            default = backend == framework["default_backend"]
            lines.append(f"  {backend} runs here" + (", the default" if default else ""))
        else:
            lines.append(f"  {backend} does not run here: " + "; ".join(state["reasons"]))
    return lines
