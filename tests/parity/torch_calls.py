"""Calls of tq_torch with a case's arrays, their results as numpy arrays of the very same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import tq_torch
from tests.cases import AttentionCase, StoreCase, make_store_inputs
from tests.torch.helpers import DTYPES, attention_tensors, on_device, tensor


def store(case: StoreCase, backend: str, device: str = "cpu") -> dict[str, np.ndarray]:
    """The cache after a store."""
    inputs = make_store_inputs(case)
    key, value = (tensor(x).to(device, DTYPES[case.dtype]) for x in (inputs.key, inputs.value))
    cache, slots = tensor(inputs.cache).to(device), tensor(inputs.slot_mapping).to(device)
    tq_torch.store(key, value, cache, slots, layout=case.layout, codec=case.codec, backend=backend)
    return {"cache": cache.cpu().numpy()}


def attention(
    case: AttentionCase, backend: str, device: str = "cpu", **options: Any
) -> dict[str, np.ndarray]:
    """Output and LSE."""
    tensors = on_device(attention_tensors(case), device)
    options |= {**case.options, "return_lse": True, "backend": backend}
    out, lse = tq_torch.attention(**tensors, **options)
    return {"out": _bits(out), "lse": _bits(lse)}


def decode(
    case: AttentionCase, backend: str, device: str = "cpu", **options: Any
) -> dict[str, np.ndarray]:
    """Output and LSE of a case with one row a sequence."""
    tensors = on_device(attention_tensors(case), device)
    del tensors["query_start_loc"]
    options |= {**case.options, "return_lse": True, "backend": backend}
    out, lse = tq_torch.decode_attention(**tensors, **options)
    return {"out": _bits(out), "lse": _bits(lse)}


def dequantize(case: AttentionCase, backend: str, device: str = "cpu") -> dict[str, np.ndarray]:
    """Keys and values in the dtype of the case."""
    tensors = on_device(attention_tensors(case), device)
    keys, values = tq_torch.dequantize(
        *(tensors[n] for n in ("cache", "block_table", "seq_lens")),
        layout=case.layout,
        codec=case.codec,
        dtype=DTYPES[case.dtype],
        backend=backend,
    )
    return {"keys": _bits(keys), "values": _bits(values)}


def _bits(x: torch.Tensor) -> np.ndarray:
    x = x.cpu().contiguous()
    return x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
