"""The hybrid format of what sampled_gate.py found: lists without the neurons that no token fires, and their entries.

One CTA per token tile, 32 warps:

    rank     prefix sums over the listed neurons: those with non-zeros get the next rank, and the entries of all come
             behind each other. The first neuron of a chunk of 64 ranks says where the chunk's entries begin.
    move     a warp copies the entries of 16 neurons, which are contiguous, and puts the rank in its chunk in place of
             the neuron.

An entry's place depends on the pattern alone: by chunk, in it by neuron, and by lane of the thread that computed it.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, Uint16, Uint32, range_constexpr
from cutlass.memory import SmemAllocator

from . import feasible, geometry
from .common import launch, operands
from .common.values import prefix_sum, widen
from .specs import CollectSpec

TOKENS, CHUNK, RUN = geometry.TOKEN_TILE, geometry.CHUNK, geometry.LISTED_RUN
WARPS = 32
THREADS = 32 * WARPS


class Found(NamedTuple):
    """What sampled_gate.py found."""

    listed: Any
    sizes: Any
    counts: Any
    staged: Any


class Results(NamedTuple):
    """The hybrid format."""

    entries: Any
    neurons: Any
    chunks: Any
    sizes: Any


class Views(NamedTuple):
    """Views of a CTA's shared memory."""

    ranks: Any  # [N] by place in the list
    runs: Any  # [N / RUN] entries before those of each run of neurons
    alive: Any  # [WARPS] sums by warp
    counted: Any
    last: Any  # [1] the last neuron that fires


class Collect:
    """The only variant; sizes stay symbolic."""

    @cute.jit
    def __call__(
        self,
        listed: cute.Tensor,
        listed_sizes: cute.Tensor,
        counts: cute.Tensor,
        staged: cute.Tensor,
        entries: cute.Tensor,
        neurons: cute.Tensor,
        chunks: cute.Tensor,
        sizes: cute.Tensor,
        size: Int32,
        stream: cuda.CUstream,
    ):
        """`size`: the number of all neurons; each token tile has room for entries of all its gates."""

        @cute.struct
        class Shared:
            ranks: cute.struct.MemRange[Uint16, geometry.MAX_NEURONS]
            runs: cute.struct.MemRange[Int32, geometry.MAX_NEURONS // RUN + 1]
            alive: cute.struct.MemRange[Int32, WARPS]
            counted: cute.struct.MemRange[Int32, WARPS]
            last: cute.struct.MemRange[Int32, 1]

        self.shared = feasible.check_shared_memory(Shared)
        if listed.shape[0] > 0:
            self.kernel(
                Found(listed, listed_sizes, counts, staged), Results(entries, neurons, chunks, sizes), size
            ).launch(grid=(listed.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=launch.overlaps())

    @cute.kernel
    def kernel(self, found: Found, results: Results, size: Int32):
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile = cute.arch.block_idx()[0]
        shared = SmemAllocator().allocate(self.shared)
        s = Views(
            ranks=shared.ranks.get_tensor(cute.make_layout(geometry.MAX_NEURONS)),
            runs=shared.runs.get_tensor(cute.make_layout(geometry.MAX_NEURONS // RUN + 1)),
            alive=shared.alive.get_tensor(cute.make_layout(WARPS)),
            counted=shared.counted.get_tensor(cute.make_layout(WARPS)),
            last=shared.last.get_tensor(cute.make_layout(1)),
        )
        launch.griddepcontrol_wait()
        launch.griddepcontrol_launch_dependents()
        listed = found.sizes[tile]
        start = tile * TOKENS * size
        alive, total = self.rank(s, found, results, tile, listed, start, thread, warp, lane)
        self.finish_lists(s, results, tile, alive, start + total, thread)
        self.move(s, found, results, tile, listed, start, warp, lane)

    @cute.jit
    def rank(self, s, found, results, tile, listed, start, thread, warp, lane):
        """Ranks of the listed neurons, and where their entries go; returns the numbers of both."""
        alive, total = Int32(0), Int32(0)
        for first in cutlass.range(0, listed, THREADS, unroll=1):
            at = first + thread
            count = widen(found.counts[tile, at]) if at < listed else 0
            fires = Int32(count > 0)
            rank, offset = alive + prefix_sum(fires, lane), total + prefix_sum(count, lane)
            if lane == 31:
                s.alive[warp] = rank + fires - alive
                s.counted[warp] = offset + count - total
            cute.arch.sync_threads()
            for w in range_constexpr(WARPS):
                here, counted = s.alive[w], s.counted[w]
                rank += here if w < warp else 0
                offset += counted if w < warp else 0
                alive += here
                total += counted
            if at < listed:
                s.ranks[at] = Uint16(rank)
                if at % RUN == 0:
                    s.runs[at // RUN] = offset
                if count > 0:
                    neuron = found.listed[tile, at]
                    results.neurons[tile, rank] = neuron
                    if rank % CHUNK == 0:
                        results.chunks[tile, rank // CHUNK] = start + offset
                    if rank == alive - 1:
                        s.last[0] = widen(neuron)
            cute.arch.sync_threads()
        if thread == 0:
            s.runs[cute.ceil_div(listed, RUN)] = total
        cute.arch.sync_threads()
        return alive, total

    @cute.jit
    def finish_lists(self, s, results, tile, alive, end, thread):
        """Repeat the last neuron up to a whole chunk, and let all other chunks begin at the end."""
        here = cute.ceil_div(alive, CHUNK)
        if alive + thread < here * CHUNK:
            results.neurons[tile, alive + thread] = Int16(s.last[0])
        for c in cutlass.range(here + thread, results.chunks.shape[1], THREADS, unroll=1):
            results.chunks[tile, c] = end
        if thread == 0:
            results.sizes[tile] = alive
            if tile == 0:
                # readers of the pattern compare this with a capacity
                results.sizes[results.chunks.shape[0]] = Int32(0)

    @cute.jit
    def move(self, s, found, results, tile, listed, start, warp, lane):
        """Copy the entries of the listed neurons, a run of them per warp."""
        for run in cutlass.range(warp, cute.ceil_div(listed, RUN), WARPS, unroll=1):
            first = s.runs[run]
            source = found.staged.iterator + (Int64(tile) * found.listed.shape[1] + run * RUN) * TOKENS
            words = cute.make_tensor(source, cute.make_layout(RUN * TOKENS))
            for i in cutlass.range(lane, s.runs[run + 1] - first, 32, unroll=4):
                word = Uint32(words[i])
                rank = Uint32(widen(s.ranks[run * RUN + Int32(word & Uint32(RUN - 1))]))
                token = (word & Uint32(0xFFFF)) // RUN
                entry = (word & Uint32(0xFFFF0000)) | token * CHUNK | (rank & Uint32(CHUNK - 1))
                results.entries[start + first + i] = Int32(entry)


def signature(spec: CollectSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    b, places = cute.sym_int32(), cute.sym_int32(divisibility=64)
    arguments = (
        operands.matrix(Int16, b, places),
        operands.vector(Int32, cute.sym_int32(), align=4),
        operands.matrix(Int16, b, places),
        operands.vector(Int32, cute.sym_int32()),
        operands.vector(Int32, cute.sym_int32()),
        *operands.lists(b),
        Int32(1),
    )
    return Collect(), arguments
