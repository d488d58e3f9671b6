"""A layer of few tokens in one pass over its weights: all rows of the first projection, and of the others the rows of
neurons that any token fires.

Clusters of CTAs take tiles of 16 neurons in turn. Each CTA has `columns` columns of x, of the weights and of y, and its
product warps divide these. One ring of slots [16, columns] takes tiles of rows of the first projection, and
groups of 16 *listed* rows of the others, in an order that depends on time. No result does: sums follow the list, and
the list follows the neurons.

    produce    one warp, and helpers that issue copies. A group if many are waiting, else the next tile. cp.async.bulk,
               one per row, into a pitch at which ldmatrix has no bank conflicts.
    multiply   WARPS warps: mma.sync with rows of weights as A, tokens as B. x and the sums of y stay in registers. The
               sums of a tile, or of a group of up rows, go to `sums`, a part from each warp.
    send       adds the warps' parts and sends them to all CTAs of the cluster, by st.async.
    reduce     adds the CTAs' parts: gate, bias, activation; or up projection and h. With many tokens each CTA does so
               for a share of them, and sends that to the others.
    list       appends neurons that fire to the list, and h, or the gate until its up projection comes, to the queue. It
               reduces, too, if tokens are not shared.

    FULL[s]      1 arrival + bytes.            EMPTY[s]    product warps arrive: they have read slot s.
    ISSUE[s]     1 arrival: helpers copy the rows of slot s.
    SUMMED[r]    product warps arrive.         TAKEN[r]    1 arrival: their parts have been read.
    ARRIVED[r]   1 arrival + bytes.            CREDIT[r]   an arrival from each CTA: they have read what it sent.
    PASSED[r]    1 arrival + bytes.            RETURNED[r] the same of reduced tokens.

With up projections each CTA of a cluster must issue tiles and groups in one order. Then a decision depends only on what
was issued `LAG` slots before. Each cluster writes its sums of y, and decode_sums.py adds them in order.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .. import feasible
from ..common import launch, operands
from ..common.copies import address
from ..common.mma import load_matrices, load_matrices_transposed, mma_16x8x16
from ..specs import E4M3, DecodeSpec
from .copies import load_row
from .decode_list import RING, ROWS, WARPS, Lists, Place, Shared, any_bits, arrive, put, quad, word
from .decode_sums import ClusterSums

# groups that wait before they are preferred to a tile, and slots after which a decision knows what was issued
BACKLOG, LAG = 4, 12
# what a slot holds, if not a group of down rows by its index
END, SUMS = -1, -2
TILE, UP, DOWN = 1, 2, 3


class Operands(NamedTuple):
    """The kernel's arguments in their order; an empty vector stands for none."""

    x: Any  # [M, K]
    w_first: Any  # [N, K]: the gate's, or the up projection's of a layer without a gate
    w_up: Any  # [N, K], any weight without a gate
    w_down: Any  # [N, K]
    b_first: Any  # [N], or [2 N] with thresholds behind, or [0]
    b_up: Any
    threshold: Any
    activation: Any
    b_down: Any
    # fp32 [clusters, columns of a cluster / 16, tokens / 8, 32, 4], see `store`
    parts: Any
    early: Any  # whether the kernel before writes no weight, so that copies of weights need not wait for it
    y: Any  # [M, K]


class Decode(Lists, ClusterSums):
    """For a dtype, columns of a CTA, CTAs of a cluster, most tokens, and with or without a gate."""

    # whether h is multiplied by the weights of experts; whether rows of x and of the weights have scales
    weighted = scaled = False
    operands: Any = Operands
    # words of shared memory for their routes
    expert_words = 0

    def __init__(self, spec: DecodeSpec):
        self.dtype = operands.DTYPES[spec.dtype]
        # of x and the weights
        self.value = cutlass.Uint8 if spec.dtype == E4M3 else self.dtype
        self.gated = spec.kind == "gated"
        self.cluster, self.columns, self.tokens = spec.cluster, spec.columns, spec.tokens
        # fragments of 8 tokens, and of 16 columns of a warp
        self.n_frags, self.k_frags = self.tokens // 8, self.columns // (16 * WARPS)
        # values of a word, and products along a warp's columns, of eight words each
        self.word = 32 // self.value.width
        self.steps = 2 * self.k_frags // self.word
        # values of 16 bytes, and of a slot's rows with these between
        self.piece = 4 * self.word
        self.pitch = self.columns + self.piece
        # whether CTAs of a cluster reduce a share of the tokens each, the fragments of a share, and how many CTAs do
        self.shares = self.n_frags >= 4
        self.share = max(self.n_frags // self.cluster, 1) if self.shares else self.n_frags
        self.sharers = self.n_frags // self.share
        # fp32 sums of an item, and those of them that a CTA gets from another
        self.part, self.sent = 128 * self.n_frags, 128 * self.share
        # stages of the warps' and of the CTAs' sums
        self.sum_stages, self.stages = {1: (3, 4), 2: (2, 3), 4: (2, 4)}[self.n_frags]
        # warps that issue copies: a warp issues one in 50 ns
        self.issuers = 2 if self.columns * self.value.width >= 1 << 14 else 4
        # with many tokens product warps get registers of those that others do not need
        if self.shares:
            # x of e4m3 takes fewer, which leaves room for more warps that issue copies
            groups = 1 if self.columns >= 1024 and self.word == 2 else 2
            self.registers = ((216, 72), (208, 48))[groups - 1]
            self.issuers = 4 * groups - 3
        self.rows = -(-ROWS // self.issuers)
        self.sender = WARPS + self.issuers
        self.reducer = self.sender + 1
        self.lister = self.reducer + int(self.shares)
        self.threads = 32 * (self.lister + 1)
        self.arrange()

    def arrange(self) -> None:
        """Divide shared memory: as many slots as there is room for."""
        slot, tile = ROWS * self.pitch * self.value.width // 8, 4 * self.part
        sums = self.sum_stages * WARPS * tile + self.stages * self.cluster * 4 * self.sent
        sums += self.stages * 256 * self.n_frags if self.shares else 0
        for slots in range(16, 2, -1):
            # no group is overwritten that is still needed: of items in slots, stages and registers, and of waiting ones
            self.groups = slots + self.sum_stages + self.stages * (1 + self.shares) + 3
            self.groups += BACKLOG * (1 + self.gated) + LAG * self.gated + 2
            queue = self.groups * (2 * ROWS * self.tokens + 4 * ROWS)
            if slots * slot + sums + queue + 4 * self.expert_words + 2048 <= feasible.SMEM_PER_CTA:
                break
        self.slots = slots

    @cute.jit
    def __call__(self, *arguments: Any):
        """The `Operands`, the number of clusters and the stream."""
        slots, part = self.slots, self.part
        from_peers = self.stages * self.cluster * self.sent
        of_shares = self.stages * 64 * self.n_frags if self.shares else 2

        @cute.struct
        class Memory:
            full: cute.struct.MemRange[Int64, slots]
            empty: cute.struct.MemRange[Int64, slots]
            issue: cute.struct.MemRange[Int64, slots]
            summed: cute.struct.MemRange[Int64, self.sum_stages]
            taken: cute.struct.MemRange[Int64, self.sum_stages]
            arrived: cute.struct.MemRange[Int64, self.stages]
            credit: cute.struct.MemRange[Int64, self.stages]
            passed: cute.struct.MemRange[Int64, self.stages]
            returned: cute.struct.MemRange[Int64, self.stages]
            words: cute.struct.MemRange[Int32, 4]
            experts: cute.struct.MemRange[Int32, max(self.expert_words, 1)]
            kind: cute.struct.MemRange[Int32, slots]
            work: cute.struct.MemRange[Int32, slots]
            bounds: cute.struct.MemRange[Int32, 2 * slots]
            totals: cute.struct.MemRange[Int32, RING]
            items: cute.struct.MemRange[Int32, RING]
            issued: cute.struct.MemRange[Int32, RING]
            rows: cute.struct.MemRange[Int32, self.groups * ROWS]
            queue: cute.struct.Align[cute.struct.MemRange[Uint16, self.groups * ROWS * self.tokens], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, self.sum_stages * WARPS * part], 128]
            received: cute.struct.Align[cute.struct.MemRange[Float32, from_peers], 128]
            exchanged: cute.struct.Align[cute.struct.MemRange[Uint32, of_shares], 16]
            ring: cute.struct.Align[cute.struct.MemRange[self.value, slots * ROWS * self.pitch], 128]

        self.memory = feasible.check_shared_memory(Memory, 1)
        *given, clusters, stream = arguments
        o = self.operands(*given)
        ctas = clusters * self.cluster
        launch.start(self.kernel(o), ctas, self.threads, stream, cluster=self.cluster, ctas_per_sm=1)
        self.add(o, clusters, stream)

    @cute.kernel
    def kernel(self, o: Any):
        memory = SmemAllocator().allocate(self.memory)
        s = Shared(*(getattr(memory, name).data_ptr() for name in Shared._fields))
        thread = cute.arch.thread_idx()[0]
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        cluster, clusters = block // self.cluster, blocks // self.cluster
        # known to the checks of barriers
        rank = cute.arch.block_idx_in_cluster()
        # CTAs have equal shares of the columns, of whole fragments
        share = cute.ceil_div(o.w_down.shape[1], self.cluster * 8 * self.word) * (8 * self.word)
        left = rank * share
        width = cutlass.min(cutlass.max(o.w_down.shape[1] - left, Int32(0)), share)
        warp = cute.arch.make_warp_uniform(thread // 32)
        at = Place(thread, warp, thread & 31, rank, cluster, clusters, Int32(0), left, width)
        launch.start_next_early()
        self.open(s, at)
        if (o.early == 0) | (warp < WARPS) | (warp >= self.sender):
            cute.arch.griddepcontrol_wait()
        tiles = self.count_tiles(o, s, at)
        at = at._replace(tiles=cutlass.max(tiles - cluster + clusters - 1, Int32(0)) // clusters)
        if warp < WARPS:
            if const_expr(self.shares):
                cute.arch.setmaxregister_increase(self.registers[0])
            self.multiply(o, s, at)
        else:
            if const_expr(self.shares):
                cute.arch.setmaxregister_decrease(self.registers[1])
            if warp == WARPS:
                self.produce(o, s, at)
            elif warp < self.sender:
                # no barrier holds back for a warp without rows, so that one could miss a phase
                if (at.width > 0) & ((warp - WARPS) * self.rows < ROWS):
                    self.help(o, s, at)
            elif warp < self.reducer:
                self.send(s, at)
            elif warp < self.lister:
                if const_expr(self.shares):
                    if at.rank < self.sharers:
                        self.reduce(o, s, at)
            else:
                self.list_neurons(o, s, at)
        # peers may still write to this CTA's memory
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def open(self, s: Shared, at: Place):
        """Initialise barriers and words, and clear the ring where copies leave columns of it out."""
        if at.thread == 0:
            for i in range_constexpr(self.slots):
                cute.arch.mbarrier_init(s.full + i, 1)
                cute.arch.mbarrier_init(s.empty + i, WARPS)
                cute.arch.mbarrier_init(s.issue + i, 1)
            for i in range_constexpr(self.sum_stages):
                cute.arch.mbarrier_init(s.summed + i, WARPS)
                cute.arch.mbarrier_init(s.taken + i, 1)
            for i in range_constexpr(self.stages):
                cute.arch.mbarrier_init(s.arrived + i, 1)
                cute.arch.mbarrier_init(s.credit + i, self.sharers if const_expr(self.shares) else self.cluster)
                cute.arch.mbarrier_init(s.passed + i, 1)
                cute.arch.mbarrier_init(s.returned + i, self.cluster)
            cute.arch.mbarrier_init_fence()
            put(s.words, 0, 0)
            put(s.words, 1, -1)
        if at.width < self.columns:
            words = cute.make_tensor(
                cute.recast_ptr(s.ring, dtype=Uint32),
                cute.make_layout(self.slots * ROWS * self.pitch * self.value.width // 32),
            )
            for i in cutlass.range(at.thread, cute.size(words), self.threads, unroll=1):
                words[i] = Uint32(0)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    # ---- tiles of a plain layer; see decode_experts.py ----

    def count_tiles(self, o: Any, s: Shared, at: Place) -> Any:
        """Tiles of all clusters."""
        return cute.ceil_div(o.w_down.shape[0], ROWS)

    def tile(self, o: Any, s: Shared, at: Place, index: Any) -> tuple[Any, Any]:
        """The first row of a cluster's tile, and the last one that exists."""
        return (index * at.clusters + at.cluster) * ROWS, o.w_down.shape[0] - 1

    def source(self, o: Any, what: Any, row: Any, column: Any) -> Any:
        """Address of a row from a column on."""
        first, up, down = (address(w, row, column).toint() for w in (o.w_first, o.w_up, o.w_down))
        source = cutlass.select_(what == TILE, first, down)
        return cutlass.select_(what == UP, up, source) if self.gated else source

    def mma(self, sums: Any, *fragments: Any) -> Any:
        """Products of eight words of x and of the first projection."""
        return mma_16x8x16(sums, *fragments, self.dtype)

    # ---- copies ----

    @cute.jit
    def produce(self, o: Any, s: Shared, at: Place):
        """Fill the ring until nothing is left."""
        what, step, slot, phase = Int32(TILE), Int32(0), Int32(0), Int32(1)
        tiles, ups, downs, items = Int32(0), Int32(0), Int32(0), Int32(0)
        # of what is listed: items, groups of up among them, and neurons
        known, ready, total = Int32(0), Int32(0), Int32(0)
        while what > 0:
            if const_expr(self.gated):
                due = Boolean(True)
                while due:
                    due = False
                    if known < items:
                        due = word(s.issued, known % RING) + LAG <= step
                    if due:
                        known, ready, total = self.learn(s, known, ready)
            else:
                known = self.listed(s)
                if known > 0:
                    total = word(s.totals, (known - 1) % RING)
            what, deciding = Int32(0), Boolean(True)
            while deciding:
                deciding, left = Boolean(False), tiles < at.tiles
                whole = total >> 4
                for_up = whole - ups if const_expr(self.gated) else Int32(0)
                for_down = (ready if const_expr(self.gated) else whole) - downs
                if for_down > (Int32(BACKLOG) if left | (for_up > 0) else Int32(0)):
                    what = Int32(DOWN)
                elif for_up > (Int32(BACKLOG) if left else Int32(0)):
                    what = Int32(UP)
                elif left:
                    what = Int32(TILE)
                elif known < items:
                    deciding = Boolean(True)
                    known, ready, total = self.learn(s, known, ready)
                elif (total & 15) != 0:
                    if const_expr(self.gated):
                        what = Int32(UP) if ups == whole else Int32(0)
                    else:
                        what = Int32(DOWN) if downs == whole else Int32(0)
            row, most = self.tile(o, s, at, tiles)
            group = ups if what == UP else downs
            last = Int32(ROWS - 1)
            if what != TILE:
                last = cutlass.min(total - group * ROWS, Int32(ROWS)) - 1
            cute.arch.mbarrier_wait(s.empty + slot, phase)
            if at.lane == 0:
                kind = Int32(SUMS) if what != DOWN else downs
                put(s.kind, slot, kind if what > 0 else Int32(END))
                put(s.work, slot, what | last << 2 | group << 6)
                put(s.bounds, 2 * slot, row)
                put(s.bounds, 2 * slot + 1, most)
                if (what == TILE) | (what == UP):
                    put(s.items, items % RING, ups if what == UP else Int32(-1))
                    put(s.issued, items % RING, step)
                if what == 0:
                    put(s.words, 1, items)
                cute.arch.mbarrier_arrive_and_expect_tx(
                    s.full + slot, at.width * (self.value.width // 8 * ROWS) if what > 0 else Int32(0)
                )
                if const_expr(self.issuers > 1):
                    cute.arch.mbarrier_arrive(s.issue + slot)
            cute.arch.sync_warp()
            self.copy_rows(o, s, at, slot, what, last, group, row, most, Int32(0))
            tiles += Int32(what == TILE)
            ups += Int32(what == UP)
            downs += Int32(what == DOWN)
            items = tiles + ups
            step += 1
            slot += 1
            if slot == self.slots:
                slot, phase = Int32(0), phase ^ 1

    @cute.jit
    def learn(self, s: Shared, known: Int32, ready: Int32) -> Any:
        """Wait until the next item is listed; return what is known then."""
        while self.listed(s) <= known:
            pass
        total = word(s.totals, known % RING)
        return known + 1, ready + Int32(word(s.items, known % RING) >= 0), total

    @cute.jit
    def help(self, o: Any, s: Shared, at: Place):
        """Issue the copies of the other rows of each slot."""
        what, slot, phase = Int32(TILE), Int32(0), Int32(0)
        own = (at.warp - WARPS) * self.rows
        while what > 0:
            cute.arch.mbarrier_wait(s.issue + slot, phase)
            work = word(s.work, slot)
            what = work & 3
            row, most = (word(s.bounds, 2 * slot + j) for j in range(2))
            self.copy_rows(o, s, at, slot, what, (work >> 2) & 15, work >> 6, row, most, own)
            cute.arch.sync_warp()
            slot += 1
            if slot == self.slots:
                slot, phase = Int32(0), phase ^ 1

    @cute.jit
    def copy_rows(self, o: Any, s: Shared, at: Place, slot, what, last, group, first, most, own):
        """Issue this warp's rows of a slot: of a tile from `first` to `most`, or of a group up to its `last`."""
        row = own + at.lane
        if (what > 0) & (at.lane < self.rows) & (row < ROWS) & (at.width > 0):
            # rows beyond are the last one again
            neuron = cutlass.min(first + row, most)
            if what != TILE:
                neuron = word(s.rows, (group % self.groups) * ROWS + cutlass.min(row, last))
            source = self.source(o, what, neuron, at.left)
            load_row(
                s.ring + (slot * ROWS + row) * self.pitch, source, at.width * (self.value.width // 8), s.full + slot
            )

    # ---- products ----

    @cute.jit
    def multiply(self, o: Any, s: Shared, at: Place):
        """Multiply what comes into the ring; then store the sums of y."""
        x = self.load_tokens(o, at)
        y = cute.make_rmem_tensor((4, self.n_frags, self.k_frags), Float32)
        y.fill(0.0)
        # rows 0-7 and 8-15 of columns 0-7, then of columns 8-15; transposed, columns and rows change places
        half, quarter = (at.lane >> 3) & 1, at.lane >> 4
        before, row = at.warp * (16 * self.k_frags), at.lane & 7
        a_sums = s.ring + ((row + half * 8) * self.pitch + before + quarter * self.piece)
        a_down = s.ring + ((row + quarter * 8) * self.pitch + before + half * self.piece)
        kind, slot, phase, stage, turn = Int32(SUMS), Int32(0), Int32(0), Int32(0), Int32(1)
        while kind != END:
            cute.arch.mbarrier_wait(s.full + slot, phase)
            kind = word(s.kind, slot)
            if kind >= 0:
                queue = s.queue + (kind % self.groups) * (ROWS * self.tokens)
                self.add_down(a_down + slot * (ROWS * self.pitch), queue, y, at.lane)
                arrive(s.empty + slot, any_bits(y[0, 0, None]), at.lane)
            else:
                sums = cute.make_rmem_tensor((4, self.n_frags), Float32)
                if kind == SUMS:
                    self.multiply_tile(a_sums + slot * (ROWS * self.pitch), x, sums)
                    arrive(s.empty + slot, any_bits(sums[None, 0]), at.lane)
                cute.arch.mbarrier_wait(s.taken + stage, turn)
                if kind == SUMS:
                    for t in range_constexpr(self.n_frags):
                        where = s.sums + ((stage * WARPS + at.warp) * self.part + 128 * t + 4 * at.lane)
                        cute.autovec_copy(sums[None, t], quad(where))
                # an end comes to the sender, too
                cute.arch.sync_warp()
                if at.lane == 0:
                    cute.arch.mbarrier_arrive(s.summed + stage)
                stage += 1
                if stage == self.sum_stages:
                    stage, turn = Int32(0), turn ^ 1
            slot += 1
            if slot == self.slots:
                slot, phase = Int32(0), phase ^ 1
        self.store(o, y, at)

    @cute.jit
    def load_tokens(self, o: Any, at: Place) -> cute.Tensor:
        """B fragments of x: lane 4 g + i has words i and i + 4 of each eight of token g; zeros outside."""
        x = cute.make_rmem_tensor((2, self.n_frags, self.steps), Uint32)
        first = at.warp * (16 * self.k_frags) + (at.lane & 3) * self.word
        for t in range_constexpr(self.n_frags):
            token = 8 * t + (at.lane >> 2)
            for k in range_constexpr(self.steps):
                for j in range_constexpr(2):
                    x[j, t, k] = Uint32(0)
                    column = first + (2 * k + j) * 4 * self.word
                    if (token < o.x.shape[0]) & (column < at.width):
                        where = cute.recast_ptr(address(o.x, token, at.left + column).align(4), dtype=Uint32)
                        x[j, t, k] = cute.make_tensor(where, cute.make_layout(1))[0]
        return x

    @cute.jit
    def multiply_tile(self, source, x: cute.Tensor, sums: cute.Tensor):
        """Sums of a warp's columns for 16 rows: lane 4 g + i has tokens 2 i and 2 i + 1 of rows g and g + 8."""
        # more chains of products than one hide their latency
        chains = 2 if self.n_frags <= 2 else 1
        parts = cute.make_rmem_tensor((4, self.n_frags, chains), Float32)
        parts.fill(0.0)
        for k in range_constexpr(self.steps):
            a = load_matrices(source + 8 * self.word * k)
            for t in range_constexpr(self.n_frags):
                own = [parts[j, t, k % chains] for j in range(4)]
                own = self.mma(own, *a, x[0, t, k], x[1, t, k])
                for j in range_constexpr(4):
                    parts[j, t, k % chains] = own[j]
        for t in range_constexpr(self.n_frags):
            for j in range_constexpr(4):
                sums[j, t] = parts[j, t, 0] + parts[j, t, 1] if const_expr(chains > 1) else parts[j, t, 0]

    @cute.jit
    def add_down(self, source, queue, y: cute.Tensor, lane: Int32):
        """Add h of a group times its rows: rows of y's fragments are columns, g and g + 8 of each sixteen."""
        b = self.load_hidden(queue, lane)
        for k in range_constexpr(self.k_frags):
            a = load_matrices_transposed(source + 16 * k)
            for t in range_constexpr(self.n_frags):
                own = [y[j, t, k] for j in range(4)]
                own = mma_16x8x16(own, *a, b[0, t], b[1, t], self.dtype)
                for j in range_constexpr(4):
                    y[j, t, k] = own[j]

    @cute.jit
    def load_hidden(self, queue, lane: Int32) -> cute.Tensor:
        """B fragments of h of a group."""
        pairs = cute.make_tensor(cute.recast_ptr(queue, dtype=Uint32), cute.make_layout(8 * self.tokens))
        b = cute.make_rmem_tensor((2, self.n_frags), Uint32)
        for t in range_constexpr(self.n_frags):
            for j in range_constexpr(2):
                b[j, t] = pairs[(8 * t + (lane >> 2)) * 8 + (lane & 3) + 4 * j]
        return b

    @cute.jit
    def store(self, o: Any, y: cute.Tensor, at: Place):
        """Store the cluster's sums of y as fragments: those of 16 columns and 8 tokens together."""
        first, before = at.warp * self.k_frags, at.cluster * (self.cluster * WARPS * self.k_frags) + at.left // 16
        for k in range_constexpr(self.k_frags):
            for t in range_constexpr(self.n_frags):
                if (16 * (first + k) < at.width) & (8 * t + (at.lane & 3) * 2 < o.x.shape[0]):
                    line = (before + first + k) * self.n_frags + t
                    where = o.parts.iterator + (Int64(line) * 128 + 4 * at.lane)
                    cute.autovec_copy(y[None, t, k], quad(where))


def signature(spec: DecodeSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    dtype, n, k = operands.DTYPES[spec.dtype], cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    weights = [operands.rows(dtype, n, k) for _ in range(3)]
    biases = [operands.bias(dtype) for _ in range(3)]
    x, y = (operands.rows(dtype, m, k) for m in [cute.sym_int32()] * 2)
    last = *[Int32(1)] * 2, biases[2], operands.dense(Float32, cute.sym_int32()), Int32(1), y, Int32(1)
    return Decode(spec), (x, *weights, *biases[:2], *last)
