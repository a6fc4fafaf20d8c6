"""The examples of the README."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def run_examples(section: str) -> dict[str, Any]:
    """Runs the code of a section, one piece after the other; gives its names."""
    (text,) = re.findall(rf"^## {section}\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, f"README.md, {section}", "exec"), names)
    return names
