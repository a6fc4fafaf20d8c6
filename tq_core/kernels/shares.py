"""Equal shares of a batch of sequences for a number of programs, from the lengths on the device.

All sequences lie one after the other, and their tiles are dealt out in that order: program ``p`` of
``P`` has what lies between cut ``p`` and cut ``p + 1``, tiles of one sequence or of several. Equal
sequences are cut into equal parts. A sequence counts two tiles more than it has, so that many short
ones are not dealt to one program, and a cut near the end of a sequence moves there.

A part has its place ``p + sequence``, which is another for each part, one more for each part of
a sequence, and below ``P`` plus the number of sequences. Every program computes its share by itself
from one load of all lengths, where it would load one: cheaper than a kernel before.
"""

import triton
import triton.language as tl

#: A tile, in the unit of cuts, and what a part takes besides its tiles.
TILE = tl.constexpr(16)
BEGIN = tl.constexpr(32)


@triton.jit
def lay_out(
    seq_lens_ptr, query_start_loc_ptr, num_seqs,
    DECODE: tl.constexpr, WINDOW: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Lengths, first tiles, numbers of tiles, and where each ends; int32 ``[BLOCK_B]``.

    A sequence has a tile at least, without tokens too, and none without query rows.
    """
    offs_b = tl.arange(0, BLOCK_B)
    mask_b = offs_b < num_seqs
    seq_len = tl.load(seq_lens_ptr + offs_b, mask=mask_b, other=0)
    rows = 1
    has_rows = mask_b
    if not DECODE:
        rows = tl.load(query_start_loc_ptr + offs_b + 1, mask=mask_b, other=0)
        rows = rows - tl.load(query_start_loc_ptr + offs_b, mask=mask_b, other=0)
        has_rows = rows > 0
    first = tl.zeros_like(seq_len)
    if WINDOW > 0:
        first = tl.maximum(seq_len - rows - WINDOW + 1, 0) // BLOCK_T
    tiles = tl.maximum(tl.cdiv(tl.maximum(seq_len, 0), BLOCK_T) - first, 1)
    tiles = tl.where(has_rows, tiles, 0)
    return seq_len, first, tiles, tl.cumsum(tl.where(has_rows, tiles * TILE + BEGIN, 0), 0)


@triton.jit
def pick(x, index):
    """``x[index]`` of a vector, 0 past its end."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == index, x, 0), 0)


@triton.jit
def cut(p, num_programs, num_seqs, tiles, ends):
    """Where the share of program ``p`` begins: a sequence, and a tile of it."""
    total = tl.max(ends, 0)
    at = (p.to(tl.int64) * total // num_programs).to(tl.int32)
    begin = tl.max(tl.where(ends <= at, ends, 0), 0)
    end = tl.min(tl.where(ends > at, ends, total), 0)
    near = total // num_programs // 8
    before, behind = at - begin, end - at
    at = tl.where((behind <= near) & (behind < before), end, tl.where(before <= near, begin, at))
    seq = tl.minimum(tl.sum((ends <= at).to(tl.int32), 0), num_seqs)
    before = (at - tl.max(tl.where(ends <= at, ends, 0), 0)).to(tl.int64)
    # The share of its tiles that it has of all that the sequence takes, rounded.
    own = pick(tiles, seq)
    size = own * TILE + BEGIN
    tile = (before * own + size // 2) // size
    return seq, tl.maximum(tl.minimum(tile.to(tl.int32), own - 1), 0)
