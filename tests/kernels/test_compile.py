"""Every kernel compiles for every architecture, without a GPU."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("triton", reason="kernels need triton")

from tests.kernels.compiling import compile_launch, report
from tests.kernels.plans import DEVICES, attention_plan, launches
from tq_core import CacheLayout, Codec, QuantConfig, dispatch, kernels

pytestmark = pytest.mark.skipif(kernels.interpreted(), reason="the kernels are interpreted")

#: Instructions in the main loop of the flagship plan (D = 128, group 4, 64-token pages and tiles),
#: registers and stack bytes, as compiled for sm_90; a budget, a little above what was measured.
BUDGETS = {
    "4bit": (1400, 168, 128),
    "k8v4": (1180, 255, 0),
    "k8v8": (1300, 255, 0),
    "2bit": (1420, 168, 128),
}

WIDE = {
    "decode": {},
    "token order, 3 heads a group": {"order": "token", "group": 3, "page_size": 16},
    "head order, table codebook": {"order": "head", "cubic": False},
    "chunk with every feature": {
        "query_len": 64,
        "num_seqs": 2,
        "features": {"sliding_window": 100, "softcap": 30.0, "sinks": True, "alibi": True},
    },
    "head_dim 72, one page a token": {"head_dim": 72, "page_size": 1, "group": 7},
    "head_dim 576": {"head_dim": 576, "group": 16, "page_size": 16},
}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        # Triton 3.9 announces a change of its default for floating-point fusion.
        warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
        yield


@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("shape", ["decode", "chunk with every feature"])
def test_attention_of_every_target(shape, target):
    for launch in launches(attention_plan("4bit", target, **WIDE[shape])):
        compile_launch(launch, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("preset", ["k8v8", "k8v4", "k3v4", "3bit", "2bit", "4bit_hq", "3bit_hq"])
@pytest.mark.parametrize("shape", WIDE)
def test_attention_of_every_preset(preset, shape, target):
    for launch in launches(attention_plan(preset, target, **WIDE[shape])):
        compile_launch(launch, target)


@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize(("preset", "order"), [("4bit", "planes"), ("3bit_hq", "token")])
def test_store_and_dequantize(preset, order, target):
    config = QuantConfig.preset(preset)
    layout = CacheLayout(config, 8, 128, 16, order)
    traits = dispatch.codec_traits(Codec(config, 128))
    plan = dispatch.plan_store(
        100,
        layout,
        traits,
        page_stride=layout.page_bytes,
        key_strides=(1024, 128, 1),
        value_strides=(1024, 128, 1),
        slot_stride=1,
    )
    compile_launch(plan.store, target)
    compile_launch(
        dispatch.plan_dequantize(
            4,
            64,
            layout,
            traits,
            DEVICES[target],
            page_stride=layout.page_bytes,
            cache_align=16,
        ),
        target,
    )


@pytest.mark.parametrize("preset", BUDGETS)
def test_instruction_budget(preset):
    loop, registers, stack = BUDGETS[preset]
    plan = attention_plan(preset)
    made = report(compile_launch(plan.attention, "sm_90"))
    assert made.loop <= loop
    assert made.registers <= registers
    assert made.stack_bytes <= stack
    assert made.operations["HMMA"] == 64
