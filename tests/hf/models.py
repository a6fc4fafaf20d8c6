"""Tiny random models, and an attention implementation that is the oracle of the tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tq_torch.hf import TurboQuantCache, padding_mask
from tq_torch.hf.cache import layer_of

# The name of the cache argument changed; the old one warns where the new one exists.
_PARAMETERS = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in _PARAMETERS else "past_key_values"
ORACLE = "turboquant_oracle"
PROMPT = 21
WINDOW = 9
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ALTERNATE = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}


def _llama() -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def _qwen2() -> PreTrainedModel:
    config = transformers.Qwen2Config(**SIZES, **ALTERNATE, use_sliding_window=True)
    return transformers.Qwen2ForCausalLM(config)


def _qwen3() -> PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=32))


def _mistral() -> PreTrainedModel:
    config = transformers.MistralConfig(**SIZES, sliding_window=WINDOW)
    return transformers.MistralForCausalLM(config)


def _gemma2() -> PreTrainedModel:
    config = transformers.Gemma2Config(
        **SIZES, **ALTERNATE, head_dim=40, query_pre_attn_scalar=24, attn_logit_softcapping=2.0
    )
    return transformers.Gemma2ForCausalLM(config)


def _gemma3() -> PreTrainedModel:
    config = transformers.Gemma3TextConfig(**SIZES, **ALTERNATE, head_dim=256)
    return transformers.Gemma3ForCausalLM(config)


def _gpt_oss() -> PreTrainedModel:
    config = transformers.GptOssConfig(
        **SIZES, **ALTERNATE, head_dim=32, num_local_experts=2, num_experts_per_tok=1
    )
    return transformers.GptOssForCausalLM(config)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
}


def make_model(name: str, attention: str = "turboquant") -> PreTrainedModel:
    """A model with large random weights, so that attention is far from uniform."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.15 if parameter.ndim > 1 else 0.5)
    model.set_attn_implementation(attention)
    return model


def make_tokens(batch: int = 1, length: int = PROMPT, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (batch, length), generator=generator)


def make_cache(model: PreTrainedModel, preset: Any = "4bit", **options: Any) -> TurboQuantCache:
    return TurboQuantCache(config=model.config, preset=preset, **{"page_size": 8, **options})


def generate(model: PreTrainedModel, tokens: Tensor, cache: Any, **options: Any) -> Any:
    """Greedy generation of 7 tokens with their logits."""
    options = {CACHE: cache, "max_new_tokens": 7, "do_sample": False, **options}
    return model.generate(
        tokens,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


@torch.no_grad()
def forward(model: PreTrainedModel, tokens: Tensor, cache: Any, mask: Tensor | None = None) -> Any:
    return model(tokens, attention_mask=mask, **{CACHE: cache}).logits


def logits_of(output: Any) -> Tensor:
    """``[new tokens, B, vocabulary]``."""
    return torch.stack(output.logits)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def oracle_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Plain attention in float32 over the unpacked cache, a sequence at a time.

    Where the layer has tokens in 16 bit, a row meets the model's own keys and values in their
    place; that is for the first pass of a cache, which has them all.
    """
    layer = layer_of(key)
    assert layer is not None
    first, recent = layer.exact.first, layer.exact.recent
    assert not layer.length or not (first or recent)
    layer.append(attention_mask)
    batch, _, rows, _ = query.shape
    stop = layer.get_seq_length()
    is_token = torch.ones(batch, stop, dtype=torch.bool, device=query.device)
    is_token = is_token if attention_mask is None else attention_mask
    packed = layer.dequantize((is_token.sum(1).int() - first).clamp(min=0), torch.float32)
    out = torch.zeros_like(query, dtype=torch.float32)
    for b in range(batch):
        count = int(is_token[b].sum())
        new = is_token[b, stop - rows :]
        position = (is_token[b].cumsum(0)[stop - rows :] - 1)[new]
        far = [_far(x[b].transpose(0, 1), first, count) for x in packed]
        near = [x[b][:, new].float() for x in (key, value)] if first or recent else far
        column = torch.arange(count, device=query.device)
        is_near = (column < first) | (column > position[:, None] - recent)
        options = scaling, sliding_window, softcap, s_aux
        rows_of_b = query[b][:, new].float()
        out[b][:, new] = _attend(rows_of_b, near, far, is_near, position, options)
    return out.transpose(1, 2).to(query.dtype), None


def _far(packed: Tensor, first: int, count: int) -> Tensor:
    """Unpacked ``[Hk, count, D]``, NaN for the first tokens, which are not packed."""
    return torch.nn.functional.pad(packed, (0, 0, first, 0), value=torch.nan)[:, :count]


def _attend(
    query: Tensor,
    near: list[Tensor],
    far: list[Tensor],
    is_near: Tensor,
    position: Tensor,
    options: Any,
) -> Tensor:
    scaling, window, softcap, sinks = options
    groups = len(query) // len(near[0])
    (near_keys, near_values), (far_keys, far_values) = (
        [x.repeat_interleave(groups, 0) for x in pair] for pair in (near, far)
    )
    scores = torch.where(  # [Hq, T, S]
        is_near, query @ near_keys.transpose(1, 2), query @ far_keys.transpose(1, 2)
    )
    scores = scaling * scores
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    column = torch.arange(scores.shape[-1], device=scores.device)
    seen = column <= position[:, None]
    if window is not None:
        seen &= column > position[:, None] - window
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : len(column)]
    far_values = far_values.nan_to_num()  # their weights are 0
    return weights * is_near @ near_values + weights * ~is_near @ far_values


AttentionInterface.register(ORACLE, oracle_attention)
AttentionMaskInterface.register(ORACLE, padding_mask)
