"""Weight gradients by tiles of 64 neurons of similar popularity: dw_gate = d_gate^T x, dw_up = d_up^T x,
dw_down = h^T dy, over the tokens that fire at least one of the tile's neurons: the operands, the units of work and the
coefficients, for the kernels of all families.

A unit of work is a neuron tile, a slab of 256 columns and one of x and dy, the most popular neurons first; its inner
dimension is the tile's list of tokens. Sums are flushed after `longest` list positions.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from .. import geometry
from . import operands

TILE_M, TILE_N = geometry.NEURON_TILE, 256


class Operands(NamedTuple):
    """Operands in global memory, None if absent, and the number of slabs and units."""

    x: Any
    dy: Any
    order: Any
    sizes: Any
    tiles: Any
    starts: Any
    packed: Any
    tokens: Any
    dw_gate: Any
    dw_up: Any
    dw_down: Any
    db_gate: Any
    db_up: Any
    main_gate: Any  # fp32 sums that the gradients are added to; empty: they are stored instead
    main_up: Any
    main_down: Any
    flushed: Any  # partial sums of long lists
    partial: Any  # sums of pieces of lists, empty if none may be cut
    arrivals: Any  # zeros: pieces that are stored, by list, part and warp
    slabs: Any
    units: Any
    pieces: Any = None  # in shared memory: list and index of each piece, the longest first
    piece: Any = None  # positions of a piece


class WeightGradForm:
    """For one dtype, gated or not, with bias gradients or not; sizes stay symbolic."""

    products = 1

    def __init__(self, spec: Any):
        self.dtype = operands.DTYPES[spec.dtype]
        self.gated, self.has_bias = spec.gated, spec.bias
        self.longest = geometry.LONGEST_SUM[spec.dtype]

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        dy: cute.Tensor,
        order: cute.Tensor,
        sizes: cute.Tensor,
        tiles: cute.Tensor,
        starts: cute.Tensor,
        packed: cute.Tensor,
        tokens: cute.Tensor,
        dw_gate: cute.Tensor,
        dw_up: cute.Tensor | None,
        dw_down: cute.Tensor,
        db_gate: cute.Tensor | None,
        db_up: cute.Tensor | None,
        main_gate: cute.Tensor,
        main_up: cute.Tensor | None,
        main_down: cute.Tensor,
        flushed: cute.Tensor,
        partial: cute.Tensor,
        arrivals: cute.Tensor,
        capacity: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        slabs = cute.ceil_div(x.shape[1], TILE_N)
        units = cute.ceil_div(order.shape[0], TILE_M) * self.parts(slabs)
        data = Operands(
            x, dy, order, sizes, tiles, starts, packed, tokens, dw_gate, dw_up, dw_down, db_gate, db_up, main_gate,
            main_up, main_down, flushed, partial, arrivals, slabs, units,
        )  # fmt: skip
        self.launch(data, capacity, max_ctas, stream)

    def launch(self, data, capacity, max_ctas, stream):
        """Launch the kernel."""
        raise NotImplementedError

    def parts(self, slabs):
        """Units of a neuron tile."""
        return 2 * slabs

    @cute.jit
    def tile_and_part(self, data, unit):
        """Neuron tile and part: the slabs of x, those of dy and what else a kernel has."""
        parts = self.parts(data.slabs)
        tile = unit // parts
        return tile, unit - tile * parts

    @cute.jit
    def list_extent(self, data, tile):
        return data.tiles[tile, 3], data.tiles[tile, 1]

    @cute.jit
    def chunk_start(self, data, tile, chunk):
        return data.starts[tile, chunk]

    @cute.jit
    def row_index(self, data, at):
        return data.tokens[at]

    @cute.jit
    def load_coefficient(self, data, at, product):
        word = Uint64(data.packed[at])
        return Uint32(word & Uint64(0xFFFFFFFF)), Uint32(word >> 32)


def arguments(spec: Any) -> tuple[Any, ...]:
    """The fake arguments that stand for the operands."""
    dtype = operands.DTYPES[spec.dtype]
    m, n, k, p = cute.sym_int32(), cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8), cute.sym_int32()
    r = cute.sym_int32()
    # either gradients or sums are empty
    stored, added = cute.sym_int32(), cute.sym_int32()
    return (
        operands.rows(dtype, m, k),
        operands.rows(dtype, m, k),
        operands.vector(Int32, n),
        operands.vector(Int32, cute.sym_int32(), align=4),
        operands.matrix(Int32, r, 5),
        operands.matrix(Int32, r, cute.sym_int32()),
        operands.vector(Int64, p),
        operands.vector(Int32, p),
        operands.rows(dtype, stored, k),
        operands.rows(dtype, stored, k) if spec.gated else None,
        operands.rows(dtype, stored, k),
        operands.vector(dtype, n) if spec.bias else None,
        operands.vector(dtype, n) if spec.bias and spec.gated else None,
        operands.rows(Float32, added, k),
        operands.rows(Float32, added, k) if spec.gated else None,
        operands.rows(Float32, added, k),
        operands.vector(Float32, cute.sym_int32()),
        operands.vector(Float32, cute.sym_int32()),
        operands.vector(Int32, cute.sym_int32()),
        Int32(1),
        Int32(1),
    )
