"""Checks of what arrays hold: they have to be read, which off the CPU waits for the device.

A cheap part is made wherever arrays are on the CPU; the checking mode, ``check=True`` of a call or
``TQ_CHECK=1`` in the environment, makes all of them everywhere.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import numpy as np

from tq_core.validation import AttentionCall

_SWITCH = "TQ_CHECK"


def _reader() -> Callable[[], bytes | None]:
    """What reads the switch: it does so in every call, and ``os.environ`` takes 0.7 us."""
    if os.name != "posix":
        return lambda: None if (text := os.environ.get(_SWITCH)) is None else text.encode()
    # With the interpreter's lock held: nobody else changes the environment meanwhile.
    getenv = ctypes.PyDLL(None).getenv
    getenv.argtypes, getenv.restype = (ctypes.c_char_p,), ctypes.c_char_p
    name = ctypes.c_char_p(_SWITCH.encode())
    return partial(getenv, name)


_read = _reader()


def is_checked(check: bool | None) -> bool:
    """Whether a call with this argument is checked; None is what the environment says now.

    Raises:
        ValueError: ``TQ_CHECK`` is neither 0 nor 1.
    """
    if check is None:
        text = _read()
        return text is not None and _is_one(text)
    return check


def _is_one(text: bytes) -> bool:
    if text not in (b"", b"0", b"1"):
        raise ValueError(
            f"{_SWITCH}: expected 0 or 1 in the environment, got {os.fsdecode(text)!r}"
        )
    return text == b"1"


def check_argument(check: Any) -> None:
    """The argument ``check`` of the public functions."""
    if check is not None and not isinstance(check, bool):
        raise TypeError(f"check: expected a bool or None, got {check!r}")


def refuse_number(name: str, value: float, index: tuple[int, ...], count: int) -> NoReturn:
    """Says that ``count`` numbers of an array are not finite, the first at ``index``."""
    raise ValueError(
        f"{name}: expected finite numbers, got {value} at {list(index)} and {count} such in all"
    )


def check_slots(slots: np.ndarray, num_slots: int, *, strict: bool = False) -> None:
    """Every slot is one of the cache's, or negative; ``strict``: and no other row's."""
    if slots.size and int(slots.max()) >= num_slots:
        index = int((slots >= num_slots).argmax())
        raise ValueError(
            f"slot_mapping: expected slots below {num_slots} (num_pages * page_size) or negative "
            f"ones, got {slots[index]} at index {index}"
        )
    if not strict:
        return
    order = np.argsort(slots, kind="stable")
    same = (np.diff(slots[order]) == 0) & (slots[order[1:]] >= 0)
    if same.any():
        index = int(order[1:][same].min())
        earlier = int((slots == slots[index]).argmax())
        raise ValueError(
            f"slot_mapping: expected distinct slots, got {slots[index]} at index {index} and "
            f"{earlier}"
        )


def check_attention(
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    query_start_loc: np.ndarray | None,
    call: AttentionCall,
    num_pages: int,
    page_size: int,
    *,
    strict: bool = False,
) -> None:
    """Rows, lengths and pages of a call exist; ``strict``: and its bounds are none too many."""
    rows = np.ones_like(seq_lens)
    if query_start_loc is not None:
        _check_rows(query_start_loc, call.num_tokens, strict)
        rows = np.diff(query_start_loc)
    # Nothing of a sequence without rows is read, its last page included.
    first = np.where(rows > 0, 0, seq_lens.astype(np.int64) + page_size)
    if call.sliding_window is not None:
        first = np.maximum(first, seq_lens.astype(np.int64) - rows - call.sliding_window + 1)
    check_pages(block_table, seq_lens, first, num_pages, page_size, strict=strict)
    if not strict:
        return
    for name, bound, lens in (
        ("max_seq_len", call.max_seq_len, seq_lens),
        ("max_query_len", call.max_query_len, rows),
    ):
        if lens.size and int(lens.max()) > bound:
            index = int((lens > bound).argmax())
            what = "seq_lens" if name == "max_seq_len" else "query_start_loc"
            raise ValueError(
                f"{name}: expected an upper bound of {what}, got {bound}, and sequence {index} has "
                f"{lens[index]}"
            )


def _check_rows(query_start_loc: np.ndarray, num_tokens: int, strict: bool) -> None:
    if (wrong := np.diff(query_start_loc) < 0).any():
        index = int(wrong.argmax()) + 1
        raise ValueError(
            f"query_start_loc: expected ascending, got {query_start_loc[index]} at index {index} "
            f"after {query_start_loc[index - 1]}"
        )
    first, last = int(query_start_loc[0]), int(query_start_loc[-1])
    if first < 0 or last > num_tokens:
        raise ValueError(
            f"query_start_loc: expected rows in [0, {num_tokens}], the rows of query, got "
            f"[{first}, {last}]"
        )
    if strict and first:
        raise ValueError(f"query_start_loc: expected to begin with 0, got {first} at index 0")


def check_pages(
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    first: np.ndarray | int,
    num_pages: int,
    page_size: int,
    *,
    strict: bool = False,
) -> None:
    """Tokens ``first[b] <= j < seq_lens[b]`` lie on pages that the table and the cache have."""
    if not seq_lens.size:
        return
    capacity = block_table.shape[1] * page_size
    if int(seq_lens.max()) > capacity:
        index = int((seq_lens > capacity).argmax())
        raise ValueError(
            f"seq_lens: expected at most {capacity} tokens (max_pages * page_size of block_table), "
            f"got {seq_lens[index]} for sequence {index}"
        )
    if strict and int(seq_lens.min()) < 0:
        index = int((seq_lens < 0).argmax())
        raise ValueError(
            f"seq_lens: expected at least 0 tokens, got {seq_lens[index]} for sequence {index}"
        )
    start = np.arange(block_table.shape[1], dtype=np.int64) * page_size
    used = start < seq_lens[:, None]
    used &= start + page_size > np.broadcast_to(first, seq_lens.shape)[:, None]
    wrong = used & ((block_table < 0) | (block_table >= num_pages))
    if wrong.any():
        sequence, number = (int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"block_table: expected a page from 0 to {num_pages - 1} for page {number} of sequence "
            f"{sequence}, which has {seq_lens[sequence]} tokens, got "
            f"{block_table[sequence, number]}"
        )
