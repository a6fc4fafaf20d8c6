"""Which backend can serve a layout, and every reason why another cannot."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec

from tq_core.layout import CacheLayout

BACKENDS = ("triton", "native", "interpret", "pallas")
#: Backends of each framework, the preferred one first; None never picks ``"interpret"``.
FRAMEWORKS = {
    "torch": ("triton", "native", "interpret"),
    "jax": ("triton", "native", "interpret"),
}
MIN_TRITON = (3, 6)
#: Devices of the kernels by backend.
_KERNEL_TARGETS = {"triton": ("cuda", "hip"), "interpret": ("cpu",)}


def why_unsupported(
    layout: CacheLayout, *, backend: str, target: str, framework: str = "torch"
) -> list[str]:
    """Every reason why ``backend`` cannot serve ``layout`` on ``target``; [] when it can.

    Args:
        layout: the cache's layout.
        backend: ``"native"`` (the framework's own operations, any device), ``"triton"``,
            ``"interpret"`` (the Triton sources on the CPU, for tests) or ``"pallas"``.
        target: a device kind, ``"cpu"``, ``"cuda"``, ``"hip"`` (ROCm), ...; ``"cuda:0"`` is
            ``"cuda"``.
        framework: ``"torch"`` or ``"jax"``.

    Raises:
        TypeError: ``layout`` is not a ``CacheLayout``, or ``target`` not a str.
        ValueError: an unknown backend or framework.
    """
    if not isinstance(layout, CacheLayout):
        raise TypeError(f"layout: expected a CacheLayout, got {type(layout).__name__}")
    if not isinstance(target, str):
        raise TypeError(f"target: expected the name of a device kind, got {target!r}")
    target = target.partition(":")[0]
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {list(BACKENDS)}, got {backend!r}")
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework: expected one of {list(FRAMEWORKS)}, got {framework!r}")
    if backend == "native":
        return []
    reasons = []
    if backend not in FRAMEWORKS[framework]:
        reasons.append(
            f"this version of tq_{framework} has no {backend} backend, only "
            + ", ".join(FRAMEWORKS[framework])
        )
    if backend not in _KERNEL_TARGETS:
        return reasons
    targets = _KERNEL_TARGETS[backend]
    if target not in targets:
        reasons.append(f"{backend} runs on {' and '.join(targets)} devices, not on {target}")
    if layout.head_dim % 8:
        reasons.append(
            f"the kernels need a head_dim that is a multiple of 8, not {layout.head_dim}; "
            "backend='native' takes any"
        )
    return reasons + _triton_reasons(backend)


@cache
def _triton_reasons(backend: str) -> list[str]:
    """What is wrong with the installed Triton; it is imported where nothing else is."""
    if find_spec("triton") is None:
        return ["the triton package is not installed"]
    # The module knows its version; the package that brings it has other names, on ROCm for one.
    try:
        version = import_module("triton").__version__
    except ImportError as error:
        return [f"triton is installed and cannot be imported: {error}"]
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_TRITON:
        needed = ".".join(map(str, MIN_TRITON))
        return [f"triton {needed} or newer is needed, {version} is installed"]
    from tq_core import kernels

    if kernels.interpreted() == (backend == "interpret"):
        return []
    if backend == "interpret":
        return ["Triton interprets only where TRITON_INTERPRET=1 was set before its first import"]
    return ["TRITON_INTERPRET=1 was set when Triton was imported: its kernels run on the CPU"]


def choose_backend(
    layout: CacheLayout,
    *,
    backend: str | None,
    target: str,
    framework: str = "torch",
    kernel_reasons: tuple[str, ...] = (),
) -> str:
    """The backend to run: the named one, or the first that can serve.

    Args:
        layout: the cache's layout.
        backend: a backend's name, or None.
        target: a device kind.
        framework: ``"torch"`` or ``"jax"``.
        kernel_reasons: why the arrays of this call are not for the Triton sources.

    Raises:
        ValueError: the named backend is unknown or cannot serve, with all the reasons.
    """
    if backend is None:
        for name in FRAMEWORKS[framework]:
            if name == "native" or (
                name in _KERNEL_TARGETS
                and target in _KERNEL_TARGETS[name]
                and not kernel_reasons
                and not why_unsupported(layout, backend=name, target=target, framework=framework)
            ):
                return name
    reasons = why_unsupported(layout, backend=str(backend), target=target, framework=framework)
    if backend in _KERNEL_TARGETS:
        reasons += kernel_reasons
    if reasons:
        raise ValueError(f"backend: {backend!r} cannot serve this call: " + "; ".join(reasons))
    return str(backend)
