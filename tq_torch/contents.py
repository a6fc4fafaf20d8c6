"""Checks of what index tensors on the CPU hold: reading them costs no wait there."""

from __future__ import annotations

import torch
from torch import Tensor

from tq_core.validation import AttentionCall


def check_attention(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    call: AttentionCall,
    page_size: int,
) -> None:
    """Rows, lengths and pages of an attention call exist."""
    rows = torch.ones_like(seq_lens)
    if query_start_loc is not None:
        _check_rows(query_start_loc, call.num_tokens)
        rows = query_start_loc.diff()
    # Nothing of a sequence without rows is read, its last page included.
    first = torch.where(rows > 0, 0, seq_lens + page_size)
    if call.sliding_window is not None:
        first = torch.maximum(first, seq_lens - rows - call.sliding_window + 1)
    check_pages(block_table, seq_lens, first, cache.shape[0], page_size)


def check_slots(slot_mapping: Tensor, num_slots: int) -> None:
    """Every slot is one of the cache's, or negative."""
    if slot_mapping.numel() and int(slot_mapping.max()) >= num_slots:
        index = int(slot_mapping.argmax())
        raise ValueError(
            f"slot_mapping: expected slots below {num_slots} (num_pages * page_size) or negative "
            f"ones, got {int(slot_mapping[index])} at index {index}"
        )


def _check_rows(query_start_loc: Tensor, num_tokens: int) -> None:
    if bool((query_start_loc.diff() < 0).any()):
        raise ValueError(f"query_start_loc: expected ascending, got {query_start_loc.tolist()}")
    first, last = int(query_start_loc[0]), int(query_start_loc[-1])
    if first < 0 or last > num_tokens:
        raise ValueError(
            f"query_start_loc: expected rows in [0, {num_tokens}], the rows of query, got "
            f"[{first}, {last}]"
        )


def check_pages(
    block_table: Tensor, seq_lens: Tensor, first: Tensor, num_pages: int, page_size: int
) -> None:
    """Tokens ``first[b] <= j < seq_lens[b]`` lie on pages that the table and the cache have."""
    if not seq_lens.numel():
        return
    capacity = block_table.shape[1] * page_size
    if int(seq_lens.max()) > capacity:
        index = int(seq_lens.argmax())
        raise ValueError(
            f"seq_lens: expected at most {capacity} tokens (max_pages * page_size of block_table), "
            f"got {int(seq_lens[index])} for sequence {index}"
        )
    start = torch.arange(block_table.shape[1], dtype=torch.int64, device="cpu") * page_size
    used = (start < seq_lens[:, None]) & (start + page_size > first[:, None])
    wrong = used & ((block_table < 0) | (block_table >= num_pages))
    if bool(wrong.any()):
        sequence, number = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"block_table: expected a page from 0 to {num_pages - 1} for page {number} of sequence "
            f"{sequence}, which has {int(seq_lens[sequence])} tokens, got "
            f"{int(block_table[sequence, number])}"
        )
