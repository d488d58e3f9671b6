"""``ffn_union``: ``gate_pack`` and ``up_down_union`` in one, slice by slice of the tokens.

The packed gate takes as much memory as one of ``format.union_slices`` needs, whatever the number of tokens. Slices are
whole tiles of 128 tokens, so that every bit is that of the two operators.
"""

from __future__ import annotations

from torch import Tensor

from twell._runtime import geometry
from twell.ops.gate_pack import figures, pack, room
from twell.ops.gate_pack import on_cpu as pack_on_cpu
from twell.ops.library import check_alike, check_layer, register, rows
from twell.ops.up_down_union import by_slices, results, union
from twell.ops.up_down_union import on_cpu as up_down_on_cpu

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


def outputs(x: Tensor, w_gate: Tensor) -> Outputs:
    """Empty y, l1, stats and sizes, as the two operators have them."""
    y, l1, sizes = results(x, w_gate.shape[0])
    return y, l1, figures(x, w_gate), sizes


def _fake(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    compression: int,
) -> Outputs:
    weights = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    check_layer(x, weights, {"b_gate": b_gate, "b_up": b_up}, b_down)
    y, l1, stats, sizes = outputs(x, w_gate)
    return y, l1, stats, union(sizes)


def _cpu(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    compression: int,
) -> Outputs:
    _fake(x, w_gate, w_up, w_down, b_gate, b_up, b_down, compression)
    words, spill, stats = pack_on_cpu(x, w_gate, b_gate, compression)
    y, l1, unions = up_down_on_cpu(x, words, spill, w_up, w_down, b_up, b_down, compression)
    return y, l1, stats, unions


def _cuda(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    compression: int,
) -> Outputs:
    check_alike(w_gate, w_up=w_up, w_down=w_down)
    y, l1, stats, sizes = outputs(x, w_gate)
    w_gate = rows(w_gate)
    slices = geometry.union_slices(x.shape[0], w_gate.shape[0])
    # the first slice is the longest
    words, spill = room(x, slices[0][1] if slices else 0, w_gate, compression)

    def packed_of(first: int, last: int) -> tuple[Tensor, Tensor]:
        blocks = slice(first // geometry.STATS_ROWS, -(-last // geometry.STATS_ROWS))
        packed = words[: last - first], spill[: last - first]
        pack(x[first:last], w_gate, b_gate, (*packed, stats[blocks]), compression)
        return packed

    by_slices(x, packed_of, w_up, w_down, b_up, b_down, (y, l1, sizes))
    return y, l1, stats, union(sizes)


ffn_union = register(
    "ffn_union(Tensor x, Tensor w_gate, Tensor? w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, "
    "Tensor? b_down, int compression) -> (Tensor y, Tensor l1, Tensor stats, Tensor union)",
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
    instead="twell.sparse_gated_ffn or twell.sparse_ffn",
)
