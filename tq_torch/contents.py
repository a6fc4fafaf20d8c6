"""Checks of what tensors hold: always of indices on the CPU, of all in the checking mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tq_core import contents
from tq_core.validation import AttentionCall


def check_store(
    key: Tensor, value: Tensor, slot_mapping: Tensor, num_slots: int, *, strict: bool
) -> None:
    """Slots exist; ``strict``: and are distinct, and what is stored to them is finite."""
    if strict:
        _check_readable(key)
    contents.check_slots(_array(slot_mapping), num_slots, strict=strict)
    if strict:
        stored = slot_mapping >= 0
        for name, x in (("key", key), ("value", value)):
            _check_finite(name, x, stored)


def check_attention(
    query: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    call: AttentionCall,
    num_pages: int,
    page_size: int,
    *,
    strict: bool,
) -> None:
    """Rows, lengths and pages exist; ``strict``: and bounds hold, and queries are finite."""
    if strict:
        _check_readable(query)
    starts = None if query_start_loc is None else _array(query_start_loc)
    table, lens = _array(block_table), _array(seq_lens)
    contents.check_attention(table, lens, starts, call, num_pages, page_size, strict=strict)
    if strict:
        rows = query.shape[0] if starts is None else int(starts[-1])
        _check_finite("query", query[:rows])


def check_dequantize(
    block_table: Tensor, seq_lens: Tensor, num_pages: int, page_size: int, *, strict: bool
) -> None:
    """Lengths and pages exist."""
    if strict:
        _check_readable(block_table)
    table, lens = _array(block_table), _array(seq_lens)
    contents.check_pages(table, lens, 0, num_pages, page_size, strict=strict)


def _array(x: Tensor) -> Any:
    return x.detach().cpu().numpy()


def _check_readable(x: Tensor) -> None:
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "check: waits for the device, which cannot be done while a CUDA graph is captured; "
            "capture with check=False, or without TQ_CHECK=1, and check a call before"
        )


def _check_finite(name: str, x: Tensor, rows: Tensor | None = None) -> None:
    """All numbers are finite, or those in ``rows``, a bool for each."""
    wrong = ~torch.isfinite(x)
    if rows is not None:
        wrong &= rows[:, None, None]
    if bool(wrong.any()):
        places = wrong.nonzero()
        index = tuple(places[0].tolist())
        contents.refuse_number(name, float(x[index]), index, len(places))
