"""A transformers cache whose layers are packed pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
from tq_torch.hf.exact import MAX_CROP, ExactTokens

#: What a layer's format may be given as.
Format = str | QuantConfig | Codec

_LAYER_TYPES = ("full_attention", "sliding_attention")
_HANDLE = "turboquant_layer"

#: Rows that a layer which forgets tokens takes at a time; at least MAX_CROP.
_ROWS = 256


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

    Sequence b of the batch owns ``capacity`` consecutive pages, which hold its tokens without its
    padding, from token ``first`` on. A layer with a sliding window uses them cyclically once they
    hold a window. ``update`` keeps the new keys and values until the attention function, which
    knows the padding, calls :meth:`attend`.

    Attributes:
        sliding_window: tokens that a row sees, None for all.
        pages: uint8 ``layout.shape(B * capacity)``.
        block_table: int32 ``[B, pages of a sequence]``.
        layout, codec: of the pages.
        exact: the tokens in 16 bit.
    """

    is_compileable = False
    is_croppable = True

    def __init__(
        self,
        format: Format,
        columns: Columns,
        *,
        sliding_window: int | None = None,
        recent: int = 0,
        first: int = 0,
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
        self.exact = ExactTokens(recent, first, sliding_window)
        self.page_size = page_size
        self.num_tokens = num_tokens
        self.seed = seed
        self.backend = backend
        self.length = 0
        self._longest = 0  # since the last reset
        self._pending: tuple[Tensor, Tensor] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether keys of ``update`` are still to be stored by the attention function."""
        return self._pending is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's pages and 16-bit tokens."""
        return self.pages.numel() + self.exact.nbytes if self.is_initialized else 0

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
        self._allocate(min(self._pages_of(self.num_tokens), self._most_pages))
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

    def append(self, mask: Tensor | None) -> None:
        """Stores the states of the last ``update`` without attention.

        Args:
            mask: as in :meth:`attend`.

        Raises:
            ValueError: as :meth:`attend`.
            RuntimeError: as :meth:`attend`.
        """
        for _ in self._store_parts(mask):
            pass

    def attend(
        self,
        query: Tensor,
        mask: Tensor | None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Stores the states of the last ``update``; attention of their rows over the cache.

        Args:
            query: ``[B, Hq, T, D]`` in fp16, bf16 or fp32.
            mask: bool ``[B, cached + new columns]``, True at tokens; None: no padding. The host
                waits for the device when the pass's first layer gets a mask.
            scale: factor of the scores. Default ``1 / sqrt(D)``.
            softcap: limit of the scores' magnitude. Default: none.
            sinks: ``[Hq]`` in any floating dtype. Default: none.

        Returns:
            ``[B, T, Hq, D]`` in the query's dtype, 0 in rows of padding.

        Raises:
            ValueError: a mask of another shape, or one that differs over cached columns.
            RuntimeError: there are no new states, or an earlier pass was not finished.
        """
        rows = query.transpose(1, 2)
        options = {
            "scale": 1 / math.sqrt(query.shape[-1]) if scale is None else scale,
            "softcap": softcap,
            "sinks": None if sinks is None else sinks.detach().float(),
        }
        parts = self._store_parts(mask)
        outs = [self._attend_part(rows[:, part], step, **options) for part, step in parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _store_parts(self, mask: Tensor | None) -> Iterator[tuple[slice, Step]]:
        """Stores rows, then yields which; a layer that forgets tokens takes some at a time."""
        if self._pending is None:
            raise RuntimeError("the layer has no new keys: call the cache's update() first")
        key, value = (states.transpose(1, 2) for states in self._pending)  # [B, T, Hk, D]
        batch, count = key.shape[:2]
        self.columns.append(self.length, (batch, count), mask)
        self._drop_pending()
        rows = _ROWS if self.is_sliding or self.exact.recent else count
        for start in range(0, count, rows):
            part = slice(start, min(start + rows, count))
            stop = self.length + part.stop - part.start
            step = self.columns.step(self.length, stop, key.device)
            self._store(key[:, part], value[:, part], step)
            yield part, step

    def _store(self, key: Tensor, value: Tensor, step: Step) -> None:
        self._reserve(step.stop)
        tq_torch.store(
            key.flatten(0, 1),
            value.flatten(0, 1),
            self.pages,
            step.slots(self.capacity * self.page_size, self.exact.first),
            layout=self.layout,
            codec=self.codec,
            backend=self.backend,
        )
        self.exact.append(key, value, step)
        self.length = step.stop
        self._longest = max(self._longest, self.length)

    def _attend_part(
        self,
        rows: Tensor,
        step: Step,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of rows ``[B, T, Hq, D]`` over the packed tokens and those in 16 bit."""
        batch, count = rows.shape[:2]
        if step.order is not None:
            rows = rows.take_along_dim(step.order[..., None, None], 1)
        has_exact = bool(self.exact.recent or self.exact.first)
        # Counted from the row: tokens closer than `recent` are read in 16 bit, not packed.
        lens, window = step.once(self._read_key, lambda: self._packed_read(step))
        result = tq_torch.attention(
            rows.flatten(0, 1),
            self.pages,
            self.block_table,
            lens,
            step.query_start_loc,
            layout=self.layout,
            codec=self.codec,
            scale=scale,
            sliding_window=window,
            softcap=softcap,
            sinks=sinks,
            return_lse=has_exact,
            max_query_len=count,
            max_seq_len=max(step.stop - self.exact.first - self.exact.recent, 1),
            backend=self.backend,
        )
        if has_exact:
            exact = self.exact.attend(rows, step, scale, softcap)
            result, _ = tq_torch.merge_attention_states(*result, *(x.flatten(0, 1) for x in exact))
        out = result.unflatten(0, (batch, count))
        if step.restore is not None:
            out = out.take_along_dim(step.restore[..., None, None], 1)
        if step.is_token is not None:
            out = out.masked_fill(~step.is_token[..., None, None], 0)
        return out

    @property
    def _read_key(self) -> tuple[str, int, int, int | None]:
        return "packed", self.exact.recent, self.exact.first, self.sliding_window

    def _packed_read(self, step: Step) -> tuple[Tensor, int | None]:
        """Lengths and window that make the last row's position that of its last packed token."""
        recent, window = self.exact.recent, self.sliding_window
        lens = (step.seq_lens - (self.exact.first + recent)).clamp(min=0)
        if window is None:
            return lens, None
        return (lens, window - recent) if window > recent else (torch.zeros_like(lens), 1)

    def dequantize(self, seq_lens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Dense keys and values ``[B, S, Hk, D]`` of the first packed tokens of each sequence.

        Args:
            seq_lens: int32 ``[B]``, how many; packed are tokens ``first``, ``first + 1``, ...
            dtype: ``torch.float16``, ``torch.bfloat16`` or ``torch.float32``.

        Returns:
            Keys and values. What has left a sliding window may be that of another token.
        """
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
        self.exact.clear()
        self.length = self._longest = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` columns; the cache checks that it can be done."""
        count = min(-tokens_to_remove, self.length)
        self.exact.crop(count, self.columns.tokens_of_last(count))
        self.length -= count

    @property
    def shortest_crop(self) -> int:
        """Columns to which :meth:`crop` can go back: none of what later rows see is forgotten."""
        kept = [self._most_pages * self.page_size - self.page_size] if self.is_sliding else []
        if self.exact.recent:
            kept.append(self.exact.recent - 1 + MAX_CROP)
        if not kept or self._longest <= min(kept):
            return 0
        return self._longest - MAX_CROP

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
        self.exact.select(indices)

    def _make_codec(self, head_dim: int) -> Codec:
        if isinstance(self.format, Codec):
            return self.format
        return _codec(self.format, head_dim, self.seed)

    def _fits(self, key: Tensor) -> bool:
        sizes = self.batch, self.layout.num_kv_heads, self.layout.head_dim, self.device
        return sizes == (key.shape[0], key.shape[1], key.shape[3], key.device)

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    @property
    def _most_pages(self) -> int | float:
        """Pages that hold what the rows of a part see, wherever in a page it begins."""
        if self.sliding_window is None:
            return math.inf
        return self._pages_of(self.sliding_window + _ROWS) + 1

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        count = self.batch * capacity
        self.pages = tq_torch.empty_cache(self.layout, count, device=self.device)
        self._fill_table(capacity)

    def _fill_table(self, width: int) -> None:
        page = torch.arange(width, dtype=torch.int32, device=self.device) % max(self.capacity, 1)
        batch = torch.arange(self.batch, dtype=torch.int32, device=self.device)
        self.block_table = page + self.capacity * batch[:, None]

    def _reserve(self, columns: int) -> None:
        """Makes room; grows by half at least, so that a token is copied a few times in all."""
        need = self._pages_of(columns)
        if min(need, self._most_pages) > self.capacity:
            self._copy_pages(min(max(need, self.capacity * 3 // 2), self._most_pages))
        width = self.block_table.shape[1]
        if need > width:
            self._fill_table(max(need, width * 3 // 2))

    def _copy_pages(self, capacity: int, sequences: Tensor | None = None) -> None:
        used = min(self._pages_of(self.length), self.capacity)
        old = self.pages.unflatten(0, (self.batch, self.capacity))[:, :used]
        width = self.block_table.shape[1]
        if sequences is not None:
            self.batch = len(sequences)
        self._allocate(capacity)
        self._fill_table(max(width, capacity))
        new = self.pages.unflatten(0, (self.batch, capacity))[:, :used]
        new.copy_(old if sequences is None else old[sequences])

    def _drop_pending(self) -> None:
        if self._pending is not None:
            delattr(self._pending[0], _HANDLE)
            self._pending = None


class TurboQuantCache(Cache):
    """A KV cache packed to 2 to 8 bits a coordinate, for ``generate``.

    The model must run the attention implementation ``"turboquant"``, which reads the packed bytes.
    No keys or values are kept in 16 bit but those that ``recent`` and ``first`` ask for.

    Args:
        config: the model's configuration, ``model.config``.
        preset: the format: a preset's name, a ``QuantConfig`` or a ``Codec`` for all layers; a
            sequence with one of these for each layer; or a mapping from layer indices to these, in
            which ``"default"`` stands for the layers that it does not name.
        recent: a row reads this many tokens in 16 bit (the model's dtype), itself and those just
            before it. Default 0: all packed.
        first: a row reads this many tokens at the start of its sequence in 16 bit. Default 0.
        page_size: tokens of a page.
        num_tokens: columns (tokens and padding of a sequence) to allocate at the start. Default 0:
            the cache grows by half when it is full.
        seed: of the codecs' rotations; a ``Codec`` in ``preset`` keeps its own.
        backend: as in ``tq_torch.attention``; None for the device's default.

    Raises:
        TypeError: ``preset`` has a wrong type.
        ValueError: an unknown preset, a preset missing for a layer or given for none, a negative
            number, or a model whose layers cannot be served; the message says why.

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
        recent: int = 0,
        first: int = 0,
        page_size: int = 64,
        num_tokens: int = 0,
        seed: int = 0,
        backend: str | None = None,
    ) -> None:
        for name, number in (("recent", recent), ("first", first), ("num_tokens", num_tokens)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ValueError(f"{name}: expected a number of tokens, 0 or more, got {number!r}")
        windows = _layer_windows(config)
        formats = _layer_formats(preset, len(windows))
        self.columns = Columns()
        layers = [
            TurboQuantLayer(
                format,
                self.columns,
                sliding_window=window,
                recent=recent,
                first=first,
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
        """Bytes of all pages and 16-bit tokens."""
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
            ValueError: ``tokens_to_remove`` is positive, or a layer has forgotten tokens that
                would be seen again.
        """
        count = -int(tokens_to_remove)  # assisted decoding may pass a tensor
        if count < 0:
            raise ValueError(
                f"tokens_to_remove: expected 0 or minus the number of tokens, got {-count}"
            )
        shortest = max(layer.shortest_crop for layer in self.layers)
        if count and max(self.get_seq_length() - count, 0) < shortest:
            raise ValueError(
                f"tokens_to_remove: {self.get_seq_length()} columns can be cropped to {shortest} "
                f"at least, got {-count}: a layer with a sliding window, and one with recent=, "
                f"forgets what is more than {MAX_CROP} columns outside; reset() forgets all"
            )
        super().crop(-count)
        self.columns.remove(count)

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
