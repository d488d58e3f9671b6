"""Sparse times dense by token tile: out[m] = sum over non-zeros c of coefficient[m, c] * w[c], optionally plus the same
sum of a second pair, plus bias: the operands, the units of work and the coefficients, for the kernels of all families.

A unit of work is a token tile and a slab of 256 columns; its inner dimension is the list of neurons. Sums are flushed
after `longest` list positions.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint16, Uint32, const_expr

from .. import geometry
from ..specs import E4M3
from . import operands
from .values import widen

TILE_M, TILE_N = geometry.TOKEN_TILE, 256
# most token tiles that are sorted: 131,072 tokens. With more, the load balances without it
SORTED = 1024


class Operands(NamedTuple):
    """Operands in global memory, None if absent, and the number of slabs and units."""

    coefficients: Any
    w: Any
    coefficients2: Any
    w2: Any
    bias: Any
    entries: Any
    neurons: Any
    chunks: Any
    sizes: Any
    out: Any
    flushed: Any  # partial sums of long lists
    activation: Any  # of the values in entries, see common/activation.py
    slabs: Any
    units: Any
    scale: Any = None  # of e4m3 columns, see sm90/gathered_e4m3.py
    order: Any = None  # in shared memory: token tiles, longest list first


class GatheredForm:
    """For one dtype and number of products; sizes and strides stay symbolic. An empty bias stands for none."""

    launch: Any  # of a family, (data, capacity, max_ctas, stream): launch the kernel unless there are no units

    def __init__(self, spec: Any):
        self.dtype = operands.DTYPES[spec.dtype]
        self.from_entries = spec.products == 0
        self.products = max(1, spec.products)
        self.longest = geometry.LONGEST_SUM["bfloat16" if spec.dtype == E4M3 else spec.dtype]

    @cute.jit
    def __call__(self, *arguments: Any):
        """The operands up to the activation, the capacity, the number of CTAs and the stream."""
        *given, capacity, max_ctas, stream = arguments
        self.launch_units((*given,), capacity, max_ctas, stream)

    @cute.jit
    def launch_units(self, given: Any, capacity: Int32, max_ctas: Int32, stream: cuda.CUstream, scale: Any = None):
        """Launch the kernel for the `given` operands, all up to the activation."""
        out = given[9]
        slabs = cute.ceil_div(out.shape[1], TILE_N)
        units = cute.ceil_div(out.shape[0], TILE_M) * slabs
        self.launch(Operands._make((*given, slabs, units, scale, None)), capacity, max_ctas, stream)

    @cute.jit
    def sort_tiles(self, data: Operands, scratch, threads: cutlass.Constexpr, thread: Int32):
        """Sort token tiles by the length of their lists, descending: a tile's rank is the number of longer lists."""
        tiles = data.sizes.shape[0] - 1
        lengths = cute.make_tensor(cute.recast_ptr(scratch, dtype=Int32), cute.make_layout(SORTED))
        if tiles <= SORTED:
            for i in cutlass.range(thread, tiles, threads, unroll=1):
                lengths[i] = data.sizes[i]
        cute.arch.sync_threads()
        if tiles <= SORTED:
            for i in cutlass.range(thread, tiles, threads, unroll=1):
                own, rank = lengths[i], Int32(0)
                for j in cutlass.range(tiles, unroll=8):
                    other = lengths[j]
                    rank += Int32((other > own) | ((other == own) & (j < i)))
                data.order[rank] = Uint16(i)
        cute.arch.sync_threads()

    @cute.jit
    def tile_and_part(self, data: Operands, unit: Int32):
        rank = unit // data.slabs
        tile = widen(data.order[rank]) if data.sizes.shape[0] - 1 <= SORTED else rank
        return tile, unit - rank * data.slabs

    @cute.jit
    def list_extent(self, data: Operands, tile: Int32):
        return data.sizes[tile], tile * data.neurons.shape[1]

    @cute.jit
    def chunk_start(self, data: Operands, tile: Int32, chunk: Int32):
        return data.chunks[tile, chunk]

    @cute.jit
    def row_index(self, data: Operands, at: Int32):
        return widen(cute.make_tensor(data.neurons.iterator, cute.make_layout(1 << 30))[at])

    @cute.jit
    def load_coefficient(self, data: Operands, at: Int32, product: Int32):
        """The entry, and the bits of its coefficient or 0 if the entry holds them; nothing here waits for the loads."""
        word, bits = Uint32(data.entries[at]), Uint32(0)
        if const_expr(not self.from_entries):
            source = data.coefficients.iterator
            if const_expr(self.products == 2):
                source = data.coefficients2.iterator if product == 1 else source
            # in backward two 16-bit values share a word, see sampled_grad.py
            values = cute.recast_ptr(source, dtype=Uint16) + at * data.coefficients.stride[0]
            bits = cute.make_tensor(values, cute.make_layout(1))[0].to(Uint32)
        return word, bits


def arguments(spec: Any) -> tuple[Any, ...]:
    """The fake arguments that stand for the operands; scales of columns follow e4m3 rows."""
    dtype, fp8 = operands.DTYPES[spec.dtype], spec.dtype == E4M3
    n, k, p = cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=16 if fp8 else 8), cute.sym_int32()
    b = cute.sym_int32()
    second = spec.products == 2
    of_bytes = operands.byte_rows(cutlass.Uint8, n, k), operands.dense(Float32, k)
    return (
        operands.strided(dtype, p) if spec.products > 0 else None,
        *(of_bytes if fp8 else (operands.rows(dtype, n, k),)),
        operands.strided(dtype, p) if second else None,
        operands.rows(dtype, n, k) if second else None,
        operands.bias(dtype),
        operands.dense(Int32, cute.sym_int32()),
        *operands.lists(b),
        operands.rows(dtype, cute.sym_int32(), k),
        operands.dense(Float32, cute.sym_int32()),
        *(Int32(1),) * 3,
    )
