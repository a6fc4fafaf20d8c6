"""A transformers cache whose layers are packed pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

import tq_torch
from tq_core.codec import Codec
from tq_core.config import QuantConfig
from tq_core.layout import CacheLayout
from tq_torch.hf.columns import Columns, Step

#: What a layer's format may be given as.
Format = str | QuantConfig | Codec

_LAYER_TYPES = ("full_attention", "sliding_attention")
_HANDLE = "turboquant_layer"


def layer_of(key: Tensor) -> TurboQuantLayer | None:
    """The layer whose ``update`` returned ``key``, None if none did.

    The handle is an attribute of the tensor object: it reaches the attention function in every
    version of transformers, and cannot name another layer than the one that holds the key.
    """
    return getattr(key, _HANDLE, None)


@lru_cache(maxsize=64)
def _codec(config: QuantConfig, head_dim: int, seed: int) -> Codec:
    return Codec(config, head_dim, seed=seed)


class TurboQuantLayer(CacheLayerMixin):
    """The packed keys and values of one attention layer.

    Sequence b of the batch owns ``capacity`` consecutive pages, which hold its tokens from
    position 0 without its padding. ``update`` keeps the new keys and values until the attention
    function, which knows the padding, calls :meth:`append`.

    Attributes:
        sliding_window: tokens that a row sees, None for all.
        pages: uint8 ``layout.shape(B * capacity)``.
        block_table: int32 ``[B, capacity]``.
        layout, codec: of the pages.
    """

    is_compileable = False
    is_croppable = True

    def __init__(
        self,
        format: Format,
        columns: Columns,
        *,
        sliding_window: int | None = None,
        page_size: int = 64,
        num_tokens: int = 0,
        seed: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.format = format
        self.columns = columns
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.page_size = page_size
        self.num_tokens = num_tokens
        self.seed = seed
        self.backend = backend
        self.length = 0
        self._pending: tuple[Tensor, Tensor] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether keys of ``update`` are still to be stored by the attention function."""
        return self._pending is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's pages."""
        return self.pages.numel() if self.is_initialized else 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the pages for the batch, heads and device of ``[B, Hk, T, D]`` states."""
        batch, num_kv_heads, _, head_dim = key_states.shape
        if value_states.shape != key_states.shape:
            raise ValueError(
                f"value_states: expected the keys' shape {list(key_states.shape)}, got "
                f"{list(value_states.shape)}; a packed cache holds values of the keys' head_dim"
            )
        self.codec = self._make_codec(head_dim)
        self.layout = CacheLayout(self.codec.config, num_kv_heads, head_dim, self.page_size)
        self.device = key_states.device
        self.batch = batch
        self._allocate(-(-self.num_tokens // self.page_size))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes the new states; attention stores them.

        Args:
            key_states: ``[B, Hk, T, D]`` in fp16, bf16 or fp32, after RoPE.
            value_states: ``[B, Hk, T, D]``.
            *args: unused.
            **kwargs: unused.

        Returns:
            The new states alone: cached ones are never unpacked.

        Raises:
            ValueError: shapes that the cache cannot hold, or another batch than the cached one.
            RuntimeError: the last states were not stored.
        """
        if self.is_waiting:
            raise RuntimeError(_NOT_CALLED)
        if self.length and len(key_states) != self.batch:
            raise ValueError(
                f"key_states: the cache holds a batch of {self.batch} sequences, got "
                f"{len(key_states)}; call reset() for a new batch"
            )
        if not self.is_initialized or (not self.length and not self._fits(key_states)):
            self.lazy_initialization(key_states, value_states)
        self._pending = key_states, value_states
        setattr(key_states, _HANDLE, self)
        return key_states, value_states

    def append(self, mask: Tensor | None) -> Step:
        """Stores the states of the last ``update``.

        Args:
            mask: bool ``[B, cached + new columns]``, True at tokens; None: no padding.

        Returns:
            The places of the pass's rows.

        Raises:
            ValueError: a mask of another shape, or one that differs over cached columns.
            RuntimeError: there are no new states, or an earlier pass was not finished.
        """
        if self._pending is None:
            raise RuntimeError("the layer has no new keys: call the cache's update() first")
        key, value = self._pending
        batch, _, rows, _ = key.shape
        step = self.columns.step(self.length, (batch, rows), mask, key.device)
        self._drop_pending()
        self._reserve(step.stop)
        tq_torch.store(
            key.transpose(1, 2).flatten(0, 1),
            value.transpose(1, 2).flatten(0, 1),
            self.pages,
            step.slots(self.capacity * self.page_size),
            layout=self.layout,
            codec=self.codec,
            backend=self.backend,
        )
        self.length = step.stop
        return step

    def attend(
        self,
        query: Tensor,
        step: Step,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of a pass's rows over the packed pages.

        Args:
            query: ``[B, Hq, T, D]`` in fp16, bf16 or fp32.
            step: what :meth:`append` returned.
            scale: factor of the scores. Default ``1 / sqrt(D)``.
            softcap: limit of the scores' magnitude. Default: none.
            sinks: ``[Hq]`` in any floating dtype. Default: none.

        Returns:
            ``[B, T, Hq, D]`` in the query's dtype, 0 in rows of padding.
        """
        rows = query.transpose(1, 2)
        batch, num_rows = rows.shape[:2]
        if step.order is not None:
            rows = rows.take_along_dim(step.order[..., None, None], 1)
        out = tq_torch.attention(
            rows.flatten(0, 1),
            self.pages,
            self.block_table,
            step.seq_lens,
            step.query_start_loc,
            layout=self.layout,
            codec=self.codec,
            scale=scale,
            sliding_window=self.sliding_window,
            softcap=softcap,
            sinks=None if sinks is None else sinks.detach().float(),
            max_query_len=num_rows,
            max_seq_len=step.stop,
            backend=self.backend,
        ).unflatten(0, (batch, num_rows))
        if step.restore is not None:
            out = out.take_along_dim(step.restore[..., None, None], 1)
        if step.is_token is not None:
            out = out.masked_fill(~step.is_token[..., None, None], 0)
        return out

    def dequantize(self, seq_lens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Dense keys and values ``[B, S, Hk, D]`` of the first ``seq_lens`` (int32 ``[B]``)."""
        return tq_torch.dequantize(
            self.pages,
            self.block_table,
            seq_lens,
            layout=self.layout,
            codec=self.codec,
            dtype=dtype,
            backend=self.backend,
        )

    def get_seq_length(self) -> int:
        """Columns stored, padding included."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the columns that attention reads: all, in every layer."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """-1: the cache grows."""
        return -1

    def reset(self) -> None:
        """Forgets all tokens; the pages stay allocated."""
        self._drop_pending()
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` columns.

        Raises:
            ValueError: ``tokens_to_remove`` is positive.
        """
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding may pass a tensor
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove: expected 0 or minus the number of tokens, got "
                f"{tokens_to_remove}"
            )
        self.length = max(self.length + tokens_to_remove, 0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes sequences ``beam_idx`` the batch; each gets pages of its own."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence ``repeats`` times."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps sequences ``indices`` (integers or bool), in that order."""
        if not self.is_initialized:
            return
        indices = as_indices(indices).to(self.device)
        self._copy_pages(self.capacity, indices)

    def _make_codec(self, head_dim: int) -> Codec:
        if isinstance(self.format, Codec):
            return self.format
        return _codec(self.format, head_dim, self.seed)

    def _fits(self, key: Tensor) -> bool:
        sizes = self.batch, self.layout.num_kv_heads, self.layout.head_dim, self.device
        return sizes == (key.shape[0], key.shape[1], key.shape[3], key.device)

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        count = self.batch * capacity
        self.pages = tq_torch.empty_cache(self.layout, count, device=self.device)
        table = torch.arange(count, dtype=torch.int32, device=self.device)
        self.block_table = table.view(self.batch, capacity)

    def _reserve(self, columns: int) -> None:
        """Makes room; grows by half at least, so that a token is copied a few times in all."""
        need = -(-columns // self.page_size)
        if need > self.capacity:
            self._copy_pages(max(need, self.capacity * 3 // 2))

    def _copy_pages(self, capacity: int, sequences: Tensor | None = None) -> None:
        used = min(-(-self.length // self.page_size), self.capacity)
        old = self.pages.unflatten(0, (self.batch, self.capacity))[:, :used]
        if sequences is not None:
            self.batch = len(sequences)
        self._allocate(capacity)
        new = self.pages.unflatten(0, (self.batch, capacity))[:, :used]
        new.copy_(old if sequences is None else old[sequences])

    def _drop_pending(self) -> None:
        if self._pending is not None:
            delattr(self._pending[0], _HANDLE)
            self._pending = None


class TurboQuantCache(Cache):
    """A KV cache packed to 2 to 8 bits a coordinate, for ``generate``.

    The model must run the attention implementation ``"turboquant"``, which reads the packed bytes;
    no 16-bit keys or values are kept.

    Args:
        config: the model's configuration, ``model.config``.
        preset: the format: a preset's name, a ``QuantConfig`` or a ``Codec`` for all layers; a
            sequence with one of these for each layer; or a mapping from layer indices to these, in
            which ``"default"`` stands for the layers that it does not name.
        page_size: tokens of a page.
        num_tokens: columns (tokens and padding of a sequence) to allocate at the start. Default 0:
            the cache grows by half when it is full.
        seed: of the codecs' rotations; a ``Codec`` in ``preset`` keeps its own.
        backend: as in ``tq_torch.attention``; None for the device's default.

    Raises:
        TypeError: ``preset`` has a wrong type.
        ValueError: an unknown preset, a preset missing for a layer or given for none, or a model
            whose layers cannot be served; the message says why.

    Example:
        >>> import torch, transformers
        >>> from tq_torch.hf import TurboQuantCache
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        ...     num_attention_heads=2, num_key_value_heads=1,
        ... )
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> model.set_attn_implementation("turboquant")
        >>> cache = TurboQuantCache(config=model.config, preset="4bit")
        >>> tokens = torch.tensor([[1, 2, 3]])
        >>> model.generate(
        ...     tokens, past_key_values=cache, max_new_tokens=4, eos_token_id=None
        ... ).shape
        torch.Size([1, 7])

    Source: TurboQuant, arXiv 2504.19874, section 3.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        preset: Format | Sequence[Format] | Mapping[int | str, Format] = "4bit",
        *,
        page_size: int = 64,
        num_tokens: int = 0,
        seed: int = 0,
        backend: str | None = None,
    ) -> None:
        windows = _layer_windows(config)
        formats = _layer_formats(preset, len(windows))
        self.columns = Columns()
        layers = [
            TurboQuantLayer(
                format,
                self.columns,
                sliding_window=window,
                page_size=page_size,
                num_tokens=num_tokens,
                seed=seed,
                backend=backend,
            )
            for format, window in zip(formats, windows, strict=True)
        ]
        super().__init__(layers=layers)
        self._last: TurboQuantLayer | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(layer.nbytes for layer in self.layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """:meth:`TurboQuantLayer.update` of a layer.

        Args:
            key_states: ``[B, Hk, T, D]`` in fp16, bf16 or fp32, after RoPE.
            value_states: ``[B, Hk, T, D]``.
            layer_idx: the layer.
            *args: unused.
            **kwargs: unused.

        Returns:
            The states, which the attention function stores.

        Raises:
            RuntimeError: the attention function did not run after the last update.
            ValueError: shapes that the cache cannot hold, or another batch than the cached one.
        """
        if self._last is not None and self._last.is_waiting:
            raise RuntimeError(_NOT_CALLED)
        self._last = self.layers[layer_idx]
        return self._last.update(key_states, value_states)

    def reset(self) -> None:
        """Forgets all tokens, to start again with any batch; the pages stay allocated."""
        self.columns.clear()
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` columns of every sequence.

        Raises:
            ValueError: ``tokens_to_remove`` is positive.
        """
        tokens_to_remove = int(tokens_to_remove)
        super().crop(tokens_to_remove)
        self.columns.remove(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes sequences ``beam_idx`` (integers ``[B]``) the batch, each with its own pages."""
        self.columns.select(beam_idx)
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence ``repeats`` times, each with its own pages."""
        batch = next((layer.batch for layer in self.layers if layer.is_initialized), 0)
        self.columns.select(torch.arange(batch).repeat_interleave(repeats))
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps sequences ``indices`` (integers or bool ``[B]``), in that order."""
        self.columns.select(as_indices(indices))
        super().batch_select_indices(indices)


_NOT_CALLED = (
    "the keys of the last update were not stored: TurboQuantCache needs a model that runs "
    'attn_implementation="turboquant" through transformers\' AttentionInterface; '
    'model.set_attn_implementation("turboquant") chooses it (after an error, reset() the cache)'
)


def as_indices(indices: Tensor) -> Tensor:
    """Integer indices of integers, or of a bool selection."""
    return indices.nonzero().flatten() if indices.dtype == torch.bool else indices


def _layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """Sliding window of each layer, None for full attention."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError("config: cross-attention of encoder-decoder models is not supported")
    text = config.get_text_config(decoder=True)
    if getattr(text, "num_kv_shared_layers", 0):
        raise ValueError("config: layers that share the keys of another layer are not supported")
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if types is None:
        if getattr(text, "attention_chunk_size", None) is not None:
            types = ["chunked_attention"]
        else:
            types = [_LAYER_TYPES[window is not None]] * text.num_hidden_layers
    others = sorted(set(types) - set(_LAYER_TYPES))
    if others:
        raise ValueError(
            f"config: layers of type {', '.join(others)} are not supported; a packed cache serves "
            f"{' and '.join(_LAYER_TYPES)}"
        )
    return [window if kind == "sliding_attention" else None for kind in types]


def _layer_formats(
    preset: Format | Sequence[Format] | Mapping[int | str, Format], num_layers: int
) -> list[QuantConfig | Codec]:
    if isinstance(preset, str | QuantConfig | Codec):
        return [_format(preset)] * num_layers
    if isinstance(preset, Mapping):
        return _mapped_formats(preset, num_layers)
    if not isinstance(preset, Sequence):
        raise TypeError(
            "preset: expected a preset's name, a QuantConfig, a Codec, or a sequence or mapping "
            f"of these, got {type(preset).__name__}"
        )
    if len(preset) != num_layers:
        raise ValueError(f"preset: expected one for each of {num_layers} layers, got {len(preset)}")
    return [_format(one) for one in preset]


def _mapped_formats(
    preset: Mapping[int | str, Format], num_layers: int
) -> list[QuantConfig | Codec]:
    unknown = [key for key in preset if key != "default" and key not in range(num_layers)]
    if unknown:
        raise ValueError(
            f'preset: expected "default" or layers 0 to {num_layers - 1} as keys, got {unknown}'
        )
    missing = [i for i in range(num_layers) if i not in preset]
    if missing and "default" not in preset:
        raise ValueError(f'preset: layers {missing} have none, and there is no "default"')
    return [_format(preset[i if i in preset else "default"]) for i in range(num_layers)]


def _format(one: Format) -> QuantConfig | Codec:
    if isinstance(one, str):
        return QuantConfig.preset(one)
    if not isinstance(one, QuantConfig | Codec):
        raise TypeError(
            f"preset: expected a preset's name, a QuantConfig or a Codec, got {type(one).__name__}"
        )
    return one
