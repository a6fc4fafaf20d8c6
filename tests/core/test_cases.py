"""The case table covers what it promises, and its checks notice what is wrong."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.cases import (
    ATTENTION_CASES,
    CONFIGS,
    DTYPES,
    GARBAGE,
    HEAD_DIMS,
    LARGE_WINDOW,
    PAGE_SIZES,
    PRESET_CONFIGS,
    STORE_CASES,
    TOLERANCE,
    Extras,
    StoreCase,
    assert_close,
    assert_same_bytes,
    blind_rows,
    expected,
    make_attention_inputs,
    make_store_inputs,
    rounded,
)
from tq_core import QuantConfig, reference
from tq_core.codebook import midpoints
from tq_core.layout import ORDERS

FAMILIES = list(itertools.product([True, False], [True, False]))


def family(case):
    return case.config.key_is_codebook, case.config.value_is_codebook


def test_ids_are_unique():
    for cases in (STORE_CASES, ATTENTION_CASES):
        assert len({str(c) for c in cases}) == len(set(cases)) == len(cases)


def test_store_covers_every_pair_at_every_head_dim():
    assert len(CONFIGS) == 5 * 7
    assert set(PRESET_CONFIGS.values()) <= set(CONFIGS)
    have = {(c.config, c.head_dim) for c in STORE_CASES}
    assert have >= set(itertools.product(CONFIGS, HEAD_DIMS))


def test_store_covers_every_order_page_size_and_family():
    have = {(c.order, c.page_size, family(c)) for c in STORE_CASES}
    assert have == set(itertools.product(ORDERS, PAGE_SIZES, FAMILIES))
    have = {(c.dtype, family(c)) for c in STORE_CASES}
    assert have == set(itertools.product(DTYPES, FAMILIES))
    assert any(c.num_kv_heads * c.page_size * c.layout.code_bytes % 2 for c in STORE_CASES)
    assert any(not c.config.norm_correction for c in STORE_CASES)


@pytest.mark.parametrize("name", Extras.__dataclass_fields__)
def test_both_tables_cover_every_extra_shared_and_per_head(name):
    for cases in (STORE_CASES, ATTENTION_CASES):
        kinds = {getattr(c.extras, name) for c in cases}
        assert kinds == {None, "shared", "heads"}
        if name != "key_scale":
            side = name.partition("_")[0]
            coded = [c for c in cases if getattr(c.extras, name)]
            assert {getattr(c.config, f"{side}_is_codebook") for c in coded} == {True, False}


def test_attention_covers_the_list():
    cases = ATTENTION_CASES
    assert {c.config for c in cases} >= set(CONFIGS)
    assert {c.group for c in cases} >= {1, 3, 4, 7, 8, 16, 71}
    assert {(c.order, c.page_size) for c in cases} >= set(itertools.product(ORDERS, PAGE_SIZES))
    assert {c.dtype for c in cases} == set(DTYPES)
    assert {c.sliding_window for c in cases} == {None, 1, 16, 17, LARGE_WINDOW}
    mixed = max(cases, key=lambda c: len(c.batch)).batch
    assert {rows for rows, _ in mixed} >= {0, 1, 2, 5, 33, 128}
    assert {length for _, length in mixed} >= {0, 1, 15, 16, 17, 1000}
    assert any(0 < length < rows for rows, length in mixed)
    assert {c.causal for c in cases} == {True, False}
    for feature in ("softcap", "sinks", "alibi", "scale", "shared_pages", "padding_rows"):
        assert any(getattr(c, feature) for c in cases), feature
    assert sum(c.is_decode for c in cases) >= 4
    assert len(cases) <= 70


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention_inputs(case):
    inputs = make_attention_inputs(case)
    table, lengths = inputs["block_table"], inputs["seq_lens"]
    assert np.array_equal(rounded(inputs["query"], case.dtype), inputs["query"])
    assert (table >= 0).sum() <= (-(-lengths // case.page_size)).sum()
    used = np.unique(table[table >= 0])
    assert len(used) < len(inputs["cache"])
    unused = np.delete(inputs["cache"], used, 0)
    if case.sliding_window is None and not case.shared_pages:
        assert (unused == GARBAGE).all()
    assert len(inputs["query"]) == inputs["query_start_loc"][-1] + case.padding_rows
    again = make_attention_inputs(case)
    for name, array in inputs.items():
        if array is not None:
            assert array.flags.writeable
            assert array is not again[name]
            np.testing.assert_array_equal(array, again[name])


def test_shared_pages_are_shared():
    case = next(c for c in ATTENTION_CASES if c.shared_pages and not c.is_decode)
    table = make_attention_inputs(case)["block_table"]
    pages = table[table >= 0]
    assert len(np.unique(pages)) < len(pages)


def test_tables_hold_entries_that_must_not_be_read():
    past_end = before_window = 0
    for case in ATTENTION_CASES:
        inputs = make_attention_inputs(case)
        needed = -(-inputs["seq_lens"] // case.page_size)
        column = np.arange(inputs["block_table"].shape[1])
        missing = inputs["block_table"] == -1
        past_end += (missing & (column >= needed[:, None])).any()
        before_window += (missing & (column < needed[:, None])).any()
    assert past_end > 20
    assert before_window >= 5


# --- rounding -------------------------------------------------------------------------------


def test_rounded_to_bfloat16():
    x = np.float32([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.14159, 0, 1e38, np.inf])
    want = np.float32([1, 1, 1 + 2**-6, 1 + 2**-7, -3.140625, 0, 0, np.inf])
    got = rounded(x, "bfloat16")
    np.testing.assert_array_equal(got[[0, 1, 2, 3, 4, 5, 7]], want[[0, 1, 2, 3, 4, 5, 7]])
    assert abs(got[6] / 1e38 - 1) < 2**-8
    assert np.isnan(rounded(np.float32([np.nan]), "bfloat16")).all()
    assert not np.any(got[np.isfinite(got)].view(np.uint32) & 0xFFFF)


def test_rounded_to_float16():
    x = np.float32([1 + 2**-11, 1 + 3 * 2**-11, 1e-8, 7e4])
    np.testing.assert_array_equal(rounded(x, "float16"), [1, 1 + 2**-9, 0, np.inf])


# --- the check of bytes ---------------------------------------------------------------------

CHECKED = [
    StoreCase(QuantConfig("mse4", "int4"), 64),
    StoreCase(QuantConfig("mse3", "int3"), 72, 3),
    StoreCase(QuantConfig("mse3", "mse4", key_packing="planar"), 100, 3, "head"),
    StoreCase(QuantConfig("fp8", "int8"), 80, 16, "token"),
    StoreCase(QuantConfig("fp8", "mse2"), 8, 1, extras=Extras("heads", "heads", "heads", "heads")),
    StoreCase(QuantConfig("mse2", "int8"), 9, 1, extras=Extras(value_transform="shared")),
]


def stored_with(case, inputs):
    cache = inputs.cache.copy()
    reference.store(
        inputs.key,
        inputs.value,
        cache,
        inputs.slot_mapping,
        layout=case.layout,
        codec=case.codec,
    )
    return cache


def stored(case):
    inputs = make_store_inputs(case)
    return inputs, stored_with(case, inputs)


def check(cache, inputs, case):
    return assert_same_bytes(cache, inputs, layout=case.layout, codec=case.codec)


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_the_reference_passes(case):
    inputs, cache = stored(case)
    difference = check(cache, inputs, case)
    assert difference.codes == difference.fields == 0
    assert difference.num_codes > 0
    assert difference.num_fields > 0


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_a_changed_byte_is_noticed(case):
    """One bit in every 53rd byte. Only the last bit of a field, one unit, may pass."""
    inputs, cache = stored(case)
    flat = cache.reshape(-1)
    page_bytes = case.layout.page_bytes
    low_bytes = set(case.layout.meta_index().reshape(-1).tolist())
    noticed = passed = 0
    for byte in range(0, flat.size, 53):
        bit = byte % 8
        flat[byte] ^= 1 << bit
        try:
            difference = check(cache, inputs, case)
        except AssertionError:
            noticed += 1
        else:
            passed += 1
            assert bit == 0
            assert byte % page_bytes in low_bytes
            assert difference.fields >= 1
        flat[byte] ^= 1 << bit
    assert noticed > 10 * passed


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_an_untouched_cache_is_noticed(case):
    inputs, _ = stored(case)
    with pytest.raises(AssertionError):
        check(inputs.cache, inputs, case)


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_a_touched_skipped_slot_is_noticed(case):
    inputs, cache = stored(case)
    free = np.setdiff1d(np.arange(len(cache) * case.page_size), inputs.slot_mapping)[0]
    page, slot = divmod(int(free), case.page_size)
    cache.reshape(len(cache), -1)[page, case.layout.key_index()[slot, 0, 0]] = 0
    with pytest.raises(AssertionError, match="bytes that must not change"):
        check(cache, inputs, case)


def test_a_code_at_an_edge_may_go_either_way():
    """A rotated coordinate beside an edge; the scale belongs to the codes stored."""
    case = CHECKED[0]
    middle = 2 ** (case.config.key_bits - 1)
    edge = midpoints(case.codec.centroids)[middle - 1]
    inputs, _ = stored(case)
    key = inputs.key.copy()
    rotated = key[20] @ case.codec.rotation.T
    differences = []
    for coordinate in (-1e-3, 1e-3, 1e-9):
        rotated[0, 3] = 0
        norm = np.linalg.norm(rotated[0])
        rotated[0, 3] = (edge + coordinate) * norm / np.sqrt(1 - (edge + coordinate) ** 2)
        key[20] = rotated @ case.codec.rotation
        variant = inputs._replace(key=key.copy())
        differences.append((variant, stored_with(case, variant)))
    at_edge = differences.pop()[0]
    assert sorted(check(cache, at_edge, case).codes for _, cache in differences) == [0, 1]
    below, cache_above = differences[0][0], differences[1][1]
    with pytest.raises(AssertionError, match=r"key: 1 of .* codes are wrong"):
        check(cache_above, below, case)


def test_many_codes_at_an_edge_are_too_many():
    """Keys with 24 of 128 rotated coordinates at an edge."""
    case = StoreCase(QuantConfig("mse2", "int2"), 128)
    inputs = make_store_inputs(case)
    edge = midpoints(case.codec.centroids)[1]
    rotated = np.full(128, np.sqrt((1 - 24 * edge**2) / 104), np.float32)
    rotated[:24] = edge
    key = np.broadcast_to(rotated @ case.codec.rotation, inputs.key.shape).astype(np.float32)
    noise = 1e-7 * np.random.default_rng(0).normal(size=key.shape)
    cache = stored_with(case, inputs._replace(key=(key + noise).astype(np.float32)))
    with pytest.raises(AssertionError, match="codes differ"):
        check(cache, inputs._replace(key=key), case)


@pytest.mark.parametrize("units, passes", [(1, True), (2, False), (-1, True), (-2, False)])
def test_a_field_may_be_one_unit_off(units, passes):
    case = CHECKED[2]
    inputs, cache = stored(case)
    page, slot = divmod(int(inputs.slot_mapping[20]), case.page_size)
    place = case.layout.meta_index()[slot, 0, 0]
    field = cache.reshape(len(cache), -1)[page, place : place + 2].view("<i2")
    field += units
    if passes:
        assert check(cache, inputs, case).fields == 1
    else:
        with pytest.raises(AssertionError, match="key scale"):
            check(cache, inputs, case)


def test_three_fields_one_unit_off_are_too_many():
    case = CHECKED[2]
    inputs, cache = stored(case)
    for row in (19, 20, 21):
        page, slot = divmod(int(inputs.slot_mapping[row]), case.page_size)
        place = case.layout.meta_index()[slot, 0, 0]
        cache.reshape(len(cache), -1)[page, place : place + 2].view("<i2")[:] += 1
    with pytest.raises(AssertionError, match="fields differ"):
        check(cache, inputs, case)


def test_affine_codes_follow_the_scale_that_was_stored():
    """With a scale one unit off, codes made with that scale pass and no others are needed."""
    case = StoreCase(QuantConfig("fp8", "int8"), 64)
    inputs, cache = stored(case)
    row = 20
    page, slot = divmod(int(inputs.slot_mapping[row]), case.page_size)
    flat = cache.reshape(len(cache), -1)[page]
    place = case.layout.meta_index()[slot, 0, 0]
    flat[place : place + 2].view("<i2")[:] -= 1
    scale = np.float32(flat[place : place + 2].view("<f2")[0])
    zero = np.float32(flat[case.layout.meta_index()[slot, 0, 1] :][:2].view("<f2")[0])
    x = inputs.value[row, 0]
    codes = np.clip(np.floor((x - zero) / scale + np.float32(0.5)), 0, 255).astype(np.uint8)
    places = case.layout.value_index()[slot, 0]
    assert not np.array_equal(codes, flat[places])
    with pytest.raises(AssertionError, match=r"value: .* codes are wrong"):
        check(cache, inputs, case)
    flat[places] = codes
    assert check(cache, inputs, case).fields == 1


def test_single_precision_arithmetic_passes(monkeypatch):
    """What a backend does: fp32 norms, products and divisions."""
    exact = reference.coded_vectors

    def quantize(coded, codec, centroids):
        x = coded.astype(np.float32)
        norm = np.sqrt((x * x).sum(-1))
        unit = np.divide(x, norm[..., None], out=np.zeros_like(x), where=norm[..., None] > 0)
        edges = (centroids[1:] + centroids[:-1]) / 2
        codes = np.searchsorted(edges, unit @ codec.rotation.T, side="right")
        if codec.config.norm_correction:
            norm = norm / np.sqrt((centroids[codes] ** 2).sum(-1))
        return codes.astype(np.uint8), [np.minimum(norm, 65504).astype(np.float16)]

    def vectors(x, offset, transform):
        x = exact(x, offset, None).astype(np.float32)
        if transform is None:
            return x
        return np.stack([x[:, h] @ transform[h % len(transform)].T for h in range(x.shape[1])], 1)

    total = np.zeros(4, int)
    for case in STORE_CASES[::5]:
        with monkeypatch.context() as patch:
            patch.setattr(reference, "_quantize_codebook", quantize)
            patch.setattr(reference, "coded_vectors", vectors)
            inputs, cache = stored(case)
        total += check(cache, inputs, case)
    assert total[0] < 1e-4 * total[1]
    assert total[2] < 1e-3 * total[3]
    assert total[0] > 0


# --- the check of outputs -------------------------------------------------------------------

DECODE_CASE = next(c for c in ATTENTION_CASES if c.is_decode and c.sinks)
MIXED_CASE = next(c for c in ATTENTION_CASES if len(c.batch) == 12 and c.padding_rows)
CLOSE_CASES = [DECODE_CASE, MIXED_CASE]


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_the_rounded_reference_is_close(case):
    out, lse = expected(case)
    assert_close(rounded(out, case.dtype), lse.astype(np.float32), case)


@pytest.mark.parametrize("case", CLOSE_CASES, ids=str)
def test_expected_rows_that_see_nothing(case):
    out, lse = expected(case)
    blind = blind_rows(case)
    assert blind.any()
    assert not out[blind].any()
    assert out[~blind].any((1, 2)).all()
    assert np.isfinite(lse[~blind]).all()


def broken(case, change):
    out, lse = (a.copy() for a in expected(case))
    change(out, lse, np.flatnonzero(~blind_rows(case)), np.flatnonzero(blind_rows(case)))
    with pytest.raises(AssertionError):
        assert_close(out, lse, case)


def set_at(array, index, value):
    array[index] = value


WRONG = {
    "nan": lambda out, lse, seen, blind: set_at(out, (seen[-1], 0, 0), np.nan),
    "all rows off": lambda out, lse, seen, blind: set_at(out, ..., out * 1.005),
    "one row off": lambda out, lse, seen, blind: set_at(out, seen[-1], out[seen[-1]] * 1.02),
    "one element off": lambda out, lse, seen, blind: set_at(
        out, (seen[0], 0, 0), out[seen[0], 0, 0] + 0.05
    ),
    "heads swapped": lambda out, lse, seen, blind: set_at(out, seen, out[seen, ::-1]),
    "rows shifted": lambda out, lse, seen, blind: set_at(out, seen, out[np.roll(seen, 1)]),
    "zeros": lambda out, lse, seen, blind: set_at(out, seen[-1], 0),
    "blind row": lambda out, lse, seen, blind: set_at(out, (blind[0], 0, 0), 1e-6),
    "blind nan": lambda out, lse, seen, blind: set_at(out, (blind[0], 0, 0), np.nan),
    "blind lse": lambda out, lse, seen, blind: set_at(lse, (blind[0], 1), -1e30),
    "lse off": lambda out, lse, seen, blind: set_at(
        lse, (seen[0], 0), lse[seen[0], 0] * 1.02 + 0.02
    ),
    "lse base 2": lambda out, lse, seen, blind: set_at(lse, seen, lse[seen] / np.log(2)),
    "lse infinite": lambda out, lse, seen, blind: set_at(lse, (seen[0], 0), -np.inf),
    "lse nan": lambda out, lse, seen, blind: set_at(lse, (seen[0], 0), np.nan),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("case", CLOSE_CASES, ids=["decode", "mixed"])
def test_wrong_outputs_are_noticed(case, name):
    broken(case, WRONG[name])


def test_tolerances_are_the_documented_ones():
    assert TOLERANCE == {"float32": 1e-3, "float16": 1e-3, "bfloat16": 4e-3}
