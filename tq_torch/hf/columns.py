"""Which columns of the attention mask hold tokens, and where those tokens lie.

A column is a position of the padded batch. Tokens alone are stored, so that the tokens of a
sequence are contiguous from 0 whatever the padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_CHANGED = (
    "attention_mask: differs from the earlier one over positions that are cached; pass the mask of "
    "the whole batch, padding of earlier calls included"
)


@dataclass(frozen=True)
class Step:
    """The rows of a forward pass or of a part of it, the same for all layers.

    Attributes:
        start, stop: the columns of the rows.
        is_ragged: whether sequences may have different lengths.
        seq_lens: int32 ``[B]``, tokens of each sequence, those of the rows included.
        query_start_loc: int32 ``[B + 1]``, multiples of the number of rows.
        position: int64 ``[B, T]``, place of each token in its sequence; -1 or that of another
            token where the row is padding.
        is_token: bool ``[B, T]``, None where every row is a token.
        order: int64 ``[B, T]``, permutation of each sequence's rows that puts its tokens last,
            as ``tq_torch.attention`` counts them; None where they are in order.
        restore: the inverse permutation.
    """

    start: int
    stop: int
    is_ragged: bool
    seq_lens: Tensor
    query_start_loc: Tensor
    position: Tensor
    is_token: Tensor | None = None
    order: Tensor | None = None
    restore: Tensor | None = None
    _made: dict[Hashable, object] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make()`` gave the first layer that asked for ``key``."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[return-value]

    def slots(self, capacity: int, first: int) -> Tensor:
        """int64 ``[B * T]``: slots of the rows, -1 for rows that are not stored.

        Sequence b owns ``capacity`` slots from ``b * capacity`` and uses them cyclically; its
        tokens from ``first`` on are stored.
        """
        return self.once((capacity, first), lambda: self._make_slots(capacity, first))

    def _make_slots(self, capacity: int, first: int) -> Tensor:
        place = self.position - first
        batch = torch.arange(len(place), device=place.device)
        slots = batch[:, None] * capacity + place % max(capacity, 1)
        skipped = place < 0
        if self.is_token is not None:
            skipped = skipped | ~self.is_token
        return slots.masked_fill(skipped, -1).flatten()


class Columns:
    """The columns that a cache has seen; its layers share it.

    The first layer of a forward pass appends the columns, the others find them appended.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets all columns."""
        self.count = 0
        self.is_token: Tensor | None = None  # bool [B, count]; None: all are tokens
        self._forget_pass()

    def remove(self, count: int) -> None:
        """Forgets the last columns."""
        self.count = max(self.count - count, 0)
        if self.is_token is not None:
            self.is_token = self.is_token[:, : self.count]
        self._forget_pass()

    def select(self, sequences: Tensor) -> None:
        """Makes ``sequences`` (indices, with repetition) the batch."""
        if self.is_token is not None:
            self.is_token = self.is_token[sequences.to(self.is_token.device)]
        self._forget_pass()

    def append(self, start: int, shape: tuple[int, int], mask: Tensor | None) -> None:
        """Takes the columns of a pass.

        Args:
            start: columns that the calling layer has stored.
            shape: sequences and rows, ``(B, T)``.
            mask: bool ``[B, start + T]``, True at tokens; None: no padding. With a mask the host
                waits for the device, once a pass.

        Raises:
            ValueError: the mask has another shape, or differs from what was stored.
            RuntimeError: the layers disagree about the number of columns.
        """
        batch, stop = shape[0], start + shape[1]
        if self._pass == (start, stop):
            return
        if start != self.count:
            raise RuntimeError(
                f"a layer has stored {start} of the cache's {self.count} columns: a forward pass "
                "was not finished, call reset() on the cache"
            )
        self._steps, self._has_padding, self._batch = {}, False, batch
        if mask is not None:
            self._append_mask(mask, (batch, stop))
        elif self.is_token is not None:
            raise ValueError(_CHANGED)
        self.count, self._pass = stop, (start, stop)

    def step(self, start: int, stop: int, device: torch.device) -> Step:
        """The rows of columns ``start`` to ``stop`` of the pass, with tensors on ``device``."""
        known = self._steps.get((start, stop))
        if known is None:
            known = self._steps[start, stop] = self._make(start, stop, device)
        if known.seq_lens.device != device:  # a model spread over devices
            fields = {f.name: getattr(known, f.name) for f in dataclasses.fields(known) if f.init}
            moved = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in fields.items()}
            known = self._steps[start, stop] = Step(**moved)
        return known

    def tokens_of_last(self, count: int) -> Tensor | None:
        """Tokens ``[B]`` in the last columns; None: all are tokens."""
        return None if self.is_token is None else self.is_token[:, self.count - count :].sum(1)

    def _forget_pass(self) -> None:
        self._pass: tuple[int, int] | None = None
        self._steps: dict[tuple[int, int], Step] = {}

    def _append_mask(self, mask: Tensor, shape: tuple[int, int]) -> None:
        if mask.shape != shape:
            raise ValueError(
                f"attention_mask: expected {list(shape)}, a column for each cached and new "
                f"position, got {list(mask.shape)}"
            )
        old, new = mask[:, : self.count], mask[:, self.count :]
        same = old.all() if self.is_token is None else (old == self.is_token).all()
        # The only wait for the device: three answers at once.
        is_same, is_full, is_new_full = torch.stack([same, mask.all(), new.all()]).tolist()
        if not is_same:
            raise ValueError(_CHANGED)
        self.is_token = None if is_full else mask.clone()
        self._has_padding = not is_new_full

    def _make(self, start: int, stop: int, device: torch.device) -> Step:
        batch, rows = self._batch, stop - start
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * rows
        if self.is_token is None:
            seq_lens = torch.full((batch,), stop, dtype=torch.int32, device=device)
            position = torch.arange(start, stop, device=device).expand(batch, rows)
            return Step(start, stop, False, seq_lens, starts, position)
        is_token = self.is_token[:, :stop].to(device)
        counts = is_token.cumsum(1)
        seq_lens, position = counts[:, -1].to(torch.int32), counts[:, start:] - 1
        if not self._has_padding:
            return Step(start, stop, True, seq_lens, starts, position)
        new = is_token[:, start:]
        order = new.to(torch.int8).argsort(dim=1, stable=True)
        return Step(start, stop, True, seq_lens, starts, position, new, order, order.argsort(1))
