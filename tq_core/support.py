"""Which backend can serve a layout, and every reason why another cannot."""

from __future__ import annotations

import sys
import warnings
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec

from tq_core.layout import CacheLayout

BACKENDS = ("triton", "native", "interpret", "pallas")
#: Backends of each framework, the preferred one first; None never picks ``"interpret"``.
FRAMEWORKS = {
    "torch": ("triton", "native", "interpret"),
    "jax": ("triton", "native", "interpret"),
}
#: Device kinds that can be asked about; ROCm's is ``"hip"``.
TARGETS = ("cpu", "cuda", "hip", "mps", "tpu", "xpu")
_Version = tuple[int, ...]
MIN_TRITON = (3, 6)
#: Releases of jax-triton from, below: those of jax and of triton that it works with, from, below.
JAX_TRITON: dict[tuple[_Version, _Version], dict[str, tuple[_Version, _Version | None]]] = {
    ((0, 3, 1), (0, 4)): {"jax": ((0, 8, 2), (0, 12)), "triton": ((3, 6), None)},
    ((0, 4, 1), (0, 5)): {"jax": ((0, 11), (0, 12)), "triton": ((3, 7), None)},
}
#: Packages that bring XLA's GPU code.
_JAX_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin", "jax_rocm7_plugin", "jax_rocm60_plugin")
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
        target: a device kind: ``"cpu"``, ``"cuda"``, ``"hip"`` (ROCm), ``"mps"``, ``"tpu"`` or
            ``"xpu"``; ``"cuda:0"`` is ``"cuda"``.
        framework: ``"torch"`` or ``"jax"``.

    Raises:
        TypeError: ``layout`` is not a ``CacheLayout``, or ``target`` not a str.
        ValueError: an unknown backend, target or framework.
    """
    if isinstance(target, str) and target.partition(":")[0] not in TARGETS:
        raise ValueError(
            f"target: expected one of {list(TARGETS)}, 'hip' being ROCm, got {target!r}"
        )
    return reasons_against(layout, backend=backend, target=target, framework=framework)


def reasons_against(layout: CacheLayout, *, backend: str, target: str, framework: str) -> list[str]:
    """:func:`why_unsupported`, where a device of any kind was found."""
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
    return reasons + _environment_reasons(backend, target, framework)


def _environment_reasons(backend: str, target: str, framework: str) -> list[str]:
    """What the installed packages lack for the kernels."""
    reasons = list(_triton_reasons(backend))
    if framework == "jax" and backend == "triton":
        if target == "cpu" and not any(map(find_spec, _JAX_PLUGINS)):
            reasons.append("JAX has no GPU support here; pip install 'jax[cuda13]' brings it")
        reasons += _jax_triton_reasons()
    return reasons


def _version(package: str) -> _Version | None:
    """Major, minor and micro of an installed package; as far as they are numbers."""
    try:
        parts = metadata.version(package).split(".")[:3]
    except metadata.PackageNotFoundError:
        return None
    digits = ("".join(c for c in part.partition("+")[0] if c.isdigit()) for part in parts)
    return tuple(int(d) for d in digits if d)


@cache
def _jax_triton_reasons() -> list[str]:
    """What is wrong with the installed jax-triton, and which would be right; nothing is imported.

    A release of it works with few of jax, and says so only by failing.
    """
    jax, installed = _version("jax"), _version("jax-triton")
    newer = sys.version_info >= (3, 12) and jax is not None and jax >= (0, 11)
    advice = "pip install 'jax-triton>=0.4.1,<0.5'" if newer else "pip install 'jax-triton==0.3.1'"
    if installed is None:
        return [f"the jax-triton package is not installed; {advice}"]
    name = ".".join(map(str, installed))
    for (first, below), needs in JAX_TRITON.items():
        if not first <= installed < below:
            continue
        reasons = []
        for package, (low, high) in needs.items():
            have = _version(package)
            if have is None or have < low or (high is not None and have >= high):
                wanted = f"{package}>={'.'.join(map(str, low))}"
                wanted += f",<{'.'.join(map(str, high))}" if high else ""
                found = ".".join(map(str, have)) if have else "none"
                reasons.append(f"jax-triton {name} needs {wanted}, {found} is installed")
        return reasons
    return [f"jax-triton {name} is not one that tq works with; {advice}"]


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
        lacks = []
        if "triton" in FRAMEWORKS[framework] and target in _KERNEL_TARGETS["triton"]:
            lacks = _environment_reasons("triton", target, framework)
        if lacks:
            warnings.warn(
                f"tq_{framework} computes without its kernels on this GPU, many times slower: "
                + "; ".join(lacks),
                RuntimeWarning,
                stacklevel=2,
            )
        for name in FRAMEWORKS[framework]:
            if name == "native" or (
                name in _KERNEL_TARGETS
                and target in _KERNEL_TARGETS[name]
                and not kernel_reasons
                and not reasons_against(layout, backend=name, target=target, framework=framework)
            ):
                return name
    reasons = reasons_against(layout, backend=str(backend), target=target, framework=framework)
    if backend in _KERNEL_TARGETS:
        reasons += kernel_reasons
    if reasons:
        raise ValueError(f"backend: {backend!r} cannot serve this call: " + "; ".join(reasons))
    return str(backend)
