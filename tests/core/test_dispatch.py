"""Launch plans: data made of plain numbers, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.cases import ATTENTION_CASES
from tests.kernels.plans import DEVICES, attention_plan, case_plan
from tq_core import PRESETS, CacheLayout, Codec, QuantConfig, dispatch
from tq_core.dispatch import MAX_SCRATCH_BYTES, SPLITS
from tq_core.validation import ArraySpec, check_attention

H200 = DEVICES["sm_90"]
BATCH = {"deterministic": "batch"}


def constants(launch):
    return dict(launch.constexprs)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("target", DEVICES)
def test_equal_calls_have_equal_plans(preset, target):
    first, second = (attention_plan(preset, target) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    for launch in first.launches:
        assert all(isinstance(v, int | float | str | tuple) for v in constants(launch).values()), (
            launch
        )


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 7, 8, 16, 33, 64, 200, 1000])
@pytest.mark.parametrize("seq_len", [1, 63, 300, 1024, 8192, 131072])
def test_splits(num_seqs, seq_len):
    plan = attention_plan("4bit", num_seqs=num_seqs, seq_len=seq_len)
    assert plan.num_splits in SPLITS
    tiles = -(-seq_len // 64)
    assert plan.num_splits <= tiles
    attention = constants(plan.attention)
    if attention["BLOCK_B"]:
        assert num_seqs > 1
        assert attention["BLOCK_B"] >= num_seqs
        parts = num_seqs * plan.num_splits
        assert plan.attention.integers[-1] == parts
        assert plan.attention.grid == 8 * parts
        assert plan.merge.integers == (parts, num_seqs)
        assert constants(plan.merge)["SHARED"]
        # Room for one more of each sequence.
        places = parts + num_seqs
        sums, state, *direct = plan.attention.outputs
        assert tuple(direct) == plan.merge.outputs
        assert plan.merge.inputs[-2:] == tuple(output.name for output in direct)
        sums, state = sums.shape, state.shape
        assert sums == (places, 32, 128)
        # Two numbers of each token behind the states.
        assert 32 * (state[0] - places) >= num_seqs
        assert state[1:] == (32, 2)
    else:
        # One sequence, short ones that are not cut, or few programs.
        few = 8 * num_seqs * plan.num_splits <= 4 * H200.num_sms
        assert num_seqs == 1 or few or (plan.num_splits == 1 and tiles <= 32)
        assert plan.attention.grid == 8 * num_seqs * plan.num_splits
        assert (plan.merge is None) == (plan.num_splits == 1)
        assert plan.attention.integers[-1] == plan.num_splits
        if plan.merge is not None:
            shape = (num_seqs * 32, plan.num_splits)
            sizes = [o.shape for o in plan.attention.outputs]
            assert sizes == [(*shape, 128), (*shape, 2), (1,), (1,)]
            assert constants(plan.merge)["BLOCK_S"] >= plan.num_splits
    if plan.merge is not None:
        assert 4 * math.prod(plan.attention.outputs[0].shape) <= MAX_SCRATCH_BYTES


@pytest.mark.parametrize("num_seqs, seq_len", [(2, 131072), (8, 32768), (64, 8192), (200, 8193)])
def test_sequences_share_as_many_programs_as_equal_splits(num_seqs, seq_len):
    """What a program then has, tests/interpret/test_shares.py says."""
    plan = attention_plan("4bit", num_seqs=num_seqs, seq_len=seq_len)
    overrides = {"num_splits": plan.num_splits}
    equal = attention_plan("4bit", num_seqs=num_seqs, seq_len=seq_len, overrides=overrides)
    assert constants(plan.attention)["BLOCK_B"] > 0 == constants(equal.attention)["BLOCK_B"]
    assert plan.attention.grid == equal.attention.grid


def test_splits_that_are_asked_for_are_equal_parts():
    for what in ({"overrides": {"num_splits": 3}}, {"features": {"num_kv_splits": 3}}):
        plan = attention_plan("4bit", num_seqs=64, seq_len=131072, **what)
        assert constants(plan.attention)["BLOCK_B"] == 0
        assert plan.attention.integers[-1] == 3
    assert attention_plan("4bit", overrides={"parts": 70}).attention.integers[-1] == 70
    for what in (
        {"overrides": {"num_splits": 3, "parts": 70}},
        {"overrides": {"parts": 70}, "features": {"num_kv_splits": 3}},
        {"overrides": {"parts": 70}, "query_len": 100},
        {"overrides": {"parts": 70, "deterministic": "batch"}},
    ):
        with pytest.raises(ValueError, match="parts is for 1 to 1024 sequences of a block of rows"):
            attention_plan("4bit", num_seqs=64, **what)


def test_few_long_sequences_are_split_further_than_many_short_ones():
    assert attention_plan("4bit", num_seqs=1, seq_len=131072).num_splits == 128
    assert attention_plan("4bit", num_seqs=1000, seq_len=1024).num_splits == 1


def test_a_hint_of_the_length_is_for_the_splits_alone():
    short, long = (
        attention_plan("4bit", num_seqs=4, seq_len=n, overrides={"num_splits": 4})
        for n in (512, 65536)
    )
    # The block table of the longer ones is wider.
    long = replace(long, attention=replace(long.attention, integers=short.attention.integers))
    assert short == long


@pytest.mark.parametrize(
    "preset, stages", [("4bit", 5), ("2bit", 5), ("4bit_hq", 5), ("k8v8", 2), ("3bit", 5)]
)
def test_two_buffers_where_they_fit_beside_the_others(preset, stages):
    assert attention_plan(preset, "sm_100").attention.num_stages == stages
    small = replace(H200, shared_memory=65536)
    assert plan_on(small, preset).attention.num_stages == 2


def plan_on(device, preset="4bit", head_dim=128, overrides=None, group=4):
    layout = CacheLayout(QuantConfig.preset(preset), 2, head_dim, 16)
    codec = Codec(layout.config, head_dim)
    call = check_attention(
        ArraySpec((8, 2 * group, head_dim), "float16"),
        ArraySpec(layout.shape(4), "uint8"),
        ArraySpec((8, 64), "int32"),
        ArraySpec((8,), "int32"),
        None,
        layout=layout,
        codec=codec,
    )
    strides = (2 * group * head_dim, head_dim, 1)
    return dispatch.plan_attention(
        call,
        layout,
        dispatch.codec_traits(codec),
        device,
        decode=True,
        page_stride=layout.page_bytes,
        table_stride=64,
        query_strides=strides,
        out_strides=strides,
        cache_align=16,
        has_sinks=False,
        has_alibi=False,
        overrides=overrides,
    )


def test_a_small_device_gets_smaller_tiles():
    big, small = (plan_on(replace(H200, shared_memory=n), "k8v8") for n in (232448, 16384))
    assert constants(big.attention)["BLOCK_T"] == 64
    assert constants(small.attention)["BLOCK_T"] == 32
    assert small.attention.num_stages == 2


def test_what_no_tile_fits_is_refused():
    with pytest.raises(ValueError, match="shared memory, a program has 4096 here"):
        plan_on(replace(H200, shared_memory=4096))


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"block_m": 8}, r"plan: expected any of \['asm', 'block_n'.*got \['block_m'\]"),
        ({"block_n": 2}, "block_n to be a power of two from 4 to 256, got 2"),
        ({"block_t": 48}, "block_t to be a power of two from 16 to 256, got 48"),
        ({"num_warps": 3}, "num_warps to be a power of two from 1 to 16, got 3"),
        ({"num_stages": 0}, "num_stages to be a number from 1 to 8, got 0"),
        ({"num_splits": 257}, "num_splits to be a number from 1 to 256, got 257"),
        ({"asm": 2}, "asm to be a number from 0 to 1, got 2"),
        ({"asm": "batch"}, "asm to be a number from 0 to 1, got 'batch'"),
        ({"deterministic": "run"}, "expected deterministic to be 'batch', got 'run'"),
        ({"split_tokens": 256}, "split_tokens is for deterministic='batch' alone"),
        (BATCH | {"split_tokens": 8}, "split_tokens to be a number from 16 to 1048576, got 8"),
        (BATCH | {"split_tokens": 100}, "split_tokens to be a multiple of the 32 tokens of a tile"),
        (BATCH | {"num_splits": 4}, "num_splits cuts sequences into equal parts"),
        ({"block_t": 256, "num_stages": 8}, "block_t=256 and num_stages=8 need about .* bytes"),
    ],
)
def test_impossible_overrides(overrides, message):
    with pytest.raises(ValueError, match=message):
        plan_on(H200, "k8v8", 256, overrides)


def test_overrides_arrive_in_the_launch():
    overrides = {
        "block_n": 16, "block_t": 32, "num_warps": 2, "num_stages": 3, "num_splits": 5, "asm": 0,
    }  # fmt: skip
    plan = plan_on(H200, overrides=overrides)
    launch = plan.attention
    assert (launch.num_warps, launch.num_stages, plan.num_splits) == (2, 3, 5)
    assert constants(launch)["BLOCK_N"] == 16
    assert constants(launch)["BLOCK_T"] == 32
    assert constants(launch)["KEY_ASM"] == ""


@pytest.mark.parametrize("target", DEVICES)
def test_inline_ptx_is_for_cuda_alone(target):
    text = constants(attention_plan("4bit", target).attention)["KEY_ASM"]
    assert bool(text) == target.startswith("sm_")


@pytest.mark.parametrize("head_dim, element, codes", [(128, 4, 16), (72, 1, 8)])
def test_three_bit_codes_come_in_words_where_they_fill_them(head_dim, element, codes):
    reader = constants(plan_on(H200, "3bit", head_dim).attention)
    assert (reader["KEY_ELEMENT"], reader["VALUE_CODES"]) == (element, codes)


@pytest.mark.parametrize("preset, head_dim, units", [
    ("4bit", 128, (16, 16)), ("4bit", 64, (8, 8)), ("3bit", 128, (4, 8)), ("2bit", 128, (8, 8)),
    ("2bit", 64, (4, 8)), ("k8v8", 128, (64, 32)), ("3bit", 256, (8, 16)),
])  # fmt: skip
def test_units_fill_the_matrix_unit(preset, head_dim, units):
    """Eight units of values are the rows of two codes each."""
    reader = constants(plan_on(H200, preset, head_dim).attention)
    assert (reader["BLOCK_KEY"], reader["BLOCK_VALUE"]) == units
    assert reader["VALUE_PAIRED"] == (units[1] == 8)


def test_foreign_centroids_take_the_table():
    config = QuantConfig.preset("4bit_hq")
    own = dispatch.codec_traits(Codec(config, 64))
    foreign = dispatch.codec_traits(
        Codec(config, 64, centroids=range(16), value_centroids=range(16))
    )
    assert (own.key_kind, own.value_kind) == ("grid", "poly")
    assert (foreign.key_kind, foreign.value_kind) == ("table", "table")


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64, 128])
@pytest.mark.parametrize("num_seqs", [1, 64])
def test_early_starts_leave_room(page_size, num_seqs):
    """Few programs start early, and then ask for whole pages with 32 lanes."""
    plan = attention_plan("4bit", page_size=page_size, num_seqs=num_seqs, overrides={"block_t": 64})
    few = plan.num_splits > 1 and plan.attention.grid <= 4 * H200.num_sms
    assert constants(plan.query)["EARLY"] == constants(plan.attention)["EARLY"] == few
    assert few == (num_seqs == 1)
    assert constants(plan.attention)["PREFETCH"] == (few and page_size in (16, 64))


def test_short_sequences_beside_long_ones_are_a_launch_of_their_own():
    """Where rows may differ; a batch of equal chunks, of drafts or of decodes needs none."""
    for query_len in (1, 4, 2048):
        assert attention_plan("4bit", query_len=query_len).short is None
    case = next(
        c for c in ATTENTION_CASES if len({rows for rows, _ in c.batch}) > 1 and c.group > 1
    )
    plan = case_plan(case, "sm_90")
    assert constants(plan.attention)["SHORT"] == constants(plan.short)["BLOCK_N"]
    assert constants(plan.short)["BLOCK_N"] < constants(plan.attention)["BLOCK_N"]
    assert [launch.kernel for launch in plan.launches if launch.kernel != "transform_output"] == [
        "transform_query", "attention", *["merge"] * (plan.merge is not None), "attention", "merge",
    ]  # fmt: skip
    assert plan.short_merge.inputs[-2:] == tuple(o.name for o in plan.short_merge.outputs)


@pytest.mark.parametrize("target", DEVICES)
def test_rows_lie_on_the_m_axis_where_that_is_faster(target):
    plan = attention_plan("4bit", target, query_len=200, num_seqs=1)
    assert constants(plan.attention)["WIDE"] == (target == "sm_90")
    assert constants(plan.attention)["BLOCK_N"] == (128 if target == "sm_90" else 32)


def names(plan):
    return [launch.kernel for launch in plan.launches]


def test_long_chunks_decode_tokens_once_piece_by_piece():
    unpack = {"overrides": {"unpack": 1}}
    plan = attention_plan("4bit", query_len=2048, num_seqs=1, seq_len=32768, **unpack)
    step = ["unpack", "attention_unpacked"]
    assert names(plan) == ["transform_query", *4 * step]
    assert [launch.integers[-1] for launch in plan.launches[1:]] == [0, 0, 1, 1, 2, 2, 3, 3]
    # However long the prefix, tokens take 40 MiB, and the sums of rows 33.
    for seq_len in (200_000, 1_000_000):
        plan = attention_plan("4bit", query_len=2048, num_seqs=1, seq_len=seq_len, **unpack)
        outputs = {o.name: o for launch in plan.launches for o in launch.outputs}
        size = {name: math.prod(o.shape) for name, o in outputs.items()}
        tokens = 2 * (size["unpacked_keys"] + size["unpacked_values"]) + 4 * size["exponents"]
        rotated = 2 * size["rotated"]
        assert tokens + 4 * (size["sums"] + size["state"]) + rotated < 100e6
        assert len(plan.launches) == 1 + 2 * -(-seq_len // constants(plan.attention)["PIECE"])
    # One piece: no sums are kept.
    plan = attention_plan("4bit", query_len=2048, num_seqs=1, seq_len=2048, **unpack)
    assert names(plan) == ["transform_query", *step]
    assert plan.attention.outputs[0].shape[0] == 1


@pytest.mark.parametrize("overrides", [None, {"unpack": 0}, {"deterministic": "batch"}], ids=str)
def test_other_calls_decode_in_every_program(overrides):
    plan = attention_plan("4bit", query_len=2048, num_seqs=1, overrides=overrides)
    assert plan.attention.kernel == "attention"
    assert plan.pieces == ()


def test_pieces_that_cannot_be_had_are_refused():
    with pytest.raises(ValueError, match="piece_tokens to be a multiple of 128, got 200"):
        attention_plan(
            "4bit", query_len=2048, num_seqs=1, overrides={"unpack": 1, "piece_tokens": 200}
        )
    for what in ({"num_splits": 2}, {"deterministic": "batch"}):
        with pytest.raises(ValueError, match=r"unpack=1 is for attention\(\) alone"):
            attention_plan("4bit", query_len=2048, num_seqs=1, overrides={"unpack": 1, **what})
    with pytest.raises(ValueError, match=r"unpack=1 is for attention\(\) alone"):
        attention_plan("4bit", overrides={"unpack": 1})
    with pytest.raises(ValueError, match="piece_tokens is for unpack=1 alone"):
        attention_plan("4bit", query_len=2048, num_seqs=1, overrides={"piece_tokens": 256})


#: Constants of a launch that may differ between calls whose results have the same bits.
FREE = {"DECODE", "PDL", "EARLY", "PREFETCH"}


@pytest.mark.parametrize("group", [1, 4, 16, 64])
@pytest.mark.parametrize("target", DEVICES)
def test_batch_deterministic_kernels_do_not_depend_on_the_batch(target, group):
    """The same kernels from one row to long chunks, for any bounds; nothing is fused."""
    calls = [
        {"num_seqs": 1, "seq_len": 1}, {"num_seqs": 1, "seq_len": 100_000}, {"num_seqs": 300},
        {"num_seqs": 3, "query_len": 4}, {"num_seqs": 1, "query_len": 500, "seq_len": 2000},
    ]  # fmt: skip
    for preset in ("4bit", "4bit_hq", "k8v4"):
        plans = [attention_plan(preset, target, group=group, overrides=BATCH, **c) for c in calls]
        kinds = {
            tuple(
                (
                    launch.kernel, launch.num_warps, launch.num_stages, launch.fp_fusion,
                    tuple(item for item in launch.constexprs if item[0] not in FREE),
                )
                for launch in plan.launches
            )
            for plan in plans
        }  # fmt: skip
        assert len(kinds) == 1
        assert not any(launch.fp_fusion for launch in plans[0].launches)
        assert [plan.num_splits for plan in plans] == [1, 98, 8, 8, 2]
        assert all(plan.merge is not None and plan.short is None for plan in plans)
    assert all(launch.fp_fusion for launch in attention_plan("4bit", target).launches)


def test_batch_deterministic_calls_that_need_too_much_memory_are_refused():
    attention_plan("4bit", num_seqs=64, seq_len=131072, overrides=BATCH)
    with pytest.raises(ValueError, match="partial sums of 4096 query rows over 131072 tokens"):
        attention_plan("4bit", num_seqs=1, query_len=4096, seq_len=131072, overrides=BATCH)


def test_batch_deterministic_splits_are_not_equal_parts():
    with pytest.raises(ValueError, match="num_kv_splits cuts sequences into equal parts"):
        attention_plan("4bit", overrides=BATCH, features={"num_kv_splits": 4})
