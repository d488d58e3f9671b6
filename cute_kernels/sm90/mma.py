"""The main loop of a product, and matrix stores from registers to shared memory."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr
from cutlass.cute.nvgpu import warpgroup


@cute.jit
def accumulate(ring, mma: cute.TiledMma, acc, rA, rB, steps: Int32, states, issued: cutlass.Constexpr):
    """acc = product over `steps` stages, at least one.

    `states` of the ring, of the next stage to wait for and to release, are returned as they are then. `issued`, a
    function of the step, is called when its products are issued.
    """
    mma.set(warpgroup.Field.ACCUMULATE, False)
    full, release = states
    for k in cutlass.range(steps, unroll=1):
        ring.consumer_wait(full)
        warpgroup.fence()
        for block in range_constexpr(cute.size(rA, mode=[2])):
            cute.gemm(mma, acc, rA[None, None, block, full.index], rB[None, None, block, full.index], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        issued(k)
        # at most one group of WGMMA is in flight: the previous stage has been read
        warpgroup.wait_group(1)
        if k > 0:
            ring.consumer_release(release)
            release.advance()
        full.advance()
    warpgroup.wait_group(0)
    ring.consumer_release(release)
    release.advance()
    return full, release


@cute.jit
def store_matrices_transposed(target: Any, registers: Any) -> None:
    """Store four 8 x 8 matrices, transposed; lane 8q + r passes the address of row r of the stored matrix q.

    With g = lane / 4 and i = lane % 4, a lane holds elements (g, 2i) and (g, 2i + 1) of each.
    """
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[target, *registers],
    )
