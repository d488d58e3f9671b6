"""The second half of layers of experts: y[t] = sum over the experts e of token t, and the non-zeros c of both, of
scale[t, e] * h[t, e, c] * w_down[e, c]. It is up_down_token.py, where a token's tiles are those of its experts, one
after the other, and the rows of weights are those of all experts.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from .. import geometry
from ..common import operands
from ..common.rows import count_of
from ..specs import ExpertDownSpec, UpDownTokenSpec
from .up_down_token import Operands, Thread, TokenCluster, UpDownToken, Views, results


class Experts(NamedTuple):
    """In global memory, see expert_pairs.py."""

    owners: Any  # int32 [tokens * k]: the expert of each pair of a token and an expert, or -1
    pairs: Any  # int32 [tokens * k]: its row of words, or -1
    scales: Any  # fp32 [tokens, k], by which h is multiplied
    up_rows: Any  # rows of w_up from one expert to the next
    down_rows: Any


class Listed(NamedTuple):
    """In shared memory: of each neuron listed which of the token's experts it is of, and what these are."""

    slots: Any  # [window]
    owners: Any  # [MAX_EXPERTS_OF_TOKEN]
    scales: Any  # [MAX_EXPERTS_OF_TOKEN]


class ExpertCluster(TokenCluster):
    """A cluster of CTAs that computes one token at a time."""

    def __init__(self, spec: UpDownTokenSpec):
        super().__init__(spec)
        # behind the other lists
        self.listed = self.lists
        self.lists += self.window
        # behind the sums, too: they may be written while others have not yet entered
        self.owned = max(self.words, self.lists)
        self.words = self.owned + 2 * geometry.MAX_EXPERTS_OF_TOKEN

    def views(self, shared: Any) -> Views:
        most = geometry.MAX_EXPERTS_OF_TOKEN
        arena = shared.arena.data_ptr()
        slots, owners = (cute.recast_ptr(arena + at, dtype=Int32) for at in (self.listed, self.owned))
        listed = Listed(
            cute.make_tensor(slots, cute.make_layout(self.window)),
            cute.make_tensor(owners, cute.make_layout(most)),
            cute.make_tensor(arena + self.owned + most, cute.make_layout(most)),
        )
        views: Views = super().views(shared)
        return views._replace(experts=listed)

    @cute.jit
    def enter(self, o: Operands, s: Views, m: Int32, at: Thread):
        """Load the token's experts, and their scales."""
        experts = o.experts.scales.shape[1]
        if at.thread < experts:
            s.experts.owners[at.thread] = o.experts.owners[m * experts + at.thread]
            s.experts.scales[at.thread] = o.experts.scales[m, at.thread]

    def tiles_of(self, o: Operands) -> Any:
        return o.words.shape[1] // o.width * o.experts.scales.shape[1]

    @cute.jit
    def locate(self, o: Operands, m: Int32, tile: Int32, tiles: Int32):
        experts = o.experts.scales.shape[1]
        own = tiles // experts
        slot, row = tile // own, Int32(-1)
        if slot < experts:
            row = o.experts.pairs[m * experts + slot]
        return row, tile - slot * own, row >= 0, slot

    @cute.jit
    def count_of(self, o: Operands, m: Int32, tile: Int32, tiles: Int32):
        row, column, exists, _ = self.locate(o, m, tile, tiles)
        return count_of(o.words, row, column, o.width, exists)

    def note(self, s: Views, at: Int32, word: Uint32, expert: Int32) -> None:
        s.nonzeros[at] = word
        s.experts.slots[at] = expert

    def rows_of(self, o: Operands, s: Views, first: Int32, up: bool) -> list[Uint32]:
        numbers, slots = super().rows_of(o, s, first, up), self.load_list(s.experts.slots, first)
        # beyond the list's end is anything
        last = geometry.MAX_EXPERTS_OF_TOKEN - 1
        between = o.experts.up_rows if up else o.experts.down_rows
        return [number + Uint32(s.experts.owners[slots[j] & last] * between) for j, number in enumerate(numbers)]

    def scaled(self, s: Views, i: Int32, h: Float32) -> Float32:
        return h * s.experts.scales[s.experts.slots[i]]


class ExpertDown(UpDownToken):
    """For one dtype, cluster size and class of hidden sizes, gated or not."""

    Team = ExpertCluster

    @cute.jit
    def __call__(self, *arguments: Any):
        """The layer without biases, y and l1, memory of helpers, `Experts`, four numbers and the stream."""
        x, words, spill, w_up, w_down, y, l1, *more, helpers, limit, words_per_tile, activation, stream = arguments
        sums, counters, weights, *experts = more
        none = cute.make_tensor(y.iterator, cute.make_layout((Int32(0),)))
        stats = cute.make_tensor(words.iterator, cute.make_layout((Int32(0), Int32(1), 2), stride=(2, 2, 1)))
        layer = (x, words, spill, w_up, w_down, none, none, y, l1, words_per_tile, activation)
        self.launch(Operands(*layer, sums, counters, weights, helpers, limit, stats, Experts(*experts)), stream)


def signature(spec: ExpertDownSpec) -> tuple[Any, tuple[Any, ...]]:
    dtype, m, pairs = operands.DTYPES[spec.dtype], cute.sym_int32(), cute.sym_int32()
    k = cute.sym_int32(divisibility=8)
    return ExpertDown(spec), (
        operands.rows(dtype, m, k) if spec.gated else None,
        *operands.packed(dtype, pairs),
        operands.rows(dtype, cute.sym_int32(divisibility=8), k) if spec.gated else None,
        operands.rows(dtype, cute.sym_int32(divisibility=8), k),
        *results(dtype, m, k),
        *(operands.dense(Int32, pairs) for _ in range(2)),
        operands.strided(Float32, m, cute.sym_int32()),
        *(Int32(1),) * 6,
    )
