"""Epilogue of the products that are sampled at the non-zeros of a hybrid gate, and its two forms: the up projection and
the gradients.

    up      up = x[m] . w_up[c] + bias[c], hidden = gate * up, and sums of |hidden|. The hidden state replaces the gate
            in the entries; training stores hidden and up in tensors of their own.
    grad    dh = dy[m] . w_down[c] + dl1 sign(h), d_gate = dh * up and d_up = dh * gate, each as two 16-bit values: the
            rounded one and its rounding error. If not gated, up is 1 and only d_gate is computed.

So it is for relu; for the other activations see activation.py. A unit of work is a tile of 128 tokens and up to 256
neurons of its list, see units.py. Once 256 threads have its sums, they go to shared memory, 128 neurons at a time, and
each entry reads its own; all other products are discarded. Entries are loaded before the sums are complete. Sums of
|hidden| are those of 128 neurons, so that their bits do not depend on how a list is cut into units.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr

from .. import geometry
from ..specs import E4M3
from . import operands
from .activation import add_l1, gradients, hidden
from .swizzle import swizzle_column
from .values import high_to_float, pack, split_value, warp_sum, widen

TILE_M, TILE_N = geometry.TOKEN_TILE, 256
# neurons whose sums are staged at a time, and added
STAGED = geometry.SUM_NEURONS
# chunks of the list in the longest unit and in a staged part
CHUNKS, STAGED_CHUNKS = TILE_N // geometry.CHUNK, STAGED // geometry.CHUNK
# threads that hold sums, and entries that each loads at a time
SAMPLERS, BATCH = 256, 4


class Operands(NamedTuple):
    """Operands in global memory."""

    x: Any
    w: Any
    entries: Any
    neurons: Any
    chunks: Any
    sizes: Any
    pointwise: Any  # the form's own operands


class Up(NamedTuple):
    """Operands of the up projection, None if absent."""

    bias: Any
    up: Any
    hidden: Any
    l1: Any
    activation: Any
    scales: Any  # of rows of x and w if these are e4m3, else None


class Grad(NamedTuple):
    """Operands of the gradients; `up` and `d_up` are None if not gated."""

    up: Any
    dl1: Any
    d_gate: Any
    d_up: Any
    activation: Any


class Loaded(NamedTuple):
    """Registers of a thread with data that it loads ahead of the sums."""

    entries: Any
    factors: Any  # one per entry, from `load_factor`
    bounds: Any  # where the entries of the unit's chunks begin, and their end


class Sampler:
    """The epilogue of a kernel, for a unit of so many `chunks`.

    The kernel's `s` has `sums`, [TILE_M, STAGED] staged for the entries, and `totals` by staged part and warp.
    """

    dtype: Any
    value: Any  # the type of x and w
    # methods of a family's kernel
    launch: Any  # (o, capacity, max_ctas, stream): launch it unless there are no tokens
    sync_sums: Any  # (): wait for all threads that hold sums
    stage_sums: Any  # (s, acc, staged, chunks, thread): store those of up to 128 neurons, the first or second
    # of a form, (o, at, value, entry, factor, tile, position): store what becomes of an entry by its product `value`;
    # returns what `store_totals` adds up
    apply_entry: Any

    @cute.jit
    def load_ahead(self, o: Operands, unit, chunks: cutlass.Constexpr, thread: Int32):
        """Load the bounds of a unit's chunks and a thread's first entries."""
        loaded = Loaded(
            entries=cute.make_rmem_tensor((BATCH,), Uint32),
            factors=cute.make_rmem_tensor((BATCH,), Float32),
            bounds=cute.make_rmem_tensor((CHUNKS + 1,), Int32),
        )
        for i in range_constexpr(chunks + 1):
            loaded.bounds[i] = o.chunks[unit.tile, cutlass.min(unit.start + i, o.chunks.shape[1] - 1)]
        self.load_entries(o, loaded, loaded.bounds[0] + thread, loaded.bounds[min(STAGED_CHUNKS, chunks)])
        return loaded

    @cute.jit
    def sample_unit(self, s, o: Operands, acc: cute.Tensor, loaded: Loaded, unit, chunks: cutlass.Constexpr, thread):
        """Apply the sums of a unit to its entries."""
        totals = []
        for staged in range_constexpr(-(-chunks // STAGED_CHUNKS)):
            totals.append(self.sample(s, o, acc, loaded, unit, staged, chunks, thread))
        self.store_totals(o, s, totals, unit, thread)

    @cute.jit
    def sample(self, s, o: Operands, acc, loaded, unit, staged: cutlass.Constexpr, chunks: cutlass.Constexpr, thread):
        """Stage up to 128 columns of the sums and apply each entry's own; the first entries are already loaded."""
        self.sync_sums()
        self.stage_sums(s, acc, staged, chunks, thread)
        self.sync_sums()
        # without a second chunk no entry is behind the middle
        first, middle, last = (loaded.bounds[min(staged * STAGED_CHUNKS + i, chunks)] for i in range(3))
        total = Float32(0.0)
        at = first + thread
        while at < last:
            for j in range_constexpr(BATCH):
                here = at + j * SAMPLERS
                if here < last:
                    entry = loaded.entries[j]
                    token, position = Int32((entry >> 6) & Uint32(127)), Int32(entry & Uint32(63))
                    position = position + geometry.CHUNK if here >= middle else position
                    value = s.sums[token * STAGED + swizzle_column(token, position)]
                    position += unit.start * geometry.CHUNK + staged * STAGED
                    total += self.apply_entry(o, here, value, entry, loaded.factors[j], unit.tile, position)
            at += BATCH * SAMPLERS
            self.load_entries(o, loaded, at, last)
        if const_expr((staged + 1) * STAGED_CHUNKS < chunks):
            self.load_entries(o, loaded, last + thread, loaded.bounds[min((staged + 2) * STAGED_CHUNKS, chunks)])
        return total

    @cute.jit
    def load_entries(self, o: Operands, loaded: Loaded, at: Int32, last: Int32):
        """Load a thread's next entries and their factors."""
        for j in range_constexpr(BATCH):
            here = at + j * SAMPLERS
            if here < last:
                loaded.entries[j] = Uint32(o.entries[here])
                loaded.factors[j] = self.load_factor(o, here)

    def load_factor(self, o, at):
        """Load what `apply_entry` needs of entry `at`."""
        return Float32(1.0)

    def store_totals(self, o, s, totals, unit, thread):
        """Store the sums of what `apply_entry` returned, by staged parts."""


class SampledUpForm(Sampler):
    """For one dtype, for training or not; sizes and strides stay symbolic. An empty bias stands for none."""

    def __init__(self, spec: Any):
        self.dtype = operands.DTYPES[spec.dtype]
        self.value = cutlass.Float8E4M3FN if spec.dtype == E4M3 else self.dtype
        self.training = spec.training

    @cute.jit
    def __call__(self, *arguments: Any):
        """x, w, the bias, the hybrid gate, the rest of `Up`, the capacity, the number of CTAs and the stream."""
        x, w, others, scales = operands.factors(arguments)
        bias, entries, neurons, chunks, sizes, *rest, capacity, max_ctas, stream = others
        own = Up(*[bias, *rest, scales])
        self.launch(Operands(x, w, entries, neurons, chunks, sizes, own), capacity, max_ctas, stream)

    @cute.jit
    def apply_entry(self, o: Operands, at: Int32, value: Float32, entry: Uint32, factor: Float32, tile, position):
        """Store the hidden state of one entry from its product `value`; returns |hidden|."""
        own = o.pointwise
        if const_expr(own.scales is not None):
            token = tile * TILE_M + Int32((entry >> 6) & Uint32(127))
            value = value * own.scales.w[widen(o.neurons[tile, position])] * own.scales.x[token]
        if own.bias.shape[0] > 0:
            value += own.bias[widen(o.neurons[tile, position])].to(Float32)
        h = hidden(high_to_float(entry, self.dtype), value, own.activation)
        if const_expr(self.training):
            own.up[at] = value.to(self.dtype)
            own.hidden[at] = h.to(self.dtype)
        else:
            o.entries[at] = Int32((pack(Float32(0.0), h, self.dtype) & Uint32(0xFFFF0000)) | (entry & Uint32(0xFFFF)))
        return cute.arch.fmax(h, -h)

    @cute.jit
    def store_totals(self, o: Operands, s, totals, unit, thread: Int32):
        """Store the sums of |hidden|, each added in a fixed order."""
        warps = SAMPLERS // 32
        for i in range_constexpr(len(totals)):
            total = warp_sum(totals[i])
            if thread & 31 == 0:
                s.totals[i * warps + thread // 32] = total
        self.sync_sums()
        if thread < len(totals):
            everything = Float32(0.0)
            for warp in range_constexpr(warps):
                everything += s.totals[thread * warps + warp]
            o.pointwise.l1[unit.tile, unit.start // STAGED_CHUNKS + thread] = everything


class SampledGradForm(Sampler):
    """For one dtype, gated or not."""

    def __init__(self, spec: Any):
        self.dtype = self.value = operands.DTYPES[spec.dtype]
        self.gated = spec.gated

    @cute.jit
    def __call__(self, *arguments: Any):
        """dy, w_down, the hybrid gate, `Grad`, the number of CTAs and the stream."""
        *layer, up, dl1, d_gate, d_up, activation, max_ctas, stream = arguments
        o = Operands(*[*layer, Grad(up, dl1, d_gate, d_up, activation)])
        self.launch(o, d_gate.shape[0], max_ctas, stream)

    @cute.jit
    def load_factor(self, o: Operands, at: Int32):
        """The up projection, 1 if not gated."""
        if const_expr(self.gated):
            return o.pointwise.up[at].to(Float32)
        return Float32(1.0)

    @cute.jit
    def apply_entry(self, o: Operands, at: Int32, value: Float32, entry: Uint32, factor: Float32, tile, position):
        """Store the gradients of one entry."""
        own = o.pointwise
        gate = high_to_float(entry, self.dtype)
        dh = add_l1(value, own.dl1[0], hidden(gate, factor, own.activation))
        d_gate, d_up = gradients(dh, gate, factor, own.activation)
        own.d_gate[at] = Int32(split_value(d_gate, self.dtype))
        if const_expr(self.gated):
            own.d_up[at] = Int32(split_value(d_up, self.dtype))
        return Float32(0.0)


def up_arguments(spec: Any) -> tuple[Any, ...]:
    """The fake arguments that stand for the operands of the up projection; scales follow e4m3 rows."""
    dtype, m = operands.DTYPES[spec.dtype], cute.sym_int32()
    n, p, b = cute.sym_int32(divisibility=8), cute.sym_int32(), cute.sym_int32()
    k = cute.sym_int32(divisibility=16 if spec.dtype == E4M3 else 8)
    return (
        *operands.scaled_rows(spec.dtype, m, k),
        *operands.scaled_rows(spec.dtype, n, k),
        operands.bias(dtype),
        operands.dense(Int32, cute.sym_int32()),
        *operands.lists(b),
        operands.dense(dtype, p) if spec.training else None,
        operands.dense(dtype, p) if spec.training else None,
        operands.dense(Float32, b, cute.sym_int32(), align=4),
        *(Int32(1),) * 3,
    )


def grad_arguments(spec: Any) -> tuple[Any, ...]:
    """The fake arguments that stand for the operands of the gradients."""
    dtype = operands.DTYPES[spec.dtype]
    n, k, p = cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8), cute.sym_int32()
    return (
        operands.rows(dtype, cute.sym_int32(), k),
        operands.rows(dtype, n, k),
        operands.dense(Int32, cute.sym_int32()),
        *operands.lists(cute.sym_int32()),
        operands.dense(dtype, p) if spec.gated else None,
        operands.dense(Float32, 1, align=4),
        operands.dense(Int32, p),
        operands.dense(Int32, p) if spec.gated else None,
        *(Int32(1),) * 2,
    )
