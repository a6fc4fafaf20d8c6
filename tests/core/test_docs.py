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


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_table_of_grids(bits):
    pattern = rf"^\| {bits} \| ([0-9. ]+) \| (0\.0[0-9]+) \| ([0-9.]+) \| ([0-9.]+) \|$"
    (row,) = re.findall(pattern, FORMAT, re.MULTILINE)
    grid = codebook.GRIDS[bits]
    assert [float(word) for word in row[0].split()] == list(grid.half)
    assert float(row[1]) == grid.scale
    levels = codebook.grid_levels(bits) * grid.scale
    assert float(row[2]) == pytest.approx(codebook.expected_error(levels), rel=3e-4)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_table_of_cubics(bits):
    pattern = rf"^\| {bits} \| ([0-9. ]+-[-0-9. ]+) \| ([0-9. ]+) \| ([0-9.]+) \| ([0-9.]+) \|$"
    (row,) = re.findall(pattern, FORMAT, re.MULTILINE)
    cubic = codebook.CUBICS[bits]
    assert [float(word) for word in row[0].split()] == list(cubic.coefficients)
    assert float(row[1]) == pytest.approx(1 / cubic.scale, rel=1e-15)
    levels = codebook.cubic_levels(bits) * cubic.scale
    assert float(row[2]) == pytest.approx(codebook.expected_error(levels), rel=3e-4)
    assert float(row[3]) == pytest.approx(
        codebook.expected_error(codebook.lloyd_max(bits)), rel=3e-4
    )


def test_the_layout_tags_are_listed():
    for order in ("token", "head", "planes"):
        assert f"`{CacheLayout(QuantConfig(), 1, 64, 16, order).tag}`" in FORMAT


@pytest.mark.parametrize("page", [FORMAT, API], ids=["format", "api"])
def test_links_between_the_pages_lead_somewhere(page):
    targets = re.findall(r"\]\(([a-z]*\.md)?(?:#([a-z0-9-]+))?\)", page)
    assert targets
    for name, anchor in targets:
        text = (DOCS / name).read_text(encoding="utf-8") if name else page
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings}
        assert not anchor or anchor in anchors
