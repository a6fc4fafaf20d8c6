"""Checks of what arrays hold, and the switch of the checking mode."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest

from tq_core import contents

NONE = SimpleNamespace(num_tokens=4, sliding_window=None, max_seq_len=8, max_query_len=4)


@pytest.mark.parametrize("text, on", [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_switch_is_read_in_each_call(text, on, monkeypatch):
    for other in ("0", "1"):
        monkeypatch.setenv("TQ_CHECK", other)
        assert contents.is_checked(None) == (other == "1")
    if text is None:
        monkeypatch.delenv("TQ_CHECK")
    else:
        monkeypatch.setenv("TQ_CHECK", text)
    assert contents.is_checked(None) is on
    assert contents.is_checked(True)
    assert not contents.is_checked(False)


def test_the_switch_without_posix(monkeypatch):
    monkeypatch.setattr(contents.os, "name", "nt")
    read = contents._reader()
    monkeypatch.setenv("TQ_CHECK", "1")
    assert read() == b"1"
    monkeypatch.delenv("TQ_CHECK")
    assert read() is None


def test_another_word_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("TQ_CHECK", "yes")
    with pytest.raises(
        ValueError, match=r"^TQ_CHECK: expected 0 or 1 in the environment, got 'yes'"
    ):
        contents.is_checked(None)
    assert os.environ["TQ_CHECK"] == "yes"


@pytest.mark.parametrize("check", [1, "1", 0.0])
def test_the_argument_is_a_bool(check):
    with pytest.raises(TypeError, match=r"^check: expected a bool or None"):
        contents.check_argument(check)


def test_slots():
    slots = np.array([3, -1, 7, -1, 3, 7])
    contents.check_slots(slots, 8)
    with pytest.raises(ValueError, match=r"slots below 7 .* got 7 at index 2"):
        contents.check_slots(slots, 7)
    with pytest.raises(ValueError, match=r"distinct slots, got 3 at index 4 and 0"):
        contents.check_slots(slots, 8, strict=True)
    contents.check_slots(slots[:4], 8, strict=True)
    contents.check_slots(slots[:0], 0, strict=True)


def attention(table, lens, starts, strict=True, **changes):
    call = SimpleNamespace(**{**vars(NONE), **changes})
    arrays = [None if x is None else np.array(x, np.int32) for x in (table, lens, starts)]
    contents.check_attention(*arrays, call, 5, 4, strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_what_nobody_reads_may_be_anything(strict):
    attention([[0, 9], [-1, 4], [9, -9]], [4, 8, 5], [0, 1, 2, 2], strict, sliding_window=4)
    attention([[0, 9]], [4], [0, 2], strict)  # rows past the last start pad
    attention([[-1, -1]], [0], None, strict)


@pytest.mark.parametrize(
    "table, lens, starts, changes, message",
    [
        ([[0, 5]], [5], [0, 4], {}, "block_table: .* 0 to 4 for page 1 of sequence 0, .* got 5"),
        ([[0, -1]], [5], [0, 4], {}, "block_table: .* page 1 of sequence 0, .* got -1"),
        ([[-1, 4]], [8], [0, 1], {"sliding_window": 5}, "block_table: .* page 0 .* got -1"),
        ([[0, 1]], [9], [0, 4], {}, "seq_lens: expected at most 8 .* got 9 for sequence 0"),
        ([[0, 1]] * 2, [3, -2], [0, 4, 4], {}, "seq_lens: .* got -2 for sequence 1"),
        ([[0, 1]] * 2, [3, 3], [0, 3, 2], {}, "expected ascending, got 2 at index 2 after 3"),
        ([[0, 1]], [3], [0, 5], {}, r"query_start_loc: expected rows in \[0, 4\]"),
        ([[0, 1]], [3], [1, 4], {}, "expected to begin with 0, got 1 at index 0"),
        ([[0, 1]] * 2, [3, 6], None, {"max_seq_len": 5}, "max_seq_len: .* sequence 1 has 6"),
        ([[0, 1]], [3], [0, 3], {"max_query_len": 2}, "max_query_len: .* sequence 0 has 3"),
    ],
)
def test_attention(table, lens, starts, changes, message):
    with pytest.raises(ValueError, match=message):
        attention(table, lens, starts, **changes)
