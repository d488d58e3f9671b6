"""fp32 sums of more terms than tensor cores add up well in one go.

A tensor core aligns its 16 products with the sum and cuts off what lies below the sum's last places, always towards
zero. Terms of one sign lose 1e-7 of their sum per instruction (H200, WGMMA): 1e-4 after 16,384 terms. So a sum is set
aside in memory after `format.LONGEST_SUM` terms and starts from zero again. What is set aside is added up by fp32
additions, which round to nearest. Each thread has its own registers' sums there, in a fixed order of pieces, so a call
has the same bits at every run.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, range_constexpr

from .. import geometry

# the threads of a CTA that have sums
THREADS = 256


@cute.jit
def set_aside(sums: Any, memory: Any, before: cutlass.Constexpr, first: Boolean) -> None:
    """Add `sums`, a multiple of four, to what `memory` holds of them, if anything yet, and clear them.

    `memory` has `format.CTA_SUMS` places for each CTA. Those of a thread are behind `before` others that it sets aside.
    """
    place = place_of(memory, before)
    flat = cute.make_tensor(sums.iterator, cute.make_layout(cute.size(sums)))
    four = cute.make_rmem_tensor((4,), Float32)
    for i in range_constexpr(cute.size(sums) // 4):
        line = quad_at(place, i)
        four.fill(0.0)
        if not first:
            cute.autovec_copy(line, four)
        for j in range_constexpr(4):
            four[j] += flat[4 * i + j]
        cute.autovec_copy(four, line)
    sums.fill(0.0)


@cute.jit
def take_back(sums: Any, memory: Any, before: cutlass.Constexpr) -> None:
    """Add what `set_aside` left to `sums`."""
    place = place_of(memory, before)
    flat = cute.make_tensor(sums.iterator, cute.make_layout(cute.size(sums)))
    four = cute.make_rmem_tensor((4,), Float32)
    for i in range_constexpr(cute.size(sums) // 4):
        cute.autovec_copy(quad_at(place, i), four)
        for j in range_constexpr(4):
            flat[4 * i + j] += four[j]


@cute.jit
def place_of(memory: Any, before: cutlass.Constexpr) -> Any:
    """A thread's first four places: threads side by side, each next four behind all of theirs."""
    # read here and in no other place, so that they take no registers while the tensor cores work
    block, thread = (
        cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[index])
        for index in (cute.arch.block_idx()[0], cute.arch.thread_idx()[0])
    )
    return memory.iterator + (block * geometry.CTA_SUMS + THREADS * before + thread % THREADS * 4)


def quad_at(place: Any, i: int) -> Any:
    """Where a thread's sums 4 i to 4 i + 3 are set aside."""
    return cute.make_tensor((place + 4 * THREADS * i).align(16), cute.make_layout(4))
