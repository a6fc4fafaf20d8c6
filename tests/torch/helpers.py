"""What the suites of the torch package share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import tq_torch
from tests.cases import (
    AttentionCase,
    StoreCase,
    assert_close,
    assert_same_bytes,
    make_attention_inputs,
    make_store_inputs,
)
from tq_core import CacheLayout, Codec, QuantConfig, reference
from tq_torch import ops

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor of its own with the array's numbers."""
    return torch.from_numpy(np.array(array))


def attention_tensors(case: AttentionCase) -> dict[str, Any]:
    """``make_attention_inputs`` as tensors, the query in the case's dtype."""
    arrays = make_attention_inputs(case)
    tensors = {name: None if a is None else tensor(a) for name, a in arrays.items()}
    tensors["query"] = tensors["query"].to(DTYPES[case.dtype])
    return tensors


def to_float64(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def check_attention(
    case: AttentionCase, backend: str, device: str = "cpu", **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a case, compares it with the reference, returns output and LSE on the CPU."""
    tensors = on_device(attention_tensors(case), device)
    out = torch.full_like(tensors["query"], float("nan"))
    call = {**tensors, **case.options, **options, "out": out, "return_lse": True}
    _, lse = tq_torch.attention(**call, backend=backend)
    out, lse = out.cpu(), lse.cpu()
    assert_close(to_float64(out), lse.numpy(), case)
    return out, lse


def check_decode(
    case: AttentionCase, backend: str, device: str = "cpu", **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`check_attention` by ``decode_attention``, for cases of one row a sequence."""
    tensors = on_device(attention_tensors(case), device)
    del tensors["query_start_loc"]
    out = torch.full_like(tensors["query"], float("nan"))
    call = {**tensors, **case.options, **options, "out": out, "return_lse": True}
    _, lse = tq_torch.decode_attention(**call, backend=backend)
    out, lse = out.cpu(), lse.cpu()
    assert_close(to_float64(out), lse.numpy(), case)
    return out, lse


def check_windows_of_any_size(backend: str, **options: Any) -> None:
    """A window that is longer than any sequence changes nothing, however large."""
    case = AttentionCase(batch=((5, 1), (6, 50), (4, 2)), dtype="bfloat16")
    tensors = attention_tensors(case)
    options |= {**case.options, "backend": backend}
    want = tq_torch.attention(**tensors, **options)
    for window in (2**30, 2**31 - 1, 2**40, 2**63):
        have = tq_torch.attention(**tensors, **{**options, "sliding_window": window})
        assert (have - want).norm() <= 4e-3 * want.norm()


def check_a_sequence_without_rows(backend: str, **options: Any) -> None:
    """Its pages may be anything: nothing reads them."""
    case = AttentionCase(batch=((4, 50), (0, 33), (3, 20)), dtype="bfloat16")
    tensors = attention_tensors(case)
    want = tq_torch.attention(**tensors, **case.options, backend=backend, **options)
    tensors["block_table"][1] = torch.iinfo(torch.int32).max
    have = tq_torch.attention(**tensors, **case.options, backend=backend, **options)
    assert torch.equal(have, want)


def check_empty_out(backend: str) -> None:
    """No element of an output without rows is written, so that its strides may be 0."""
    layout = CacheLayout(QuantConfig(), 2, 64, 16)
    out = torch.empty(0, 1, 1).expand(0, 8, 64)
    assert out.stride()[1:] == (0, 0)
    result, lse = tq_torch.attention(
        torch.empty(0, 8, 64), tq_torch.empty_cache(layout, 1),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        seq_lens=torch.ones(1, dtype=torch.int32),
        query_start_loc=torch.zeros(2, dtype=torch.int32),
        layout=layout, codec=Codec(layout.config, 64), out=out, return_lse=True, backend=backend,
    )  # fmt: skip
    assert result is out
    assert lse.shape == (0, 8)


def check_store(case: StoreCase, backend: str, device: str = "cpu") -> torch.Tensor:
    """Runs a case, compares every byte with the reference's, returns the cache on the CPU."""
    inputs = make_store_inputs(case)
    dtype = DTYPES[case.dtype]
    key, value = (tensor(x).to(device, dtype) for x in (inputs.key, inputs.value))
    cache, slots = tensor(inputs.cache).to(device), tensor(inputs.slot_mapping).to(device)
    tq_torch.store(key, value, cache, slots, layout=case.layout, codec=case.codec, backend=backend)
    cache = cache.cpu()
    assert_same_bytes(cache.numpy(), inputs, layout=case.layout, codec=case.codec)
    return cache


def check_dequantize(
    case: AttentionCase, backend: str, device: str = "cpu", tolerance: float = 2e-5
) -> None:
    """Dequantizes a case's cache; ``tolerance`` is relative to the largest number, fp32's."""
    tensors = attention_tensors(case)
    arrays = [tensors[n] for n in ("cache", "block_table", "seq_lens")]
    what = {"layout": case.layout, "codec": case.codec}
    want = reference.dequantize(*(x.numpy() for x in arrays), **what)
    have = tq_torch.dequantize(
        *(x.to(device) for x in arrays), **what, dtype=torch.float32, backend=backend
    )
    for a, b in zip(have, want, strict=True):
        error = np.abs(to_float64(a.cpu()) - b).max()
        assert error <= tolerance * np.abs(b).max(), f"{error:.1e}"


def on_device(tensors: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The tensors on a device; None stays None."""
    return {name: None if x is None else x.to(device) for name, x in tensors.items()}


def common_options(case, backend, check=None):
    """The argument ``options`` of ``torch.ops.tq.store`` and ``dequantize`` for a case."""
    return ops.common_options(case.layout.descriptor, case.codec.digest, backend, check)


def operator_arguments(case, tensors, backend, decode=False):
    """Arguments of ``torch.ops.tq.attention`` for a case's tensors."""
    arrays = [tensors[n] for n in ("query", "cache", "block_table", "seq_lens", "query_start_loc")]
    if decode:
        arrays[-1] = None
    options = ops.attention_options(
        layout=case.layout.descriptor,
        codec=case.codec.digest,
        causal=case.causal,
        sliding_window=case.sliding_window,
        softcap=case.softcap,
        num_kv_splits=None,
        plan="",
        backend=backend,
    )
    optional = (tensors["sinks"], tensors["alibi_slopes"])
    return (*arrays, torch.zeros_like(arrays[0]), *optional, case.scale, None, None, options)
