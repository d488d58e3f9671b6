"""Warp-level matrix instructions on 16-bit operands with fp32 sums."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr


@cute.jit
def mma_16x8x16(
    sums: Any, a0: Uint32, a1: Uint32, a2: Uint32, a3: Uint32, b0: Uint32, b1: Uint32, dtype: cutlass.Constexpr
) -> Any:
    """sums + A B. With g = lane / 4 and i = lane % 4: a0, a1 hold rows g, g + 8 of k = 2i, 2i + 1, a2, a3 of k + 8;
    b0, b1 hold column g of k = 2i, 2i + 1 and k + 8; sums hold rows g, g + 8 of columns 2i, 2i + 1.
    """
    kind = "bf16" if const_expr(dtype is cutlass.BFloat16) else "f16"
    return list(
        cute.arch.inline_ptx(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            "{ {$w0}, {$w1}, {$w2}, {$w3} }, { {$r0}, {$r1}, {$r2}, {$r3} }, { {$r4}, {$r5} }, "
            "{ {$r6}, {$r7}, {$r8}, {$r9} };",
            write_only_types=[Float32] * 4,
            read_only_args=[a0, a1, a2, a3, b0, b1, *sums],
        )
    )


@cute.jit
def mma_16x8x8(sums: Any, a0: Uint32, a1: Uint32, b0: Uint32, dtype: cutlass.Constexpr) -> Any:
    """sums + A B: the first halves of the operands of `mma_16x8x16`."""
    kind = "bf16" if const_expr(dtype is cutlass.BFloat16) else "f16"
    return list(
        cute.arch.inline_ptx(
            f"mma.sync.aligned.m16n8k8.row.col.f32.{kind}.{kind}.f32 "
            "{ {$w0}, {$w1}, {$w2}, {$w3} }, { {$r0}, {$r1} }, { {$r2} }, { {$r3}, {$r4}, {$r5}, {$r6} };",
            write_only_types=[Float32] * 4,
            read_only_args=[a0, a1, b0, *sums],
        )
    )


@cute.jit
def load_matrices_transposed(source: Any) -> Any:
    """Four 8 x 8 matrices from shared memory; lane 8q + r passes the address of row r of matrix q.

    With g = lane / 4 and i = lane % 4, a lane gets elements (2i, g) and (2i + 1, g) of each.
    """
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[source],
    )
