"""Where each byte of a page lies. docs/format.md describes the same in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from tq_core.config import QuantConfig, _one_of
from tq_core.packing import packed_bytes

ORDERS = ("token", "head", "planes")
DEFAULT_ORDER = "planes"
MIN_HEAD_DIM, MAX_HEAD_DIM = 8, 576
WORD = 4

#: Names of the byte orders in files; a change of an order's bytes changes its tag.
ORDER_TAGS = {"token": "token", "head": "head", "planes": "planes/word-major-values/paired-affine"}


@dataclass(frozen=True)
class CacheLayout:
    """The packed byte layout of a paged cache. Hashable, so it can be static in ``jax.jit``.

    Args:
        config: formats of keys and values.
        num_kv_heads: Hk, at least 1.
        head_dim: D of keys, 8 to 576.
        page_size: P, tokens a page, at least 1.
        order: ``"token"``, ``"head"``, ``"planes"``, or None for the default order.
        value_head_dim: must equal ``head_dim``; it is here so that a model with two head
            dimensions is refused with a reason.

    Attributes:
        descriptor: all arguments in one line of text, for places that hold no objects.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a size out of range, or an unknown order.

    Example:
        >>> layout = CacheLayout(QuantConfig.preset("4bit"), 8, 128, 16)
        >>> layout.slot_bytes, round(layout.compression_ratio, 2)
        (134, 3.82)
    """

    config: QuantConfig
    num_kv_heads: int
    head_dim: int
    page_size: int
    order: str | None = None
    value_head_dim: int | None = field(default=None, repr=False)
    descriptor: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.config, QuantConfig):
            raise TypeError(f"config: expected a QuantConfig, got {type(self.config).__name__}")
        for name in ("num_kv_heads", "head_dim", "page_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"{name}: expected an int, got {value!r}")
            object.__setattr__(self, name, int(value))
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if not MIN_HEAD_DIM <= self.head_dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"head_dim: expected {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got {self.head_dim}"
            )
        if self.value_head_dim not in (None, self.head_dim):
            raise ValueError(
                f"value_head_dim: expected head_dim ({self.head_dim}), got {self.value_head_dim}; "
                "values of a different size than keys (as in latent attention) are not supported: "
                "one page record holds keys and values of one head_dim"
            )
        object.__setattr__(self, "value_head_dim", None)
        order = DEFAULT_ORDER if self.order is None else self.order
        _one_of("order", order, ORDERS)
        object.__setattr__(self, "order", order)
        c = self.config
        fields = (c.key, c.value, int(c.norm_correction), c.key_packing, self.num_kv_heads)
        words = (*fields, self.head_dim, self.page_size, order)
        object.__setattr__(self, "descriptor", " ".join(map(str, words)))

    @classmethod
    def from_descriptor(cls, descriptor: str) -> CacheLayout:
        """The layout with this ``descriptor``.

        Raises:
            ValueError: it is not the descriptor of a layout.
        """
        try:
            key, value, correction, packing, heads, dim, size, order = descriptor.split(" ")
            config = QuantConfig(key, value, {"0": False, "1": True}[correction], packing)
            return cls(config, int(heads), int(dim), int(size), order)
        except (KeyError, ValueError) as error:
            raise ValueError(f"descriptor: {descriptor!r} is not one of a layout") from error

    @property
    def key_bytes(self) -> int:
        """Bytes of the packed key codes of one token and head (KD)."""
        return packed_bytes(self.head_dim, self.config.key_bits, self.config.key_packing)

    @property
    def value_bytes(self) -> int:
        """Bytes of the packed value codes of one token and head (VD)."""
        return packed_bytes(self.head_dim, self.config.value_bits)

    @property
    def code_bytes(self) -> int:
        """Key and value bytes of one token and head."""
        return self.key_bytes + self.value_bytes

    @property
    def num_meta_fields(self) -> int:
        """2-byte metadata fields of one token and head (F)."""
        return len(self.config.meta_fields)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token and head, metadata included, rounded up to even."""
        size = self.code_bytes + 2 * self.num_meta_fields
        return size + size % 2

    @property
    def meta_offset(self) -> int:
        """Offset of the metadata region in a page."""
        size = self.page_size * self.num_kv_heads * self.code_bytes
        return size + size % 2

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.page_size * self.num_kv_heads * self.slot_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all KV heads, keys, values and metadata."""
        return self.num_kv_heads * self.slot_bytes

    @property
    def compression_ratio(self) -> float:
        """How many times smaller than keys and values in 16 bits."""
        return 4 * self.head_dim / self.slot_bytes

    @property
    def tag(self) -> str:
        """Name of the byte order in files."""
        return ORDER_TAGS[str(self.order)]

    def shape(self, num_pages: int) -> tuple[int, int, int, int]:
        """Shape of the uint8 cache, ``(num_pages, page_size, num_kv_heads, slot_bytes)``."""
        return (num_pages, self.page_size, self.num_kv_heads, self.slot_bytes)

    def key_index(self) -> np.ndarray:
        """Offset in its page of every key byte: int64 ``[P, Hk, KD]``, read-only."""
        return _key_index(self)

    def value_index(self) -> np.ndarray:
        """Offset in its page of every value byte: int64 ``[P, Hk, VD]``, read-only."""
        return _value_index(self)

    def meta_index(self) -> np.ndarray:
        """Offset in its page of the low byte of every metadata field: int64 ``[P, Hk, F]``."""
        return _meta_index(self)


def _grid(layout: CacheLayout, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slot ``[P, 1, 1]``, head ``[1, Hk, 1]`` and byte or field number ``[1, 1, width]``."""
    return np.ogrid[: layout.page_size, : layout.num_kv_heads, :width]  # type: ignore[return-value]


def _frozen(index: np.ndarray) -> np.ndarray:
    index.flags.writeable = False
    return index


def _record(layout: CacheLayout, slot: np.ndarray, head: np.ndarray) -> np.ndarray:
    """Number of the (slot, head) record in the orders that keep a record together."""
    if layout.order == "token":
        return slot * layout.num_kv_heads + head
    return head * layout.page_size + slot


@lru_cache(maxsize=64)
def _key_index(layout: CacheLayout) -> np.ndarray:
    slot, head, byte = _grid(layout, layout.key_bytes)
    if layout.order == "planes":
        plane = head * layout.page_size * layout.code_bytes
        return _frozen(plane + slot * layout.key_bytes + byte)
    return _frozen(_record(layout, slot, head) * layout.code_bytes + byte)


@lru_cache(maxsize=64)
def _value_index(layout: CacheLayout) -> np.ndarray:
    size, page_size = layout.value_bytes, layout.page_size
    slot, head, byte = _grid(layout, size)
    if layout.order != "planes":
        record = _record(layout, slot, head) * layout.code_bytes
        return _frozen(record + layout.key_bytes + byte)
    plane = page_size * (head * layout.code_bytes + layout.key_bytes)
    # Words of 4 bytes, word-major over tokens; the bytes left over follow, token by token.
    whole = size - size % WORD
    in_words = (byte // WORD * page_size + slot) * WORD + byte % WORD
    in_tail = page_size * whole + slot * (size - whole) + byte - whole
    return _frozen(plane + np.where(byte < whole, in_words, in_tail))


@lru_cache(maxsize=64)
def _meta_index(layout: CacheLayout) -> np.ndarray:
    fields, page_size = layout.num_meta_fields, layout.page_size
    slot, head, number = _grid(layout, fields)
    base = head * fields * page_size
    if layout.order == "planes" and not layout.config.value_is_codebook:
        # Key scales of all tokens, then the (scale, zero) pair of each token.
        keys = fields - 2
        place = np.where(
            number < keys, number * page_size + slot, keys * page_size + 2 * slot + number - keys
        )
    else:
        place = number * page_size + slot
    return _frozen(layout.meta_offset + 2 * (base + place))
