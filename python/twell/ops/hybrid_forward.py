"""``hybrid_forward``: the forward pass of training. Returns y, the sum of |h|, the number of non-zeros and the pattern.

h[m, c] = gate[m, c] * (x[m] . w_up[c] + b_up[c]) for the non-zeros of gate = relu(x @ w_gate^T + b_gate), and
without ``w_up`` h = gate; y = h @ w_down + b_down. This is relu; ``twell._activation`` has the others. The gate is
rounded to x's dtype, and so is h, once. The gate is kept in the hybrid format of ``twell.ops.hybrid``, with room for
``held`` non-zeros per token on average, or for max(64, N / 36) if ``held`` is 0. Dtypes are bfloat16 and float16, on
the CPU also float32 and float64.

With ``screen`` gates are computed only where an int8 product says that they may be non-zeros. It misses a gate with a
probability of at most 2^-80, and takes 16-bit values alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twell import tuning
from twell._activation import RELU, Activation, activation_of
from twell._runtime import device, geometry, nvtx
from twell.ops import hybrid, screened
from twell.ops.gate_pack import outputs as packed_outputs
from twell.ops.gate_pack import pack
from twell.ops.hybrid import Kept
from twell.ops.library import (
    ACTIVATION,
    LAYER,
    bias_vector,
    check_alike,
    check_layer,
    down_rows,
    empty,
    launch,
    layer_first,
    register,
)
from twell.ops.operands import Operands
from twell.ops.quantize_gate import on_cuda as quantize_on_cuda
from twell.ops.quantize_gate import quantize_gate, require

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def result(x: Tensor) -> Tensor:
    """Uninitialised y [M, K] of x's dtype."""
    return empty(x, x.shape)


def figures(x: Tensor, w_gate: Tensor, w_up: Tensor | None, held: int) -> tuple[Tensor, Tensor, Kept]:
    """Uninitialised l1 (0-d, float32 or float64), nonzeros (0-d, int64) and the hybrid format."""
    l1 = x.new_empty((), dtype=hybrid.accumulator(x.dtype))
    nonzeros = x.new_empty((), dtype=torch.int64)
    return l1, nonzeros, hybrid.empty_kept(x, w_gate.shape[0], w_up is not None, held)


def outputs(x: Tensor, w_gate: Tensor, w_up: Tensor | None, held: int) -> Outputs:
    """Everything that the operator returns, uninitialised: ``result``, then ``figures``."""
    l1, nonzeros, kept = figures(x, w_gate, w_up, held)
    return result(x), l1, nonzeros, *kept


@layer_first
def _fake(
    layer: Operands,
    compression: int,
    held: int = 0,
    activation: str = "relu",
    threshold: float = 0.0,
    screen: bool = False,
) -> Outputs:
    check_layer(*layer, wide=not screen)
    activation_of(activation, threshold, layer.w_up is not None).level(layer.x.dtype)
    geometry.words_per_tile(compression)
    if held < 0:
        raise ValueError(f"held must be non-zeros per token, or 0 for the most, got {held}")
    return outputs(layer.x, layer.w_gate, layer.w_up, held)


@layer_first
def _cpu(
    layer: Operands,
    compression: int,
    held: int = 0,
    activation: str = "relu",
    threshold: float = 0.0,
    screen: bool = False,
) -> Outputs:
    y, l1, nonzeros, *tensors = _fake(*layer, compression, held, activation, threshold, screen)
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    hybrid.require_offsets(x.shape[0], w_gate.shape[0])
    kept = Kept(*tensors)
    form = activation_of(activation, threshold)
    gate = form.after(hybrid.project(x, w_gate, b_gate).to(x.dtype), inplace=True)
    if screen:
        quantized = quantize_gate(w_gate, True)
        screened.masked(gate, screened.candidates_on_cpu(x, w_gate, b_gate, quantized, form))
    up = None if w_up is None else hybrid.project(x, w_up, b_up)
    hidden = form.hidden(gate.to(l1.dtype), up).masked_fill(gate == 0, 0)
    l1.copy_(hidden.abs().sum())
    nonzeros.copy_((gate != 0).sum())
    y.copy_(hybrid.project(hidden.to(x.dtype), w_down.t(), b_down))
    hybrid.encode(gate, None if up is None else up.to(x.dtype), kept)
    return y, l1, nonzeros, *kept


@layer_first
def _cuda(
    layer: Operands,
    compression: int,
    held: int = 0,
    activation: str = "relu",
    threshold: float = 0.0,
    screen: bool = False,
) -> Outputs:
    form = activation_of(activation, threshold, layer.w_up is not None)
    y, l1, nonzeros, kept = on_cuda(layer, compression, held, form, totals=True, screen=screen)
    assert l1 is not None
    assert nonzeros is not None
    return y, l1, nonzeros, *kept


@nvtx.marked(
    lambda layer, compression, *_: nvtx.range(
        "hybrid_forward", category=nvtx.FORWARD, **nvtx.sizes(layer._asdict() | {"compression": compression})
    )
)
def on_cuda(
    layer: Operands, compression: int, held: int, activation: Activation, totals: bool, screen: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None, Kept]:
    """The operator on the current device; l1 and nonzeros are None unless ``totals``, which cost three kernels."""
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = layer
    hybrid.require_offsets(x.shape[0], w_gate.shape[0])
    check_alike(w_gate, w_up=w_up, w_down=w_down)
    (m, k), n, dtype, gated = x.shape, w_gate.shape[0], x.dtype, w_up is not None
    family = tuning.family(x.device.index)
    hybrid.require_neurons(n, family, "training")
    l1: Tensor | None = None
    nonzeros: Tensor | None = None
    if totals or not m:
        l1, nonzeros, kept = figures(x, w_gate, w_up, held)
    else:
        kept = hybrid.empty_kept(x, n, gated, held)
    if l1 is not None and nonzeros is not None and not m:
        nothing = kept._replace(sizes=kept.sizes.zero_(), popularity=kept.popularity.zero_())
        return result(x), l1.zero_(), nonzeros.zero_(), nothing

    x, w_gate, w_down = (hybrid.near_rows(t) for t in (x, w_gate, down_rows(w_down)))
    w_up = None if w_up is None else hybrid.near_rows(w_up)
    multiprocessors, capacity = device.sm_count(x.device.index), geometry.hybrid_capacity(m, n, held)
    if screen:
        require(x, "hybrid_forward with screen=True")
    words, spill, stats = packed = packed_outputs(x, w_gate, compression)
    lists = screened.empty_lists(x, m, n) if screen else None
    if lists is None:
        pack(x, w_gate, b_gate, packed, compression, activation)
    else:
        bias = bias_vector("b_gate", b_gate, n, x)
        bits = screened.find(x, bias, quantize_on_cuda(w_gate, True), activation)
        screened.pack(x, w_gate, bias, bits, lists, packed, compression, activation)
    entries, neurons, chunks, sizes, popularity = kept
    pattern = (entries, neurons, chunks, sizes)
    width = geometry.words_per_tile(compression)
    # sums of |h| per token tile, written by the kernel that computes h
    sums = empty(x, (geometry.token_tiles(m), geometry.training_sums(n)), torch.float32)
    code, of_entries = activation.code(), RELU.code() if gated else activation.code()
    plain = 0 if gated else 1 + code
    compact = tuning.compact(dtype, True, family)
    # after a screen the words hold places in these lists, else neurons
    listed = (neurons, sizes, 0) if lists is None else (*lists, 1)
    launch(compact, words, spill, stats, *pattern, popularity, sums, n, width, plain, capacity, *listed)
    if nonzeros is not None:
        if m * n <= geometry.MOST:
            nonzeros.copy_(sizes[-1])
        else:
            # the total in ``sizes`` may be cut off
            torch.sum(stats.select(2, 0), (0, 1), out=nonzeros)
    # the largest tensors of the step are given back before y is allocated
    del packed, words, spill, stats, lists, listed
    y = result(x)

    hidden = None
    if w_up is not None:
        up = hybrid.values(entries, capacity, dtype, 1)[0]
        hidden = empty(up, capacity)
        spec = tuning.sampled_up(dtype, True, family)
        up_bias, last = bias_vector("b_up", b_up, n, x), (code, capacity, multiprocessors)
        launch(spec, x, w_up, up_bias, *pattern, up, hidden, sums, *last)
    # without an up projection the gates in the entries become h as they are read
    down = tuning.gathered(dtype, 1 if gated else 0, family)
    bias = bias_vector("b_down", b_down, k, x)
    aside = hybrid.room_aside(x, n, multiprocessors)
    launch(down, hidden, w_down, None, None, bias, *pattern, y, aside, of_entries, capacity, multiprocessors)

    laid = layer._replace(x=x, w_gate=w_gate, w_up=w_up, w_down=w_down)
    hybrid.overflow_forward(laid, kept, capacity, activation, y, sums, aside)
    if l1 is not None:
        torch.sum(sums, (0, 1), out=l1)
    return y, l1, nonzeros, kept


hybrid_forward = register(
    f"hybrid_forward({LAYER}, int compression, int held=0, {ACTIVATION}, bool screen=False) -> "
    "(Tensor y, Tensor l1, Tensor nonzeros, "
    "Tensor entries, Tensor neurons, Tensor chunks, Tensor sizes, Tensor popularity)",
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
    instead="twell.sparse_gated_ffn or twell.sparse_ffn",
    phase=nvtx.FORWARD,
)
