"""expert_gathered.py of e4m3 rows with scales of columns: z[p] = sum over c of h[p, c] * w_q[e, c] * scale[e].

The product is that of columns_e4m3.py: a tile has 256 columns, as many bytes as there, and each mma group half of them.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint16, range_constexpr

from ..common.copies import address, aligned
from ..specs import ExpertGatheredSpec
from .columns_e4m3 import BLOCKS, COLUMNS, Columns, E4m3Columns
from .expert_gathered import ExpertGathered, Operands, arguments


class ExpertGatheredE4m3(E4m3Columns, ExpertGathered):
    """For one number of pairs per unit."""

    # the operands that are converted are registers
    ctas_per_sm = 1

    @cute.jit
    def __call__(self, *operands: Any):
        """As there, with the scale of columns behind w."""
        compact, w, scale, *given, multiprocessors, stream = operands
        o = Operands(*[cute.recast_tensor(w, Uint16), *given, scale])
        self.launch(compact, o, multiprocessors, stream)

    def products(self) -> Any:
        return self.products_of_columns()

    def columns_of(self, o: Operands) -> Any:
        return o.w.shape[1]

    @cute.jit
    def fragments(self, mma: cute.TiledMma, sW: cute.Tensor, sH: cute.Tensor, thread: Int32):
        rows = cute.make_tensor(sW.iterator, cute.make_layout(cute.cosize(sW.layout)))
        return self.columns(mma, rows.iterator, sH, thread)

    @cute.jit
    def store(self, o: Operands, f: Columns, unit: Int32, own, column: Int32):
        (first, pairs), expert, lane = own, o.units[unit, 0], cute.arch.lane_idx()
        for block in range_constexpr(BLOCKS):
            sums, place = self.block_of(f.acc, block), 2 * column + block * COLUMNS + f.first
            if place < o.z.shape[1]:
                scales = [o.scale[expert, place + i] for i in range(2)]
                for v in range_constexpr(self.tokens // 8):
                    for j in range_constexpr(2):
                        pair = 8 * v + (lane & 3) * 2 + j
                        if pair < pairs:
                            two = cute.make_rmem_tensor((2,), Float32)
                            for i in range_constexpr(2):
                                two[i] = sums[(j, i, v), 0, 0] * scales[i]
                            cute.autovec_copy(two, aligned(address(o.z, first + pair, place), 2))


def signature(spec: ExpertGatheredSpec) -> tuple[Any, tuple[Any, ...]]:
    return ExpertGatheredE4m3(spec), arguments(spec)
