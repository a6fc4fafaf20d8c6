"""Less time in Triton's interpreter, for the same work."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def patch_the_language_once() -> None:
    """Within a launch each module's ``triton.language`` is patched once.

    Triton does it again at every call of a device function, which takes a quarter of the time.
    There is no public way to have it otherwise; a Triton without these names stays as it is.
    """
    patch, launch = (
        getattr(interpreter, "_patch_lang", None),
        getattr(interpreter, "GridExecutor", None),
    )
    if patch is None or launch is None or hasattr(patch, "tq_once"):
        return
    plain_launch, patched = launch.__call__, None

    def once(fn: Any) -> Any:
        if patched is None:
            return patch(fn)
        module = id(fn.__globals__)
        if module in patched:
            return None
        patched.add(module)
        return patch(fn)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal patched
        before, patched = patched, set()
        try:
            return plain_launch(self, *args, **kwargs)
        finally:
            patched = before

    once.tq_once = True
    interpreter._patch_lang, launch.__call__ = once, call
