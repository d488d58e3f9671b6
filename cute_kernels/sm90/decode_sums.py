"""y of the layers of decode.py from what its clusters store: the kernel behind it."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from ..common import launch
from ..common.copies import load_values_if
from .decode_list import WARPS

# quads of a CTA, and loads of a thread in flight
ADDED, IN_FLIGHT = 64, 8


class ClusterSums:
    """The kernel, for a `Decode`."""

    dtype: Any
    scaled: bool
    cluster: int
    n_frags: int
    k_frags: int

    def add(self, o: Any, clusters: Int32, stream: Any) -> None:
        """Launch the kernel for so many clusters."""
        fragments = cute.ceil_div(o.w_down.shape[1], 16) * self.n_frags
        launch.start(self.add_clusters(o, clusters), cute.ceil_div(fragments * 32, ADDED), 4 * ADDED, stream)

    @cute.kernel
    def add_clusters(self, o: Any, clusters: Int32):
        """Add the clusters' sums of y, in a fixed order: four threads for four values, all their loads at once."""
        launch.start_next_early()
        cute.arch.griddepcontrol_wait()
        thread = cute.arch.thread_idx()[0]
        own, quarter = thread % ADDED, thread // ADDED
        shared = SmemAllocator().allocate_tensor(Float32, cute.make_layout((4, ADDED, 3)), byte_alignment=16)
        index = cute.arch.block_idx()[0] * ADDED + own
        line, lane = index // 32, index % 32
        token = line % self.n_frags * 8 + (lane & 3) * 2
        column = line // self.n_frags * 16 + (lane >> 2) * (2 if self.scaled else 1)
        size = self.cluster * WARPS * self.k_frags * self.n_frags * 32
        exists = (token < o.y.shape[0]) & (column < o.y.shape[1])
        total, four = cute.make_rmem_tensor((4,), Float32), cute.make_rmem_tensor((4, IN_FLIGHT), Float32)
        bits = cute.recast_tensor(four, Uint32)
        total.fill(0.0)
        first = quarter
        while first < (clusters if exists else 0):
            for j in range_constexpr(IN_FLIGHT):
                where = o.parts.iterator + (Int64(first + 4 * j) * size + index) * 4
                load_values_if(where, bits[None, j], first + 4 * j < clusters)
            for j in range_constexpr(IN_FLIGHT):
                for i in range_constexpr(4):
                    total[i] += four[i, j]
            first += 4 * IN_FLIGHT
        if quarter > 0:
            cute.autovec_copy(total, shared[None, own, quarter - 1])
        cute.arch.sync_threads()
        if (quarter == 0) & exists:
            for part in range_constexpr(3):
                for i in range_constexpr(4):
                    total[i] += shared[i, own, part]
            for i in range_constexpr(4):
                m, k = token + i % 2, column + i // 2 * (1 if self.scaled else 8)
                if (m < o.y.shape[0]) & (k < o.y.shape[1]):
                    bias = o.b_down[k].to(Float32) if o.b_down.shape[0] > 0 else Float32(0.0)
                    scale = o.down_scale[k] if const_expr(self.scaled) else Float32(1.0)
                    o.y[m, k] = (total[i] * scale + bias).to(self.dtype)
