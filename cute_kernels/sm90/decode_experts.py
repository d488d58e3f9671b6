"""decode.py for routed experts without a gate: y[t] = sum over the experts e of token t of weights[t, e] * ffn_e(x[t]).

A tile is one of an expert that any token is routed to, and all tokens are multiplied; h of a token that is not routed
there is zero. So nothing is sorted, and a group of listed rows mixes experts. The tiles of a shared layer, whose weight
is 1, come first. Each CTA makes the list of experts for itself. A row's word has its expert above `EXPERT_BITS`; the
shared layer is the expert behind the last.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, range_constexpr

from .. import geometry
from ..common import operands
from ..common.activation import power
from ..common.copies import address
from ..common.values import MAGNITUDE, high_to_float, low_to_float, pack
from ..specs import DecodeSpec
from . import decode
from .decode import TILE
from .decode_list import ROWS, Place, Shared, put, word

EXPERT_BITS = 20
_NEURONS = (1 << EXPERT_BITS) - 1


class Operands(NamedTuple):
    """The kernel's arguments in their order, those of decode.py among them; a matrix without rows stands for none."""

    x: Any  # [M, K]
    w_first: Any  # [rows, K]: of all experts
    w_up: Any  # [N shared, K]: the first projection of the shared layer
    w_down: Any  # [rows, K]
    shared_down: Any  # [N shared, K]
    first_step: Any  # rows from one expert to the next
    down_step: Any
    neurons: Any  # of an expert
    count: Any  # of experts
    ids: Any  # int32 [M * top], at any stride
    weights: Any  # fp32 [M * top]
    b_first: Any  # none
    b_up: Any
    threshold: Any
    activation: Any
    b_down: Any
    parts: Any
    early: Any
    y: Any


class DecodeExperts(decode.Decode):
    """For a dtype, columns of a CTA, CTAs of a cluster and most tokens."""

    weighted = True
    operands: Any = Operands

    def __init__(self, spec: DecodeSpec):
        # ids and weights by slot and token; bits, then the list of experts that are touched
        self.bits = 2 * geometry.MAX_EXPERTS_OF_TOKEN * spec.tokens
        self.list_at = self.bits + geometry.MAX_EXPERTS // 32
        self.expert_words = self.list_at + geometry.MAX_EXPERTS
        super().__init__(spec)

    @cute.jit
    def count_tiles(self, o: Any, s: Shared, at: Place) -> Int32:
        """List the experts that any token is routed to, in their order; return the number of all tiles."""
        top, slots = o.ids.shape[0] // o.x.shape[0], geometry.MAX_EXPERTS_OF_TOKEN
        if at.thread < geometry.MAX_EXPERTS // 32:
            put(s.experts, self.bits + at.thread, 0)
        cute.arch.sync_threads()
        for i in cutlass.range(at.thread, o.ids.shape[0], self.threads, unroll=1):
            token, expert, weight = i // top, o.ids[i], o.weights[i]
            place = (i - token * top) * self.tokens + token
            exists = (expert >= 0) & (expert < o.count)
            put(s.experts, place, expert if exists else Int32(-1))
            put(s.experts, slots * self.tokens + place, weight.bitcast(Int32))
            if exists:
                bits = cute.recast_ptr(s.experts + (self.bits + (expert >> 5)), dtype=Uint32)
                cute.arch.atomic_or(bits, Uint32(1) << Uint32(expert & 31), scope="cta")
        cute.arch.sync_threads()
        if at.thread == 0:
            # rounded up
            per = cute.ceil_div(o.neurons, ROWS)
            put(s.words, 3, Int32(Uint32((Int64(1 << 32) + per - 1) // Int64(per))))
        if at.warp == 0:
            mine = Uint32(word(s.experts, self.bits + at.lane))
            own = Int32(cute.arch.popc(mine))
            before = own
            for d in range_constexpr(5):
                other = cute.arch.shuffle_sync_up(before, 1 << d)
                before = before + other if at.lane >= (1 << d) else before
            if at.lane == 31:
                put(s.words, 2, before)
            before -= own
            for bit in cutlass.range(32, unroll=1):
                if (mine >> Uint32(bit)) & 1 != 0:
                    put(s.experts, self.list_at + before, at.lane * 32 + bit)
                    before += 1
        cute.arch.sync_threads()
        return cute.ceil_div(o.w_up.shape[0], ROWS) + word(s.words, 2) * cute.ceil_div(o.neurons, ROWS)

    @cute.jit
    def tile(self, o: Any, s: Shared, at: Place, index: Int32) -> tuple[Int32, Int32]:
        """Words of the first row of a cluster's tile, and of the last one that exists."""
        shared, per = cute.ceil_div(o.w_up.shape[0], ROWS), cute.ceil_div(o.neurons, ROWS)
        unit = index * at.clusters + at.cluster
        expert, first, most = o.count, unit * ROWS, o.w_up.shape[0] - 1
        if unit >= shared:
            place = self.divided(unit - shared, per, s)
            # beyond the last tile: of no expert
            expert = word(s.experts, self.list_at + cutlass.min(place, Int32(geometry.MAX_EXPERTS - 1)))
            first, most = (unit - shared - place * per) * ROWS, o.neurons - 1
        base = expert << EXPERT_BITS
        return base + first, base + most

    @cute.jit
    def divided(self, number: Int32, per: Int32, s: Shared) -> Int32:
        """number // per, by a product, which is one too large for some of millions of tiles."""
        quotient = Int32(cute.arch.mul_hi(Uint32(number), Uint32(word(s.words, 3))))
        return number if per == 1 else quotient - Int32(quotient * per > number)

    @cute.jit
    def source(self, o: Any, what: Int32, row: Int32, column: Int32) -> Any:
        """Address of a row from a column on."""
        expert, neuron = row >> EXPERT_BITS, row & _NEURONS
        is_shared = expert == o.count
        first = address(o.w_first, expert * o.first_step + neuron, column).toint()
        down = address(o.w_down, expert * o.down_step + neuron, column).toint()
        first = cutlass.select_(is_shared, address(o.w_up, neuron, column).toint(), first)
        down = cutlass.select_(is_shared, address(o.shared_down, neuron, column).toint(), down)
        return cutlass.select_(what == TILE, first, down)

    @cute.jit
    def weigh(self, o: Any, s: Shared, row: Int32, held: Any, at: Place) -> Any:
        """The sum of the weights by which token `lane` is routed to a tile's expert, and a bit for each that is."""
        of, weight, routed = held
        expert = row >> EXPERT_BITS
        if expert != of:
            of, weight, here = expert, Float32(1.0), Boolean(True)
            if expert != o.count:
                weight, here = Float32(0.0), Boolean(False)
                token = at.lane & (self.tokens - 1)
                for j in cutlass.range(o.ids.shape[0] // o.x.shape[0], unroll=4):
                    place = j * self.tokens + token
                    own = word(s.experts, geometry.MAX_EXPERTS_OF_TOKEN * self.tokens + place)
                    if word(s.experts, place) == expert:
                        weight, here = weight + own.bitcast(Float32), Boolean(True)
            routed = Uint32(cute.arch.vote_ballot_sync(here))
        return of, weight, routed

    @cute.jit
    def weighted_pair(self, o: Any, pair: Uint32, held: Any, token: Int32) -> Uint32:
        """h of two tokens, times their weights, rounded; zero of a token that is not routed here."""
        places = [(token + j) & (self.tokens - 1) for j in range(2)]
        weights = [cute.arch.shuffle_sync(held[1], place) for place in places]
        here = [held[2] >> Uint32(place) & 1 != 0 for place in places]
        gates = low_to_float(pair, self.dtype), high_to_float(pair, self.dtype)
        h = pack(*(power(gate, o.activation) * w for gate, w in zip(gates, weights)), self.dtype)
        low = h & Uint32(0xFFFF) if (pair & Uint32(MAGNITUDE) != 0) & here[0] else Uint32(0)
        high = h & Uint32(0xFFFF0000) if (pair & Uint32(MAGNITUDE << 16) != 0) & here[1] else Uint32(0)
        return low | high


def signature(spec: DecodeSpec) -> tuple[Any, tuple[Any, ...]]:
    """The kernel object of a spec and the fake arguments that stand for its operands."""
    dtype, k, m = operands.DTYPES[spec.dtype], cute.sym_int32(divisibility=8), cute.sym_int32()
    first, shared, down, shared_down = (operands.rows(dtype, cute.sym_int32(), k) for _ in range(4))
    x, y = (operands.rows(dtype, m, k) for _ in range(2))
    routes = operands.strided(Int32, number := cute.sym_int32()), operands.dense(Float32, number)
    none = [operands.bias(dtype) for _ in range(3)]
    last = *none[:2], *[Int32(1)] * 2, none[2], operands.dense(Float32, cute.sym_int32()), Int32(1), y, Int32(1)
    return DecodeExperts(spec), (x, first, shared, down, shared_down, *[Int32(1)] * 4, *routes, *last)
