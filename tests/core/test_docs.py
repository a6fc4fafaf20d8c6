"""What the documentation pages state in numbers and code holds."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tq_core import PRESET_ALIASES, PRESETS, CacheLayout, QuantConfig, codebook

DOCS = Path(__file__).parents[2] / "docs"
FORMAT = (DOCS / "format.md").read_text(encoding="utf-8")
API = (DOCS / "api.md").read_text(encoding="utf-8")
README = (DOCS.parent / "README.md").read_text(encoding="utf-8")


def anchors_of(text):
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^a-z0-9_ -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_links_of_the_readme_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", README)
    assert targets
    for name, anchor in targets:
        page = DOCS.parent / name
        assert page.exists(), name
        assert not anchor or anchor in anchors_of(page.read_text(encoding="utf-8")), anchor


def test_the_example_of_the_api_page_runs():
    (code,) = re.findall(r"```python\n(.*?)```", API, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "docs/api.md", "exec"), names)
    assert np.shape(names["out"]) == (1, 8, 64)
    assert np.isfinite(names["lse"]).all()


@pytest.mark.parametrize("name", PRESETS)
def test_the_table_of_presets(name):
    (row,) = re.findall(rf"^\| `{name}` \| (.*) \|$", FORMAT, re.MULTILINE)
    key, value, alias, size, ratio = (cell.strip(" `") for cell in row.split("|"))
    layout = CacheLayout(QuantConfig.preset(name), 1, 128, 16)
    assert (key, value) == PRESETS[name]
    assert PRESET_ALIASES.get(alias) == (name if alias else None)
    assert int(size) == layout.slot_bytes
    assert ratio == f"{layout.compression_ratio:.2f}"


def codebook_row(column: str, bits: int) -> list[list[float]]:
    """The numbers of each cell, of the table in which ``column`` is named."""
    (table,) = (t for t in FORMAT.split("\n\n") if t.startswith(f"| bits | {column} |"))
    (row,) = re.findall(rf"^\| {bits} \| (.*) \|$", table, re.MULTILINE)
    return [[float(word) for word in cell.split()] for cell in row.split("|")]


def check_errors(levels, printed, best, bits):
    assert printed == [pytest.approx(codebook.expected_error(levels), rel=3e-4)]
    lloyd_max = codebook.expected_error(codebook.lloyd_max(bits))
    assert best == [pytest.approx(lloyd_max, rel=3e-4)]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_table_of_grids(bits):
    half, scale, *errors = codebook_row("positive levels", bits)
    grid = codebook.GRIDS[bits]
    assert half == list(grid.half)
    assert scale == [grid.scale]
    check_errors(codebook.grid_levels(bits) * grid.scale, *errors, bits)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_table_of_cubics(bits):
    coefficients, divisor, *errors = codebook_row("`a3 a2 a1 a0`", bits)
    cubic = codebook.CUBICS[bits]
    assert coefficients == list(cubic.coefficients)
    assert divisor == [pytest.approx(1 / cubic.scale, rel=1e-15)]
    check_errors(codebook.cubic_levels(bits) * cubic.scale, *errors, bits)


def test_the_layout_tags_are_listed():
    for order in ("token", "head", "planes"):
        assert f"`{CacheLayout(QuantConfig(), 1, 64, 16, order).tag}`" in FORMAT


@pytest.mark.parametrize("page", [FORMAT, API], ids=["format", "api"])
def test_links_between_the_pages_lead_somewhere(page):
    targets = re.findall(r"\]\(([a-z]*\.md)?(?:#([a-z0-9-]+))?\)", page)
    assert targets
    for name, anchor in targets:
        text = (DOCS / name).read_text(encoding="utf-8") if name else page
        assert not anchor or anchor in anchors_of(text)
