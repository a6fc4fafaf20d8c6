from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import tq_torch
from tests.cases import STORE_CASES, assert_same_bytes, make_store_inputs
from tests.torch.helpers import DTYPES, tensor
from tq_torch import native

CASE = STORE_CASES[0]


def store(case, key=None, value=None, cache=None, slots=None):
    inputs = make_store_inputs(case)
    dtype = DTYPES[case.dtype]
    cache = tensor(inputs.cache) if cache is None else cache
    result = tq_torch.store(
        tensor(inputs.key).to(dtype) if key is None else key,
        tensor(inputs.value).to(dtype) if value is None else value,
        cache,
        tensor(inputs.slot_mapping) if slots is None else slots,
        layout=case.layout,
        codec=case.codec,
    )
    assert result is None
    return inputs, cache


@pytest.mark.parametrize("case", STORE_CASES, ids=str)
def test_store(case):
    inputs, cache = store(case)
    assert_same_bytes(cache.numpy(), inputs, layout=case.layout, codec=case.codec)


@pytest.mark.parametrize("case", STORE_CASES[::17], ids=str)
def test_store_in_small_tiles(case, monkeypatch):
    monkeypatch.setitem(native.TILE_ELEMENTS, "cpu", 3 * case.num_kv_heads * case.head_dim)
    inputs, cache = store(case)
    assert_same_bytes(cache.numpy(), inputs, layout=case.layout, codec=case.codec)


def test_the_later_row_of_a_slot_is_stored():
    inputs = make_store_inputs(CASE)
    slots = np.arange(len(inputs.slot_mapping)) % 7
    _, cache = store(CASE, slots=tensor(slots))
    slots[:-7] = -1
    expected = inputs._replace(slot_mapping=slots)
    assert_same_bytes(cache.numpy(), expected, layout=CASE.layout, codec=CASE.codec)


def test_strides_of_the_inputs_do_not_matter():
    inputs = make_store_inputs(CASE)
    _, plain = store(CASE)
    n, heads, dim = inputs.key.shape
    fused = torch.randn(n, 2 * heads, dim + 3)
    fused[:, ::2, 2:-1] = tensor(inputs.key)
    transposed = tensor(np.ascontiguousarray(inputs.value.transpose(2, 1, 0))).permute(2, 1, 0)
    slots = torch.stack([tensor(inputs.slot_mapping)] * 2, 1)[:, 0]
    _, strided = store(CASE, key=fused[:, ::2, 2:-1], value=transposed, slots=slots)
    assert torch.equal(plain, strided)


def test_expanded_inputs():
    case = replace(CASE, dtype="float32")
    layout = case.layout
    n = len(make_store_inputs(case).slot_mapping)
    row = torch.randn(1, layout.num_kv_heads, layout.head_dim)
    _, plain = store(case, key=row.repeat(n, 1, 1), value=row.repeat(n, 1, 1))
    _, expanded = store(case, key=row.expand(n, -1, -1), value=row.expand(n, -1, -1))
    assert torch.equal(plain, expanded)


def test_a_cache_inside_a_bigger_allocation_is_written_in_place():
    inputs, plain = store(CASE)
    pages = len(plain)
    pool = torch.full((3 * pages, *plain.shape[1:]), 0xAB, dtype=torch.uint8)
    view = pool[1::3]
    view.copy_(tensor(inputs.cache))
    store(CASE, cache=view)
    assert torch.equal(view, plain)
    assert (pool[0::3] == 0xAB).all()
    assert (pool[2::3] == 0xAB).all()


def test_int32_slots():
    inputs, plain = store(CASE)
    _, other = store(CASE, slots=tensor(inputs.slot_mapping).to(torch.int32))
    assert torch.equal(plain, other)


def test_no_tokens_change_nothing():
    inputs = make_store_inputs(CASE)
    empty = torch.zeros(0, *inputs.key.shape[1:])
    _, cache = store(CASE, key=empty, value=empty, slots=torch.zeros(0, dtype=torch.int64))
    assert np.array_equal(cache.numpy(), inputs.cache)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_numbers_stay_in_their_token(bad):
    inputs = make_store_inputs(CASE)
    key, value = tensor(inputs.key), tensor(inputs.value)
    _, clean = store(CASE, key=key, value=value)
    row = int(np.flatnonzero(inputs.slot_mapping >= 0)[3])
    key[row, :, 1] = bad
    value[row, :, 2] = bad
    _, dirty = store(CASE, key=key, value=value)
    page, slot = divmod(int(inputs.slot_mapping[row]), CASE.layout.page_size)
    table = torch.arange(len(clean), dtype=torch.int32)[None]
    lens = torch.tensor([len(clean) * CASE.layout.page_size], dtype=torch.int32)
    options = {"layout": CASE.layout, "codec": CASE.codec, "dtype": torch.float32}
    at = page * CASE.layout.page_size + slot
    others = np.setdiff1d(inputs.slot_mapping[inputs.slot_mapping >= 0], [at])
    for before, after in zip(
        tq_torch.dequantize(clean, table, lens, **options),
        tq_torch.dequantize(dirty, table, lens, **options),
        strict=True,
    ):
        assert torch.isfinite(after[0, at]).all()
        assert torch.equal(before[0, others], after[0, others])


def test_autocast_and_matrix_precision_do_not_change_a_byte():
    _, plain = store(CASE)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            _, cast = store(CASE)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(plain, cast)


@pytest.mark.parametrize("name", ["key", "value"])
def test_no_input_may_require_a_gradient(name):
    inputs = make_store_inputs(CASE)
    x = tensor(inputs.key).to(DTYPES[CASE.dtype]).requires_grad_()
    with pytest.raises(ValueError, match=f"^{name}: requires a gradient"):
        store(CASE, **{name: x})
    with torch.no_grad():
        store(CASE, **{name: x})
