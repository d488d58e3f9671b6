"""Transpose the hybrid gate: for each tile of 64 neurons, most popular first, a list of tokens, and coefficients that
refer to list positions.

A coefficient packs h, d_gate and d_up in 64 bits, for products over tokens. Three launches:

    count   one CTA per token tile: count the tile's entries and tokens of each neuron tile.
    scan    one warp per neuron tile: prefix sums of these counts over the token tiles.
    place   one CTA per token tile: count again, by token; prefix sums over neuron tiles and tokens give the positions.

`count` and `place` count the entries of a token and neuron tile in a byte, as there are at most 64; the bytes of four
tokens share a word. In `place` the word then holds prefix sums over its tokens, and an atomic add of one allocates the
next position: entries of one token and neuron tile are in any order. Coefficients are staged in shared memory if they
fit. `window` neuron tiles are processed at a time. If a batch exceeds the pool it has no entries, and all three return.

A neuron tile with few entries has its list twice; the second time with the coefficients' rounding errors.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint16, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .. import feasible, geometry
from ..common import launch, operands
from ..common.activation import hidden, power
from ..common.byte_counters import PITCH, count_token, thread_index
from ..common.values import byte_sum, high_to_float, low_to_float, prefix_sum, split_value, widen
from ..specs import PORTABLE, SM90, TransposeSpec

TOKENS = geometry.TOKEN_TILE
CHUNK = geometry.CHUNK
TILE = geometry.NEURON_TILE
WARPS = 32
THREADS = 32 * WARPS
SCAN_WARPS = 4
# by family: most neurons; neuron tiles that are processed at a time; words of shared memory for slots, counters and
# staged coefficients
SIZES = {SM90: (geometry.MAX_NEURONS, 256, 54272), PORTABLE: (geometry.PORTABLE_UNION_NEURONS, 128, 24064)}
# runs of 32 entries whose loads are in flight together
BATCHES = 4
# `info` of four tokens and a neuron tile: entries before, tokens before, and which of the four have entries
TOKENS_SHIFT, FLAGS_SHIFT = 14, 22


class Hybrid(NamedTuple):
    """The non-zeros by token tile, and each neuron's rank by popularity."""

    entries: Any
    neurons: Any
    chunks: Any
    sizes: Any
    slot: Any


class Coefficients(NamedTuple):
    """Values of each entry; `up` and `d_up` are None if not gated."""

    up: Any
    d_gate: Any
    d_up: Any


class ByNeuron(NamedTuple):
    """The results, by neuron tile."""

    groups: Any
    tiles: Any
    starts: Any
    packed: Any
    tokens: Any


class Views(NamedTuple):
    """Views of a CTA's shared memory; [window] is by neuron tile."""

    ends: Any  # [C + 1] index of each chunk's first entry
    slots: Any  # [U] rank by popularity of each listed neuron
    bases: Any  # [window] this token tile's first position in `packed`
    ordinals: Any  # [window] this token tile's first position in the list of tokens
    lists: Any  # [window] where the list of tokens begins
    again: Any  # [window] distance from a coefficient to its rounding error, 0 if there are none
    again_tokens: Any  # [window] distance from a token to its second occurrence in the list
    offsets: Any  # [window + 1] entries of this token tile in earlier neuron tiles
    counters: Any  # [window, PITCH] bytes by token
    info: Any  # [window, PITCH] see TOKENS_SHIFT
    staged: Any  # [room] coefficients for `packed`


class Transpose:
    """For one dtype; if not `gated`, up is 1 and d_up is zero."""

    def __init__(self, spec: TransposeSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        self.gated = spec.gated
        self.portable = spec.family == PORTABLE
        self.neurons, self.window, self.arena = SIZES[spec.family]
        self.chunks = self.neurons // CHUNK

    @cute.jit
    def __call__(self, *arguments: Any):
        """The hybrid gate, `Coefficients`, the slots of neurons, `ByNeuron`, the activation and the stream."""
        entries, neurons, chunks, sizes, up, d_gate, d_up, slot, *lists, activation, stream = arguments

        @cute.struct
        class Shared:
            ends: cute.struct.MemRange[Int32, self.chunks + 1]
            bases: cute.struct.MemRange[Int32, self.window]
            ordinals: cute.struct.MemRange[Int32, self.window]
            lists: cute.struct.MemRange[Int32, self.window]
            again: cute.struct.MemRange[Int32, self.window]
            again_tokens: cute.struct.MemRange[Int32, self.window]
            offsets: cute.struct.MemRange[Int32, self.window + 1]
            arena: cute.struct.Align[cute.struct.MemRange[Uint32, self.arena], 16]

        # the slots of all neurons, counters and info fit
        assert self.neurons // 2 + 2 * self.window * PITCH < self.arena
        self.shared = (feasible.check_portable_memory if self.portable else feasible.check_shared_memory)(Shared)
        hybrid = Hybrid(entries, neurons, chunks, sizes, slot)
        results = ByNeuron(*lists)
        capacity = d_gate.shape[0]
        if chunks.shape[0] > 0:
            launch.start(self.count(hybrid, results.groups, capacity), chunks.shape[0], THREADS, stream, ctas_per_sm=1)
        scan = self.scan(sizes, results.groups, results.tiles, capacity)
        launch.start(scan, cute.ceil_div(results.tiles.shape[0], SCAN_WARPS), 32 * SCAN_WARPS, stream)
        if chunks.shape[0] > 0:
            place = self.place(hybrid, Coefficients(up, d_gate, d_up), results, activation)
            launch.start(place, chunks.shape[0], THREADS, stream, ctas_per_sm=1)

    # ---- the three kernels ----

    @cute.kernel
    def count(self, hybrid: Hybrid, groups: cute.Tensor, capacity: Int32):
        at = thread_index()
        s, _ = self.views(SmemAllocator().allocate(self.shared), hybrid.slot.shape[0])
        launch.wait()
        if hybrid.sizes[hybrid.chunks.shape[0]] <= capacity:
            listed = self.load_list(s, hybrid, at)
            total = groups.shape[0]
            for first in cutlass.range(0, total, self.window, unroll=1):
                here = cutlass.min(total - first, Int32(self.window))
                self.clear_counters(s, here, at)
                cute.arch.sync_threads()
                self.count_entries(s, hybrid.entries, listed, first, here, at)
                cute.arch.sync_threads()
                for r in cutlass.range(at.warp, here, WARPS, unroll=1):
                    own = self.totals(Uint32(s.counters[r * PITCH + at.lane]))
                    own = Int32(cute.arch.warp_redux_sync(own, "add"))
                    if at.lane == 0:
                        groups[first + r, at.tile, 0] = own & 0xFFFF
                        groups[first + r, at.tile, 1] = own >> 16
                cute.arch.sync_threads()

    @cute.kernel
    def scan(self, sizes: cute.Tensor, groups: cute.Tensor, tiles: cute.Tensor, capacity: Int32):
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        r = cute.arch.block_idx()[0] * SCAN_WARPS + warp
        token_tiles = groups.shape[1]
        launch.wait()
        if r < tiles.shape[0] and sizes[token_tiles] <= capacity:
            entries, tokens = Int32(0), Int32(0)
            own = cute.make_rmem_tensor((2, BATCHES), Int32)
            for first in cutlass.range(0, token_tiles, 32 * BATCHES, unroll=1):
                for i in range_constexpr(BATCHES):
                    b = first + 32 * i + lane
                    for j in range_constexpr(2):
                        own[j, i] = groups[r, b, j] if b < token_tiles else 0
                for i in range_constexpr(BATCHES):
                    b = first + 32 * i + lane
                    entries_before = entries + prefix_sum(own[0, i], lane)
                    tokens_before = tokens + prefix_sum(own[1, i], lane)
                    if b < token_tiles:
                        groups[r, b, 0] = entries_before
                        groups[r, b, 1] = tokens_before
                    entries = cute.arch.shuffle_sync(entries_before + own[0, i], 31)
                    tokens = cute.arch.shuffle_sync(tokens_before + own[1, i], 31)
            if lane == 0:
                copies = Int32(2) if entries <= geometry.RARE_ENTRIES else Int32(1)
                tiles[r, 2] = entries * copies
                tiles[r, 3] = tokens * copies
                tiles[r, 4] = copies

    @cute.kernel
    def place(self, hybrid: Hybrid, given: Coefficients, results: ByNeuron, activation: Int32):
        at = thread_index()
        s, room = self.views(SmemAllocator().allocate(self.shared), hybrid.slot.shape[0])
        launch.griddepcontrol_wait()
        if hybrid.sizes[hybrid.chunks.shape[0]] <= given.d_gate.shape[0]:
            listed = self.load_list(s, hybrid, at)
            total = results.tiles.shape[0]
            for first in cutlass.range(0, total, self.window, unroll=1):
                here = cutlass.min(total - first, Int32(self.window))
                self.clear_counters(s, here, at)
                cute.arch.sync_threads()
                self.count_entries(s, hybrid.entries, listed, first, here, at)
                if at.warp * 32 < here:
                    self.compute_bases(s, results, first, here, at)
                cute.arch.sync_threads()
                for r in cutlass.range(at.warp, here, WARPS, unroll=1):
                    self.write_tokens(s, results, first, r, at)
                cute.arch.sync_threads()
                fits = s.offsets[here] <= room
                self.write_coefficients(
                    s, hybrid.entries, given, results.packed, listed, first, here, fits, activation, at
                )
                cute.arch.sync_threads()
                if fits:
                    self.copy_out(s, results.packed, here, at)
                    cute.arch.sync_threads()

    # ---- count the entries of a token tile by neuron tile and token ----

    @cute.jit
    def load_list(self, s, hybrid, at):
        """Load the listed neurons' ranks and the chunks' bounds to shared memory; return the number of chunks."""
        size = hybrid.sizes[at.tile]
        count = cute.ceil_div(size, CHUNK)
        for i in cutlass.range(at.thread, count + 1, THREADS, unroll=1):
            s.ends[i] = hybrid.chunks[at.tile, i]
        # neurons, then their ranks
        own = cute.make_rmem_tensor((BATCHES,), Int32)
        for first in cutlass.range(at.thread, size, THREADS * BATCHES, unroll=1):
            for j in range_constexpr(BATCHES):
                i = first + j * THREADS
                own[j] = widen(hybrid.neurons[at.tile, i]) if i < size else 0
            for j in range_constexpr(BATCHES):
                own[j] = hybrid.slot[own[j]]
            for j in range_constexpr(BATCHES):
                i = first + j * THREADS
                if i < size:
                    s.slots[i] = Uint16(own[j])
        return count

    @cute.jit
    def clear_counters(self, s, here, at):
        for i in cutlass.range(at.thread, here * PITCH, THREADS, unroll=1):
            s.counters[i] = Uint32(0)

    @cute.jit
    def warp_range(self, s, listed, warp):
        """The entries of a warp: index and chunk of the first, and the end."""
        start, end = s.ends[0], s.ends[listed]
        step = cute.ceil_div(cute.ceil_div(end - start, 32), WARPS) * 32
        first = start + warp * step
        # the last chunk that begins at or before the first entry
        low, high = Int32(0), listed
        while high - low > 1:
            middle = (low + high) // 2
            below = s.ends[middle] <= first
            low = middle if below else low
            high = high if below else middle
        return first, low, cutlass.min(first + step, end)

    @cute.jit
    def count_entries(self, s, entries, listed, window, here, at):
        """Count the entries of `here` neuron tiles from `window` on, by token."""
        first, chunk, end = self.warp_range(s, listed, at.warp)
        loaded = cute.make_rmem_tensor((BATCHES,), Uint32)
        for base in cutlass.range(first, end, 32 * BATCHES, unroll=1):
            for i in range_constexpr(BATCHES):
                p = base + 32 * i + at.lane
                loaded[i] = Uint32(entries[p]) if p < end else Uint32(0)
            for i in range_constexpr(BATCHES):
                if base + 32 * i < end:
                    p = base + 32 * i + at.lane
                    chunk_end = s.ends[chunk + 1]
                    if p < end:
                        r, _, token = self.decode(s, loaded[i], chunk + Int32(p >= chunk_end), window)
                        if r >= 0 and r < here:
                            count_token(s.counters, r, token)
                    # a chunk has at least 64 entries, unless it is the last one
                    chunk += Int32(base + 32 * i + 32 >= chunk_end)

    @cute.jit
    def decode(self, s, entry, chunk, window):
        """Neuron tile in the window, neuron in the tile and token in the token tile of an entry."""
        slot = widen(s.slots[chunk * CHUNK + Int32(entry & (CHUNK - 1))])
        return slot // TILE - window, slot % TILE, Int32((entry >> 6) & (TOKENS - 1))

    @cute.jit
    def totals(self, word):
        """Sum of four counters, and in the upper half the number of non-zero ones."""
        return byte_sum(word) | (Int32(cute.arch.popc(self.nonzero_bytes(word))) << 16)

    def nonzero_bytes(self, word):
        """Bit 7 of each byte that is not zero; bytes are at most 64."""
        return (word + Uint32(0x7F7F7F7F)) & Uint32(0x80808080)

    # ---- positions ----

    @cute.jit
    def compute_bases(self, s, results, window, here, at):
        """Compute positions of 32 of the window's neuron tiles by one warp; the first token tile's CTA stores them."""
        groups, tiles, starts = results.groups, results.tiles, results.starts
        entries, tokens, offset = Int32(0), Int32(0), Int32(0)
        for r in cutlass.range(at.lane, window + at.warp * 32, 32, unroll=4):
            entries += tiles[r, 2]
            tokens += tiles[r, 3]
            offset += self.entries_of(groups, tiles, r, at.tile) if r >= window else 0
        entries = Int32(cute.arch.warp_redux_sync(entries, "add"))
        tokens = Int32(cute.arch.warp_redux_sync(tokens, "add"))
        offset = Int32(cute.arch.warp_redux_sync(offset, "add"))
        inside = at.warp * 32 + at.lane
        r, exists = window + inside, inside < here
        own = tiles[r, 2] if exists else 0
        own_tokens = tiles[r, 3] if exists else 0
        here_only = self.entries_of(groups, tiles, r, at.tile) if exists else 0
        offset += prefix_sum(here_only, at.lane)
        base = entries + prefix_sum(own, at.lane)
        base_tokens = tokens + prefix_sum(own_tokens, at.lane)
        if exists:
            s.bases[inside] = base + groups[r, at.tile, 0]
            s.ordinals[inside] = groups[r, at.tile, 1]
            s.lists[inside] = base_tokens
            s.offsets[inside] = offset
            if inside == here - 1:
                s.offsets[here] = offset + here_only
            if at.tile == 0:
                tiles[r, 0] = base
                tiles[r, 1] = base_tokens
                starts[r, cute.ceil_div(own_tokens, 64)] = base + own
            twice = tiles[r, 4] == 2
            s.again[inside] = own // 2 if twice else 0
            s.again_tokens[inside] = own_tokens // 2 if twice else 0

    @cute.jit
    def entries_of(self, groups, tiles, r, tile):
        """Entries of a neuron tile in this token tile, from the prefix sums over token tiles."""
        after = groups[r, tile + 1, 0] if tile + 1 < groups.shape[1] else tiles[r, 2] // tiles[r, 4]
        return after - groups[r, tile, 0]

    @cute.jit
    def write_tokens(self, s, results, window, r, at):
        """Write this token tile's part of a neuron tile's list, four tokens per lane; prepare counters and info."""
        starts, tokens = results.starts, results.tokens
        four = r * PITCH + at.lane
        word = Uint32(s.counters[four])
        before = prefix_sum(self.totals(word), at.lane)
        entries_before, tokens_before = before & 0xFFFF, before >> 16
        flags = self.nonzero_bytes(word)
        info = Uint32(entries_before) | (Uint32(tokens_before) << TOKENS_SHIFT)
        position, ordinal, first = s.bases[r] + entries_before, s.ordinals[r] + tokens_before, s.lists[r]
        again, again_tokens = s.again[r], s.again_tokens[r]
        for j in range_constexpr(4):
            present = (flags >> (8 * j + 7)) & 1
            info = info | (present << (FLAGS_SHIFT + j))
            if present != 0:
                tokens[first + ordinal] = at.tile * TOKENS + at.lane * 4 + j
                if ordinal & 63 == 0:
                    starts[window + r, ordinal >> 6] = position
                if again > 0:
                    repeated = ordinal + again_tokens
                    tokens[first + repeated] = at.tile * TOKENS + at.lane * 4 + j
                    if repeated & 63 == 0:
                        starts[window + r, repeated >> 6] = position + again
            ordinal += Int32(present)
            position += Int32((word >> (8 * j)) & 0xFF)
        s.info[four] = info
        # bytes 1 to 3: entries of earlier tokens, at most 192
        s.counters[four] = word * Uint32(0x01010100)

    @cute.jit
    def write_coefficients(self, s, entries, given, packed, listed, window, here, fits, activation, at):
        """Write the coefficients of the window's neuron tiles, to shared memory if they fit there."""
        first, chunk, end = self.warp_range(s, listed, at.warp)
        loaded = cute.make_rmem_tensor((4, BATCHES), Uint32)
        # neuron tile or -1, neuron, h, token, counters of four tokens
        tiles, neurons = cute.make_rmem_tensor((BATCHES,), Int32), cute.make_rmem_tensor((BATCHES,), Int32)
        hiddens = cute.make_rmem_tensor((BATCHES,), Uint32)
        tokens, counts = cute.make_rmem_tensor((BATCHES,), Int32), cute.make_rmem_tensor((BATCHES,), Uint32)
        loaded.fill(0)
        for base in cutlass.range(first, end, 32 * BATCHES, unroll=1):
            for i in range_constexpr(BATCHES):
                p = base + 32 * i + at.lane
                if p < end:
                    loaded[0, i] = Uint32(entries[p])
                    loaded[1, i] = Uint32(given.d_gate[p])
                    if const_expr(self.gated):
                        loaded[2, i] = Uint32(given.d_up[p])
                        loaded[3, i] = Uint32(widen(given.up[p].bitcast(Uint16)))
            for i in range_constexpr(BATCHES):
                tiles[i] = Int32(-1)
                if base + 32 * i < end:
                    p = base + 32 * i + at.lane
                    chunk_end = s.ends[chunk + 1]
                    if p < end:
                        r, neuron, token = self.decode(s, loaded[0, i], chunk + Int32(p >= chunk_end), window)
                        if r >= 0 and r < here:
                            tiles[i], tokens[i] = r, token
                            neurons[i] = neuron
                            hiddens[i] = self.hidden_bits(loaded[0, i], loaded[3, i], activation)
                            counts[i] = count_token(s.counters, r, token)
                    chunk += Int32(base + 32 * i + 32 >= chunk_end)
            for i in range_constexpr(BATCHES):
                r, token = tiles[i], tokens[i]
                if r >= 0:
                    info = Uint32(s.info[r * PITCH + (token >> 2)])
                    earlier = (info >> FLAGS_SHIFT) & ((Uint32(1) << Uint32(token & 3)) - 1)
                    ordinal = s.ordinals[r] + Int32((info >> TOKENS_SHIFT) & 0xFF) + Int32(cute.arch.popc(earlier))
                    position = Int32(info & ((1 << TOKENS_SHIFT) - 1))
                    position += Int32((counts[i] >> Uint32((token & 3) * 8)) & 0xFF)
                    dg, du, h = loaded[1, i], loaded[2, i], hiddens[i]
                    word = self.coefficient(ordinal, neurons[i], h << 16, (dg & Uint32(0xFFFF)) | (du << 16))
                    if s.again[r] > 0:
                        errors = (dg >> 16) | (du & Uint32(0xFFFF0000))
                        packed[s.bases[r] + s.again[r] + position] = self.coefficient(
                            ordinal + s.again_tokens[r], neurons[i], h & Uint32(0xFFFF0000), errors
                        )
                    if fits:
                        s.staged[s.offsets[r] + position] = word
                    else:
                        packed[s.bases[r] + position] = word

    @cute.jit
    def copy_out(self, s, packed, here, at):
        """Copy the staged coefficients to `packed`, a neuron tile per warp."""
        for r in cutlass.range(at.warp, here, WARPS, unroll=1):
            first, base = s.offsets[r], s.bases[r]
            for i in cutlass.range(at.lane, s.offsets[r + 1] - first, 32, unroll=4):
                packed[base + i] = s.staged[first + i]

    def coefficient(self, ordinal, neuron, h, gradients):
        """The 64 bits of a coefficient; `h` is in bits 16-31, d_up above d_gate in `gradients`."""
        low = Uint32(ordinal & 63) | (Uint32(neuron) << 6) | h
        return (Int64(gradients) << 32) | (Int64(low) & 0xFFFFFFFF)

    @cute.jit
    def hidden_bits(self, entry, up, activation):
        """h of an entry rounded to 16 bits, its rounding error in the upper half."""
        gate = high_to_float(entry, self.dtype)
        if const_expr(self.gated):
            return split_value(hidden(gate, low_to_float(up, self.dtype), activation), self.dtype)
        return split_value(power(gate, activation), self.dtype)

    # ---- shared memory ----

    def views(self, shared, neurons):
        """Tensors over the shared struct, and the number of coefficients that can be staged."""
        arena = shared.arena.data_ptr()
        slots = (neurons + 7) // 8 * 4
        counters = cutlass.min(cute.ceil_div(neurons, TILE), self.window) * PITCH
        staged = (slots + 2 * counters + 1) // 2 * 2
        views = Views(
            ends=shared.ends.get_tensor(cute.make_layout(self.chunks + 1)),
            slots=cute.make_tensor(cute.recast_ptr(arena, dtype=Uint16), cute.make_layout(self.neurons)),
            bases=shared.bases.get_tensor(cute.make_layout(self.window)),
            ordinals=shared.ordinals.get_tensor(cute.make_layout(self.window)),
            lists=shared.lists.get_tensor(cute.make_layout(self.window)),
            again=shared.again.get_tensor(cute.make_layout(self.window)),
            again_tokens=shared.again_tokens.get_tensor(cute.make_layout(self.window)),
            offsets=shared.offsets.get_tensor(cute.make_layout(self.window + 1)),
            counters=cute.make_tensor(
                cute.recast_ptr(arena + slots, dtype=Uint32), cute.make_layout(self.window * PITCH)
            ),
            info=cute.make_tensor(
                cute.recast_ptr(arena + (slots + counters), dtype=Uint32), cute.make_layout(self.window * PITCH)
            ),
            staged=cute.make_tensor(
                cute.recast_ptr((arena + staged).align(8), dtype=Int64), cute.make_layout(self.arena // 2)
            ),
        )
        return views, (self.arena - staged) // 2


def signature(spec: TransposeSpec) -> tuple[Any, tuple[Any, ...]]:
    dtype = operands.DTYPES[spec.dtype]
    b, r, p, q = cute.sym_int32(), cute.sym_int32(), cute.sym_int32(), cute.sym_int32()
    arguments = (
        operands.dense(Int32, cute.sym_int32()),
        *operands.lists(b),
        operands.dense(dtype, p) if spec.gated else None,
        operands.dense(Int32, p),
        operands.dense(Int32, p) if spec.gated else None,
        operands.dense(Int32, cute.sym_int32()),
        operands.dense(Int32, r, b, 2),
        operands.dense(Int32, r, 5, align=4),
        operands.dense(Int32, r, cute.sym_int32(), align=4),
        operands.dense(Int64, q),
        operands.dense(Int32, q),
        Int32(1),
    )
    return Transpose(spec), arguments
