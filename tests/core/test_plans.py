"""Measured plans: package data, who takes them, and how good the plans from numbers are."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kernels.plans import DEVICES, attention_plan
from tq_core import PRESETS, plans

H200 = DEVICES["sm_90"].name
RECORDED = Path(__file__).parents[2] / "bench/results/tune.csv"
FOUR_BITS = plans.Kind("mse4", "int4", 128, 4)


@pytest.fixture
def measured(monkeypatch):
    """Gives a device named ``"a device"`` the points that a test names."""

    def put(*points, kind=FOUR_BITS):
        found = {kind: tuple(plans.Point(*point) for point in points)}
        monkeypatch.setattr(plans, "load", lambda device: found if device == "a device" else {})
        plans.nearest.cache_clear()
        monkeypatch.setitem(DEVICES, "other", replace(DEVICES["sm_90"], name="a device"))

    yield put
    plans.nearest.cache_clear()


def test_a_measured_plan_is_taken(measured):
    measured((8 * 64, 8192, {"block_t": 32, "num_stages": 2, "num_splits": 6}))
    plan = attention_plan("4bit", "other")
    assert (plan.attention.num_stages, plan.num_splits) == (2, 6)
    assert dict(plan.attention.constexprs)["BLOCK_T"] == 32
    # Other formats, heads and rows are planned from numbers.
    for other in ({"preset": "3bit"}, {"group": 8}, {"head_dim": 64}, {"query_len": 2}):
        plan = attention_plan(target="other", **{"preset": "4bit", **other})
        assert dict(plan.attention.constexprs)["BLOCK_T"] == 64


def test_as_many_programs_as_were_measured(measured):
    measured((8 * 8, 8192, {"num_splits": 16}))
    splits = {n: attention_plan("4bit", "other", num_seqs=n).num_splits for n in (4, 8, 16, 23)}
    assert splits == {4: 32, 8: 16, 16: 8, 23: 4}
    # Not more than tiles.
    measured((8 * 8, 256, {"num_splits": 16}))
    assert attention_plan("4bit", "other", num_seqs=8, seq_len=130).num_splits == 3


def test_what_is_far_away_is_planned_from_numbers(measured):
    measured((8 * 64, 8192, {"num_splits": 6}))
    kind = FOUR_BITS
    assert plans.nearest("a device", kind, 512, 3000).plan == {"num_splits": 6}
    assert plans.nearest("a device", kind, 512, 2000) is None
    assert plans.nearest("a device", kind, 1800, 8192) is None
    assert plans.nearest("another device", kind, 512, 8192) is None
    assert plans.nearest("a device", kind, 0, 0) is None


def test_who_asks_is_answered(measured):
    measured((8 * 64, 8192, {"block_t": 32, "num_splits": 6}))
    asked = attention_plan("4bit", "other", overrides={"num_stages": 3})
    assert (asked.num_splits, asked.attention.num_stages) == (2, 3)
    asked = attention_plan("4bit", "other", features={"num_kv_splits": 5})
    assert asked.num_splits == 5
    assert dict(asked.attention.constexprs)["BLOCK_T"] == 32


def test_the_name_of_a_file():
    assert plans.file_name("NVIDIA H200") == "nvidia-h200.json"
    assert plans.file_name("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb.json"
    assert plans.load("no such device") == {}


def test_every_recorded_plan_can_be_launched():
    points = plans.load(H200)
    assert points
    formats = {value: name for name, value in PRESETS.items()}
    for kind, found in points.items():
        for point in found:
            made = attention_plan(
                formats[kind.key, kind.value], head_dim=kind.head_dim, group=kind.group,
                num_seqs=point.programs // 8, seq_len=point.tokens,
            )  # fmt: skip
            for name in ("num_splits", "num_stages"):
                have = made.num_splits if name == "num_splits" else made.attention.num_stages
                assert have == point.plan.get(name, have)


def test_plans_from_numbers_are_nearly_as_fast_as_the_measured_ones():
    """And what was measured last is what is on file."""
    where = ("device", "preset", "B", "L", "Hk", "g", "D")
    rows = csv.DictReader(RECORDED.read_text().splitlines())
    last = {tuple(row[name] for name in where): row for row in rows}
    assert last
    for row in last.values():
        assert float(row["us_planned"]) <= 1.3 * float(row["us_measured"]), row
        key, value = PRESETS[row["preset"]]
        kind = plans.Kind(key, value, int(row["D"]), int(row["g"]))
        programs, tokens = int(row["B"]) * int(row["Hk"]), int(row["L"])
        point = plans.nearest(row["device"], kind, programs, tokens)
        assert point == (programs, tokens, json.loads(row["plan"]))
