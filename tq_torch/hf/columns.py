"""Which columns of the attention mask hold tokens, and where those tokens lie.

A column is a position of the padded batch. Tokens alone are stored, so that the tokens of a
sequence are contiguous from 0 whatever the padding.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """The rows of one forward pass, the same for all layers.

    Attributes:
        start, stop: the pass's columns.
        seq_lens: int32 ``[B]``, tokens of each sequence, those of this pass included.
        query_start_loc: int32 ``[B + 1]``, multiples of the pass's number of rows.
        position: int64 ``[B, T]``, place of each token in its sequence; -1 or that of another
            token where the row is padding.
        is_token: bool ``[B, T]``, None where every row is a token.
        order: int64 ``[B, T]``, permutation of each sequence's rows that puts its tokens last,
            as ``tq_torch.attention`` counts them; None where they are in order.
        restore: the inverse permutation.
    """

    start: int
    stop: int
    seq_lens: Tensor
    query_start_loc: Tensor
    position: Tensor
    is_token: Tensor | None
    order: Tensor | None
    restore: Tensor | None
    _slots: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    def slots(self, capacity: int) -> Tensor:
        """int64 ``[B * T]``: slots where sequence b owns ``capacity`` from ``b * capacity``."""
        if capacity not in self._slots:
            self._slots[capacity] = self._make_slots(capacity)
        return self._slots[capacity]

    def _make_slots(self, capacity: int) -> Tensor:
        batch = torch.arange(len(self.position), device=self.position.device)
        slots = batch[:, None] * capacity + self.position
        if self.is_token is not None:
            slots = slots.masked_fill(~self.is_token, -1)
        return slots.flatten()

    def to(self, device: torch.device) -> Step:
        """The step with its tensors on another device."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        return Step(**{n: v.to(device) if isinstance(v, Tensor) else v for n, v in fields.items()})


_CHANGED = (
    "attention_mask: differs from the earlier one over positions that are cached; pass the mask of "
    "the whole batch, padding of earlier calls included"
)


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
        self._steps: dict[torch.device, Step] = {}

    def remove(self, count: int) -> None:
        """Forgets the last columns."""
        self.count = max(self.count - count, 0)
        if self.is_token is not None:
            self.is_token = self.is_token[:, : self.count]
        self._steps = {}

    def select(self, sequences: Tensor) -> None:
        """Makes ``sequences`` (indices, with repetition) the batch."""
        if self.is_token is not None:
            self.is_token = self.is_token[sequences.to(self.is_token.device)]
        self._steps = {}

    def step(
        self, start: int, shape: tuple[int, int], mask: Tensor | None, device: torch.device
    ) -> Step:
        """The pass that has rows ``shape`` (``B, T``) from column ``start``.

        Args:
            start: columns that the calling layer has stored.
            shape: sequences and rows.
            mask: bool ``[B, start + T]``, True at tokens; None: no padding.
            device: of the step's tensors.

        Raises:
            ValueError: the mask has another shape, or differs from what was stored.
            RuntimeError: the layers disagree about the number of columns.
        """
        stop = start + shape[1]
        known = next(iter(self._steps.values()), None)
        if known is None or (known.start, known.stop) != (start, stop):
            if start != self.count:
                raise RuntimeError(
                    f"a layer has stored {start} of the cache's {self.count} columns: a forward "
                    "pass was not finished, call reset() on the cache"
                )
            self._append(stop, shape[0], mask)
            self._steps = {device: self._make(start, stop, shape[0], device)}
        if device not in self._steps:
            self._steps[device] = next(iter(self._steps.values())).to(device)
        return self._steps[device]

    def _append(self, stop: int, batch: int, mask: Tensor | None) -> None:
        """Takes the mask of a pass; with one, the host waits for the device, here only."""
        if mask is None:
            if self.is_token is not None:
                raise ValueError(_CHANGED)
        else:
            if mask.shape != (batch, stop):
                raise ValueError(
                    f"attention_mask: expected [{batch}, {stop}], a column for each cached and new "
                    f"position, got {list(mask.shape)}"
                )
            old = mask[:, : self.count]
            same = old.all() if self.is_token is None else (old == self.is_token).all()
            is_same, is_full = torch.stack([same, mask.all()]).tolist()
            if not is_same:
                raise ValueError(_CHANGED)
            self.is_token = None if is_full else mask.clone()
        self.count = stop

    def _make(self, start: int, stop: int, batch: int, device: torch.device) -> Step:
        rows = stop - start
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * rows
        if self.is_token is None:
            seq_lens = torch.full((batch,), stop, dtype=torch.int32, device=device)
            position = torch.arange(start, stop, device=device).expand(batch, rows)
            return Step(start, stop, seq_lens, starts, position, None, None, None)
        counts = self.is_token.to(device).cumsum(1)
        new = self.is_token[:, start:].to(device)
        order = new.to(torch.int8).argsort(dim=1, stable=True) if rows > 1 else None
        seq_lens = counts[:, -1].to(torch.int32)
        restore = None if order is None else order.argsort(1)
        return Step(start, stop, seq_lens, starts, counts[:, start:] - 1, new, order, restore)
