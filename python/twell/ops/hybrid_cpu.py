"""The hybrid format on the CPU: its writer, its reader and backward, by dense matrix products."""

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.base.activation import RELU, Activation
from twell.ops import hybrid
from twell.ops.operands import Gradients, Layer, opened
from twell.runtime import geometry


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight^T + bias`` [M, N], in float32."""
    out = x.float() @ weight.float().t()
    return out if bias is None else out.add_(bias.float())


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` rounded to ``dtype``, in their own."""
    return values.to(dtype).to(values.dtype)


def gate_on_cpu(layer: Layer, activation: Activation) -> Tensor:
    """The gate [M, N] after its activation, in the layer's dtype."""
    layer, activation = opened(layer, activation)
    if layer.gate is not None:
        return activation.after(layer.gate)
    return activation.after(project(layer.x, layer.w_gate, layer.b_gate).to(layer.x.dtype), inplace=True)


def encode(gate: Tensor, up: Tensor | None, out: Tensor) -> None:
    """Write ``gate`` and ``up`` [M, N], both of the layer's dtype, into ``out``; unused elements become 0."""
    m, n = gate.shape
    active = gate != 0
    kept = hybrid.parts(out.zero_(), m, n)
    kept.popularity.copy_(active.sum(0))
    total = int(active.sum())
    kept.sizes[-1] = min(total, geometry.MOST)
    capacity = hybrid.capacity_of(gate, n, up is not None, out)
    if total > capacity:
        return

    tiles, chunks = geometry.token_tiles(m), geometry.chunks(n)
    union = F.pad(active, (0, 0, 0, -m % geometry.TOKEN_TILE)).view(tiles, geometry.TOKEN_TILE, n).any(1)
    lengths, ranks = union.sum(1), union.cumsum(1) - 1
    kept.sizes[:-1] = lengths
    tile, neuron = union.nonzero(as_tuple=True)
    kept.neurons[tile, ranks[tile, neuron]] = neuron.short()
    place = torch.arange(geometry.CHUNK * chunks, device="cpu")
    last = kept.neurons.gather(1, (lengths - 1).clamp(min=0)[:, None])
    repeats = (place >= lengths[:, None]) & (place < -(-lengths // geometry.CHUNK)[:, None] * geometry.CHUNK)
    kept.neurons.copy_(torch.where(repeats, last, kept.neurons))

    token, neuron = active.nonzero(as_tuple=True)
    rank = ranks[token // geometry.TOKEN_TILE, neuron]
    run = token // geometry.TOKEN_TILE * chunks + rank // geometry.CHUNK
    word = token % geometry.TOKEN_TILE << 6 | rank % geometry.CHUNK
    order = (run << 13 | word).argsort()
    token, neuron = token[order], neuron[order]
    starts = F.pad(run.bincount(minlength=tiles * chunks).cumsum(0), (1, 0)).int()
    if tiles:
        kept.chunks.copy_(starts.unfold(0, chunks + 1, chunks))
    kept.entries[:total] = gate.view(torch.int16)[token, neuron].int() << 16 | word[order].int()
    if up is not None:
        hybrid.values(kept.entries, capacity, gate.dtype)[:total] = up[token, neuron]


def decode(layer: Layer, given: Tensor, activation: Activation = RELU) -> tuple[Tensor, Tensor | None]:
    """The gate and the up projection, if there is one, at its non-zeros: dense float32 [M, N]."""
    w_up, tokens, n = layer.w_up, layer.tokens, layer.w_down.shape[0]
    m, dtype = tokens.shape[0], tokens.dtype
    kept, capacity = hybrid.parts(given, m, n), hybrid.capacity_of(tokens, n, w_up is not None, given)
    total = int(kept.sizes[-1])
    if total > capacity:
        gate = gate_on_cpu(layer, activation).float()
        return gate, None if w_up is None else project(layer.x, w_up, layer.b_up).masked_fill_(gate == 0, 0)

    entries, chunks = kept.entries[:total], geometry.chunks(n)
    run = torch.arange(kept.neurons.shape[0] * chunks, device="cpu").repeat_interleave(
        kept.chunks.diff(dim=1).flatten()
    )
    tile = run // chunks
    token = tile * geometry.TOKEN_TILE + (entries >> 6 & geometry.TOKEN_TILE - 1)
    neuron = kept.neurons[tile, run % chunks * geometry.CHUNK + (entries & geometry.CHUNK - 1)].long() & 0xFFFF

    def dense(at_entries: Tensor) -> Tensor:
        values = at_entries[:total].float()
        return values.new_zeros(m, n).index_put_((token, neuron), values)

    up = None if w_up is None else dense(hybrid.values(kept.entries, capacity, dtype))
    return dense((entries >> 16).short().view(dtype)), up


def rare(popularity: Tensor) -> Tensor:
    """Which neurons [N] are in a tile, by popularity, of at most ``geometry.RARE_ENTRIES`` non-zeros."""
    counts, order = popularity.sort(descending=True, stable=True)
    tiles = F.pad(counts, (0, -len(counts) % geometry.NEURON_TILE)).view(-1, geometry.NEURON_TILE).sum(1)
    few = (tiles <= geometry.RARE_ENTRIES).repeat_interleave(geometry.NEURON_TILE)[: len(counts)]
    return torch.empty_like(few).scatter_(0, order, few)


def backward_cpu(given: hybrid.Backward, out: Gradients, accumulate: bool) -> None:
    """Fill ``out`` by dense matrix products of the decoded gate, rounded where the kernels round."""
    dy, dl1, layer, kept, activation = given
    m, n, dtype = dy.shape[0], layer.w_down.shape[0], dy.dtype
    gate, up = decode(layer, kept, activation)
    hidden = activation.hidden(gate, up).masked_fill(gate == 0, 0)
    dh = project(dy, layer.w_down, None)
    if dl1 is not None:
        dh.add_(dl1 * hidden.sign())
    dh.masked_fill_(gate == 0, 0)
    wide_gate, wide_up = activation.gradients(dh, gate, up)
    d_gate, d_up = rounded(wide_gate, dtype), None if wide_up is None else rounded(wide_up, dtype)

    # for rare neurons the weights' gradients add the rounding errors of their coefficients, too
    pattern = hybrid.parts(kept, m, n)
    again = rare(pattern.popularity) & (pattern.sizes[-1] <= hybrid.capacity_of(dy, n, up is not None, kept))

    def for_weights(values: Tensor) -> Tensor:
        first = rounded(values, dtype)
        return torch.where(again & first.isfinite(), first + rounded(values - first, dtype), first)

    def product(coefficients: Tensor, matrix: Tensor) -> Tensor:
        return coefficients @ matrix.float()

    if out.gate is not None:
        out.gate.copy_(d_gate)
    if out.x is not None:
        pairs = (d_gate, layer.w_gate), (d_up, layer.w_up)
        products = [product(d, weight) for d, weight in pairs if d is not None and weight is not None]
        out.x.copy_(sum(products[1:], products[0]))
    for target, coefficients, matrix in (
        (out.w_gate, wide_gate, layer.x),
        (out.w_up, wide_up, layer.x),
        (out.w_down, hidden, dy),
    ):
        if target is not None and coefficients is not None:
            gradient = product(for_weights(coefficients).t(), matrix)
            target.add_(gradient) if accumulate else target.copy_(gradient)
    for target, coefficients in ((out.b_gate, wide_gate), (out.b_up, wide_up)):
        if target is not None and coefficients is not None:
            target.zero_()[:n] = for_weights(coefficients).sum(0)
