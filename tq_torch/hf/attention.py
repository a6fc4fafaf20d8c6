"""The attention implementation ``"turboquant"`` and its mask function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from tq_torch.hf.cache import TurboQuantLayer, layer_of

#: The name for ``attn_implementation``.
ATTENTION_NAME = "turboquant"

#: Entries of a mask that are compared at a time.
_MASK_BLOCK = 1 << 24

#: Keywords that would change the result.
_REFUSED = ("position_bias", "head_mask", "alibi", "cu_seq_lens_q")


def register() -> None:
    """Registers attention and mask function under ``ATTENTION_NAME``, for all models.

    ``"paged|turboquant"``, which continuous batching asks for in some versions, is registered as
    a function that refuses.
    """
    AttentionInterface.register(ATTENTION_NAME, turboquant_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, padding_mask)
    AttentionInterface.register(f"paged|{ATTENTION_NAME}", _refuse_continuous_batching)


def turboquant_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stores the new keys and values of a layer, then attends to its packed pages.

    Args:
        module: the attention module.
        query: ``[B, Hq, T, D]`` in fp16, bf16 or fp32, after RoPE.
        key: ``[B, Hk, T, D]``, the tensor that ``TurboQuantCache.update`` returned.
        value: ``[B, Hk, T, D]``, likewise.
        attention_mask: bool ``[B, cached + T]``, True at tokens; None: no padding.
        dropout: 0.
        scaling: factor of the scores. Default ``1 / sqrt(D)``.
        sliding_window: tokens that a row sees, that of the cache's layer.
        softcap: limit of the scores' magnitude. Default: none.
        is_causal: None for the module's, which must be True.
        s_aux: attention sinks ``[Hq]``. Default: none.
        **kwargs: what else the model passes.

    Returns:
        ``[B, T, Hq, D]`` in the query's dtype, 0 in rows of padding; and None for the weights,
        which are never formed.

    Raises:
        ValueError: what a packed cache cannot serve; the message says why.
    """
    _check_inference(query, dropout, kwargs)
    layer = layer_of(key)
    if layer is None:
        raise ValueError(_no_layer(module))
    _check_layer(module, layer, is_causal, sliding_window)
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask: a mask of {attention_mask.ndim} dimensions is not supported; a "
            "packed cache serves causal attention with the padding mask [B, positions]"
        )
    out = layer.attend(query, attention_mask, scale=scaling, softcap=softcap, sinks=s_aux)
    return out, None


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function: the padding mask, after a check that the rest is causal.

    Args:
        batch_size: sequences.
        q_length: rows of the pass.
        kv_length: cached and new columns.
        q_offset: column of the first row.
        kv_offset: first column.
        mask_function: says whether a row sees a column.
        attention_mask: bool ``[B, kv_length]``, True at tokens.
        local_size: sliding window.
        use_vmap: whether the model added a mask function of its own.
        device: of the model's inputs.
        **kwargs: unused.

    Returns:
        ``attention_mask`` as it is: the layers look for padding, once a forward pass.

    Raises:
        ValueError: a mask that is not causal, with a sliding window or without.
    """
    _check_not_exporting()
    if use_vmap:
        raise ValueError(_NOT_CAUSAL)
    # One row after cached ones cannot look ahead, and the passes before it were looked at.
    if mask_function is not causal_mask_function and (q_length > 1 or not q_offset):
        rows = torch.arange(q_offset, q_offset + q_length, device=device)
        columns = torch.arange(kv_offset, kv_offset + kv_length, device=device)
        for part in rows.split(max(_MASK_BLOCK // max(batch_size * kv_length, 1), 1)):
            _check_causal(mask_function, part, columns, batch_size, local_size)
    return attention_mask


_NOT_CAUSAL = (
    "this model's mask is not supported: a packed cache serves causal attention with padding, "
    "with a sliding window or without"
)


def _check_causal(
    mask_function: Callable[..., Tensor],
    rows: Tensor,
    columns: Tensor,
    batch_size: int,
    window: int | None,
) -> None:
    batch = torch.arange(batch_size, device=rows.device)[:, None, None]
    row, column = rows[None, :, None], columns[None, None, :]
    expected = column <= row
    if window is not None:
        expected = expected & (column > row - window)
    given = mask_function(batch, torch.zeros_like(batch), row, column)
    if not torch.equal(*torch.broadcast_tensors(given, expected)):
        raise ValueError(_NOT_CAUSAL)


def _check_not_exporting() -> None:
    if torch.compiler.is_exporting():
        raise ValueError("attention over a packed cache cannot be exported: the cache grows")


def _check_inference(query: Tensor, dropout: float, kwargs: dict[str, Any]) -> None:
    _check_not_exporting()
    if dropout or (torch.is_grad_enabled() and query.requires_grad):
        raise ValueError(
            "a packed cache is for inference: call model.eval(), and the model under "
            "torch.no_grad() or torch.inference_mode()"
        )
    refused = [name for name in _REFUSED if kwargs.get(name) is not None]
    if refused:
        raise ValueError(f"{refused[0]}: not supported by attention over a packed cache")


def _check_layer(
    module: nn.Module, layer: TurboQuantLayer, is_causal: bool | None, window: int | None
) -> None:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise ValueError("attention that is not causal is not supported over a packed cache")
    if window != layer.sliding_window:
        raise ValueError(
            f"sliding_window: the model passes {window}, the cache's layer was made for "
            f"{layer.sliding_window}; TurboQuantCache needs the configuration of this model"
        )


def _no_layer(module: nn.Module) -> str:
    return (
        f"{type(module).__name__}: keys that a TurboQuantCache returned are expected: pass "
        "past_key_values=TurboQuantCache(config=model.config), cache= in newer versions; "
        "attention without a cache, cross-attention, continuous batching and layers that share or "
        "change the cached keys are not supported"
    )


def _refuse_continuous_batching(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    raise ValueError(
        "continuous batching is not supported: its cache has no place for packed pages; use "
        "generate() with a TurboQuantCache"
    )
