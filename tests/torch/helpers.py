"""What the suites of the torch package share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.cases import AttentionCase, make_attention_inputs

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
