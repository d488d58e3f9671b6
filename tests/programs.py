"""Programs that layers launch as a part, run alone on a GPU or what stands in for one, with all that they write."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twell.base.activation import RELU, Activation
from twell.ops import pack, screened, union
from twell.ops.library import laid, new
from twell.ops.operands import Layer, run
from twell.runtime.program import Program


def union_layer(layer: Sequence[Any], compression: int = 8, activation: Activation = RELU) -> tuple[Tensor, ...]:
    """y, l1, stats and unions of a layer with w_down [N, K] by strategy "union", without kernels for few tokens."""
    own = Layer(*layer)
    *found, sizes = new(own.x, union.shapes(own.x, len(own.w_gate)))
    if len(own.x):
        given = *laid(own._replace(w_down=own.w_down.t())).unscaled, *found, sizes
        run(_union, given, compression, activation)
    return *found, sizes[:-1]


def _union(p: Program, *given: Any) -> None:
    union.launches(p, Layer(*given[:8]), given[8:12], *given[12:])


def screened_layer(layer: Sequence[Any], compression: int = 8, activation: Activation = RELU) -> tuple[Tensor, ...]:
    """The same with the int8 screen, and the number of candidates of each tile."""
    own = Layer(*layer)
    *found, sizes, candidates = new(own.x, screened.shapes(own.x, len(own.w_gate)))
    if len(own.x):
        firing = screened.firing_bias(own.w_gate, own.b_gate, activation)
        given = *laid(own._replace(w_down=own.w_down.t())).unscaled, firing, *found, sizes, candidates
        run(_screened, given, compression, activation)
    return *found, sizes[:-1], candidates[:-1]


def _screened(p: Program, *given: Any) -> None:
    screened.launches(p, Layer(*given[:8]), given[8], given[9:14], *given[14:])


def quantised(rows: Tensor, weights: bool) -> tuple[Tensor, ...]:
    """q, scale, spread and offset of rows [R, K], as ``reference.quantize_gate``."""
    q, *vectors = new(rows, screened.quantized_shapes(*rows.shape))
    q = q[:, : rows.shape[1]]
    run(screened.quantize_rows, (rows, q, *vectors), weights)
    return q, *vectors


def candidates(x: Sequence[Tensor], w_gate: Sequence[Tensor], bias: Tensor) -> Tensor:
    """The words of candidates of quantised rows; an empty bias is none."""
    found = x[0].new_empty(screened.candidates_shape(len(x[0]), len(w_gate[0])), dtype=torch.int32)
    run(_candidates, (*x, *w_gate, bias, found))
    return found


def _candidates(p: Program, *given: Any) -> None:
    screened.screen_rows(p, given[:4], given[4:8], *given[8:])


def listed(words: Tensor, n: int) -> Tensor:
    """Words of candidates as booleans [token tiles, N]; all bits beyond must be 0."""
    bits = (words.cpu().long()[:, :, None] >> torch.arange(32) & 1).bool().flatten(1)
    assert not bits[:, n:].any()
    return bits[:, :n]


def packed(
    gate: Tensor,
    compression: int = 8,
    activation: Activation = RELU,
    levels: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """words, spill and stats of a gate [M, N] before its activation."""
    found = new(gate, pack.shapes(gate.dtype, *gate.shape, compression))
    run(_packed, (gate, *found, levels), compression, activation)
    return tuple(found)


def _packed(p: Program, *given: Any) -> None:
    *tensors, levels, compression, activation = given
    pack.pack_gate(p, *tensors, compression, activation, 0, None, levels)


def packed_on_cpu(gate: Tensor, compression: int = 8) -> tuple[Tensor, ...]:
    """The same of a gate after its activation, by the code of a CPU."""
    words, spill, stats = new(gate, pack.shapes(gate.dtype, *gate.shape, compression))
    return pack.fill_on_cpu((words, spill, stats), gate, compression)


def levels(gate: Tensor, k: int) -> Tensor:
    """The levels of the k largest gates of each token, as ``reference.top_k``."""
    found = gate.new_empty((len(gate), 2), dtype=torch.int32)
    run(pack.find_levels, (gate, found), k)
    return found
