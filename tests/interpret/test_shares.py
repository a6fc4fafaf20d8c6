"""The cuts by which programs share a batch: each tile once, no program much more than others."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("triton", reason="kernels need triton")

import torch
import triton
import triton.language as tl

from tests.interpret.speed import patch_the_language_once
from tq_core import kernels
from tq_core.kernels.shares import BEGIN, TILE, cut, lay_out

if not kernels.interpreted():
    pytest.skip("needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)

patch_the_language_once()

BLOCK_T = 64


@triton.jit
def write_cuts(
    seq_lens_ptr, starts_ptr, num_seqs, num_programs, out_ptr,
    DECODE: tl.constexpr, WINDOW: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Sequence and tile of each cut."""
    p = tl.program_id(0)
    _, _, tiles, ends = lay_out(
        seq_lens_ptr, starts_ptr, num_seqs, DECODE, WINDOW, BLOCK_B, BLOCK_T
    )
    seq, tile = cut(p, num_programs, num_seqs, tiles, ends)
    tl.store(out_ptr + 2 * p, seq)
    tl.store(out_ptr + 2 * p + 1, tile)


def cuts_of(lens, num_programs, rows=None, window=0):
    """``[num_programs + 1, 2]``."""
    starts = np.concatenate([[0], np.cumsum(np.ones(len(lens)) if rows is None else rows)])
    out = torch.full((num_programs + 1, 2), -1, dtype=torch.int32)
    write_cuts[(num_programs + 1,)](
        torch.tensor(lens, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32), len(lens),
        num_programs, out, rows is None, window, 64, BLOCK_T,
    )  # fmt: skip
    return out.numpy()


def shares_of(cuts, tiles):
    """What each program has: ``(sequence, first tile, last tile + 1)`` of its parts."""
    shares = []
    for (seq, tile), (to_seq, to_tile) in pairwise(cuts):
        parts = [
            (s, tile if s == seq else 0, to_tile if s == to_seq else tiles[s])
            for s in range(seq, to_seq + (to_tile > 0))
        ]
        shares.append([part for part in parts if tiles[part[0]]])
    return shares


def check(lens, num_programs, rows=None, window=0):
    """Every tile is in one part, and a program has about its share; returns the shares."""
    counts = np.ones(len(lens), int) if rows is None else np.asarray(rows)
    first = np.maximum(np.asarray(lens) - counts - window + 1, 0) // BLOCK_T if window else 0
    tiles = np.where(counts > 0, np.maximum(-(-np.asarray(lens) // BLOCK_T) - first, 1), 0)
    shares = shares_of(cuts_of(lens, num_programs, rows, window), tiles.tolist())
    seen = [np.zeros(n, int) for n in tiles]
    places = [[] for _ in tiles]
    for p, parts in enumerate(shares):
        for seq, start, stop in parts:
            assert 0 <= start <= stop <= tiles[seq]
            seen[seq][start:stop] += 1
            places[seq].append(p + seq)
    assert all((n == 1).all() for n in seen)
    # The places of a sequence's parts follow each other, and no two parts have the same.
    assert all(p == list(range(p[0], p[0] + len(p))) for p in places if p)
    every = [place for p in places for place in p]
    assert len(set(every)) == len(every)
    assert max(every, default=0) < num_programs + len(lens)
    begin = BEGIN.value // TILE.value
    most = (tiles + begin * (tiles > 0)).sum() / num_programs
    loads = [sum(stop - start + begin for _, start, stop in parts) for parts in shares]
    # An eighth for cuts that move to the end of a sequence and a tile of rounding, on either side,
    # and what a part takes that a sequence is cut into.
    assert max(loads) <= 1.25 * most + 2 + 2 * begin
    return shares


@pytest.mark.parametrize("num_seqs, seq_len, splits", [(2, 9000, 16), (64, 8192, 2), (50, 8193, 3)])
def test_equal_sequences_have_equal_parts(num_seqs, seq_len, splits):
    shares = check([seq_len] * num_seqs, num_seqs * splits)
    assert all(len(parts) == 1 for parts in shares)
    sizes = {stop - start for parts in shares for _, start, stop in parts}
    assert max(sizes) - min(sizes) <= 1


def test_nearly_equal_sequences_are_not_cut_near_their_ends(rng):
    shares = check(rng.integers(8000, 8400, 64), 128)
    sizes = [stop - start for parts in shares for _, start, stop in parts]
    assert len(sizes) < 1.5 * 128
    assert min(sizes) >= 6


@pytest.mark.parametrize("num_programs", [1, 7, 128, 1000])
@pytest.mark.parametrize("window", [0, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_uneven_sequences(num_programs, window, seed):
    rng = np.random.default_rng(seed)
    lens = np.exp(rng.uniform(0, np.log(131072), 60)).astype(int)
    lens[rng.integers(60, size=5)] = 0
    check(lens, num_programs, window=window)
    check(lens, num_programs, rows=rng.integers(0, 4, 60), window=window)


def test_one_long_sequence_among_short_ones():
    shares = check([16] * 40 + [131072] + [16] * 20, 256)
    assert max(map(len, shares)) < 10


@pytest.mark.parametrize("rows", [None, [0, 0, 0], [0, 1, 0]])
def test_sequences_of_nothing(rows):
    shares = check([0, 0, 0], 5, rows)
    assert sum(map(len, shares)) == (3 if rows is None else sum(rows))
