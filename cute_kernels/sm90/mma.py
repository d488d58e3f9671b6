"""Matrix stores from registers to shared memory."""

from typing import Any

import cutlass.cute as cute


@cute.jit
def store_matrices_transposed(target: Any, registers: Any) -> None:
    """Store four 8 x 8 matrices, transposed; lane 8q + r passes the address of row r of the stored matrix q.

    With g = lane / 4 and i = lane % 4, a lane holds elements (g, 2i) and (g, 2i + 1) of each.
    """
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[target, *registers],
    )


@cute.jit
def store_matrices(target: Any, registers: Any) -> None:
    """Store four 8 x 8 matrices; lane 8q + r passes the address of row r of matrix q.

    With g = lane / 4 and i = lane % 4, a lane holds elements (g, 2i) and (g, 2i + 1) of each.
    """
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[target, *registers],
    )
