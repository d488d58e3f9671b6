"""A whole layer of up to 32 tokens in one pass over its weights, on sm_90a: rows of neurons that no token fires are
read of the first projection alone, whatever share fires. h is rounded to x's dtype, as in dense PyTorch.
"""

import math
from typing import Any

import torch

from twell.base.activation import Activation, threshold_pair
from twell.choose import tuning
from twell.ops.library import bias_view, down_rows
from twell.ops.operands import Layer, launched
from twell.ops.pairs import all_rows
from twell.runtime import specs
from twell.runtime.program import Program, View


def _kernel(p: Program, x: Any, kind: str) -> tuple[specs.DecodeSpec, View, int]:
    """The kernel for x [M, K], memory for the sums of its clusters, and their number."""
    spec = tuning.decode(x.dtype, *x.shape, kind, tuning.family(p.index))
    assert spec is not None
    clusters = p.clusters(spec.cluster)
    return spec, p.scratch(torch.float32, clusters * spec.cluster * spec.columns * spec.tokens), clusters


def launch(p: Program, layer: Layer, y: View, activation: Activation) -> None:
    """Launch what fills y [M, K]."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down, _ = layer.unscaled
    spec, sums, clusters = _kernel(p, x, "plain" if w_up is None else "gated")
    # the kernel that quantises tokens lets the next start when its own wait is over; a copy made below is of a weight
    early = int(bool(p.launches))
    first, down = launched(w_gate), launched(down_rows(p, w_down))
    # any matrix stands for an absent one
    matrices = *launched(x), *first, *(first if w_up is None else launched(w_up)), *down
    biases = [bias_view(p, bias, y.dtype) for bias in (b_gate, b_up, b_down)]
    form = threshold_pair(activation, y.dtype), activation.code()
    p.launch(spec, *matrices, *biases[:2], *form, biases[2], sums, early, y, clusters)


def launch_experts(
    p: Program,
    x: View,
    w_up: View,
    w_down: View,
    ids: View,
    weights: View,
    shared_up: View | None,
    shared_down: View | None,
    y: View,
    activation: Activation,
) -> None:
    """The same of routed experts [E, N, K] without a gate; and of a shared layer beside."""
    spec, sums, clusters = _kernel(p, x, "experts")
    (first, first_step), (down, down_step) = all_rows(w_up), all_rows(w_down)
    nothing = View(first.base, first.offset, first.dtype, (0, x.shape[1]), first.strides)
    beside = nothing if shared_up is None else shared_up, nothing if shared_down is None else shared_down
    none, sizes = p.scratch(x.dtype, 0), (first_step, down_step, w_up.shape[1], w_up.shape[0])
    number = math.prod(ids.shape)
    words = View(ids.base, ids.offset, torch.int32, (number,), (ids.dtype.itemsize // 4,))
    routes = words, weights.at(0, torch.float32, number)
    form = threshold_pair(activation, x.dtype), activation.code()
    last = *form, none, sums, 0, y, clusters
    p.launch(spec, x, first, beside[0], down, beside[1], *sizes, *routes, none, none, *last)
