"""The jitted generation of the example model with the kernels, in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="kernels need triton")

from examples import llama_jax
from tests.examples.models import make_prompts, make_weights, shortfall, with_ends
from tests.interpret.speed import patch_the_language_once
from tq_core import QuantConfig, kernels

if not kernels.interpreted():
    pytest.skip("needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)

patch_the_language_once()

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_kernels_in_the_while_loop():
    """Two sequences end before the third."""
    quant, room, new = QuantConfig.preset("k8v4"), [32] * 3, 6
    weights, prompts = make_weights(64, tied=False), make_prompts((1, 17, 5))
    judge = llama_jax.Llama(weights)
    whole = judge.generate(prompts, judge.new_cache(quant, room, "native"), new)
    llama = llama_jax.Llama(with_ends(weights, whole[1][1], whole[2][2]))
    written = llama.generate(prompts, llama.new_cache(quant, room, "interpret"), new)
    assert list(map(len, written)) == [6, 1, 2]
    for prompt, tokens in zip(prompts, written, strict=True):
        assert shortfall(judge, prompt, tokens, judge.new_cache(quant, 64, "native")) < 0.4
