from __future__ import annotations

import numpy as np
import pytest
import torch

import tq_torch
from tests.cases import ATTENTION_CASES, DTYPES, AttentionCase
from tests.engines import Engine
from tests.property import checks
from tests.property.examples import Example
from tests.torch.helpers import DTYPES as TORCH_DTYPES
from tests.torch.helpers import (
    attention_tensors,
    check_attention,
    check_dequantize,
    to_float64,
)
from tq_core import PRESETS, QuantConfig, reference
from tq_core.layout import ORDERS
from tq_torch import native

CASES = [c for c in ATTENTION_CASES if c.sliding_window is None]
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}


def expected_arrays(tensors, case):
    names = ("cache", "block_table", "seq_lens")
    options = {n: case.options[n] for n in ("layout", "codec")}
    return reference.dequantize(*(tensors[n].numpy() for n in names), **options)


@pytest.mark.parametrize("case", CASES[::2], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize(case, dtype):
    tensors = attention_tensors(case)
    result = tq_torch.dequantize(
        tensors["cache"],
        tensors["block_table"],
        tensors["seq_lens"],
        layout=case.layout,
        codec=case.codec,
        dtype=TORCH_DTYPES[dtype],
    )
    for actual, want in zip(result, expected_arrays(tensors, case), strict=True):
        assert actual.dtype == TORCH_DTYPES[dtype]
        actual = to_float64(actual)
        assert actual.shape == want.shape
        scale = np.abs(want).max() + 1e-30
        assert np.abs(actual - want).max() <= TOLERANCE[dtype] * scale


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("head_dim", [8, 16, 24, 32])
def test_small_head_dims(head_dim, preset, order):
    """The codes of a token and head may be one word, or less."""
    case = AttentionCase(QuantConfig.preset(preset), head_dim, order=order, batch=((1, 20),))
    check_dequantize(case, "native")
    check_attention(case, "native")


@pytest.mark.parametrize("value, head_dim, page_size, order", [
    ("int4", 9, 16, "planes"), ("int3", 16, 2, "planes"), ("int3", 13, 1, "head"),
])  # fmt: skip
def test_one_page_of_one_head_with_one_word_of_values(value, head_dim, page_size, order):
    """Dimensions of 1 have strides of no meaning."""
    example = Example(
        QuantConfig("mse2", value), head_dim, page_size, order, num_kv_heads=1, group=1,
        batch=((1, 1),), spare=0,
    )  # fmt: skip
    for check in (checks.attention, checks.round_trip):
        check(example, Engine("torch", "native"))


@pytest.mark.parametrize("elements", [1, 2**12])
def test_dequantize_in_small_tiles(elements, monkeypatch):
    case = next(c for c in CASES if c.page_size == 64)
    tensors = attention_tensors(case)
    arrays = [tensors[n] for n in ("cache", "block_table", "seq_lens")]
    monkeypatch.setitem(native.TILE_ELEMENTS, "cpu", elements)
    result = tq_torch.dequantize(*arrays, layout=case.layout, codec=case.codec, dtype=torch.float32)
    for actual, want in zip(result, expected_arrays(tensors, case), strict=True):
        assert np.abs(to_float64(actual) - want).max() <= 1e-5 * np.abs(want).max()


def test_tokens_past_the_end_are_zero():
    case = CASES[0]
    tensors = attention_tensors(case)
    keys, values = tq_torch.dequantize(
        tensors["cache"],
        tensors["block_table"],
        tensors["seq_lens"],
        layout=case.layout,
        codec=case.codec,
        dtype=torch.float32,
    )
    for row, length in enumerate(tensors["seq_lens"]):
        assert not keys[row, length:].any()
        assert not values[row, length:].any()
        assert torch.isfinite(keys[row]).all()


def test_empty_sequences_alone_are_zero():
    case = CASES[0]
    tensors = attention_tensors(case)
    result = tq_torch.dequantize(
        tensors["cache"],
        tensors["block_table"],
        torch.zeros_like(tensors["seq_lens"]),
        layout=case.layout,
        codec=case.codec,
        dtype=torch.float32,
    )
    for dense in result:
        assert len(dense) == len(tensors["seq_lens"])
        assert not dense.any()
