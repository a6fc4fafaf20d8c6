"""Programmatic dependent launch: a kernel is made ready while the one before it still runs.

On NVIDIA from compute capability 9.0 on, where the launcher asks for it; elsewhere a kernel starts
when the one before it has ended, and this does nothing. No kernel here lets the next one start
early: programs that wait take room and shared memory from those that work (docs/kernels.md).
"""

import triton
import triton.language as tl


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Returns when all that kernels before this one have written can be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()
