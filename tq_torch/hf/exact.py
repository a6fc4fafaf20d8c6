"""The tokens of a layer that are read in 16 bit: its first ones and the most recent ones."""

from __future__ import annotations

import torch
from torch import Tensor

from tq_torch.hf.columns import Step

#: Columns that ``crop`` can take back once a layer forgets tokens.
MAX_CROP = 128


class ExactTokens:
    """The first tokens of each sequence and its most recent ones, in the model's dtype.

    Token j is read exactly by the row at position p if ``j < first`` or ``p - recent < j <= p``.
    That depends on neither how a prompt is cut into passes nor what was cropped.

    Attributes:
        first_keys, first_values: ``[B, first + 1, Hk, D]``, by position; the last place takes
            what is not kept.
        keys, values: ``[B, L, Hk, D]``, the last L tokens of each sequence, the newest at the end;
            where a sequence has fewer, what precedes them is not read.
    """

    def __init__(self, recent: int, first: int, sliding_window: int | None) -> None:
        self.recent = recent
        self.first = first
        self.sliding_window = sliding_window
        self.clear()

    def clear(self) -> None:
        """Forgets all tokens."""
        self._tensors: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the kept keys and values."""
        return sum(x.numel() * x.element_size() for x in self._tensors.values())

    def append(self, key: Tensor, value: Tensor, step: Step) -> None:
        """Takes keys and values ``[B, T, Hk, D]`` of a step's rows."""
        for name, new in (("keys", key), ("values", value)):
            new = new.nan_to_num(nan=0.0)  # as store() does: masked tokens must not spoil others
            if self.first and (step.is_ragged or step.start < self.first):
                self._put_first(f"first_{name}", new, step)
            if self.recent:
                self._put_recent(name, new, step)

    def attend(
        self, query: Tensor, step: Step, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Attention over the exact tokens alone.

        Args:
            query: ``[B, T, Hq, D]``, rows in ``step.order``.
            step: the rows, whose keys and values were appended.
            scale: factor of the scores.
            softcap: limit of the scores' magnitude, None for none.

        Returns:
            ``[B, T, Hq, D]`` in the query's dtype, and the natural-log LSE, fp32 ``[B, T, Hq]``;
            0 and ``-inf`` for rows that see none of them.
        """
        count = min(query.shape[1] + self.recent - 1, self._length)
        keys, values = self._seen("keys", count), self._seen("values", count)
        name = "exact", self.recent, self.first, self.sliding_window, count
        seen = step.once(name, lambda: self._make_mask(step, count))  # [B, T, S]
        query_heads = query.float().unflatten(2, (keys.shape[2], -1))
        scores = scale * torch.einsum("bthgd,bshd->bthgs", query_heads, keys)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen[:, :, None, None], -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
        out = torch.einsum("bthgs,bshd->bthgd", weights, values)
        return out.flatten(2, 3).to(query.dtype), lse.flatten(2)

    def crop(self, columns: int, tokens: Tensor | None) -> None:
        """Forgets the last columns, which hold ``tokens`` ``[B]`` (None: nothing but tokens)."""
        for name in ("keys", "values"):
            if name in self._tensors:
                x = self._tensors[name]
                if tokens is None:
                    x = x[:, : max(x.shape[1] - columns, 0)]
                else:
                    places = torch.arange(x.shape[1], device=x.device)
                    source = places - tokens.to(x.device)[:, None]
                    x = x.take_along_dim(source.clamp(min=0)[..., None, None], 1)
                self._tensors[name] = x

    def select(self, sequences: Tensor) -> None:
        """Makes ``sequences`` (integers ``[B]``) the batch."""
        self._tensors = {n: x[sequences.to(x.device)] for n, x in self._tensors.items()}

    @property
    def _length(self) -> int:
        return self._tensors["keys"].shape[1] if self.recent else 0

    def _put_first(self, name: str, new: Tensor, step: Step) -> None:
        if name not in self._tensors:
            batch, _, heads, size = new.shape
            self._tensors[name] = new.new_zeros(batch, self.first + 1, heads, size)
        place = step.once(("first", self.first), lambda: self._first_places(step))
        self._tensors[name].scatter_(1, place[..., None, None].expand_as(new), new)

    def _first_places(self, step: Step) -> Tensor:
        is_kept = step.position < self.first
        if step.is_token is not None:
            is_kept = is_kept & step.is_token
        return step.position.where(is_kept, self.first)

    def _put_recent(self, name: str, new: Tensor, step: Step) -> None:
        if step.order is not None:
            new = new.take_along_dim(step.order[..., None, None], 1)
        old = self._tensors.get(name, new[:, :0])[:, -(self.recent - 1 + MAX_CROP) :]
        joined = torch.cat([old, new], 1)
        if step.is_token is not None:
            source = step.once(("joined", old.shape[1]), lambda: _without_gap(old.shape[1], step))
            joined = joined.take_along_dim(source[..., None, None], 1)
        self._tensors[name] = joined

    def _seen(self, name: str, count: int) -> Tensor:
        """fp32 ``[B, first + count, Hk, D]``."""
        parts = []
        if self.first:
            parts.append(self._tensors[f"first_{name}"][:, : self.first])
        if self.recent:
            parts.append(self._tensors[name][:, self._length - count :])
        return torch.cat(parts, 1).float()

    def _make_mask(self, step: Step, count: int) -> Tensor:
        device = step.seq_lens.device
        last = step.seq_lens[:, None].long() - 1
        row = last + torch.arange(step.start - step.stop + 1, 1, device=device)  # [B, T]
        recent = last + torch.arange(1 - count, 1, device=device)  # [B, count]
        first = torch.arange(self.first, device=device).expand(len(last), -1)
        distance = row[:, :, None] - torch.cat([first, recent], 1)[:, None]
        seen = distance >= 0
        seen[:, :, self.first :] &= distance[:, :, self.first :] < self.recent
        seen[:, :, self.first :] &= recent[:, None] >= self.first
        if self.sliding_window is not None:
            seen &= distance < self.sliding_window
        return seen


def _without_gap(length: int, step: Step) -> Tensor:
    """int64 ``[B, length + T]``: closes the gap of a step's padding behind ``length`` tokens."""
    rows = step.stop - step.start
    places = torch.arange(length + rows, device=step.position.device)
    padding = rows - step.is_token.sum(1, keepdim=True)
    return torch.where(places >= length + padding, places, places - padding).clamp(min=0)
