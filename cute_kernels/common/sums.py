"""fp32 sums of more terms than tensor cores add accurately.

A tensor core aligns its 16 products with the sum and truncates the bits below the sum's last place. Terms of one sign
lose 1e-7 of their sum per instruction (H200, WGMMA): 1e-4 after 16,384 terms. So after `geometry.LONGEST_SUM` terms a
thread flushes its sums to global memory and starts again from zero. Flushes add in fp32, which rounds to nearest. Each
thread has its own memory and flushes at fixed points, so results are bitwise reproducible.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, range_constexpr

from .. import geometry
from .copies import aligned
from .mma import clear

# threads of a CTA that hold sums
THREADS = 256


@cute.jit
def flush_sums(sums: Any, memory: Any, first: Boolean) -> None:
    """Add `sums`, a multiple of four, to those flushed before, unless this is the `first` flush, and clear them.

    `memory` has `geometry.CTA_SUMS` values per CTA.
    """
    base = thread_memory(memory)
    flat = cute.make_tensor(sums.iterator, cute.make_layout(cute.size(sums)))
    four = cute.make_rmem_tensor((4,), Float32)
    for i in range_constexpr(cute.size(sums) // 4):
        flushed = aligned(base + 4 * THREADS * i, 4)
        four.fill(0.0)
        if not first:
            cute.autovec_copy(flushed, four)
        for j in range_constexpr(4):
            four[j] += flat[4 * i + j]
        cute.autovec_copy(four, flushed)
    clear(sums)


@cute.jit
def add_flushed(sums: Any, memory: Any) -> None:
    """Add the flushed sums to `sums`."""
    base = thread_memory(memory)
    flat = cute.make_tensor(sums.iterator, cute.make_layout(cute.size(sums)))
    four = cute.make_rmem_tensor((4,), Float32)
    for i in range_constexpr(cute.size(sums) // 4):
        cute.autovec_copy(aligned(base + 4 * THREADS * i, 4), four)
        for j in range_constexpr(4):
            flat[4 * i + j] += four[j]


@cute.jit
def thread_memory(memory: Any) -> Any:
    """Address of a thread's first four sums; its next four come after the first four of all threads."""
    # read again here, so that they take no registers in the main loop
    block, thread = (
        cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[index])
        for index in (cute.arch.block_idx()[0], cute.arch.thread_idx()[0])
    )
    return memory.iterator + (block * geometry.CTA_SUMS + thread % THREADS * 4)
