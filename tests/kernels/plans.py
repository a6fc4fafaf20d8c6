"""Launch plans of ordinary serving shapes, for tests that need no device."""

from __future__ import annotations

import numpy as np

from tests.cases import AttentionCase, make_attention_inputs
from tq_core import CacheLayout, Codec, QuantConfig, codebook, dispatch
from tq_core.dispatch import AttentionPlan, Device
from tq_core.validation import ArraySpec, check_attention

DEVICES = {
    "sm_80": Device("cuda", 80, 108, 166912),
    "sm_90": Device("cuda", 90, 132, 232448, "NVIDIA H200"),
    "sm_100": Device("cuda", 100, 148, 232448),
    "gfx942": Device("hip", 0, 304, 65536),
}


def table_codec(config: QuantConfig, head_dim: int) -> Codec:
    """A codec whose codebooks need a table: Lloyd-Max levels."""

    def levels(bits: int) -> np.ndarray:
        return codebook.lloyd_max(bits) / np.sqrt(head_dim)

    return Codec(
        config,
        head_dim,
        centroids=levels(config.key_bits) if config.key_is_codebook else None,
        value_centroids=levels(config.value_bits) if config.value_is_codebook else None,
    )


def attention_plan(
    preset: str,
    target: str = "sm_90",
    *,
    head_dim: int = 128,
    page_size: int = 64,
    order: str = "planes",
    group: int = 4,
    num_kv_heads: int = 8,
    num_seqs: int = 64,
    seq_len: int = 8192,
    query_len: int = 1,
    cubic: bool = True,
    features: dict | None = None,
    overrides: dict | None = None,
) -> AttentionPlan:
    """The plan of a decode (``query_len`` 1) or of equal chunks; features as in ``attention``."""
    config = QuantConfig.preset(preset)
    layout = CacheLayout(config, num_kv_heads, head_dim, page_size, order)
    codec = Codec(config, head_dim) if cubic else table_codec(config, head_dim)
    features = dict(features or {})
    flags = {f"has_{n}": features.pop(n, False) for n in ("sinks", "alibi")}
    return _plan(
        layout,
        codec,
        target,
        shape=(num_seqs * query_len, num_kv_heads * group),
        table=(num_seqs, -(-seq_len // page_size)),
        decode=query_len == 1,
        max_query_len=query_len,
        overrides=overrides,
        features=features,
        **flags,
    )


def case_plan(case: AttentionCase, target: str) -> AttentionPlan:
    """The plan of a call of ``attention`` with a case's arrays."""
    arrays = make_attention_inputs(case)
    return _plan(
        case.layout,
        case.codec,
        target,
        shape=arrays["query"].shape[:2],
        table=arrays["block_table"].shape,
        decode=False,
        dtype=case.dtype,
        has_sinks=case.sinks,
        has_alibi=case.alibi,
        features={n: getattr(case, n) for n in ("scale", "causal", "sliding_window", "softcap")},
    )


def _plan(
    layout: CacheLayout,
    codec: Codec,
    target: str,
    *,
    shape: tuple[int, int],
    table: tuple[int, int],
    decode: bool,
    has_sinks: bool,
    has_alibi: bool,
    features: dict,
    max_query_len: int | None = None,
    overrides: dict | None = None,
    dtype: str = "bfloat16",
) -> AttentionPlan:
    (rows, heads), dim = shape, layout.head_dim
    call = check_attention(
        ArraySpec((rows, heads, dim), dtype),
        ArraySpec(layout.shape(8), "uint8"),
        ArraySpec(table, "int32"),
        ArraySpec(table[:1], "int32"),
        None if decode else ArraySpec((table[0] + 1,), "int32"),
        layout=layout,
        codec=codec,
        max_query_len=max_query_len,
        **features,
    )
    strides = (heads * dim, dim, 1)
    return dispatch.plan_attention(
        call,
        layout,
        dispatch.codec_traits(codec),
        DEVICES[target],
        decode=decode,
        page_stride=layout.page_bytes,
        table_stride=table[1],
        query_strides=strides,
        out_strides=strides,
        cache_align=16,
        has_sinks=has_sinks,
        has_alibi=has_alibi,
        overrides=overrides,
    )
