"""Warp-level matrix instructions on 16-bit operands with fp32 sums."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr, range_constexpr

from .architecture import at_least
from .values import ptx_type


@cute.jit
def clear(sums: Any) -> None:
    """Set a thread's sums to zero."""
    if const_expr(at_least(100)):
        # of a whole vector the compiler would make 64-bit pairs there, keep them in the main loop and spill
        for i in range_constexpr(cute.size(sums)):
            sums[i] = Float32(0.0)
    else:
        sums.fill(0.0)


@cute.jit
def mma_16x8x16(
    sums: Any, a0: Uint32, a1: Uint32, a2: Uint32, a3: Uint32, b0: Uint32, b1: Uint32, dtype: cutlass.Constexpr
) -> Any:
    """Return sums + A B.

    With g = lane / 4 and i = lane % 4, a0 and a1 hold k = 2i, 2i + 1 of rows g and g + 8, a2 and a3 the same rows of
    k + 8; b0 and b1 hold column g of k = 2i, 2i + 1 and of k + 8; sums hold columns 2i, 2i + 1 of rows g and g + 8.
    """
    kind = ptx_type(dtype)
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
def load_matrices(source: Any, kind: cutlass.Constexpr = "") -> Any:
    """Load four 8 x 8 matrices from shared memory; lane 8q + r passes the address of row r of matrix q.

    With g = lane / 4 and i = lane % 4, a lane gets elements (g, 2i) and (g, 2i + 1) of each.
    """
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{ {{$w0}}, {{$w1}}, {{$w2}}, {{$w3}} }}, [{{$r0}}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[source],
    )


def load_matrices_transposed(source: Any) -> Any:
    """The same, transposed: a lane gets elements (2i, g) and (2i + 1, g) of each."""
    return load_matrices(source, ".trans")
