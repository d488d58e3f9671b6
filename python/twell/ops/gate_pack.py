"""``gate_pack``: the gate projection, packed. words, spill, stats = TwELL of relu(x @ w_gate^T + b_gate).

With a ``threshold`` values up to it are zero, too. A ``b_gate`` [2 N] has a threshold of each neuron behind the
biases.

x [M, K], w_gate [N, K] and b_gate [N] are bfloat16 or float16, and ``compression`` is 2, 4 or 8. With T = ceil(N / 256)
and W = 256 / compression words is int32 [M, T * W], spill [M, T * 256] of x's dtype, stats int32 [ceil(M / 8), T, 2].
"""

import torch
from torch import Tensor

from twell.base.activation import Activation, activation_of, threshold_pair
from twell.choose import tuning
from twell.ops.hybrid_cpu import gate_on_cpu
from twell.ops.library import aligned, bias_view, check_layer, new, register, rows
from twell.ops.operands import Layer, Scaled, bias_alone, has_thresholds, launched, run
from twell.ops.pack import Packed, fill_on_cpu, find_levels, pack_gate, shapes
from twell.runtime import geometry, specs
from twell.runtime.program import Program, View


def outputs(x: Tensor, w_gate: Tensor, compression: int) -> Packed:
    """Uninitialised words int32 [M, T*W], spill [M, T*256] of x's dtype, stats int32 [ceil(M/8), T, 2]."""
    words, spill, stats = new(x, shapes(x.dtype, x.shape[0], w_gate.shape[0], compression))
    return words, spill, stats


def _fake(x: Tensor, w_gate: Tensor, b_gate: Tensor | None, compression: int, threshold: float = 0.0) -> Packed:
    check_layer(Layer(x, w_gate, None, None, b_gate))
    activation_of("fatrelu", threshold).level(x.dtype)
    return outputs(x, w_gate, compression)


def _cpu(x: Tensor, w_gate: Tensor, b_gate: Tensor | None, compression: int, threshold: float = 0.0) -> Packed:
    packed = _fake(x, w_gate, b_gate, compression, threshold)
    gate = gate_on_cpu(Layer(x, w_gate, None, None, b_gate), Activation("fatrelu", threshold))
    return fill_on_cpu(packed, gate, compression)


def _cuda(x: Tensor, w_gate: Tensor, b_gate: Tensor | None, compression: int, threshold: float = 0.0) -> Packed:
    packed = _fake(x, w_gate, b_gate, compression, threshold)
    if len(x):
        given = rows(x), rows(w_gate), aligned(b_gate), *packed
        run(pack, given, compression, activation_of("fatrelu", threshold))
    return packed


def pack(
    p: Program,
    x: View | Scaled,
    w_gate: View | Scaled,
    b_gate: View | None,
    words: View,
    spill: View,
    stats: View,
    compression: int,
    activation: Activation,
    invariant: bool = False,
    counters: int = 0,
) -> View | None:
    """Launch what fills words, spill and stats; if ``invariant``, with bits that do not depend on the other tokens.

    Returns int32 [counters] for up_down, zeroed by the kernel; None for none. In the portable family, and where the
    largest gates of a token are chosen, the gate is PyTorch's product. It lies in the spill until it is packed, if that
    has as many columns.
    """
    n = w_gate.shape[0]
    if tuning.family(p.index) == specs.PORTABLE or activation.k:
        # contiguous, so that the library's kernels, and with them the bits, are those of dense PyTorch
        gate = spill if n == spill.shape[1] else p.scratch(spill.dtype, spill.shape[0], n)
        p.call(_project_invariantly if invariant else _project, x, w_gate, bias_alone(b_gate, n), gate)
        levels = None
        if activation.k and has_thresholds(b_gate, n):
            raise ValueError('b_gate must have no thresholds behind the biases with activation "topk", got some')
        if activation.k:
            levels = p.scratch(torch.int32, gate.shape[0], 2)
            find_levels(p, gate, levels, activation.k)
        return pack_gate(p, gate, words, spill, stats, compression, activation, counters, b_gate, levels)
    # a cluster is two CTAs, one per multiprocessor
    clusters, fast = p.multiprocessors // 2, x.fast if isinstance(x, Scaled) else True
    spec = tuning.gate_pack(x.dtype, x.shape[0], n, clusters, fast)
    operands = *launched(x), *launched(w_gate), bias_view(p, b_gate, spill.dtype), words, spill, stats
    zeroed = p.scratch(torch.int32, counters)
    width = geometry.words_per_tile(compression)
    p.launch(spec, *operands, zeroed, width, threshold_pair(activation, spill.dtype), clusters)
    return zeroed if counters else None


# Tokens of each product of an invariant gate.
_INVARIANT = 128


def _project(x: Tensor, w_gate: Tensor, b_gate: Tensor | None, gate: Tensor) -> None:
    """Fill ``gate`` with x @ w_gate^T + b_gate, the bits of ``F.linear``."""
    if b_gate is None:
        torch.mm(x, w_gate.t(), out=gate)
    else:
        torch.addmm(b_gate, x, w_gate.t(), out=gate)


def _project_invariantly(x: Tensor, w_gate: Tensor, b_gate: Tensor | None, gate: Tensor) -> None:
    """The same by products of one size: which kernel a library takes, and so the order of sums, depends on that."""
    for first in range(0, len(x), _INVARIANT):
        tokens = x[first : first + _INVARIANT]
        padded = x.new_zeros(_INVARIANT, x.shape[1])
        padded[: len(tokens)] = tokens
        part = gate.new_empty(_INVARIANT, gate.shape[1])
        _project(padded, w_gate, b_gate, part)
        gate[first : first + _INVARIANT] = part[: len(tokens)]


gate_pack = register(
    "gate_pack(Tensor x, Tensor w_gate, Tensor? b_gate, int compression, float threshold=0.0) "
    "-> (Tensor words, Tensor spill, Tensor stats)",
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
)
