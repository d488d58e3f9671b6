"""From the sums of products to the list of neurons that fire: the warps of decode.py that send, reduce and list."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint16, Uint32, const_expr, range_constexpr

from ..common.activation import above, hidden, level_of, power_pair
from ..common.values import MAGNITUDE, high_to_float, low_to_float, pack, relu_pack
from .copies import send

# product warps; rows of a slot; words of a ring of counts, more than there are items between a producer and a lister
WARPS, ROWS, RING = 8, 16, 64


class Shared(NamedTuple):
    """Addresses in shared memory."""

    ring: Any
    sums: Any  # fp32 [stage, warp, tokens / 8, lane, 4]
    received: Any  # the same by CTA in place of warp, of this CTA's share of tokens
    exchanged: Any  # pairs of tokens [stage, tokens / 8, lane, 2 rows]
    queue: Any  # 16 bits [group, token, row]: gates, then h
    rows: Any  # of neurons [group, row]
    totals: Any  # listed neurons after an item, [RING]
    items: Any  # by item, as sums come: TILE's is -1, else the group
    issued: Any  # by item, the slots before it
    kind: Any  # by slot: END, SUMS or the group of down rows
    work: Any  # by slot, for helpers: what, the last row of a group, and the group
    bounds: Any  # by slot: the first row of a tile, and the last that exists
    words: Any  # items listed, all items when they are known, experts and what
    # divides by their tiles
    experts: Any  # see decode_experts.py
    full: Any
    empty: Any
    issue: Any
    summed: Any
    taken: Any
    arrived: Any
    credit: Any
    passed: Any
    returned: Any


class Place(NamedTuple):
    """Indices of a thread and of its CTA."""

    thread: Any
    warp: Any
    lane: Any
    rank: Any
    cluster: Any
    clusters: Any
    tiles: Any
    left: Any  # the first column of this CTA
    width: Any  # its columns


class Lists:
    """The warps behind the products; see decode.py, which has what is not here."""

    gated: bool
    weighted: bool
    shares: bool
    dtype: Any
    cluster: int
    columns: int
    n_frags: int
    share: int
    sharers: int
    part: int
    sent: int
    tokens: int
    groups: int
    stages: int
    sum_stages: int
    tile: Any  # (o, s, at, index): the first row of a cluster's tile, and the last one that exists
    weighted_pair: Any  # (o, pair, held, token): h of two tokens by their gates, times their weights

    def weigh(self, o: Any, s: Shared, row: Any, held: Any, at: Place) -> Any:
        """What h of token `lane` is multiplied by in a tile, and a bit for each that is; `held`: of an earlier tile."""
        return held

    def scale(self, o: Any, s: Shared, sums: Any, neuron: Any, group: Any, first: Any, lane: Any) -> None:
        """Multiply the sums of e4m3 values by the scales of their tokens and rows, of a tile or of a group."""

    @cute.jit
    def listed(self, s: Shared) -> Int32:
        """The number of items that are listed; what the lister stored before is visible to all lanes."""
        listed = Int32(cute.arch.load(s.words, Int32, sem="acquire", scope="cta"))
        return Int32(cute.arch.warp_redux_sync(listed, "min"))

    # ---- sums ----

    @cute.jit
    def add_parts(self, source, count: cutlass.Constexpr, frags: cutlass.Constexpr, lane: Int32) -> cute.Tensor:
        """The sums of `count` parts in shared memory, each of some fragments."""
        sums, four = cute.make_rmem_tensor((4, frags), Float32), cute.make_rmem_tensor((4,), Float32)
        for t in range_constexpr(frags):
            for part in range_constexpr(count):
                cute.autovec_copy(quad(source + (128 * (part * frags + t) + 4 * lane)), four)
                for j in range_constexpr(4):
                    sums[j, t] = four[j] if const_expr(part == 0) else sums[j, t] + four[j]
        return sums

    @cute.jit
    def send(self, s: Shared, at: Place):
        """Send the sums of this CTA's columns to all CTAs, itself too: of all tokens, or of its share to each."""
        item, running = Int32(0), Boolean(True)
        while running:
            own, stage = item % self.sum_stages, item % self.stages
            cute.arch.mbarrier_wait(s.summed + own, (item // self.sum_stages) & 1)
            running = word(s.words, 1) != item
            if running:
                sums = self.add_parts(s.sums + own * (WARPS * self.part), WARPS, self.n_frags, at.lane)
                arrive(s.taken + own, any_bits(sums), at.lane)
                cute.arch.mbarrier_wait(s.credit + stage, ((item // self.stages) & 1) ^ 1)
                target = s.received + ((stage * self.cluster + at.rank) * self.sent + 4 * at.lane)
                if const_expr(self.shares):
                    for t in range_constexpr(self.n_frags):
                        where = target + 128 * (t % self.share)
                        four = [sums[j, t].bitcast(Uint32) for j in range(4)]
                        send(where, s.arrived + stage, Int32(t // self.share), *four)
                else:
                    for c in cutlass.range(self.cluster, unroll=1):
                        # each begins with itself
                        peer = (at.rank + c) % self.cluster
                        for t in range_constexpr(self.n_frags):
                            four = [sums[j, t].bitcast(Uint32) for j in range(4)]
                            send(target + 128 * t, s.arrived + stage, peer, *four)
                item += 1

    @cute.jit
    def give_back(self, full, credit, size: cutlass.Constexpr, read: Uint32, lane: Int32):
        """Expect the next bytes at a stage, and tell all CTAs that they may send them."""
        none = all_have(read)
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, size + none)
        cute.arch.sync_warp()
        if lane < self.cluster + none:
            cute.arch.mbarrier_arrive(credit, lane)

    @cute.jit
    def expect(self, full, size: cutlass.Constexpr, lane: Int32):
        """Expect the first bytes at all stages."""
        if lane == 0:
            for stage in range_constexpr(self.stages):
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, size)

    @cute.jit
    def reduce(self, o: Any, s: Shared, at: Place):
        """Reduce this CTA's share of the tokens, and send it to all CTAs."""
        self.expect(s.arrived, 4 * self.cluster * self.sent, at.lane)
        item, tiles, end = Int32(0), Int32(0), Int32(1 << 30)
        running, first, held = at.tiles > 0, at.rank * self.share, (Int32(-1), Float32(1.0), Uint32(0))
        while running:
            stage = item % self.stages
            row, most = self.tile(o, s, at, tiles)
            held = self.weigh(o, s, row, held, at)
            pairs, is_tile, _ = self.reduced(o, s, item, row, most, held, first, at)
            tiles += Int32(is_tile)
            cute.arch.mbarrier_wait(s.returned + stage, ((item // self.stages) & 1) ^ 1)
            for c in cutlass.range(self.cluster, unroll=1):
                peer = (at.rank + c) % self.cluster
                for t in range_constexpr(self.share):
                    target = s.exchanged + (((stage * self.n_frags + first + t) * 32 + at.lane) * 2)
                    send(target, s.passed + stage, peer, pairs[t, 0], pairs[t, 1])
            item += 1
            running = tiles < at.tiles
            if const_expr(self.gated):
                if is_tile & (tiles == at.tiles):
                    # the list is complete with this tile
                    while self.listed(s) < item:
                        pass
                    end = tiles + ((word(s.totals, (item - 1) % RING) + ROWS - 1) >> 4)
                running = running | (item < end)

    @cute.jit
    def reduced(self, o: Any, s: Shared, item: Int32, row, most, held, first, at: Place) -> Any:
        """What follows from the sums of an item, in pairs of tokens [fragments, 2 rows] from a fragment on.

        `row`, `most`, `held`: of the next tile. Returns whether it is one, and else its group, too.
        """
        neuron = row + (at.lane >> 2)
        levels, biases = self.of_neurons(o, neuron)
        stage, pairs = item % self.stages, cute.make_rmem_tensor((self.share, 2), Uint32)
        cute.arch.mbarrier_wait(s.arrived + stage, (item // self.stages) & 1)
        source = s.received + stage * (self.cluster * self.sent)
        sums = self.add_parts(source, self.cluster, self.share, at.lane)
        group = word(s.items, item % RING) if const_expr(self.gated) else Int32(-1)
        self.scale(o, s, sums, neuron, group, first, at.lane)
        if const_expr(self.gated):
            if group < 0:
                self.activate(o, sums, pairs, most - neuron, levels, biases, held, first, at.lane)
            else:
                self.multiply_gates(o, s, sums, pairs, group, first, at.lane)
        else:
            self.activate(o, sums, pairs, most - neuron, levels, biases, held, first, at.lane)
        size = 4 * self.cluster * self.sent
        self.give_back(s.arrived + stage, s.credit + stage, size, any_bits(pairs), at.lane)
        return pairs, group < 0, group

    # ---- the list ----

    @cute.jit
    def list_neurons(self, o: Any, s: Shared, at: Place):
        """List neurons that fire, and queue what their rows are multiplied by."""
        if const_expr(self.shares):
            self.expect(s.passed, 256 * self.n_frags, at.lane)
        else:
            self.expect(s.arrived, 4 * self.cluster * self.sent, at.lane)
        item, tiles, total = Int32(0), Int32(0), Int32(0)
        running, held = at.tiles > 0, (Int32(-1), Float32(1.0), Uint32(0))
        while running:
            row, most = self.tile(o, s, at, tiles)
            if const_expr(self.shares):
                pairs, is_tile, group = self.receive(s, item, at.lane)
            else:
                held = self.weigh(o, s, row, held, at)
                pairs, is_tile, group = self.reduced(o, s, item, row, most, held, Int32(0), at)
            if is_tile:
                tiles += 1
                total = self.append(s, pairs, row + (at.lane >> 2), total, tiles == at.tiles, at.lane)
            elif const_expr(self.gated):
                for r in range_constexpr(2):
                    self.enqueue(s, pairs, r, group % self.groups, (at.lane >> 2) + 8 * r, at.lane)
            if at.lane == 0:
                put(s.totals, item % RING, total)
            cute.arch.sync_warp()
            if at.lane == 0:
                cute.arch.store(s.words, item + 1, sem="release", scope="cta")
            item += 1
            running = tiles < at.tiles
            if const_expr(self.gated):
                running = running | (item < tiles + ((total + ROWS - 1) >> 4))

    @cute.jit
    def receive(self, s: Shared, item: Int32, lane: Int32) -> Any:
        """What CTAs have reduced of an item; as `reduced` has it."""
        stage, pairs = item % self.stages, cute.make_rmem_tensor((self.n_frags, 2), Uint32)
        cute.arch.mbarrier_wait(s.passed + stage, (item // self.stages) & 1)
        for t in range_constexpr(self.n_frags):
            two = cute.make_tensor(
                (s.exchanged + ((stage * self.n_frags + t) * 32 + lane) * 2).align(8), cute.make_layout(2)
            )
            for r in range_constexpr(2):
                pairs[t, r] = two[r]
        self.give_back(s.passed + stage, s.returned + stage, 256 * self.n_frags, any_bits(pairs), lane)
        group = Int32(-1)
        if const_expr(self.gated):
            group = word(s.items, item % RING)
        return pairs, group < 0, group

    @cute.jit
    def of_neurons(self, o: Any, neuron: Int32) -> Any:
        """Thresholds, twice each, and biases of this lane's neurons of a tile."""
        levels, biases = [], []
        for r in range_constexpr(2):
            own, bias = neuron + 8 * r, Float32(0.0)
            levels.append(level_of(o.b_first, o.w_down.shape[0], own, o.threshold))
            if (own < o.b_first.shape[0]) & (own < o.w_down.shape[0]):
                bias = o.b_first[own].to(Float32)
            biases.append(bias)
        return levels, biases

    @cute.jit
    def activate(self, o: Any, sums: cute.Tensor, pairs: cute.Tensor, rest, levels, biases, held, first, lane):
        """Gates of a tile, rounded; without up projections, h. Zeros where there is no token or neuron.

        `rest`: neurons behind this lane's first one. `held`: of h, see `weigh`.
        """
        for r in range_constexpr(2):
            for t in range_constexpr(self.share):
                pair = relu_pack(sums[2 * r, t] + biases[r], sums[2 * r + 1, t] + biases[r], self.dtype)
                pair = above(pair, levels[r], self.dtype)
                left = o.x.shape[0] - (8 * (first + t) + (lane & 3) * 2)
                pair = pair if left > 1 else pair & Uint32(0xFFFF)
                pair = pair if (left > 0) & (8 * r <= rest) else Uint32(0)
                if const_expr(self.weighted):
                    pair = self.weighted_pair(o, pair, held, 8 * (first + t) + (lane & 3) * 2)
                elif const_expr(not self.gated):
                    pair = power_pair(pair, o.activation, self.dtype)
                pairs[t, r] = pair

    @cute.jit
    def multiply_gates(self, o: Any, s: Shared, sums: cute.Tensor, pairs: cute.Tensor, group, first, lane):
        """h of a group, from its gates in the queue and its up projections."""
        place = group % self.groups
        for r in range_constexpr(2):
            row, bias = (lane >> 2) + 8 * r, Float32(0.0)
            if o.b_up.shape[0] > 0:
                bias = o.b_up[self.listed_neuron(o, s, place, row)].to(Float32)
            for t in range_constexpr(self.share):
                entry = self.entry(s, place, 8 * (first + t) + (lane & 3) * 2, row)
                gates = Uint32(entry[0]) | Uint32(entry[1]) << 16
                two = low_to_float(gates, self.dtype), high_to_float(gates, self.dtype)
                own = [hidden(two[j], sums[2 * r + j, t] + bias, o.activation) for j in range(2)]
                h = pack(*own, self.dtype)
                low = h & Uint32(0xFFFF) if gates & Uint32(MAGNITUDE) != 0 else Uint32(0)
                high = h & Uint32(0xFFFF0000) if gates & Uint32(MAGNITUDE << 16) != 0 else Uint32(0)
                pairs[t, r] = low | high

    @cute.jit
    def listed_neuron(self, o: Any, s: Shared, place: Int32, row: Int32) -> Int32:
        """The neuron of a row of a group; any for rows beyond the list, whose gates are zero."""
        return cutlass.max(cutlass.min(word(s.rows, place * ROWS + row), o.w_down.shape[0] - 1), Int32(0))

    @cute.jit
    def append(self, s: Shared, pairs: cute.Tensor, neuron: Int32, total: Int32, is_last: Boolean, lane) -> Int32:
        """Append the neurons of a tile that fire, and their pairs; return the length of the list."""
        fires = []
        for r in range_constexpr(2):
            own = Uint32(0)
            for t in range_constexpr(self.n_frags):
                own = own | pairs[t, r]
            fires.append(lanes_of_four(cute.arch.vote_ballot_sync((own & Uint32(0x7FFF7FFF)) != 0)))
        below, start = (Uint32(1) << Uint32(lane & 28)) - 1, total
        for r in range_constexpr(2):
            place = start + Int32(cute.arch.popc(fires[r] & below))
            start += Int32(cute.arch.popc(fires[r]))
            if (fires[r] >> Uint32(lane & 28)) & 1 != 0:
                group, row = (place >> 4) % self.groups, place & 15
                if (lane & 3) == 0:
                    put(s.rows, group * ROWS + row, neuron + 8 * r)
                self.enqueue(s, pairs, r, group, row, lane)
        if is_last & ((start & 15) != 0):
            group = (start >> 4) % self.groups
            for i in cutlass.range(start & 15, ROWS, unroll=1):
                if lane < self.tokens:
                    entry = self.entry(s, group, lane, i)
                    entry[0] = Uint16(0)
        return start

    @cute.jit
    def enqueue(self, s: Shared, pairs: cute.Tensor, r: cutlass.Constexpr, group: Int32, row: Int32, lane: Int32):
        """Store this lane's pairs of a row of a group."""
        for t in range_constexpr(self.n_frags):
            entry = self.entry(s, group, 8 * t + (lane & 3) * 2, row)
            entry[0] = Uint16(pairs[t, r] & Uint32(0xFFFF))
            entry[1] = Uint16(pairs[t, r] >> 16)

    @cute.jit
    def entry(self, s: Shared, group: Int32, token: Int32, row: Int32) -> cute.Tensor:
        """The entries of a row of a group for two tokens."""
        where = s.queue + ((group * self.tokens + token) * ROWS + row)
        return cute.make_tensor(where, cute.make_layout(2, stride=ROWS))


@cute.jit
def all_have(read: Uint32) -> Int32:
    """Zero, when all lanes have what they `read` from memory that they give back.

    An arrival that follows may overtake loads that wait behind those of other kernels, and the compiler moves it before
    loads that it does not depend on. In cluster scope, where it may not overtake, it costs a fence.
    """
    # no lane, which the compiler cannot know
    return Int32(cute.arch.popc(cute.arch.vote_ballot_sync((read & Uint32(cute.arch.block_idx()[0] >> 30)) != 0)))


@cute.jit
def arrive(barrier: Any, read: Uint32, lane: Int32):
    """Arrive when all lanes have what they `read`."""
    none = all_have(read)
    if lane == 0:
        cute.arch.mbarrier_arrive(barrier, arrive_count=1 + none)


@cute.jit
def any_bits(values: cute.Tensor) -> Uint32:
    """The bits that any of some values has."""
    bits, words = Uint32(0), cute.recast_tensor(values, Uint32)
    for i in range_constexpr(cute.size(words)):
        bits = bits | words[i]
    return bits


@cute.jit
def lanes_of_four(ballot: Any) -> Uint32:
    """Bit 4 g for each four lanes of which any has its bit set."""
    bits = Uint32(ballot)
    bits = bits | bits >> 1
    return (bits | bits >> 2) & Uint32(0x11111111)


def word(base: Any, index: Any) -> Any:
    """A word in shared memory."""
    return cute.make_tensor(base + index, cute.make_layout(1))[0]


def put(base: Any, index: Any, value: Any) -> None:
    """Store a word in shared memory."""
    cute.make_tensor(base + index, cute.make_layout(1))[0] = value


def quad(where: Any) -> cute.Tensor:
    """Four words at a 16-byte aligned address."""
    return cute.make_tensor(where.align(16), cute.make_layout(4))
