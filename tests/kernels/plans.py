"""Launch plans of ordinary serving shapes, for tests that need no device."""

from __future__ import annotations

import numpy as np

from tq_core import CacheLayout, Codec, QuantConfig, codebook, dispatch
from tq_core.dispatch import AttentionPlan, Device, Launch
from tq_core.validation import ArraySpec, check_attention

DEVICES = {
    "sm_80": Device("cuda", 80, 108, 166912),
    "sm_90": Device("cuda", 90, 132, 232448),
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
    heads, rows = num_kv_heads * group, num_seqs * query_len
    decode = query_len == 1
    features = dict(features or {})
    flags = {f"has_{n}": features.pop(n, False) for n in ("sinks", "alibi")}
    call = check_attention(
        ArraySpec((rows, heads, head_dim), "bfloat16"),
        ArraySpec(layout.shape(8), "uint8"),
        ArraySpec((num_seqs, -(-seq_len // page_size)), "int32"),
        ArraySpec((num_seqs,), "int32"),
        None if decode else ArraySpec((num_seqs + 1,), "int32"),
        layout=layout,
        codec=codec,
        max_query_len=query_len,
        **features,
    )
    strides = (heads * head_dim, head_dim, 1)
    return dispatch.plan_attention(
        call,
        layout,
        dispatch.codec_traits(codec),
        DEVICES[target],
        decode=decode,
        page_stride=layout.page_bytes,
        query_strides=strides,
        out_strides=strides,
        cache_align=16,
        overrides=overrides,
        **flags,
    )


def launches(plan: AttentionPlan) -> list[Launch]:
    """The launches of a plan, in order."""
    steps = (plan.query, plan.attention, plan.merge, plan.output)
    return [step for step in steps if step is not None]
