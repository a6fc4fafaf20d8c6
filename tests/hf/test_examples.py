"""The examples of the pages and of a docstring, pasted into a file and run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from examples.tokenizer import load_tokenizer
from examples.weights import LlamaWeights, load_model
from tests.isolation import ROOT

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
NAMES = {  # transformers' name of a tensor of a layer: ours
    "self_attn.q_proj": "wq",
    "self_attn.k_proj": "wk",
    "self_attn.v_proj": "wv",
    "self_attn.o_proj": "wo",
    "mlp.gate_proj": "w_gate",
    "mlp.up_proj": "w_up",
    "mlp.down_proj": "w_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
}


def example(page: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Cache(" in c)
    return code


def run(code: str, folder: Path) -> str:
    (folder / "example.py").write_text(code, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "example.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def to_transformers(weights: LlamaWeights) -> transformers.LlamaForCausalLM:
    c, inner = weights.config, weights.layers["w_gate"].shape[1]
    config = transformers.LlamaConfig(
        vocab_size=len(weights.embedding),
        hidden_size=weights.embedding.shape[1],
        intermediate_size=inner,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_eps,
        max_position_embeddings=c.context_length,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(c.inv_freq[1] ** (-c.head_dim / 2)),
        },
        bos_token_id=c.bos_id,
        eos_token_id=list(c.eos_ids) or None,
        tie_word_embeddings=False,
    )
    tensors = {
        f"model.layers.{i}.{theirs}.weight": weights.layers[ours][i]
        for theirs, ours in NAMES.items()
        for i in range(c.num_layers)
    }
    tensors["model.embed_tokens.weight"] = weights.embedding
    tensors["model.norm.weight"] = weights.final_norm
    tensors["lm_head.weight"] = weights.lm_head
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict({n: torch.from_numpy(x.copy()) for n, x in tensors.items()})
    return model


def test_the_example_of_the_page(tmp_path: Path) -> None:
    assert "[2, 13]" in run(example("docs/transformers.md"), tmp_path)


@pytest.mark.slow
def test_the_example_of_the_readme_with_smollm2(tmp_path: Path) -> None:
    """Where a folder has the model's name, transformers reads it instead of the hub."""
    weights, path = load_model()
    to_transformers(weights).save_pretrained(tmp_path / MODEL)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=load_tokenizer(path))
    tokenizer.save_pretrained(tmp_path / MODEL)
    code = example("README.md")
    assert MODEL in code
    assert "Paris" in run(code, tmp_path)
