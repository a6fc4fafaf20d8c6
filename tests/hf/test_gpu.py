"""``generate`` on a GPU, against plain attention over the unpacked cache, and its host syncs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="tq_torch.hf needs transformers, which is missing here")

from tests.hf.models import (
    MODELS,
    ORACLE,
    forward,
    generate,
    logits_of,
    make_cache,
    make_model,
    make_tokens,
    relative_error,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TOLERANCES = {torch.float32: 1e-2, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@pytest.mark.parametrize("name", MODELS)
def test_generate_equals_the_oracle(name: str) -> None:
    model, tokens = make_model(name).cuda(), make_tokens(batch=2).cuda()
    actual = generate(model, tokens, make_cache(model))
    model.set_attn_implementation(ORACLE)
    expected = forward(model, actual.sequences, make_cache(model))
    first = tokens.shape[1] - 1
    expected = expected[:, first:-1].transpose(0, 1)
    assert relative_error(logits_of(actual), expected) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_dtypes_equal_the_oracle(dtype: torch.dtype) -> None:
    model, tokens = make_model("qwen3").to("cuda", dtype), make_tokens(batch=2).cuda()
    mask = torch.ones_like(tokens)
    mask[1, :6] = 0
    actual = forward(model, tokens, make_cache(model), mask)[mask.bool()].float()
    model.set_attn_implementation(ORACLE)
    expected = forward(model, tokens, make_cache(model), mask)[mask.bool()].float()
    assert relative_error(actual, expected) < TOLERANCES[dtype]
