"""Shares of the sequences of a batch in a number of programs, from their lengths on the device.

All parts have about the same number of tiles: ``size``, that of all tiles over the parts wanted,
rounded up. ``FINER`` times as many parts are wanted where the longest sequence has more than twice
the mean, so that the last programs to end are short ones; equal sequences have no use for that. A
sequence has ``ceil(tiles / size)`` parts, equal ones, or one, so there are at most as many as
wanted and one more for each sequence, and equal sequences have equally many. Every program computes
this by itself from one load of all lengths, where it would load one: cheaper than a kernel before.
"""

import triton
import triton.language as tl


@triton.jit
def shares(
    seq_lens_ptr, num_seqs, num_parts,
    WINDOW: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr, FINER: tl.constexpr,
):  # fmt: skip
    """Lengths, parts, and parts of the sequences up to it, int32 ``[BLOCK_B]`` of one row each."""
    offs_b = tl.arange(0, BLOCK_B)
    seq_len = tl.load(seq_lens_ptr + offs_b, mask=offs_b < num_seqs, other=0)
    tiles = tl.cdiv(tl.maximum(seq_len, 0), BLOCK_T)
    if WINDOW > 0:
        tiles = tiles - tl.maximum(seq_len - WINDOW, 0) // BLOCK_T
    total = tl.sum(tiles, 0)
    if FINER > 1:
        uneven = tl.max(tiles, 0).to(tl.float32) * num_seqs > 2 * total.to(tl.float32)
        num_parts = tl.where(uneven, num_parts * FINER, num_parts)
    size = tl.maximum(tl.cdiv(total, num_parts), 1)
    parts = tl.where(offs_b < num_seqs, tl.maximum(tl.cdiv(tiles, size), 1), 0)
    return seq_len, parts, tl.cumsum(parts, 0)


@triton.jit
def pick(x, index):
    """``x[index]`` of a vector."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == index, x, 0), 0)
