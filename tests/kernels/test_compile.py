"""Every kernel compiles for every architecture, without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton", reason="kernels need triton")

from tests.cases import ATTENTION_CASES
from tests.kernels.compiling import compile_launch, report
from tests.kernels.plans import DEVICES, attention_plan, case_plan
from tq_core import PRESETS, CacheLayout, Codec, QuantConfig, dispatch, kernels

pytestmark = pytest.mark.skipif(kernels.interpreted(), reason="the kernels are interpreted")

#: Of the flagship plans (D = 128, group 4, 64-token pages and tiles) as compiled for sm_90: lane-
#: instructions an element of the main loop, registers, stack bytes, programs resident on a
#: multiprocessor, and matrix instructions of fp16 and int8 a tile: today's, and a little room for
#: instructions and registers, since compilers differ.
BUDGETS = {
    "k8v8": (2.13, 165, 0, 11, (64, 0)),
    "k8v4": (1.96, 165, 0, 12, (64, 0)),
    "4bit": (1.62, 228, 8, 8, (32, 16)),
    "k3v4": (1.71, 226, 0, 8, (32, 16)),
    "3bit": (1.78, 220, 24, 9, (32, 16)),
    "2bit": (1.28, 200, 0, 10, (32, 16)),
    "4bit_hq": (2.52, 255, 96, 8, (32, 16)),
    "3bit_hq": (2.70, 246, 0, 8, (32, 16)),
    "2bit_hq": (2.24, 168, 0, 12, (32, 16)),
}
ROOM = 1.03
BATCH = {"deterministic": "batch"}

WIDE = {
    "decode": {},
    "token order, 3 heads a group": {"order": "token", "group": 3, "page_size": 16},
    "head order, table codebook": {"order": "head", "cubic": False},
    "chunk with every feature": {
        "query_len": 64,
        "num_seqs": 2,
        "features": {"sliding_window": 100, "softcap": 30.0, "sinks": True, "alibi": True},
    },
    "a few rows each": {"query_len": 4, "features": {"sliding_window": 5000, "sinks": True}},
    "rows on the M axis": {"query_len": 2048, "num_seqs": 2, "overrides": {"block_n": 128}},
    "head_dim 72, one page a token": {"head_dim": 72, "page_size": 1, "group": 7},
    "head_dim 576": {"head_dim": 576, "group": 16, "page_size": 16},
}


@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize(
    "shape", ["decode", "a few rows each", "chunk with every feature", "rows on the M axis"]
)
def test_attention_of_every_target(shape, target):
    for launch in attention_plan("4bit", target, **WIDE[shape]).launches:
        compile_launch(launch, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("preset", ["k8v8", "k8v4", "k3v4", "3bit", "2bit", "4bit_hq", "3bit_hq"])
@pytest.mark.parametrize("shape", WIDE)
def test_attention_of_every_preset(preset, shape, target):
    for launch in attention_plan(preset, target, **WIDE[shape]).launches:
        compile_launch(launch, target)


@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize(("preset", "order"), [("4bit", "planes"), ("3bit_hq", "token")])
def test_store_and_dequantize(preset, order, target):
    config = QuantConfig.preset(preset)
    layout = CacheLayout(config, 8, 128, 16, order)
    traits = dispatch.codec_traits(Codec(config, 128))
    plan = dispatch.plan_store(
        100,
        16,
        layout,
        traits,
        DEVICES[target],
        page_stride=layout.page_bytes,
        key_strides=(1024, 128, 1),
        value_strides=(1024, 128, 1),
        slot_stride=1,
        cache_align=16,
    )
    compile_launch(plan, target)
    compile_launch(
        dispatch.plan_dequantize(
            4,
            64,
            layout,
            traits,
            DEVICES[target],
            dtype="bfloat16",
            page_stride=layout.page_bytes,
            table_stride=4,
            cache_align=16,
        ),
        target,
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("preset, transform", [("4bit", False), ("2bit_hq", False), ("k8v8", True)])
def test_dequantize_of_the_largest_head_dim_fits_or_is_refused(preset, transform, target):
    """What the compiler takes is no more than the plan counted with."""
    layout = CacheLayout(QuantConfig.preset(preset), 2, 576, 16)
    matrix = np.stack(2 * [np.eye(576)]) if transform else None
    traits = dispatch.codec_traits(Codec(layout.config, 576, key_transform=matrix))
    what = {"dtype": "bfloat16", "page_stride": layout.page_bytes, "table_stride": 4}
    device = DEVICES[target]

    def plan(shared):
        given = replace(device, shared_memory=shared)
        return dispatch.plan_dequantize(4, 64, layout, traits, given, **what, cache_align=16)

    made = compile_launch(plan(device.shared_memory), target).metadata.shared
    assert made <= device.shared_memory
    tiles = dict(plan(device.shared_memory).constexprs)["BLOCK_O"]
    assert dict(plan(made).constexprs)["BLOCK_O"] == tiles


@pytest.mark.parametrize("preset", PRESETS)
def test_budget(preset):
    lanes, registers, stack, programs, matrix = BUDGETS[preset]
    plan = attention_plan(preset).attention
    made = report(compile_launch(plan, "sm_90"))
    elements = dict(plan.constexprs)["BLOCK_T"] * 2 * 128
    assert made.loop * plan.num_warps * 32 / elements <= lanes * ROOM
    assert made.registers <= registers * ROOM
    assert made.stack_bytes <= stack
    assert made.programs(plan.num_warps) >= programs
    assert (made.operations["HMMA"], made.operations["IMMA"]) == matrix
    if stack <= 24:
        assert made.operations["LDL"] + made.operations["STL"] == 0


@pytest.mark.parametrize("preset, most", [("4bit", 800), ("3bit", 820), ("k8v4", 695)])
def test_budget_of_rows_on_the_m_axis(preset, most):
    """Instructions of a warp for 64 rows and 64 tokens of its group of warps."""
    plan = attention_plan(preset, query_len=2048, num_seqs=1, overrides={"block_n": 128}).attention
    made = report(compile_launch(plan, "sm_90"))
    assert plan.num_warps == 8
    assert made.loop <= most * ROOM
    assert made.stack_bytes <= 96
    assert made.operations["IGMMA"] + made.operations["HGMMA"] >= 12


@pytest.mark.parametrize("num_splits", [2, 16, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 128, 576])
def test_merge_is_one_warp(num_splits, head_dim):
    """At most the splits' weights go through shared memory."""
    overrides = {"num_splits": num_splits}
    merge = attention_plan("4bit", head_dim=head_dim, overrides=overrides).merge
    made = report(compile_launch(merge, "sm_90"))
    assert made.shared_bytes <= 4 * min(num_splits, 128)
    assert made.stack_bytes <= 8
    assert merge.num_warps == 1


def _layouts_of_sums(launch):
    """Types, layouts spelt out, of what ``attention`` reduces in each of its two loops."""
    text = compile_launch(launch, "sm_90").asm["ttgir"]
    names = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    loops = [part.split("scf.yield")[0] for part in text.split("scf.for")[1:]]
    found = []
    for loop in loops:
        types = re.findall(r"\}\) : \((tensor<[^)]*)\) ->", loop)
        found.append([re.sub(r"#\w+", lambda m: names.get(m[0], m[0]), t) for t in types])
    return found


@pytest.mark.parametrize(
    "preset", ["4bit", *(pytest.param(p, marks=pytest.mark.slow) for p in PRESETS if p != "4bit")]
)
def test_batch_deterministic_sums_have_one_order(preset):
    """Masked or not, decode or chunk: lanes and registers of a tile's sums are the same."""
    plans = [attention_plan(preset, overrides=BATCH, query_len=n) for n in (1, 8)]
    loops = [sums for plan in plans for sums in _layouts_of_sums(plan.attention)]
    assert len(loops) == 4
    assert len(loops[0]) >= 2
    assert all(sums == loops[0] for sums in loops)


@pytest.mark.parametrize("preset", ["4bit", "k8v4"])
def test_budget_of_batch_deterministic_plans(preset):
    plan = attention_plan(preset, overrides=BATCH).attention
    made = report(compile_launch(plan, "sm_90"))
    lanes, registers, stack, programs, _ = BUDGETS[preset]
    assert made.loop * 32 / (64 * 2 * 128) <= lanes * ROOM * 1.02
    assert made.registers <= registers * ROOM
    assert made.stack_bytes <= stack
    assert made.programs(plan.num_warps) >= programs


@pytest.mark.parametrize("target", DEVICES)
def test_batch_deterministic_plans_of_every_target(target):
    features = {"sliding_window": 100, "softcap": 30.0, "sinks": True, "alibi": True}
    what = {"query_len": 64, "num_seqs": 2, "features": features, "overrides": BATCH}
    for launch in attention_plan("4bit", target, **what).launches:
        compile_launch(launch, target)


#: One case of each set of constants that the shared table leads to.
TABLE = [c for c in ATTENTION_CASES if c.head_dim % 8 == 0]


@pytest.mark.slow
@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("case", TABLE, ids=str)
def test_every_plan_of_the_case_table(case, target):
    for launch in case_plan(case, target).launches:
        compile_launch(launch, target, case.dtype)
