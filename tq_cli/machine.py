"""What torch and JAX say about this machine; both are imported here alone, when asked for."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class Device:
    """A device of a framework.

    Attributes:
        id: how the framework names it.
        name: its model.
        memory: bytes that the framework can use of it, where it says so.
    """

    id: str
    name: str
    memory: int | None = None


@dataclass(frozen=True)
class Machine:
    """The devices of a framework.

    Attributes:
        target: the kind of the default device, as ``tq_core.why_unsupported`` names it.
        devices: all of them.
        reason: why the framework cannot be used, or None.
    """

    target: str = "cpu"
    devices: list[Device] = field(default_factory=list)
    reason: str | None = None

    @property
    def gpus(self) -> list[Device]:
        """The devices that kernels run on."""
        return self.devices if self.target in ("cuda", "hip") else []


def inspect(framework: str) -> Machine:
    """The devices of ``"torch"`` or ``"jax"``; what goes wrong becomes the reason."""
    try:
        if find_spec(framework) is None:
            return Machine(reason=f"{framework} is not installed")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _INSPECT[framework]()
    except Exception as error:
        return Machine(reason=f"{framework} is installed and cannot be used: {sentence(error)}")


def sentence(error: BaseException) -> str:
    """An exception in one line: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _torch() -> Machine:
    torch: Any = import_module("torch")
    if not torch.cuda.is_available():
        return Machine(devices=[Device("cpu", "CPU")])
    devices = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        devices.append(Device(f"cuda:{number}", properties.name, properties.total_memory))
    return Machine("hip" if torch.version.hip else "cuda", devices)


def _jax() -> Machine:
    # Or JAX takes most of a GPU's memory, only to name it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax: Any = import_module("jax")
    found = jax.devices()
    devices = []
    for device in found:
        memory = (device.memory_stats() or {}).get("bytes_limit") if device.platform == "gpu" else 0
        name = "CPU" if device.platform == "cpu" else device.device_kind
        devices.append(Device(f"{device.platform}:{device.id}", name, memory or None))
    target = found[0].platform
    if target == "gpu":
        target = "hip" if "rocm" in found[0].client.platform_version else "cuda"
    return Machine(target, devices)


_INSPECT: dict[str, Callable[[], Machine]] = {"torch": _torch, "jax": _jax}
