"""Sizes of memory as people write them."""

from __future__ import annotations

import re

from tq_cli.errors import CommandError

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
_UNIT_OF = {name.lower(): size for name, size in UNITS.items()}


def parse_size(name: str, text: str) -> int:
    """Bytes of ``"80GB"`` (10^9 each) or ``"75 GiB"`` (2^30 each), rounded to a whole byte.

    Raises:
        CommandError: not a number with a unit; it says which argument (``name``) is meant.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]+)\s*", text)
    unit = _UNIT_OF.get(match[2].lower()) if match else None
    number = float(match[1]) if match else 0.0
    if unit is None or number >= 1e18:
        raise CommandError(
            f"{name}: expected a size such as 80GB (10^9 bytes each) or 75GiB (2^30 each), "
            f"got {text!r}"
        )
    return round(number * unit)


def parse_share(name: str, text: str, whole: int) -> int:
    """Bytes of ``"10%"`` of ``whole``, or of a size.

    Raises:
        CommandError: neither, or not below 100 %.
    """
    if not text.strip().endswith("%"):
        return parse_size(name, text)
    number = text.strip()[:-1].strip()
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", number) or float(number) >= 100:
        raise CommandError(f"{name}: expected 0% to less than 100%, or a size, got {text!r}")
    return round(whole * float(number) / 100)


def show_size(size: int) -> str:
    """``size`` in GB, with two digits after the point; in bytes below 10 MB."""
    return f"{size / 1e9:,.2f} GB" if size >= 10**7 else f"{size:,} bytes"
