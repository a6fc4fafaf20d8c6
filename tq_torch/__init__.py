"""Paged attention over a packed TurboQuant KV cache, for PyTorch."""

from tq_torch.api import (
    attention,
    decode_attention,
    dequantize,
    empty_cache,
    merge_attention_states,
    store,
)
from tq_torch.serving import warmup
from tq_torch.snapshot import load_cache, save_cache

__all__ = [
    "attention",
    "decode_attention",
    "dequantize",
    "empty_cache",
    "load_cache",
    "merge_attention_states",
    "save_cache",
    "store",
    "warmup",
]
