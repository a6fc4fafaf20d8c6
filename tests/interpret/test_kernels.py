"""The Triton sources in Triton's interpreter, on a CPU: a process of its own runs this.

``TRITON_INTERPRET=1 pytest tests/interpret``; `make test` does so. The table is that of the other
suites with shorter sequences, since the interpreter is slow.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

import tq_torch
from tests.batch import PLAN, SHORT, check_batch_invariance, invariance_cases
from tests.cases import ATTENTION_CASES, STORE_CASES, AttentionCase, config_id, make_store_inputs
from tests.interpret.speed import patch_the_language_once
from tests.torch.helpers import (
    attention_tensors,
    check_a_sequence_without_rows,
    check_attention,
    check_decode,
    check_dequantize,
    check_empty_out,
    check_store,
    check_windows_of_any_size,
    tensor,
)
from tq_core import CacheLayout, Codec, QuantConfig, dispatch, kernels, why_unsupported

if not kernels.interpreted():
    pytest.skip("needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)

patch_the_language_once()

# Numpy computes both sides of a choice and says so of the side that is not taken.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

RAGGED = ((1, 17), (5, 3), (0, 16), (2, 0), (3, 80))
ONE_ROW = ((1, 70), (1, 1), (1, 0), (1, 17))


def _shorter(case: AttentionCase) -> AttentionCase:
    batch = ONE_ROW if case.is_decode else RAGGED
    return replace(case, batch=batch, group=min(case.group, 7))


ATTENTION = [_shorter(c) for c in ATTENTION_CASES if c.head_dim % 8 == 0]
#: One store of every pair of formats, then those with offsets, transforms and scales.
STORE = list({c.config: c for c in STORE_CASES if c.head_dim in (64, 72, 80, 128)}.values())
STORE += [c for c in STORE_CASES if str(c.extras) and c.head_dim % 8 == 0]


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention(case):
    splits = (None, 3)[ATTENTION.index(case) % 2]
    check_attention(case, "interpret", num_kv_splits=splits)


def test_an_out_without_elements_may_have_any_strides():
    check_empty_out("interpret")


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_rows_on_the_other_axis(case):
    block_n = 64 if case.head_dim > 256 else (64, 128)[ATTENTION.index(case) % 2]
    plan = {"block_n": block_n, "num_warps": 4}
    check_attention(
        case, "interpret", plan=plan, num_kv_splits=(None, 3)[ATTENTION.index(case) // 3 % 2]
    )


@pytest.mark.parametrize("case", ATTENTION[::3], ids=str)
def test_tokens_decoded_once(case):
    """In pieces that end within sequences, or in one piece."""
    piece = (32, 512)[ATTENTION.index(case) % 2]
    case = replace(case, dtype="bfloat16")
    plan = {"unpack": 1, "block_n": 16, "block_t": 32, "piece_tokens": piece}
    check_attention(case, "interpret", plan=plan)


PIECES = {"unpack": 1, "block_n": 16, "block_t": 32, "piece_tokens": 32}


@pytest.mark.parametrize("plan", [None, PIECES, {"deterministic": "batch"}], ids=str)
def test_windows_and_sequences_without_rows(plan):
    check_windows_of_any_size("interpret", plan=plan)
    check_a_sequence_without_rows("interpret", plan=plan)


def test_unseen_tiles_of_large_values_count_for_nothing():
    """A zero query's scores are all equal: only masks tell tiles apart."""
    layout = CacheLayout(QuantConfig.preset("4bit"), 1, 64, 16)
    codec = Codec(layout.config, 64)
    cache = tq_torch.empty_cache(layout, 5)
    key, value = torch.randn((2, 80, 1, 64), generator=torch.Generator().manual_seed(1))
    value[:32] *= 6e4
    value[32:] *= 1e-3
    tq_torch.store(key, value, cache, torch.arange(80), layout=layout, codec=codec)
    rows = torch.tensor([0, 80], dtype=torch.int32)
    table, lens = torch.arange(5).int()[None], torch.tensor([80]).int()
    call = (torch.zeros(80, 1, 64).bfloat16(), cache, table, lens, rows)
    options = {"layout": layout, "codec": codec, "sliding_window": 4}
    want = tq_torch.attention(*call, **options, backend="native")[36:].float()
    have = tq_torch.attention(*call, **options, backend="interpret", plan=PIECES)[36:].float()
    assert want.norm() > 0
    assert (have - want).norm() <= 8e-3 * want.norm()


@pytest.mark.parametrize("case", ATTENTION[::11], ids=str)
def test_splits_agree(case):
    whole, whole_lse = check_attention(case, "interpret", num_kv_splits=1)
    parts, parts_lse = check_attention(case, "interpret", num_kv_splits=16)
    assert torch.allclose(whole.float(), parts.float(), rtol=2e-3, atol=2e-3)
    assert torch.allclose(whole_lse, parts_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ATTENTION[::16], ids=str)
@pytest.mark.parametrize("plan", [{"block_t": 16}, {"block_t": 128, "block_n": 16}], ids=str)
def test_other_plans(case, plan):
    check_attention(case, "interpret", plan=plan)


#: Lengths that share few or many parts, the longest one more than `merge` loads at once.
UNEVEN = ((1, 1), (1, 1200), (1, 0), (1, 64), (1, 65), (1, 300))


@pytest.mark.parametrize("case", [c for c in ATTENTION if c.is_decode][::3], ids=str)
@pytest.mark.parametrize("parts", [1, 6, 100])
def test_parts_in_shares_of_the_lengths(case, parts):
    check_decode(case, "interpret", plan={"parts": parts, "block_t": 16})


@pytest.mark.parametrize("features", [
    {}, {"sliding_window": 100, "sinks": True}, {"config": QuantConfig.preset("4bit_hq")},
    {"group": 9, "causal": False},
], ids=str)  # fmt: skip
def test_parts_of_uneven_lengths(features):
    case = AttentionCase(head_dim=64, num_kv_heads=1, group=2, batch=UNEVEN, dtype="float16")
    plan = {"parts": 30, "block_t": 32, "block_n": 4}
    check_decode(replace(case, **features), "interpret", plan=plan)


@pytest.mark.parametrize(
    "lens",
    [(1, 1000, 0, 64, 300, 90, 17, 5, 33, 65), tuple(range(991, 1001)), (900,) * 10],
    ids=["uneven", "near", "equal"],
)
def test_lengths_that_differ_without_a_plan(lens, monkeypatch):
    """Sequences of one part write their results; those of several are merged."""
    monkeypatch.setattr(dispatch, "_FEW_TILES", 1)
    shared = []
    plan_attention = dispatch.plan_attention

    def recorded(*args, **kwargs):
        plan = plan_attention(*args, **kwargs)
        shared.append(dict(plan.attention.constexprs)["BLOCK_B"])
        return plan

    monkeypatch.setattr(dispatch, "plan_attention", recorded)
    # Another head size than the other cases have: none of their plans is at hand.
    case = AttentionCase(
        head_dim=48, num_kv_heads=1, group=2, batch=tuple((1, n) for n in lens), dtype="float16",
        sinks=True,
    )  # fmt: skip
    check_decode(case, "interpret")
    assert shared == [64]


@pytest.mark.parametrize("features", [
    {}, {"sliding_window": 100, "sinks": True, "padding_rows": 3}, {"group": 3, "num_kv_heads": 2},
    {"padding_rows": 2, "batch": ((0, 40), (1, 300), (0, 0), (3, 2), (1, 0), (0, 9))},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("parts", [2, 30])
def test_parts_of_a_few_rows_each(features, parts):
    batch = ((1, 1), (3, 700), (0, 50), (2, 0), (4, 65), (1, 300))
    case = AttentionCase(head_dim=64, num_kv_heads=1, group=2, batch=batch, dtype="float16")
    plan = {"parts": parts, "block_t": 32, "block_n": 16}
    check_attention(replace(case, **features), "interpret", plan=plan, max_query_len=4)


@pytest.mark.parametrize("case", ATTENTION[::4], ids=str)
@pytest.mark.parametrize("split_tokens", [64, 1024])
def test_batch_deterministic(case, split_tokens):
    check_attention(case, "interpret", plan={**PLAN, "split_tokens": split_tokens})


@pytest.mark.parametrize("case", invariance_cases(SHORT, 1), ids=str)
def test_a_sequence_has_the_same_bits_in_any_batch(case):
    check_batch_invariance(case, "interpret", few=True, split_tokens=128)


@pytest.mark.parametrize("case", [c for c in ATTENTION if c.sliding_window is None][::6], ids=str)
def test_dequantize(case):
    check_dequantize(case, "interpret")


@pytest.mark.parametrize("case", STORE, ids=str)
def test_store(case):
    check_store(case, "interpret")


@pytest.mark.parametrize("key, value", [("mse4", "mse2"), ("mse3", "mse3"), ("mse2", "mse4")])
def test_other_centroids_are_read_from_a_table(key, value):
    """Lloyd-Max levels, as a cache written elsewhere may have."""
    from tests.kernels.plans import table_codec

    class TableCase(AttentionCase):
        @property
        def codec(self):
            return table_codec(self.config, self.head_dim)

    case = TableCase(QuantConfig(key=key, value=value), 64, batch=RAGGED, dtype="float16")
    assert dispatch.codec_traits(case.codec).key_kind == "table"
    assert dispatch.codec_traits(case.codec).value_kind == "table"
    check_attention(case, "interpret")
    # The table holds fp16 numbers; a vector is off by at most 2**-11 of its length.
    check_dequantize(case, "interpret", tolerance=2e-3)


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_strided_pages_at_any_address(shift):
    """An odd address or page stride is refused by name and left to native otherwise."""
    case = ATTENTION[0]
    tensors = attention_tensors(case)
    pages = tensors["cache"].shape[0]
    room = torch.full((pages, case.layout.page_bytes + shift), 255, dtype=torch.uint8)
    flat = torch.cat([torch.full((shift,), 255, dtype=torch.uint8), room.flatten()])
    inner = (case.layout.num_kv_heads * case.layout.slot_bytes, case.layout.slot_bytes, 1)
    moved = flat.as_strided(tensors["cache"].shape, (room.stride(0), *inner), shift)
    moved.copy_(tensors["cache"])
    tensors["cache"] = moved
    call = {**tensors, **case.options}
    want = tq_torch.attention(**call, backend="native")
    if shift % 2:
        with pytest.raises(ValueError, match="address and page stride are even"):
            tq_torch.attention(**call, backend="interpret")
    else:
        have = tq_torch.attention(**call, backend="interpret")
        assert torch.allclose(have, want, rtol=2e-3, atol=2e-3)


def test_strided_arrays():
    case = next(c for c in ATTENTION if c.sinks and c.alibi)
    tensors = attention_tensors(case)
    call = {**tensors, **case.options}
    want, lse = tq_torch.attention(**call, backend="interpret", return_lse=True)
    for name in ("query", "block_table", "seq_lens", "query_start_loc", "sinks", "alibi_slopes"):
        x = call[name]
        wide = torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype)
        wide[..., ::2] = x
        call[name] = wide[..., ::2]
    out = torch.full((*want.shape[::-1],), float("nan"), dtype=want.dtype).permute(2, 1, 0)
    have, have_lse = tq_torch.attention(**call, backend="interpret", return_lse=True, out=out)
    assert have is out
    assert torch.equal(have, want)
    assert torch.equal(have_lse, lse)


def test_store_takes_any_strides():
    case = next(c for c in STORE if config_id(c.config) == "mse4-int4")
    inputs = make_store_inputs(case)
    key, value, cache, slots = (tensor(x) for x in inputs)
    call = {"layout": case.layout, "codec": case.codec, "backend": "interpret"}
    want = cache.clone()
    tq_torch.store(key, value, want, slots, **call)
    fused = torch.cat([value, key], 1)[:, case.num_kv_heads :]
    turned = value.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    wide = torch.stack([slots, slots], 1)[:, 0]
    tq_torch.store(fused, turned, cache, wide, **call)
    assert torch.equal(cache, want)


def test_nothing_to_do():
    case = ATTENTION[0]
    layout, codec = case.layout, case.codec
    call = {"layout": layout, "codec": codec, "backend": "interpret"}
    cache = tq_torch.empty_cache(layout, 0)
    query = torch.zeros((0, case.num_query_heads, case.head_dim))
    table, lens = torch.zeros((0, 0), dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    assert tq_torch.decode_attention(query, cache, table, lens, **call).shape == query.shape
    rows = torch.zeros((3, case.num_query_heads, case.head_dim))
    out, lse = tq_torch.attention(
        rows, cache, table, lens, torch.zeros(1, dtype=torch.int32), return_lse=True, **call
    )
    assert not out.any()
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    token = torch.zeros((0, case.num_kv_heads, case.head_dim))
    tq_torch.store(token, token, cache, torch.zeros(0, dtype=torch.int64), **call)
    dense, _ = tq_torch.dequantize(cache, table, lens, dtype=torch.float32, **call)
    assert dense.shape == (0, 0, case.num_kv_heads, case.head_dim)


def test_triton_is_refused_where_it_is_interpreted():
    reasons = why_unsupported(ATTENTION[0].layout, backend="triton", target="cuda")
    assert reasons == [
        "TRITON_INTERPRET=1 was set when Triton was imported: its kernels run on the CPU"
    ]
