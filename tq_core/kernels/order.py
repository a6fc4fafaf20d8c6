"""Programmatic dependent launch: a kernel is made ready while the one before it still runs.

On NVIDIA from compute capability 9.0 on, where the launcher asks for it; elsewhere a kernel starts
when the one before it has ended, and this does nothing. Programs that wait take room and shared
memory from those that work, so the next kernel starts early only in plans where both have room
(docs/kernels.md).
"""

import triton
import triton.language as tl


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Returns when all that kernels before this one have written can be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Lets programs of the next kernel start as soon as all of this one's have come here."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(ptr, BYTES: tl.constexpr):
    """Asks for ``BYTES``, a multiple of 16, behind each pointer to be brought to the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r",
        [ptr.to(tl.int64), BYTES], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
