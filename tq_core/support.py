"""Which backend can serve a layout, and every reason why another cannot."""

from __future__ import annotations

from tq_core.layout import CacheLayout

BACKENDS = ("triton", "native", "interpret", "pallas")


def why_unsupported(layout: CacheLayout, *, backend: str, target: str) -> list[str]:
    """Every reason why ``backend`` cannot serve ``layout`` on ``target``; [] when it can.

    Args:
        layout: the cache's layout.
        backend: ``"native"`` (the framework's own operations, any device), ``"triton"``,
            ``"interpret"`` or ``"pallas"``.
        target: a device kind, ``"cpu"``, ``"cuda"``, ``"hip"``, ...

    Raises:
        ValueError: an unknown backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {list(BACKENDS)}, got {backend!r}")
    if backend == "native":
        return []
    reasons = [f"this version of tq has no {backend} backend, only native"]
    if backend == "triton" and target not in ("cuda", "hip"):
        reasons.append(f"triton runs on cuda and hip devices, not on {target}")
    return reasons


def choose_backend(layout: CacheLayout, *, backend: str | None, target: str) -> str:
    """The backend to run: the named one, or the first that can serve.

    Raises:
        ValueError: the named backend is unknown or cannot serve, with all the reasons.
    """
    if backend is None:
        return "native"
    reasons = why_unsupported(layout, backend=backend, target=target)
    if reasons:
        raise ValueError(f"backend: {backend!r} cannot serve this call: " + "; ".join(reasons))
    return backend
