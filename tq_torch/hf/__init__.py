"""Hugging Face transformers: ``generate`` over a packed cache.

Importing this package registers the attention implementation ``"turboquant"`` and its mask
function with transformers' public interfaces; nothing of transformers is replaced.
"""

from __future__ import annotations

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "tq_torch.hf needs transformers 5.17 or newer: pip install transformers"
    ) from error

from tq_torch.hf.attention import ATTENTION_NAME, padding_mask, register, turboquant_attention
from tq_torch.hf.cache import TurboQuantCache, TurboQuantLayer

__all__ = [
    "ATTENTION_NAME",
    "TurboQuantCache",
    "TurboQuantLayer",
    "padding_mask",
    "register",
    "turboquant_attention",
]

register()
