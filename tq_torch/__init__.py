"""Paged attention over a packed TurboQuant KV cache, for PyTorch."""

from tq_torch.api import (
    attention,
    decode_attention,
    dequantize,
    empty_cache,
    merge_attention_states,
    store,
)

__all__ = [
    "attention",
    "decode_attention",
    "dequantize",
    "empty_cache",
    "merge_attention_states",
    "store",
]
